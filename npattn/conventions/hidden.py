"""Hidden keys that stay in the softmax: their score is a number, or has a number added.

docs/derivations/conventions.md derives both translations.
"""

import numpy as np

from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.problem.options import ScoreMod


def fill_hidden(problem: Problem, fill: float) -> Problem:
    """Make a canonical problem whose hidden scores are `fill`.

    Every key gets a twin that is visible exactly where it is hidden. The twin's key is 0, so that
    its score is its bias, `fill`, which no gradient passes; its value is the key's own.
    """
    xp, visible, S = problem.xp, problem.visible, problem.S
    assert visible is not None
    visible = xp.broadcast_to(visible, (*visible.shape[:-1], S))
    bias = problem.bias_array
    real = problem.to_compute_dtype(xp.zeros((1, 1)) if bias is None else bias)
    real = xp.broadcast_to(real, (*real.shape[:-1], S))
    twin = xp.full_like(real, fill)
    mod = problem.score_mod
    if mod is not None or not xp.isfinite(problem.q).all():  # a twin's score is not 0 · NaN
        mod = _on_real_keys(problem, mod)
    keep = problem.dropout_mask
    if keep is not None:
        keep = xp.broadcast_to(keep, (*keep.shape[:-1], S))
        keep = xp.concatenate([keep, keep], axis=-1)
    return problem.replace(
        k=xp.concatenate([problem.k, xp.zeros_like(problem.k)], axis=-2),
        v=xp.concatenate([problem.v, problem.v], axis=-2),
        mask=xp.concatenate([visible, ~visible], axis=-1),
        bias=xp.concatenate([real, twin], axis=-1), dropout_mask=keep, score_mod=mod, causal=False,
        window=None,
    )  # fmt: skip


def _on_real_keys(problem: Problem, mod: ScoreMod | None) -> ScoreMod:
    xp, S = problem.xp, problem.S

    def modify(s: Array, b: Array, h: Array, t: Array, s_index: Array) -> Array:
        # A twin's index is clipped: mod may look up a table of S entries with it.
        real = s if mod is None else mod(s, b, h, t, xp.minimum(s_index, S - 1))
        kept: Array = xp.where(s_index < S, real, 0)
        return kept

    return modify


def add_to_hidden(problem: Problem, number: float) -> Problem:
    """Make a problem without hidden keys, whose bias has the number more where they were."""
    visible, bias = problem.visible, problem.bias_array
    assert visible is not None
    xp = problem.xp
    plain = problem.to_compute_dtype(xp.zeros((1, 1)) if bias is None else bias)
    with np.errstate(over="ignore"):  # the smallest number, and less: −inf
        more = xp.where(visible, plain, plain + number)
    return problem.replace(mask=None, causal=False, window=None, bias=more)
