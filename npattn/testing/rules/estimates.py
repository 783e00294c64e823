"""What identities are held with: results of the implementation, and how far each may be off.

Results are within what is allowed of exact ones, and exact ones keep the identity. So both of its
sides are made of `Estimate`s, and they differ by no more than the errors of both together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from npattn import dense
from npattn.arrays import Array, finfo, sum_to
from npattn.options import FEATURES
from npattn.problem import Problem
from npattn.testing.bounds.rounding import unit_roundoff
from npattn.testing.bounds.ulp import half_ulp
from npattn.testing.compare import Comparison, compare_arrays
from npattn.testing.trial import GRADIENTS, Judged, Trial, Violation

__all__ = [
    "Estimate",
    "agree",
    "as_is",
    "exact",
    "forward_only",
    "live",
    "nats",
    "needs",
    "on_grid",
    "per_unit_of_bias",
    "related",
    "scale",
    "settle",
    "shared",
    "small",
    "spread",
    "uncapped",
]

U = unit_roundoff(np.float64)


class Estimate(NamedTuple):
    """What results of the implementation come to, and how far that may be from exact."""

    value: Array  # float64
    error: Array  # inf where nothing is required; then value is 0

    @classmethod
    def of(cls, judged: Judged, name: str) -> Estimate | None:
        """A result as delivered; None where there is none, or not of its right shape or kind."""
        found, want = judged.results.get(name), judged.want.get(name)
        if found is None or want is None or found.shape != want.shape or found.dtype.kind in "biuc":
            return None
        value, error = found.astype(np.float64), judged.allowed[name] + half_ulp(found)
        # What overflows the dtype, and what a convention leaves undefined.
        beyond = abs(want) + judged.allowed[name] > float(finfo(found.dtype).max)
        free = ~np.isfinite(want) | (~np.isfinite(value) & beyond)
        return cls(value, error).where(~free)

    def where(self, here: Array) -> Estimate:
        """Of which nothing is required elsewhere."""
        return Estimate(np.where(here, self.value, 0), np.where(here, self.error, np.inf))

    @np.errstate(all="ignore")  # a wrong implementation may give anything
    def times(self, factor: Array | float) -> Estimate:
        value = self.value * factor
        # 0 times what is not known is 0.
        error = np.where(factor == 0, 0, self.error * abs(factor))
        return Estimate(value, error + _rounded(value))

    @np.errstate(all="ignore")
    def plus(self, other: Estimate) -> Estimate:
        value = self.value + other.value
        return Estimate(value, self.error + other.error + _rounded(value))

    def minus(self, other: Estimate) -> Estimate:
        return self.plus(Estimate(-other.value, other.error))

    @np.errstate(all="ignore")
    def over(self, add: Callable[[Array], Array]) -> Estimate:
        """What `add` makes of it, which adds elements, or leaves some out."""
        value = add(self.value)
        terms = self.value.size / max(value.size, 1)
        return Estimate(value, add(self.error) + terms * add(_rounded(self.value)))


def _rounded(value: Array) -> Array:
    """What float64 may have lost in an operation."""
    return U * np.where(np.isfinite(value), abs(value), 0)


def exact(value: Array | float) -> Estimate:
    """A number that is known."""
    array = np.asarray(value, np.float64)
    return Estimate(array, np.zeros_like(array))


def agree(name: str, got: Estimate, want: Estimate) -> Comparison:
    """The two sides of an identity, within what both may be off together."""
    # Where nothing is required values are 0, so that what is not finite is wrong on either side.
    finite = np.isfinite(want.value)
    value, wanted = np.where(finite, got.value, np.nan), np.where(finite, want.value, 0)
    room = np.broadcast_to(got.error + want.error, value.shape)
    return compare_arrays(name, value, np.broadcast_to(wanted, value.shape), room)


def related(
    first: Judged, second: Judged, across: Mapping[str, Callable[[Array], Array]]
) -> list[Comparison]:
    """The results of `second`, by name, against what `across` makes of those of `first`."""
    found = []
    for name, carry in across.items():
        here, there = Estimate.of(first, name), Estimate.of(second, name)
        if here is not None and there is not None:
            found.append(agree(name, there, here.over(carry)))
    return found


def settle(found: Iterable[Comparison], *judged: Judged) -> float | None:
    """The worst ratio, None where nothing was compared; a Violation if an identity is broken.

    It then shows the first problem on which results are beyond what is allowed by themselves: there
    must be one, or the identity would hold.
    """
    found = [c for c in found if c.size]
    worst = max((c.ratio for c in found), default=None)
    if worst is None or worst <= 1:
        return worst
    wrong = sorted((c for c in found if not c.passed), key=lambda c: -c.ratio)
    shown = next((j for j in judged if _is_wrong(j)), judged[0])
    text = "\n".join(map(str, wrong))
    raise Violation(text, shown.problem, shown.cotangents, ratio=worst)


def _is_wrong(judged: Judged) -> bool:
    return any(
        not compare_arrays(name, x, judged.want[name], judged.allowed[name]).passed
        for name, x in judged.results.items()
        if name in judged.want and x.shape == judged.want[name].shape
    )


def as_is(x: Array) -> Array:
    return x


# --- what rules need to know ----------------------------------------------------------------------


def needs(*names: str) -> Callable[[Trial], str | None]:
    """Why a rule does not apply without these options and gradients."""

    def unless(trial: Trial) -> str | None:
        for name in names:
            if name in FEATURES and name not in trial.space.features:
                return f"has no {name}"
            if name in GRADIENTS and name not in trial.gradients:
                return f"gives no {name}"
        return None

    return unless


def small(trial: Trial, **force: Any) -> dict[str, Any]:
    """What `Pools` force: few queries, for an identity asks for several results of a problem."""
    return force if "T" in trial.space.sizes else {"T": (2, 1, 3, 5, 7, 16), **force}


def uncapped(trial: Trial, *others: str) -> frozenset[str]:
    """Options to forbid: these, and a cap on more than q·k, which no longer lets bias and mask
    be what they are."""
    cap = () if trial.conventions.softcap == "before_bias" else ("softcap",)
    return frozenset({*others, *cap})


def forward_only(trial: Trial) -> Trial:
    """The same without gradients, for `judge`."""
    return replace(trial, gradients=frozenset())


def live(trial: Trial, problem: Problem) -> Array:
    """Where a key takes part: it is visible, and its bias is not −inf; (..., H, T, S)."""
    visible = trial.visible(problem)
    return (
        visible
        if problem.bias_array is None
        else visible & ~np.isneginf(problem.bias_array.astype(float))
    )


def nats(trial: Trial) -> float:
    """What a natural logarithm is multiplied with to be an lse; dlse likewise to be natural."""
    return 1 / math.log(2) if trial.conventions.lse_base == "2" else 1.0


def scale(problem: Problem) -> float:
    """The scale; a number, once the problem is made."""
    return cast(float, problem.scale)


def per_unit_of_bias(trial: Trial, problem: Problem) -> float:
    """How much a score rises with its bias."""
    return scale(problem) if trial.conventions.bias == "before_scale" else 1.0


def _heads(trial: Trial, problem: Problem) -> Array:
    """(H,): the key/value head that each query head uses."""
    h = np.arange(problem.H)
    tiled = trial.conventions.kv_head == "tile"
    K = max(problem.K, 1)
    return h % K if tiled else h // max(problem.H // K, 1)


def spread(trial: Trial, problem: Problem, x: Array) -> Array:
    """k or v as each query head sees it: (..., K, S, n) → (..., H, S, n), float64."""
    wide = x.astype(np.float64)
    return wide if problem.headless else wide[..., _heads(trial, problem), :, :]


def shared(trial: Trial, problem: Problem, x: Array, shape: tuple[int, ...]) -> Array:
    """The sum over what shares a key/value head: (..., H, n, m) → `shape`, (..., K, n, m)."""
    if problem.headless:
        return sum_to(x, shape)
    together = np.argsort(_heads(trial, problem), kind="stable")
    return dense.sum_shared(x[..., together, :, :], problem.K, shape)


def on_grid(x: Array, y: Array) -> tuple[Array, Array, Array]:
    """x and y rounded to multiples of one power of two, so that their sum is exact; and that."""
    limits, dtype = finfo(x.dtype), x.dtype
    most = float(limits.max) / 2
    wide = [np.clip(a.astype(np.float64), -most, most) for a in (x, y)]
    top = max(float(abs(a).max(initial=0)) for a in wide)
    # Multiples of the grid below 2 ** (nmant + 1) of them are numbers of the dtype.
    grid = 2.0 ** (math.ceil(math.log2(top or 1)) - limits.nmant)
    grid = max(grid, float(limits.smallest_subnormal))
    a, b = (np.trunc(a / grid) * grid for a in wide)
    return a.astype(dtype), b.astype(dtype), (a + b).astype(dtype)
