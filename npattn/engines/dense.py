"""Attention and its gradients, o = softmax(scale · q kᵀ + bias) v: one line per equation.

    B batch   H query heads   K key/value heads   T queries   S keys
    D query/key size   E value size
    The softmax runs over the visible keys of a query; a query that sees none gives o = 0,
    lse = −inf, and passes no gradient. Numbers in brackets are the rules of docs/semantics.md.
    Source: Vaswani et al. 2017, eq. 1. Gradients: docs/derivations/attention.md.

No line conjugates, and the row maximum is taken by real part, so that complex arrays go through:
complex-step differentiation of this file gives derivatives that are exact to rounding.

A score_mod is called, checked and differentiated by score_mod.py.
"""

from typing import Any, NamedTuple

import numpy as np

from npattn.engines.score_mod import call_score_mod, slope
from npattn.problem import Gradients, Problem
from npattn.problem.arrays import Array, BiasLike, sum_to

# Hidden scores may be anything, and a fully masked row takes log(0): both are intended.
QUIET = {"divide": "ignore", "invalid": "ignore", "over": "ignore", "under": "ignore"}


class Residuals(NamedTuple):
    """Intermediates that backward and jvp need and cannot rebuild from each other."""

    q: Array  # (..., H, T, D)
    k: Array  # (..., H, S, D) shared heads repeated
    v: Array  # (..., H, S, E) shared heads repeated
    tanh: Array | None  # (..., H, T, S) of s / softcap
    capped: Array | None  # (..., H, T, S) the argument of score_mod
    live: Array  # (..., H, T, S) True where a key is visible and its score is not −inf
    p: Array  # (..., H, T, S) the weights: each row sums to 1 (with a sink to less), or to 0
    p_sink: Array | None  # (..., H, T, 1) the weight of the sink
    keep: Array | None  # (..., H, T, S) 1 / (1 − rate) where kept, 0 where dropped
    top: Array  # (..., H, T, 1) the largest score


@np.errstate(**QUIET)  # type: ignore[arg-type]  # a dict of literals
def forward(problem: Problem) -> tuple[Array, Array, Residuals]:
    """Compute out (..., H, T, E), lse (..., H, T) and the residuals for backward."""
    q, k, v = operands(problem)
    s = problem.scale * (q @ k.swapaxes(-1, -2))  # (..., H, T, S)  [1]
    tanh = capped = None
    if problem.softcap is not None:
        tanh = np.tanh(s / problem.softcap)
        s = problem.softcap * tanh  # [2]
    if problem.score_mod is not None:
        capped, s = s, call_score_mod(problem, s)  # [3]
    if problem.bias_array is not None:
        s = s + problem.bias_array.astype(s.dtype)  # [4]
    if problem.visible is not None:
        s = np.where(problem.visible, s, -np.inf)  # [5-7]
    live = s.real != -np.inf  # [4] a score of −inf leaves the softmax, wherever it comes from

    top = s.real.max(-1, keepdims=True, initial=-np.inf)
    p, p_sink, lse = softmax(s, top, live, _sinks(problem))  # [8, 11]
    keep = dropout_factor(problem)
    w = p if keep is None else p * keep  # [9]
    o = sum_live(problem.round_to_storage(w), v, live)  # (..., H, T, E)  [10, 15]

    residuals = Residuals(q, k, v, tanh, capped, live, p, p_sink, keep, top)
    return (o[0], lse[0], residuals) if problem.headless else (o, lse, residuals)


@np.errstate(**QUIET)  # type: ignore[arg-type]
def backward(
    problem: Problem,
    residuals: Residuals,
    do: Array,
    dlse: Array | None = None,
    dweights: Array | None = None,
) -> Gradients:
    """Gradients of Σ do·out + Σ dlse·lse + Σ dweights·weights: forward, read upwards.

    do is (..., H, T, E), dlse (..., H, T), dweights (..., H, T, S).
    """
    q, k, v, tanh, capped, live, p, p_sink, keep, _ = residuals
    w = problem.round_to_storage(p if keep is None else p * keep)
    do = problem.round_to_storage(do)  # [15]

    dv = sum_live(w.swapaxes(-1, -2), do, live.swapaxes(-1, -2))  # from o = w v
    dp = do @ v.swapaxes(-1, -2)  # from o = w v
    dp = dp if keep is None else dp * keep  # from w = p · keep
    dp = dp if dweights is None else dp + dweights
    dp = where_live(dp, live)  # 0 · NaN is NaN, but a hidden value matters to nobody  [10]
    g, g_sink = subtract_mean(dp, 0, p, p_sink)  # from p = softmax(s)
    if dlse is not None:
        g, g_sink = g + dlse[..., None], g_sink + dlse[..., None]  # from lse = log Σ exp(s)
    ds = where_live(p * g, live)
    ds_sink = None if p_sink is None else p_sink * g_sink  # one more key, with dp = 0

    dx = ds  # from s = x + bias
    if capped is not None:
        dx = dx * slope(problem, capped)  # from s = score_mod(x)
    if tanh is not None:
        dx = dx * (1 - tanh**2)  # from s = c · tanh(x / c)
    dx = problem.round_to_storage(dx if dx is ds else where_live(dx, live))
    dq = problem.scale * sum_live(dx, k, live)  # from x = scale · q kᵀ
    dk = problem.scale * sum_live(dx.swapaxes(-1, -2), q, live.swapaxes(-1, -2))

    return Gradients(
        q=sum_to(dq, problem.q.shape),
        k=sum_shared(dk, problem.K, problem.k.shape),
        v=sum_shared(dv, problem.K, problem.v.shape),
        bias=problem.bias_gradient(ds),
        sinks=None if ds_sink is None else sum_to(ds_sink, (problem.H, 1, 1))[:, 0, 0],
    )


@np.errstate(**QUIET)  # type: ignore[arg-type]
def jvp(
    problem: Problem,
    residuals: Residuals,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    dbias: Array | BiasLike | None = None,
    dsinks: Array | None = None,
) -> tuple[Array, Array]:
    """Directional derivative (do, dlse) of (out, lse): forward, line by line."""
    q, k, v, tanh, capped, live, p, p_sink, keep, _ = residuals
    dx = np.zeros_like(p)
    if dq is not None:
        dx = dx + problem.scale * (dq @ k.swapaxes(-1, -2))  # x = scale · q kᵀ
    if dk is not None:
        dx = dx + problem.scale * (q @ repeat_heads(dk, problem).swapaxes(-1, -2))
    ds = dx if tanh is None else dx * (1 - tanh**2)  # s = c · tanh(x / c)
    ds = ds if capped is None else ds * slope(problem, capped)  # s = score_mod(x)
    ds = ds if dbias is None else ds + problem.as_array(dbias)  # s = z + bias
    ds = where_live(ds, live)
    ds_sink = 0 if dsinks is None else dsinks[:, None, None]
    dlse = (p * ds).sum(-1, keepdims=True)  # (..., H, T, 1)
    dlse = dlse if p_sink is None else dlse + p_sink * ds_sink
    dp = p * subtract_mean(ds, ds_sink, p, p_sink)[0]  # p = exp(s − lse)
    dw, w = (dp, p) if keep is None else (dp * keep, p * keep)
    do = sum_live(dw, v, live)
    if dv is not None:
        do = do + sum_live(w, repeat_heads(dv, problem), live)  # o = w v
    return (do[0], dlse[0, ..., 0]) if problem.headless else (do, dlse[..., 0])


def weights(_: Problem, residuals: Residuals) -> Array:
    """Weights (..., H, T, S), with a head axis."""
    return residuals.p


def max_score(_: Problem, residuals: Residuals) -> Array:
    """Largest score of each row, (..., H, T) with a head axis; of complex ones the real part."""
    return residuals.top[..., 0]


# --- the parts ------------------------------------------------------------------------------------


def operands(problem: Problem) -> tuple[Array, Array, Array]:
    """Return q, k, v in the dtype of the computation, with a head axis, heads repeated [1, 15]."""
    q, k, v = (problem.to_operand(x) for x in (problem.q, problem.k, problem.v))
    if problem.headless:
        return q[None], k[None], v[None]
    full_shape = (*problem.lead, problem.H, problem.T, problem.D)
    q = q if q.shape == full_shape else np.broadcast_to(q, full_shape)
    return q, repeat_heads(k, problem), repeat_heads(v, problem)


def repeat_heads(x: Array, problem: Problem) -> Array:
    """Repeat shared heads, (..., K, S, n) → (..., H, S, n): head h uses h // (H / K) [1]."""
    if problem.K == problem.H:
        return x
    return np.repeat(x, problem.H // problem.K, axis=-3)


def sum_shared(dx: Array, K: int, shape: tuple[int, ...]) -> Array:
    """Sum over the query heads that share a head, and over broadcast axes, to `shape`."""
    H = dx.shape[-3]
    if H != K:
        dx = dx.reshape(*dx.shape[:-3], K, H // K, *dx.shape[-2:]).sum(-3)
    return sum_to(dx, shape)


def softmax(
    s: Array, top: Array, live: Array, sinks: Array | None
) -> tuple[Array, Array | None, Array]:
    """Compute p, p_sink and lse from the scores, their maxima and one sink per head [8, 11].

    s and live are (..., H, T, S), top is (..., H, T, 1), sinks are (H, 1, 1).
    """
    m = top if sinks is None else np.maximum(top, sinks.real)  # (..., H, T, 1)
    # A query that sees no key has maximum −inf, and −inf − −inf is NaN.
    m = np.where(m == -np.inf, 0, m)
    e = s - m  # (..., H, T, S)
    np.exp(e, out=e)
    total = e.sum(-1, keepdims=True)
    e_sink = None if sinks is None else np.exp(sinks - m)
    total = total if e_sink is None else total + e_sink
    lse = (m + np.log(total))[..., 0]
    total = np.where(total == 0, 1, total)
    e /= total
    p = where_live(e, live)  # in a row of NaN, hidden keys still have weight 0  [10]
    return p, None if e_sink is None else e_sink / total, lse


def subtract_mean(x: Array, x_sink: Any, p: Array, p_sink: Array | None) -> tuple[Array, Any]:
    """Subtract the mean of each row, Σ p x + p_sink x_sink, from x and x_sink.

    Where one weight is almost 1, the mean is almost its x, and of their difference little is left
    but the rounding of the mean. That rounding is common to the row, so a second pass takes it off.
    """
    for _ in range(2):
        mean = (p * x).sum(-1, keepdims=True)  # (..., H, T, 1)
        mean = mean if p_sink is None else mean + p_sink * x_sink
        x, x_sink = x - mean, x_sink - mean
    return x, x_sink


def where_live(x: Array, live: Array) -> Array:
    """Return x, with 0 where a key is not live."""
    return x if live.all() else np.where(live, x, 0)


def sum_live(w: Array, x: Array, live: Array) -> Array:
    """Compute w @ x, in which x counts only where it is live: 0 · NaN is NaN [10]."""
    finite = np.isfinite(x)
    if finite.all():
        return w @ x
    touched = live.astype(np.float64) @ ~finite > 0  # a NaN or inf that this row does see
    return np.where(touched, np.nan, w @ np.where(finite, x, 0))


def _sinks(problem: Problem) -> Array | None:
    return None if problem.sinks is None else problem.sinks.astype(problem.dtype)[:, None, None]


def dropout_factor(problem: Problem) -> Array | None:
    """Factor of the weights: 1 / (1 − rate) where kept, 0 where dropped [9]."""
    if problem.dropout_mask is None:
        return None
    return problem.dropout_mask.astype(problem.dtype) / (1 - problem.dropout_rate)
