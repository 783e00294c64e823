"""Correct implementations of npattn itself: the oracles, rounded once, and the NumPy target."""

from __future__ import annotations

from typing import Any

import numpy as np

import npattn
from benchmarks.zoo.correct.arithmetic import cast
from benchmarks.zoo.correct.register import correct
from benchmarks.zoo.correct.signature import with_every_option
from npattn.engines import loops
from npattn.mistakes.attention import base, base_backward
from npattn.problem import Forward, Gradients, Problem
from npattn.problem.arrays import Array
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.targets.numpy import flash, flash_backward

GRADIENTS = ("q", "k", "v", "bias", "sinks", "gate")


def bottom_right(causal: bool) -> Any:
    return "bottom_right" if causal else False


@with_every_option()
def dense(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    *,
    causal: bool = False,
    return_lse: bool = False,
    return_weights: bool = False,
    **options: Any,
) -> Any:
    fwd = npattn.forward(q, k, v, mask, causal=bottom_right(causal), **options)
    return select(fwd.out, fwd.lse, fwd.weights if return_weights else None, q, return_lse)


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
    fwd: Forward = npattn.forward(q, k, v, causal=bottom_right(causal), **options)
    return round_gradients(npattn.backward(fwd, dout, dlse, dweights), q)


@with_every_option()
def by_loops(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    *,
    causal: bool = False,
    return_lse: bool = False,
    return_weights: bool = False,
    **options: Any,
) -> Any:
    problem = Problem(q, k, v, mask, causal=bottom_right(causal), **options)
    out, lse, weights = loops.forward(problem)
    return select(out, lse, weights if return_weights else None, q, return_lse)


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
    problem = Problem(q, k, v, causal=bottom_right(causal), **options)
    return round_gradients(loops.backward(problem, dout, dlse, dweights), q)


def select(out: Array, lse: Array, weights: Array | None, q: Array, return_lse: bool) -> Any:
    """Return out in the dtype of q, with lse and weights if they are requested."""
    results = [cast(out, q.dtype)] + [lse] * return_lse + ([] if weights is None else [weights])
    return results[0] if len(results) == 1 else tuple(results)


def round_gradients(grads: Gradients, q: Array) -> dict[str, Array]:
    """Return the gradients by input name; those of q, k, v in the dtype of q."""
    arrays = {n: getattr(grads, n) for n in GRADIENTS if getattr(grads, n) is not None}
    return {
        n: cast(x, q.dtype) if n in ("q", "k", "v") else np.asarray(x) for n, x in arrays.items()
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
    "Base of the mutants: float64 inside.",
    base,
    base_backward,
    rounding=Rounding.upcast(),
)
