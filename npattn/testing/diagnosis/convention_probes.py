"""A probe for each convention: small problems on which its values give different results.

The probes run in an order in which each needs only conventions that are known by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from npattn.problem import Problem
from npattn.testing.adapters.base import Crash, TimedOut
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis.conventions import NEEDS
from npattn.testing.diagnosis.fills import probe_hidden
from npattn.testing.diagnosis.unknown import ENDS, FILLS, KINDS, Unknown

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
    mask, v = np.zeros(np.shape(f.mask_of(problem)), bool), np.zeros_like(problem.v)
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
