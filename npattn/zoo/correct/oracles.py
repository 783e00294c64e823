"""npattn's own: the oracles, rounded once at the end, and what ships beside them."""

from __future__ import annotations

from typing import Any

import numpy as np

import npattn
from npattn import loops
from npattn.arrays import Array
from npattn.mistakes.attention import base, base_backward
from npattn.options import ScoreMod, Window
from npattn.problem import Forward, Gradients, Problem
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.targets.numpy import flash, flash_backward
from npattn.zoo.correct.arithmetic import cast
from npattn.zoo.correct.register import correct

GRADIENTS = ("q", "k", "v", "bias", "sinks")


def _aligned(causal: bool) -> Any:
    return "bottom_right" if causal else False


def dense(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Array | None = None,
    dropout_mask: Array | None = None,
    dropout_rate: float = 0.0,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Any:
    fwd = npattn.forward(
        q, k, v, mask, causal=_aligned(causal), window=window, bias=bias, scale=scale,
        softcap=softcap, score_mod=score_mod, sinks=sinks, dropout_mask=dropout_mask,
        dropout_rate=dropout_rate,
    )  # fmt: skip
    return _asked(fwd.out, fwd.lse, fwd.weights if return_weights else None, q, return_lse)


def dense_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    dweights: Array | None = None,
    causal: bool = False,
    **options: Any,
) -> dict[str, Array]:
    fwd: Forward = npattn.forward(q, k, v, causal=_aligned(causal), **options)
    return _delivered(npattn.backward(fwd, dout, dlse, dweights), q)


def by_loops(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Array | None = None,
    dropout_mask: Array | None = None,
    dropout_rate: float = 0.0,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Any:
    problem = Problem(
        q, k, v, mask, causal=_aligned(causal), window=window, bias=bias, scale=scale,
        softcap=softcap, score_mod=score_mod, sinks=sinks, dropout_mask=dropout_mask,
        dropout_rate=dropout_rate,
    )  # fmt: skip
    out, lse, weights = loops.forward(problem)
    return _asked(out, lse, weights if return_weights else None, q, return_lse)


def loops_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    dweights: Array | None = None,
    causal: bool = False,
    **options: Any,
) -> dict[str, Array]:
    problem = Problem(q, k, v, causal=_aligned(causal), **options)
    return _delivered(loops.backward(problem, dout, dlse, dweights), q)


def _asked(out: Array, lse: Array, weights: Array | None, q: Array, return_lse: bool) -> Any:
    found = [cast(out, q.dtype)] + [lse] * return_lse + ([] if weights is None else [weights])
    return found[0] if len(found) == 1 else tuple(found)


def _delivered(grads: Gradients, q: Array) -> dict[str, Array]:
    found = {n: getattr(grads, n) for n in GRADIENTS if getattr(grads, n) is not None}
    return {
        n: cast(x, q.dtype) if n in ("q", "k", "v") else np.asarray(x) for n, x in found.items()
    }


WIDE = Rounding(name="float64 inside", accumulator="float64")

correct(
    "dense",
    "The dense oracle, rounded once at the end.",
    dense,
    dense_backward,
    rounding=WIDE,
)
correct(
    "loops",
    "The oracle in plain Python, one query at a time.",
    by_loops,
    loops_backward,
    rounding=WIDE,
    sizes={
        "B": (2, 1),
        "H": (2, 1, 4),
        "T": (2, 1, 3, 5),
        "S": (3, 1, 2, 5),
        "D": (3, 1),
        "E": (2, 1),
    },
)
correct(
    "numpy.flash",
    "The target that ships with npattn: online softmax, backward in two passes over the keys.",
    flash,
    flash_backward,
    rounding=Rounding.upcast(),
)
correct(
    "base of the zoo",
    "What the mutants are made of: float64 inside.",
    base,
    base_backward,
    rounding=Rounding.upcast(),
)
