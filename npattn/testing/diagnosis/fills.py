"""Fate of hidden scores: they leave, become a number, or have one added.

A number is read off the results. One key is visible at a score of −x, and the others are hidden:
where −x falls below the fill, the weight goes over to them, and bisection finds that x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn.problem.arrays import Array, finfo
from npattn.profiles import PROFILES
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.diagnosis.unknown import ENDS, Unknown

USUAL = (
    *(-1e4, -1e5, -1e6, -1e7, -1e8, -1e9, -1e10, -1e15, -1e20, -1e30, -1e38),
    *(-100.0, -1000.0, -5e4, -32767.0, -65504.0, -1e12),
    float(np.finfo(np.float32).min) / 2,
    *(
        fill
        for profile in PROFILES.values()
        for fill in (profile.conventions.hidden_fill, profile.conventions.hidden_add)
        if isinstance(fill, float)
    ),
)
"""Numbers that systems put at hidden scores; one of these is meant where it is measured."""
CLOSE = 2.0**-9
"""Relative error of a measured fill."""
STEPS = 24
"""Halvings of the logarithm, and then of the number: enough for any float."""


def probe_hidden(f: Unknown) -> str | None:
    """Determine hidden_fill, hidden_add and, where hidden keys leave, empty_row."""
    kind = f.kind("mask") if "mask_true" in f.determined else None
    if kind is None:
        return f.ended.get("mask", "no mask tells")
    problem = f.hide_rows("mask", kind)
    try:
        empty = f.call(problem)["o"].astype(float)
    except ENDS:
        raise
    except ImplementationError as err:
        return f"a row without keys raised {err}"
    reader = FillReader(f, kind)
    fill = None if np.isnan(empty).any() else reader.measure()
    if fill is not None and fill <= -reader.largest and not empty[f.trial.empty(problem)].any():
        fill = None  # it outweighs a visible −inf alone, and rows without keys are set to 0
    if fill is None:
        f.settle(hidden_fill=None, hidden_add=None)
        reason = f.choose("empty_row", [problem])
        if reason is not None:
            f.give_up(reason, "empty_row")
        return None
    filled = {"hidden_fill": None, "hidden_add": None}
    filled["hidden_add" if reader.adds(fill) else "hidden_fill"] = reader.name(fill)
    f.settle(**filled)
    if reader.largest < -min(USUAL) and abs(fill) > reader.largest:  # which of them, or "min"
        number = next(name for name, x in filled.items() if x is not None)
        del f.determined[number]
        return f"any number below −{reader.largest:.2g} gives the same: nothing tells"
    return None


@dataclass
class FillReader:
    """Reads the score that hidden keys have from their weight beside a visible one."""

    f: Unknown
    kind: str  # kind of mask

    def __post_init__(self) -> None:
        recipe = self.f.recipe(mask=self.kind)
        recipe = recipe if not self.f.has("scale") else self.f.recipe(mask=self.kind, scale=1.0)
        self.problem = self.f.problem(recipe)
        visible = np.zeros(self.f.mask_of(self.problem).shape, bool)
        visible[..., 0] = True
        self.mask = ~visible if self.f.conventions.mask_true == "hide" else visible
        assert self.problem.scale is not None
        self.scale = float(self.problem.scale)
        self.top = float(finfo(recipe.dtype).max)
        self.largest: float = 0.9 * self.top * min(self.scale, 1.0)

    def share(self, score: float, mask: Array | None = None) -> float:
        """Return the weight of all keys but the first, which has this score beside theirs of 0."""
        q, k, v = (np.zeros_like(a) for a in (self.problem.q, self.problem.k, self.problem.v))
        root = math.sqrt(abs(score)) / math.sqrt(self.scale)
        root = min(root, self.top**0.75)  # whose square is beyond the dtype
        q[..., 0] = root
        k[..., 0, 0] = math.copysign(root, score)
        v[..., 1:, :] = 1
        mask = self.mask if mask is None else mask
        results = self.f.call(self.problem.replace(q=q, k=k, v=v, mask=mask))
        return float(results["o"].astype(np.float64).mean())

    def measure(self) -> float | None:
        """Return the score that hidden keys get; None if a visible one always outweighs them."""
        if not self.share(-self.largest) > 0.5:
            # Where the visible score overflows to −inf, any number outweighs it.
            return -self.top if self.share(-math.inf) > 1 - 0.5 / self.problem.S else None
        low, high = -20.0, math.log2(self.largest)  # log2 of minus the score
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.share(-(2.0**middle)) > 0.5 else (middle, high)
        # As many weights of e^fill as there are hidden keys balance one of e^score.
        return float(-(2.0**high) - math.log(self.problem.S - 1))

    def adds(self, fill: float) -> bool:
        """Return True if the fill is added to hidden scores, so that they still differ."""
        nothing = np.full_like(self.mask, self.f.conventions.mask_true == "hide")
        return self.share(min(abs(fill) / 2, self.largest), nothing) < 0.5

    def name(self, fill: float) -> Any:
        """Return the usual number that was measured, "min", or the measured one in three digits."""
        if math.isclose(fill, -self.top, rel_tol=CLOSE):
            return "min"
        near = min(USUAL, key=lambda x: abs(x - fill))
        return near if math.isclose(fill, near, rel_tol=CLOSE) else float(f"{fill:.3g}")
