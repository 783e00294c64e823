"""A probe for each convention: small problems on which its values give different results.

The probes run in an order in which each needs only conventions that are known by then. Hidden
scores leave, become a number, or have one added. A number is read off the results: one key is
visible at a score of −x, and the others are hidden; where −x falls below the fill, the weight goes
over to them, and bisection finds that x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npattn.problem import Problem
from npattn.problem.arrays import Array, finfo
from npattn.profiles import PROFILES
from npattn.testing.adapters.base import Crash, ImplementationError, TimedOut
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis.conventions import NEEDS
from npattn.testing.diagnosis.unknown import ENDS, FILLS, KINDS, Unknown

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
        fill = None  # it outweighs nothing but a visible −inf, and rows without keys are set to 0
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
        visible = np.zeros_like(self.problem.mask_array, bool)
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


REFUSED = "refused in every shape"


def probe_conventions(f: Unknown) -> None:
    """Determine every convention that results tell; a call that ends the process costs one."""
    for topic, probe in PROBES.items():
        names = FILLS if topic == "hidden scores" else (topic,)
        try:
            found = _find_lack(f, topic) or probe(f)
            found = f.choose(topic, found) if isinstance(found, list) else found
        except ENDS as err:
            found = err.status if isinstance(err, Crash | TimedOut) else str(err)
            f.crashes.append(f"{', '.join(names)}: {err}")
        if found is not None:
            f.give_up(found, *names)


def _find_lack(f: Unknown, topic: str) -> str:
    """Return what it lacks for a convention to show, in words; "" if it lacks nothing."""
    needs, own = NEEDS[topic], f.trial.implementation
    returned = {n for n in ("lse", "weights") if getattr(own, f"returns_{n}")}
    there = f.trial.space.features | f.trial.space.structure | returned
    lacking = min((x - there for x in needs), key=len)
    if not lacking:
        arrays = {n for n in KINDS if {n} in needs and f.has(n) and f.kind(n) is None}
        return "" if any(there - arrays >= x for x in needs) else REFUSED
    for name in sorted(lacking - f.trial.space.features):
        if name in ("lse", "weights"):
            return f"returns no {name}"
        if " " in name:
            return f"takes no {name.replace('!=', '≠')}"
    return f.missing(*sorted(lacking))


# --- each returns recipes or problems that tell, why none does, or None if it is determined -------


def probe_mask(f: Unknown) -> str | None:
    """Determine the polarity: the share of keys where mask is True, whose values are 1."""
    problem = f.problem(f.recipe(mask=f.kind("mask")))
    mask, v = np.zeros_like(problem.mask_array, bool), np.zeros_like(problem.v)
    mask[..., ::2], v[..., ::2, :] = True, 1
    flat = problem.replace(q=np.zeros_like(problem.q), v=v, mask=mask)
    share = float(f.call(flat)["o"].astype(float).mean())
    even = v[..., 0].mean()
    if not abs(share - even) > 0.1:  # a NaN too
        return "its mask does not choose among keys"
    f.settle(mask_true="attend" if share > even else "hide")
    return None


def list_late_queries(f: Unknown) -> list[Recipe] | str | None:
    """Return rows that causal empties, where no mask has told."""
    if "empty_row" in f.determined or f.fills:
        return None
    if not f.has("causal", "T > S") or f.conventions.causal != "bottom_right":
        return f.ended.get("mask", "neither a mask nor causal empties a row")
    late = f.recipe(causal=True)
    return [replace(late, S=late.T, T=late.T + 8)]


def probe_bias_rows(f: Unknown) -> str | None:
    """Determine the rows that a bias of −inf empties."""
    reason = f.choose("empty_row_bias", [f.hide_rows("bias", str(f.kind("bias")))])
    if f.conventions.empty_row_bias == f.conventions.empty_row:
        f.settle(empty_row_bias=None)
    return reason


def list_windows(f: Unknown) -> list[Recipe]:
    square = replace(f.recipe(window=(3, 1)), S=f.recipe().T)
    causal = [replace(square, causal=True, window=(3, 0))] if f.has("causal") else []
    return [square, *causal]


def list_caps(f: Unknown) -> list[Recipe]:
    """Return a cap beside a bias, and beside what hides keys."""
    beside: list[dict[str, Any]] = [{n: f.kind(n)} for n in ("bias", "mask") if f.has(n)]
    beside += [{"causal": True}] if f.has("causal") else []
    return [f.recipe(softcap=2.0, **options) for options in beside]


def probe_lse_empty(f: Unknown) -> str | None:
    """Settle the lse of rows that see no key; return the reason if it cannot be known."""
    options = [n for n in ("bias", *(() if f.fills else ("mask",))) if f.has(n)]
    problems = [f.hide_rows(n, kind) for n in options if (kind := f.kind(n)) is not None]
    if not problems:
        return "nothing empties a row"
    lse = dict(f.call(problems[-1]).pairs)["lse"][f.trial.empty(problems[-1])]
    value = float(lse.flat[0])
    if not np.array_equal(lse, np.full_like(lse, value), equal_nan=True):
        return "it differs from one empty row to another"
    f.settle(lse_empty=value)
    return None


PROBES: dict[str, Callable[[Unknown], list[Recipe] | list[Problem] | str | None]] = {
    # with K = 1 both are the same
    "kv_head": lambda f: (
        [f.recipe(H=H, K=K) for H, K in sorted(f.trial.space.heads) if 1 < K < H][:1]
        or "takes no 1 < K < H"
    ),
    "bias": lambda f: [f.recipe(bias=f.kind("bias"))],
    "mask_true": probe_mask,
    "hidden scores": probe_hidden,
    "causal": lambda f: [f.recipe(causal=True) if f.has("causal") else f.recipe(window=(3, 1))],
    "empty_row": list_late_queries,
    "empty_row_bias": probe_bias_rows,
    "window": list_windows,
    "softcap": list_caps,
    "lse_base": lambda f: [f.recipe()],
    "lse_empty": probe_lse_empty,
    "dropout_at_rate_0": lambda f: [f.recipe(dropout=0.0)],
    "weights": lambda f: [f.recipe(dropout=0.5 if f.has("dropout_rate") else 0.0)],
}
"""Topic of conventions → its probe, in order."""
