"""Attention and its gradients in pairs of float64: results are the nearest float64, nearly always.

The equations are those of `dense`, with two changes against cancellation: the slope of the softcap
is 4 e^(−2|x|) / (1 + e^(−2|x|))², and the gradient of a softmax is taken relative to the key h that
has the most weight in its row.

    dp' = dp − dp_h      g = dp' − Σ p dp'      ds = p g

`certify` says how far each result may be off. The rules on NaN and inf are left to `dense`: where a
result of `dense` is not finite, the result here is the same.
"""

from typing import NamedTuple

import numpy as np

from npattn.engines import dense
from npattn.engines.dense import QUIET
from npattn.engines.double_double import Pair, as_pair, dot, exp, expm1, log, select, total
from npattn.errors import OptionError
from npattn.problem import Gradients, Problem
from npattn.problem.arrays import Array, sum_to
from npattn.problem.options import default_scale


class ExtendedResiduals(NamedTuple):
    """Intermediates of the forward pass, and the residuals of `dense`."""

    q: Pair  # (..., H, T, D)
    k: Pair  # (..., H, S, D)
    v: Pair  # (..., H, S, E)
    slope: Pair | None  # (..., H, T, S) of the softcap
    live: Array  # (..., H, T, S)
    p: Pair  # (..., H, T, S)
    p_sink: Pair | None  # (..., H, T, 1)
    keep: Pair | None  # (..., H, T, S)
    top: Array  # (..., H, T, 1)
    dense: dense.Residuals


def find_obstacle(problem: Problem) -> str | None:
    """Return what keeps a problem from extended precision, in words; None if nothing does."""
    if problem.dtype != np.float64 or problem.storage is not None:
        return f"dtype {problem.storage or problem.dtype}, must be float64 there"
    if problem.gate is not None:
        return "a gate: multiply its o by the gate"
    if problem.score_mod is not None:
        return "score_mod, which computes in float64: leave one out"
    return None


@np.errstate(**QUIET)  # type: ignore[arg-type]
def forward(problem: Problem) -> tuple[Array, Array, ExtendedResiduals]:
    """Compute out (..., H, T, E), lse (..., H, T) and the residuals for backward."""
    if obstacle := find_obstacle(problem):
        raise OptionError(f"precision is 'extended' beside {obstacle}")
    plain_o, plain_lse, plain = dense.forward(problem)
    q, k, v = (as_pair(_finite(x)) for x in (plain.q, plain.k, plain.v))
    s = dot(q, _transpose(k)).times(scale_of(problem))
    slope = None
    if problem.softcap is not None:
        s, slope = _cap(s, problem.softcap)
    if problem.bias_array is not None:
        s = s.plus(_finite(problem.bias_array.astype(np.float64)))
    live = plain.live
    sinks = None if problem.sinks is None else problem.sinks.astype(np.float64)[:, None, None]

    largest = _row_maximum(s, live)
    top = largest
    if sinks is not None:
        less = (top.high < sinks) | ((top.high == sinks) & (top.low < 0))
        top = select(less, as_pair(sinks), top)
    top = Pair(_finite(top.high), _finite(top.low))
    e = select(live, exp(s.minus(top)), 0.0)
    row_total = total(e, -1)
    e_sink = None
    if sinks is not None:
        seen = np.broadcast_to(np.isfinite(sinks), top.high.shape)
        e_sink = select(seen, exp(as_pair(_finite(sinks)).minus(top)), 0.0)
        row_total = row_total.plus(e_sink)
    divisor = select(row_total.high == 0, as_pair(np.ones_like(top.high)), row_total)
    p, p_sink = e.over(divisor), None if e_sink is None else e_sink.over(divisor)
    lse = np.where(row_total.high == 0, -np.inf, log(divisor).plus(top).nearest)[..., 0]

    keep = None
    if problem.dropout_mask is not None:
        kept = problem.dropout_mask.astype(np.float64)
        keep = as_pair(kept).over(as_pair(1.0).minus(problem.dropout_rate))
    w = p if keep is None else p.times(keep)
    o = dot(w, v).nearest
    residuals = ExtendedResiduals(q, k, v, slope, live, p, p_sink, keep, largest.high, plain)
    if problem.headless:
        return _where_finite(plain_o, o[0]), _where_finite(plain_lse, lse[0]), residuals
    return _where_finite(plain_o, o), _where_finite(plain_lse, lse), residuals


@np.errstate(**QUIET)  # type: ignore[arg-type]
def backward(
    problem: Problem, residuals: ExtendedResiduals, do: Array, dlse: Array | None = None,
    dweights: Array | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of Σ do·out + Σ dlse·lse + Σ dweights·weights; shapes are as in dense.backward."""
    plain = dense.backward(problem, residuals.dense, do, dlse, dweights)
    q, k, v, slope, live, p, p_sink, keep, *_ = residuals
    cotangent, w = as_pair(_finite(do)), p if keep is None else p.times(keep)
    dv = dot(_transpose(w), cotangent)
    dp = dot(cotangent, _transpose(v))
    dp = dp if keep is None else dp.times(keep)
    dp = dp if dweights is None else dp.plus(_finite(dweights))
    dp = select(live, dp, 0.0)
    g, g_sink = less_mean(dp, p, p_sink)
    if dlse is not None:
        passed = _finite(dlse)[..., None]
        g, g_sink = g.plus(passed), g_sink.plus(passed)
    ds = select(live, p.times(g), 0.0)
    dx = ds if slope is None else ds.times(slope)
    dq = dot(dx, k).times(scale_of(problem))
    dk = dot(_transpose(dx), q).times(scale_of(problem))

    bias = sinks = None
    if isinstance(problem.bias, np.ndarray):
        bias = _sum_to(ds, problem.bias.shape)
    elif problem.bias is not None:  # its own sums are in float64
        bias = problem.bias_gradient(ds.nearest)
    if p_sink is not None:
        sinks = _sum_to(p_sink.times(g_sink), (problem.H, 1, 1))[:, 0, 0]
    return Gradients(
        q=_where_finite(plain.q, _sum_to(dq, problem.q.shape)),
        k=_where_finite(plain.k, _sum_shared(dk, problem.K, problem.k.shape)),
        v=_where_finite(plain.v, _sum_shared(dv, problem.K, problem.v.shape)),
        bias=bias if bias is None or isinstance(bias, tuple) else _where_finite(plain.bias, bias),
        sinks=None if plain.sinks is None or sinks is None else _where_finite(plain.sinks, sinks),
    )


def jvp(*_: object, **__: object) -> tuple[Array, Array]:
    """Raise OptionError: directional derivatives are computed in float64 only."""
    raise OptionError("jvp has no precision='extended': call forward without it")


def weights(_: Problem, residuals: ExtendedResiduals) -> Array:
    """Weights (..., H, T, S), with a head axis."""
    return _where_finite(residuals.dense.p, residuals.p.nearest)


def max_score(_: Problem, residuals: ExtendedResiduals) -> Array:
    """Largest score of each row, (..., H, T) with a head axis."""
    return _where_finite(residuals.dense.top, residuals.top)[..., 0]


# --- the parts ------------------------------------------------------------------------------------


def scale_of(problem: Problem) -> Pair:
    """Return the scale: 1/√D to 106 bits where none was given, else the number that was."""
    assert problem.scale is not None
    if not problem.has_default_scale:
        return as_pair(problem.scale)
    high, low = default_scale(problem.D)
    return Pair(np.asarray(high), np.asarray(low))


def less_mean(x: Pair, p: Pair, p_sink: Pair | None) -> tuple[Pair, Pair]:
    """Subtract the mean of each row, Σ p x, from x and from the 0 of the sink."""
    pivot = heaviest(x, p, p_sink)
    x, x_sink = x.minus(pivot), -pivot
    mean = total(p.times(x), -1)
    mean = mean if p_sink is None else mean.plus(p_sink.times(x_sink))
    return x.minus(mean), x_sink.minus(mean)


def heaviest(x: Pair, p: Pair, p_sink: Pair | None) -> Pair:
    """Return x at the key with most weight in each row, (..., T, 1); 0 if the sink has more."""
    if not p.high.shape[-1]:
        return as_pair(np.zeros((*p.high.shape[:-1], 1)))
    at = p.high.argmax(-1, keepdims=True)
    pivot = Pair(*(np.take_along_axis(part, at, -1) for part in x))
    if p_sink is None:
        return pivot
    row_has_heavier = np.take_along_axis(p.high, at, -1) >= p_sink.high
    return select(row_has_heavier, pivot, 0.0)


def _cap(s: Pair, c: float) -> tuple[Pair, Pair]:
    """Return c tanh(s / c) and its slope."""
    x = s.over(c)
    sign = np.where(x.high < 0, -1.0, 1.0)
    size = Pair(sign * x.high, sign * x.low)
    small = size.times_power(1)
    near = expm1(select(small.high > 80, as_pair(80.0), small))  # tanh is 1 beyond
    tanh = near.over(near.plus(2.0))
    e = exp(-small)
    slope = e.times_power(2).over(e.plus(1.0).times(e.plus(1.0)))
    return Pair(sign * tanh.high, sign * tanh.low).times(c), slope


def _row_maximum(s: Pair, live: Array) -> Pair:
    """Return the largest live score of each row with its low part, in which large scores differ."""
    high = np.where(live, s.high, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    low = np.where(live & (s.high == high), s.low, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    return Pair(high, low)


def _transpose(x: Pair) -> Pair:
    return Pair(x.high.swapaxes(-1, -2), x.low.swapaxes(-1, -2))


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def _where_finite(plain: Array, x: Array) -> Array:
    """Return x where the plain result is finite, and the plain result elsewhere."""
    return np.where(np.isfinite(plain), x, plain)


def _sum_shared(x: Pair, K: int, shape: tuple[int, ...]) -> Array:
    """Sum over the query heads that share a key head, and over broadcast axes, to `shape`."""
    H = x.high.shape[-3]
    if H != K:
        parts = (y.reshape(*y.shape[:-3], K, H // K, *y.shape[-2:]) for y in x)
        x = total(Pair(*parts), -3)
        x = Pair(*(y.squeeze(-3) for y in x))
    return _sum_to(x, shape)


def _sum_to(x: Pair, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an input of this shape broadcasts, and round."""
    sizes = (1,) * (x.high.ndim - len(shape)) + tuple(shape)
    for axis, (size, wanted) in enumerate(zip(x.high.shape, sizes, strict=True)):
        if size != wanted:
            x = total(x, axis)
    return sum_to(x.nearest, shape)
