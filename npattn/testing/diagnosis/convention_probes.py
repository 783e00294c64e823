"""A probe for each convention: small problems on which its values give different results.

The probes run in an order in which each needs only conventions that are known by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from npattn.problem.options import ALIGNMENTS
from npattn.testing.adapters.base import Crash, TimedOut
from npattn.testing.diagnosis.fills import probe_hidden
from npattn.testing.diagnosis.unknown import ENDS, Unknown, legal

REFUSED = "refused in every shape"


def probe_conventions(f: Unknown) -> None:
    """Determine every convention that results tell; a call that ends the process costs one."""
    for names, probe in PROBES.items():
        try:
            reason = probe(f)
        except ENDS as err:
            reason = err.status if isinstance(err, Crash | TimedOut) else str(err)
            f.crashes.append(f"{', '.join(names)}: {err}")
        if reason is not None:
            f.give_up(reason, *names)


# Each returns why it cannot be asked, or None.


def probe_kv_head(f: Unknown) -> str | None:
    if not f.has("K < H"):
        return "takes no K < H"
    between = [(H, K) for H, K in f.trial.space.heads if 1 < K < H]  # with K = 1 both are the same
    if not between:
        return "takes no 1 < K < H"
    H, K = min(between)
    return f.choose("kv_head", legal("kv_head"), [f.problem(f.recipe(H=H, K=K))])


def probe_bias(f: Unknown) -> str | None:
    if not f.has("bias"):
        return f.missing("bias")
    if f.kind("bias") is None:
        return REFUSED
    return f.choose("bias", legal("bias"), [f.problem(f.recipe(bias=f.kind("bias")))])


def probe_mask(f: Unknown) -> str | None:
    """Determine the polarity: the share of keys where mask is True, whose values are 1."""
    kind = f.kind("mask") if f.has("mask") else None
    if kind is None:
        return REFUSED if f.has("mask") else f.missing("mask")
    problem = f.problem(f.recipe(mask=kind))
    mask, v = np.zeros(np.shape(f.mask_of(problem)), bool), np.zeros_like(problem.v)
    mask[..., ::2], v[..., ::2, :] = True, 1
    flat = problem.replace(q=np.zeros_like(problem.q), v=v, mask=mask)
    share = float(f.call(flat)["o"].astype(float).mean())
    even = v[..., 0].mean()
    if not abs(share - even) > 0.1:  # a NaN too
        return "its mask does not choose among keys"
    f.settle(mask_true="attend" if share > even else "hide")
    return None


def probe_causal(f: Unknown) -> str | None:
    """Compare the alignments of causal, or of a window where it has no causal."""
    option: dict[str, Any] = {"causal": True} if f.has("causal") else {"window": (3, 1)}
    if not f.has(*option):
        return f.missing("causal", "window")
    if not f.has("T != S"):
        return "takes no T ≠ S"
    return f.choose("causal", ALIGNMENTS, [f.problem(f.recipe(**option))])


def probe_late_queries(f: Unknown) -> str | None:
    """Determine the rows that causal empties, where no mask does."""
    if "empty_row" in f.determined or f.fills:
        return None
    if not f.has("causal", "T > S") or f.conventions.causal != "bottom_right":
        return f.ended.get("mask", "neither a mask nor causal empties a row")
    late = f.recipe(causal=True)
    problem = f.problem(replace(late, S=late.T, T=late.T + 8))
    return f.choose("empty_row", legal("empty_row"), [problem])


def probe_bias_rows(f: Unknown) -> str | None:
    """Determine the rows that a bias of −inf empties."""
    kind = f.kind("bias") if f.has("bias") else None
    if kind is None:
        return REFUSED if f.has("bias") else f.missing("bias")
    problem = f.hide_rows("bias", kind)
    reason = f.choose("empty_row_bias", legal("empty_row"), [problem])
    if f.conventions.empty_row_bias == f.conventions.empty_row:
        f.settle(empty_row_bias=None)
    return reason


def probe_window(f: Unknown) -> str | None:
    if not f.has("window"):
        return f.missing("window")
    square = f.recipe(window=(3, 1))
    square = replace(square, S=square.T)
    problems = [f.problem(square)]
    if f.has("causal"):
        problems.append(f.problem(replace(square, causal=True, window=(3, 0))))
    return f.choose("window", legal("window"), problems)


def probe_softcap(f: Unknown) -> str | None:
    """Compare its places beside a bias, and beside what hides keys."""
    if not f.has("softcap"):
        return f.missing("softcap")
    beside: list[dict[str, Any]] = [{n: f.kind(n)} for n in ("bias", "mask") if f.has(n)]
    beside += [{"causal": True}] if f.has("causal") else []
    if not beside:
        return "it has no bias, and hides nothing"
    problems = [f.problem(f.recipe(softcap=2.0, **options)) for options in beside]
    return f.choose("softcap", legal("softcap"), problems)


def probe_lse_base(f: Unknown) -> str | None:
    if not f.trial.implementation.returns_lse:
        return "returns no lse"
    return f.choose("lse_base", legal("lse_base"), [f.problem(f.recipe())], "lse")


def probe_lse_empty(f: Unknown) -> str | None:
    """Settle the lse of rows that see no key; return the reason if it cannot be known."""
    if not f.trial.implementation.returns_lse:
        return "returns no lse"
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


def probe_rate_0(f: Unknown) -> str | None:
    if not f.has("dropout_mask"):
        return f.missing("dropout_mask")
    values = legal("dropout_at_rate_0")
    return f.choose("dropout_at_rate_0", values, [f.problem(f.recipe(dropout=0.0))])


def probe_weights(f: Unknown) -> str | None:
    if not f.trial.implementation.returns_weights:
        return "returns no weights"
    if not f.has("dropout_mask", "dropout_rate"):
        return f.missing("dropout_mask")
    return f.choose("weights", legal("weights"), [f.problem(f.recipe(dropout=0.5))], "weights")


PROBES: dict[tuple[str, ...], Callable[[Unknown], str | None]] = {
    ("kv_head",): probe_kv_head,
    ("bias",): probe_bias,
    ("mask_true",): probe_mask,
    ("hidden_fill", "hidden_add"): probe_hidden,
    ("causal",): probe_causal,
    ("empty_row",): probe_late_queries,
    ("empty_row_bias",): probe_bias_rows,
    ("window",): probe_window,
    ("softcap",): probe_softcap,
    ("lse_base",): probe_lse_base,
    ("lse_empty",): probe_lse_empty,
    ("dropout_at_rate_0",): probe_rate_0,
    ("weights",): probe_weights,
}
"""Conventions → their probe, in order."""
