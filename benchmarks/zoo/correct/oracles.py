"""Correct implementations of npattn itself: the oracles, rounded once, and the NumPy target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.zoo.correct.arithmetic import cast
from benchmarks.zoo.correct.register import correct
from benchmarks.zoo.correct.signature import with_every_option
from npattn.engines import loops
from npattn.mistakes.attention import base, base_backward
from npattn.oracle.api import backward, evaluate
from npattn.problem import Gradients, Problem
from npattn.problem.arrays import Array
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.targets.numpy import flash, flash_backward

GRADIENTS = ("q", "k", "v", "bias", "sinks", "gate")


Pair = tuple[Callable[..., Any], Callable[..., Any]]


def implementation(
    evaluate: Callable[[Problem], tuple[Array, Array, Array]],
    pull_back: Callable[[Problem, Array, Array | None, Array | None], Gradients],
) -> Pair:
    """Return an oracle as an implementation and its backward, rounded to the dtype of q."""

    def problem_of(
        q: Array, k: Array, v: Array, *, causal: bool = False, **options: Any
    ) -> Problem:
        return Problem(q, k, v, causal="bottom_right" if causal else False, **options)

    @with_every_option()
    def forward(
        q: Array,
        k: Array,
        v: Array,
        mask: Array | None = None,
        *,
        return_lse: bool = False,
        return_weights: bool = False,
        **options: Any,
    ) -> Any:
        out, lse, weights = evaluate(problem_of(q, k, v, mask=mask, **options))
        results = [cast(out, q.dtype)] + [lse] * return_lse + [weights] * return_weights
        return results[0] if len(results) == 1 else tuple(results)

    def backward(
        dout: Array,
        *arrays: Array,
        dlse: Array | None = None,
        dweights: Array | None = None,
        **options: Any,
    ) -> dict[str, Array]:
        grads = pull_back(problem_of(*arrays, **options), dout, dlse, dweights)
        found = {n: x for n in GRADIENTS if (x := getattr(grads, n)) is not None}
        return {
            n: cast(x, arrays[0].dtype) if n in ("q", "k", "v") else np.asarray(x)
            for n, x in found.items()
        }

    return forward, backward


def by_dense(problem: Problem) -> tuple[Array, Array, Array]:
    fwd = evaluate(problem)
    return fwd.out, fwd.lse, fwd.weights


WIDE = Rounding(name="float64 inside", accumulator="float64")

correct("dense", "The dense oracle, rounded once at the end.",
        *implementation(by_dense, lambda problem, *douts: backward(evaluate(problem), *douts)),
        rounding=WIDE)  # fmt: skip
correct(
    "loops",
    "The oracle in plain Python, one query at a time.",
    *implementation(loops.forward, loops.backward),
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
correct("numpy.flash",
        "The target that ships with npattn: online softmax, backward in two passes over the keys.",
        flash, flash_backward, rounding=Rounding.upcast())  # fmt: skip
correct("base of the zoo", "Base of the mutants: float64 inside.", base, base_backward,
        rounding=Rounding.upcast())  # fmt: skip
