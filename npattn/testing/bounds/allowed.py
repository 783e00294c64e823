"""How far an implementation may be from the exact result, per element: derived, never typed in.

An implementation with a given rounding model (which intermediates it rounds, and to what) cannot
err by more than the worst case (hard.py), and on generic inputs is not seen to err by more than
eight standard deviations of what such roundings do (noise.py). docs/tolerance.md derives both.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from npattn.arrays import Array, sum_to
from npattn.conventions import Conventions
from npattn.problem import Gradients, Problem
from npattn.testing.bounds.rounding import Rounding, Units, unit_roundoff
from npattn.testing.bounds.row_norms import Cheap, covers
from npattn.testing.bounds.variance import DEVIATIONS, Noise
from npattn.testing.bounds.worst_case import Hard

__all__ = ["Rounding", "allowed", "bounds", "certificate", "deviations", "unit_roundoff"]


def bounds(
    problem: Problem,
    dtype: Any,
    rounding: Rounding | None = None,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    dweights: Array | None = None,
    conventions: Conventions | None = None,
) -> dict[str, Array]:
    """The hard bound: no implementation that keeps the rounding model errs by more.

    Parameters
    ----------
    problem : Problem
    dtype : dtype
        Of q, k, v as the implementation gets them.
    rounding : Rounding, optional
        Default: what is allowed to whoever declares nothing, for this dtype.
    dout, dlse, dweights : array, optional
        Cotangents, float64. With dout the gradients are bounded too.
    conventions : Conventions, optional

    Returns
    -------
    dict
        o, lse, weights and, with dout, dq, dk, dv, dbias, dsinks: absolute, float64, each of the
        shape of what it bounds. It is the distance allowed from the exact value to the interval of
        numbers that round to what was delivered (so rounding the result itself costs nothing), the
        oracle's own error included.
    """
    task = _Task(problem, dtype, rounding, dout, dlse, dweights, conventions)
    return task.certified(task.hard_bounds())


def allowed(
    problem: Problem,
    dtype: Any,
    rounding: Rounding | None = None,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    dweights: Array | None = None,
    conventions: Conventions | None = None,
    cheap: bool = False,
) -> dict[str, Array]:
    """What is allowed of each result: the hard bound or, where roundings are as good as random,
    eight of their standard deviations, whichever is less.

    With `cheap`, where it holds, a looser hard bound at the price of a few matrix products: what it
    fails deserves the second opinion of the full form. Parameters and returns are otherwise those
    of `bounds`.
    """
    task = _Task(problem, dtype, rounding, dout, dlse, dweights, conventions)
    found = task.cheap_bounds() if cheap else None
    if found is not None:
        return task.certified(found)
    hard = task.hard_bounds()
    sharp = task.deviations()
    return task.certified({name: np.minimum(t, sharp[name]) for name, t in hard.items()})


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
    """The standard deviation of each result before delivery, as if all roundings were random.

    Parameters and returns are those of `bounds`.
    """
    task = _Task(problem, dtype, rounding, dout, dlse, dweights, conventions)
    task.hard_bounds()
    found = task.certified(task.deviations(everywhere=True))
    return {name: x / DEVIATIONS for name, x in found.items()}


def certificate(
    problem: Problem,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    dweights: Array | None = None,
    conventions: Conventions | None = None,
) -> dict[str, Array]:
    """How far the float64 oracle itself may be from the exact result: the same bound, for its own
    arithmetic. Parameters and returns are those of `bounds`."""
    own = Rounding.upcast()
    task = _Task(problem, np.float64, own, dout, dlse, dweights, conventions)
    return task.hard_bounds()


class _Task:
    """One problem under conventions, with what was asked of it."""

    def __init__(
        self,
        problem: Problem,
        dtype: Any,
        rounding: Rounding | None,
        dout: Array | None,
        dlse: Array | None,
        dweights: Array | None,
        conventions: Conventions | None,
    ) -> None:
        self.problem = problem = problem.materialised()
        self.conventions = conventions or Conventions()
        self.canonical = self.conventions.canonical(problem)
        self.rounding, self.dtype = rounding or Rounding.undeclared(dtype), dtype
        self.unit = Units.of(self.rounding, dtype)
        self.dout, self.dlse, self.dweights = dout, dlse, dweights

    @cached_property
    def hard(self) -> Hard:
        return Hard(self.canonical, self.rounding, self.dtype, self.problem, self.conventions)

    def _cotangents(self) -> tuple[Array, Array | None, Array | None]:
        """Of the canonical problem, with a head axis."""
        assert self.dout is not None
        do, *more = self.conventions.cotangents(
            self.problem, self.dout.astype(float), self.dlse, self.dweights
        )
        head = (None,) if self.problem.headless else (...,)
        dl, dw = (None if x is None else x[head] for x in more)
        return do[head], dl, dw

    def cheap_bounds(self) -> dict[str, Array] | None:
        """None where the cheap form does not hold."""
        if self.conventions != Conventions() or self.dweights is not None:
            return None
        if not covers(self.canonical):
            return None
        form = Cheap(self.canonical, self.rounding, self.dtype)
        if not form.fits:
            return None
        found = form.forward()
        if self.dout is not None:
            do, dl, _ = self._cotangents()
            found |= form.backward(do, dl)
        head = 0 if self.problem.headless else ...
        return {n: t[head] if n in ("o", "lse", "weights") else t for n, t in found.items()}

    def hard_bounds(self) -> dict[str, Array]:
        found = self.hard.forward()
        if self.dout is not None:
            found |= self.hard.backward(*self._cotangents())
        return _translated(self.problem, self.conventions, self.hard, found, self.dout)

    def deviations(self, everywhere: bool = False) -> dict[str, Array]:
        """Eight of them; after `hard_bounds`."""
        noise = Noise(self.hard, everywhere)
        found = noise.forward()
        if self.dout is not None:
            found |= noise.backward()
        return _translated(self.problem, self.conventions, self.hard, found, self.dout)

    def certified(self, found: dict[str, Array]) -> dict[str, Array]:
        """With the oracle's own error, which obeys the same bound with its own, smaller unit: the
        bound is convex in the units and 0 where they are, so the ratio of the units is enough."""
        more = 1 + unit_roundoff(np.float64) / self.unit.u
        return {name: more * bound for name, bound in found.items()}


def _translated(
    problem: Problem,
    conventions: Conventions,
    form: Hard,
    found: dict[str, Array],
    dout: Array | None,
) -> dict[str, Array]:
    """Bounds of the canonical problem as those of what the conventions make of it."""
    u, lse = form.unit.u, form.lse
    empty = np.isneginf(lse)
    if conventions.lse_base == "2":
        size = np.where(empty, 0, abs(lse))
        found["lse"] = (found["lse"] + 4 * u * size) / math.log(2)
    whole = replace(conventions, empty_row="zero")
    with np.errstate(invalid="ignore"):  # a deviation of inf, dropped
        found["weights"] = whole.returned_weights(problem, found["weights"], lse)
    if conventions.weights == "after_dropout" and problem.dropout_mask is not None:
        p_hat = replace(whole, weights="before_dropout").returned_weights(problem, form.p_hat, lse)
        more = (2 * u + form.unit.p.u) / (1 - problem.dropout_rate) * p_hat
        found["weights"] = found["weights"] + more + form.unit.p.eta + form.unit.tiny
    mean = conventions.empty_row == "mean" and empty.any()
    if mean:
        # As a softmax over S equal scores: a weight, S products and sums, a division.
        rel = form.gamma(form.chain + 4) + 2 * form.unit.p.u + form.unit.exp
        sizes = conventions.results(problem.replace(v=abs(problem.v)), abs(form.o), lse)[0]
        found["o"] = np.where(empty[..., None], rel * sizes, found["o"])
        even = rel / max(problem.S, 1)
        found["weights"] = np.where(empty[..., None], even, found["weights"])
    if problem.headless:
        found = {n: t[0] if n in ("o", "lse", "weights") else t for n, t in found.items()}
    if dout is not None:
        raw = Gradients(**{n[1:]: t for n, t in found.items() if n[0] == "d"})
        flat = form.lse[0] if problem.headless else form.lse
        grads = whole.gradients(problem, raw, abs(dout), flat)
        if problem.bias_array is not None and grads.bias is not None and raw.bias is not None:
            bias = abs(grads.bias) + _more_of_dbias(problem, conventions, form, raw.bias)
            grads = replace(grads, bias=np.where(np.isnan(bias), np.inf, bias))
        if mean:
            # The cotangent of an empty row goes to v through a rounded 1/S.
            nothing = replace(
                raw, **{n: np.zeros_like(t) for n, t in vars(raw).items() if t is not None}
            )
            mean_of = replace(conventions, empty_row="mean").gradients(
                problem, nothing, abs(dout), flat
            )
            rel = form.gamma(form.chain + problem.T + 4) + 3 * form.unit.low.u
            grads = replace(grads, v=grads.v + rel * mean_of.v)
        found = {n: t for n, t in found.items() if n[0] != "d"}
        found |= {f"d{n}": t for n, t in vars(grads).items() if t is not None}
    return found


@np.errstate(invalid="ignore")  # inf · 0, in deviations that say nothing
def _more_of_dbias(
    problem: Problem, conventions: Conventions, form: Hard, raw: Array
) -> Array | float:
    """What dbias errs by on its way through a late cap, or through the scale."""
    before = conventions.bias == "before_scale"
    if problem.bias_array is None or not (form.capped_late or before):
        return 0.0
    S, unit = problem.S, form.unit
    mass, extra = abs(form.ds)[..., :S], np.zeros(())
    if form.capped_late:
        n = mass.size / max(problem.bias_array.size, 1)
        extra = form.cap_error[..., :S] * (mass + raw[..., :S])
        extra = extra + (unit.u + unit.ds.u + form.gamma(n + 4)) * mass + unit.ds.eta
    if before:
        extra = (extra + 2 * (unit.u + unit.ds.u) * mass + unit.ds.eta) * form.scale
    return sum_to(np.broadcast_to(extra, mass.shape), problem.bias_array.shape)
