"""Caps that come after the bias, and the gradient of a bias inside the cap."""

from collections.abc import Callable

import numpy as np

from npattn.engines import dense
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.problem.options import ScoreMod


def cap_late(problem: Problem) -> Problem:
    """Make a canonical problem that caps the score with its bias: score_mod does all three.

    A bias of 0 stays, in full shape: its gradient is that of each final score.
    """
    xp, cap = problem.xp, _cap(problem)
    scores_shape = (*problem.lead, problem.H, problem.T, problem.S)
    return problem.replace(
        score_mod=_after_bias(problem, lambda y: cap * xp.tanh(y / cap)),
        softcap=None,
        bias=None if problem.bias is None else xp.zeros(scores_shape, dtype=problem.dtype),
    )


@np.errstate(all="ignore")  # hidden scores may be anything
def through_cap(problem: Problem, ds: Array) -> Array:
    """Gradient of the bias from that of the final scores: ds · (1 − tanh²)."""
    xp, cap = problem.xp, _cap(problem)
    textbook = getattr(problem, "textbook", dense)
    q, k, _ = textbook.operands(problem)
    x = scale_of(problem) * (q @ k.swapaxes(-1, -2))  # the input of score_mod
    rate = problem.replace(score_mod=_after_bias(problem, lambda y: 1 - xp.tanh(y / cap) ** 2))
    slope = textbook.call_score_mod(rate, x)
    capped: Array = xp.where(ds == 0, 0, ds * slope)  # a hidden score may be NaN, its slope too
    return capped


def _after_bias(problem: Problem, function: Callable[[Array], Array]) -> ScoreMod:
    """Make the score_mod function(score_mod(s) + bias)."""
    xp, mod, bias = problem.xp, problem.score_mod, problem.bias_array
    bias = None if bias is None else problem.to_compute_dtype(bias)

    def modify(s: Array, b: Array, h: Array, t: Array, s_index: Array) -> Array:
        s = s if mod is None else mod(s, b, h, t, s_index)
        if bias is not None:
            lead = xp.unravel_index(b, problem.lead) if problem.lead else ()
            at = (*lead, h, t, s_index)[-bias.ndim :]
            s = s + bias[tuple(xp.minimum(i, n - 1) for i, n in zip(at, bias.shape, strict=True))]
        return function(s)

    return modify


def scale_of(problem: Problem) -> float:
    """Return the scale of a problem: a number, once the problem is made."""
    assert problem.scale is not None
    return problem.scale


def _cap(problem: Problem) -> float:
    assert problem.softcap is not None
    return problem.softcap
