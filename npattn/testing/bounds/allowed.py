"""Allowed errors: how far an implementation may be from the exact result, per element.

They are derived, never typed in. An implementation with a given rounding model (which intermediates
it rounds, and to what) cannot err by more than the worst case (worst_case/), and on generic inputs
does not err by more than eight standard deviations of its roundings (variance/). docs/tolerance.md
derives both.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.testing.bounds.rounding import Rounding, Units, unit_roundoff
from npattn.testing.bounds.translate import gate_bounds, gate_cotangent, translate_bounds
from npattn.testing.bounds.variance import DEVIATIONS, Variance
from npattn.testing.bounds.worst_case import WorstCase

OPTIONAL = WorstCase.wanted
OWN = Conventions()


def bounds(
    problem: Problem,
    dtype: Any,  # the dtype of q, k, v as the implementation gets them
    rounding: Rounding | None = None,  # default: ``Rounding.undeclared(dtype)``
    *,
    dout: Array | None = None,  # cotangents, float64. With dout the gradients are bounded too.
    dlse: Array | None = None,
    dweights: Array | None = None,
    conventions: Conventions | None = None,
) -> dict[str, Array]:
    """Return the worst case: no implementation that keeps the rounding model errs by more.

    Returns
    -------
    dict
        o, lse, weights, max_score and, with dout, dq, dk, dv, dbias, dsinks, dgate: absolute,
        float64, each of the shape of its result. It bounds the distance from the exact value to the
        interval of numbers that round to the returned one (so rounding the result itself costs
        nothing), the oracle's own error included.
    """
    task = BoundTask(problem, dtype, rounding, dout, dlse, dweights, conventions)
    return task.add_oracle_error(task.worst_case())


def tolerance(
    problem: Problem,
    dtype: Any,
    rounding: Rounding | None = None,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    dweights: Array | None = None,
    conventions: Conventions | None = None,
    queries: int | None = None,
    delivered: Array | None = None,
    only: Collection[str] = OPTIONAL,
) -> dict[str, Array]:
    """Return the allowed error of each result: the worst case, or eight deviations if less.

    The deviations count where roundings are as good as random. `queries` is the number of queries
    of a longer problem of which this one has some, whose other cotangents are 0. `delivered`
    (..., H, T, E) is the error of the out that a backward gets, where that has another dtype than
    q, k and v. weights and max_score are left out unless they are in `only`. Parameters and returns
    are otherwise those of `bounds`.
    """
    task = BoundTask(problem, dtype, rounding, dout, dlse, dweights, conventions, delivered, only)
    if queries is not None:
        # Each of these queries may lie in a block of its own; of 0 no block rounds anything.
        block = task.rounding.gradient_block or 1
        task.form.set_lengths(min(queries, problem.T * block), task.canonical.S)
    worst = task.worst_case()
    likely = task.deviations()
    return task.add_oracle_error(
        {name: np.minimum(t, likely[name]) if likely else t for name, t in worst.items()}
    )


def deviations(
    problem: Problem,
    dtype: Any,
    rounding: Rounding | None = None,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    dweights: Array | None = None,
    conventions: Conventions | None = None,
) -> dict[str, Array]:
    """Return the standard deviation of each result before delivery, if all roundings were random.

    Parameters and returns are those of `bounds`.
    """
    task = BoundTask(problem, dtype, rounding, dout, dlse, dweights, conventions)
    return bounds_and_deviations(task)[1]


def bounds_and_deviations(task: BoundTask) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return `bounds` and `deviations` of one problem, which share their sums."""
    hard = task.add_oracle_error(task.worst_case())
    limits = task.add_oracle_error(task.deviations(everywhere=True))
    return hard, {name: x / DEVIATIONS for name, x in limits.items()}


def certificate(
    problem: Problem,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    dweights: Array | None = None,
    conventions: Conventions | None = None,
) -> dict[str, Array]:
    """Return how far the float64 oracle itself may be from the exact result.

    It is the same bound, for the oracle's arithmetic. Parameters and returns are those of `bounds`.
    """
    rounding = Rounding.upcast()
    task = BoundTask(problem, np.float64, rounding, dout, dlse, dweights, conventions)
    return task.worst_case()


class BoundTask:
    """One problem under conventions, with its cotangents and a rounding model."""

    def __init__(
        self,
        problem: Problem,
        dtype: Any,
        rounding: Rounding | None,
        dout: Array | None,
        dlse: Array | None,
        dweights: Array | None,
        conventions: Conventions | None,
        delivered: Array | None = None,
        only: Collection[str] = OPTIONAL,
    ) -> None:
        self.problem = problem = problem.materialise()
        self.conventions = conventions or OWN
        self.canonical = self.conventions.canonical(problem)
        self.rounding, self.dtype = rounding or Rounding.undeclared(dtype), dtype
        self.unit = Units.of(self.rounding, dtype)
        self.dout, self.dlse, self.dweights = dout, dlse, dweights
        self.delivered, self.wanted = delivered, OPTIONAL.intersection(only)

    @cached_property
    def form(self) -> WorstCase:
        """The worst case of the canonical problem."""
        form = WorstCase(self.canonical, self.rounding, self.dtype, self.problem, self.conventions)
        form.wanted = self.wanted
        if self.delivered is not None:
            head = (None,) if self.problem.headless else (...,)
            form.delivered = self.delivered[head]
        return form

    def _cotangents(self) -> tuple[Array, Array | None, Array | None]:
        """Return the cotangents of the canonical problem, with a head axis."""
        dout = self._inner_dout
        assert dout is not None
        do, *more = self.conventions.cotangents(self.problem, dout, self.dlse, self.dweights)
        head = (None,) if self.problem.headless else (...,)
        dl, dw = (None if x is None else x[head] for x in more)
        return do[head], dl, dw

    @cached_property
    def _inner_dout(self) -> Array | None:
        """Cotangent of o before the gate."""
        return None if self.dout is None else gate_cotangent(self.problem, self.dout.astype(float))

    def _results(self, bounds: dict[str, Array]) -> dict[str, Array]:
        """Translate bounds of the canonical problem into those of the results."""
        problem, conventions = self.problem, self.conventions
        bounds = translate_bounds(problem, conventions, self.form, bounds, self._inner_dout)
        dout = None if self.dout is None else self.dout.astype(float)
        return gate_bounds(problem, conventions, self.form, bounds, dout)

    def worst_case(self) -> dict[str, Array]:
        """Return the worst case of each result."""
        self.bounds = self.form.forward()
        if self.dout is not None:
            self.bounds |= self.form.backward(*self._cotangents())
        return self._results(dict(self.bounds))

    def deviations(self, everywhere: bool = False) -> dict[str, Array]:
        """Return eight deviations of each result, inf where they do not count.

        After `worst_case`. Empty, if they do not count anywhere.
        """
        variance = Variance(self.form, everywhere)
        limits = variance.forward()
        if not limits and not everywhere:
            return {}
        if self.dout is not None:
            limits |= variance.backward()
        unlimited = {name: np.full(t.shape, np.inf) for name, t in self.bounds.items()}
        limits = self._results(unlimited | limits)
        if "dgate" in limits:  # that of the gate is of the worst case alone
            limits["dgate"] = np.full(limits["dgate"].shape, np.inf)
        return limits

    def add_oracle_error(self, bounds: dict[str, Array]) -> dict[str, Array]:
        """Add the oracle's own error, which obeys the same bound with its own, smaller unit.

        The bound is convex in the units and 0 where they are, so the ratio of the units is enough.
        """
        more = 1 + unit_roundoff(np.float64) / self.unit.u
        return {name: more * bound for name, bound in bounds.items()}
