"""Steps of the backward pass that are left out, or computed otherwise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.problem.arrays import Array, sum_to
from npattn.testing.diagnosis.steps.step import overrides

# --- the Jacobian of the softmax ---


def _no_delta(self: Attention, p: Array, dp: Array) -> Array:
    return np.zeros((*p.shape[:-1], 1))


def _delta_of_other_row(self: Attention, p: Array, dp: Array) -> Array:
    return np.roll(Attention.delta(self, p, dp), 1, axis=-2)


def _delta_without_last_row(self: Attention, p: Array, dp: Array) -> Array:
    delta = Attention.delta(self, p, dp)
    delta[..., -1:, :] = 0
    return delta


def _delta_normalised(self: Attention, p: Array, dp: Array) -> Array:
    total = p.sum(-1, keepdims=True)
    return Attention.delta(self, p, dp) / np.where(total == 0, 1, total)


def _weights_on_dp(self: Attention, p: Array, dp: Array, delta: Array, c: Inputs) -> Array:
    return np.asarray(p * dp - delta)


def _no_weights(self: Attention, p: Array, dp: Array, delta: Array, c: Inputs) -> Array:
    return np.asarray(dp - delta)


def _diagonal(self: Attention, p: Array, dp: Array, delta: Array, c: Inputs) -> Array:
    return np.asarray(p * (1 - p) * dp)


def _dropped_weights(self: Attention, p: Array, dp: Array, delta: Array, c: Inputs) -> Array:
    return np.asarray(p * c.keep * (dp - delta))


def _dropped_delta(self: Attention, p: Array, dp: Array, delta: Array, c: Inputs) -> Array:
    return np.asarray(p * dp - p * c.keep * delta)


overrides(
    "delta",
    "the term Σ do·o (delta) is missing in dS = p (dP − delta)",
    delta=_no_delta,
    backward_only=True,
)
overrides(
    "delta", "delta is that of the query before", delta=_delta_of_other_row, backward_only=True
)
overrides(
    "delta", "delta of the last query is 0", delta=_delta_without_last_row, backward_only=True
)
overrides(
    "delta", "delta leaves out the weight of the sink", delta=_delta_normalised, backward_only=True
)
overrides(
    "delta",
    "dS is p dP − delta: delta is not multiplied by p",
    jacobian=_weights_on_dp,
    backward_only=True,
)
overrides(
    "delta", "dS is dP − delta: the weights are missing", jacobian=_no_weights, backward_only=True
)
overrides(
    "delta",
    "dS has only the diagonal p (1 − p) of the Jacobian",
    jacobian=_diagonal,
    backward_only=True,
)
overrides(
    "dropout", "dS uses the weights after dropout", jacobian=_dropped_weights, backward_only=True
)
overrides(
    "dropout",
    "delta is multiplied by the weights after dropout",
    jacobian=_dropped_delta,
    backward_only=True,
)

# --- cotangents ---


def _use_dlse(factor: float) -> Any:
    def use_dlse(self: Attention, dlse: Any, live: Array) -> Any:
        return dlse * factor

    return use_dlse


def _with_cotangents(do: Any = None, dlse: Any = None, dw: Any = None) -> Any:
    """Return gradients of changed cotangents."""

    def gradients(self: Attention, c: Inputs, *given: Any) -> tuple[Array, ...]:
        changed = [f(x) if f else x for f, x in zip((do, dlse, dw), given, strict=True)]
        return Attention.gradients(self, c, *changed)

    return gradients


def _without_row(at: int) -> Any:
    def drop(do: Array) -> Array:
        do = do.copy()
        do[..., at : at + 1 or None, :] = 0
        return do

    return drop


overrides(
    "dlse",
    "the gradient of lse is ignored in dq and dk",
    use_dlse=_use_dlse(0.0),
    backward_only=True,
)
overrides(
    "dlse",
    "the gradient of lse has the wrong sign in dq and dk",
    use_dlse=_use_dlse(-1.0),
    backward_only=True,
)
overrides(
    "dlse",
    "the gradient of lse is that of a base-2 lse",
    use_dlse=_use_dlse(1 / math.log(2)),
    backward_only=True,
)
overrides(
    "dlse",
    "the gradient of lse is ignored",
    gradients=_with_cotangents(dlse=lambda x: 0.0),
    backward_only=True,
)
overrides(
    "dweights",
    "the gradient of the weights is ignored",
    gradients=_with_cotangents(dw=lambda x: 0.0),
    backward_only=True,
)
overrides(
    "dout", "dout is taken as 1", gradients=_with_cotangents(do=np.ones_like), backward_only=True
)
overrides(
    "dout",
    "dout of the last query is lost",
    gradients=_with_cotangents(do=_without_row(-1)),
    backward_only=True,
)
overrides(
    "dout",
    "dout of the first query is lost",
    gradients=_with_cotangents(do=_without_row(0)),
    backward_only=True,
)


def _leave_undropped(self: Attention, dp: Array, c: Inputs) -> Array:
    return dp


overrides(
    "dropout",
    "dropout is not applied to the gradient of the weights",
    undrop=_leave_undropped,
    backward_only=True,
)

# --- softcap ---


def _no_slope(self: Attention, c: Inputs) -> Any:
    return 1.0


def _slope_at(score: Any) -> Any:
    """Return a slope of the softcap evaluated at another score."""

    def cap_slope(self: Attention, c: Inputs) -> Any:
        return 1.0 if c.softcap is None else 1 - np.tanh(score(self, c) / c.softcap) ** 2

    return cap_slope


overrides(
    "softcap", "the derivative of the softcap is missing", cap_slope=_no_slope, backward_only=True
)
overrides(
    "softcap",
    "the derivative of the softcap is taken at the score with its bias",
    cap_slope=_slope_at(lambda self, c: self.product(c) + self.bias(c)),
    backward_only=True,
)
overrides(
    "softcap",
    "the derivative of the softcap is taken at the capped score",
    cap_slope=_slope_at(lambda self, c: self.cap(self.product(c), c)),
    backward_only=True,
)
overrides(
    "softcap",
    "the derivative of the softcap is taken at q·k, without the scale",
    cap_slope=_slope_at(lambda self, c: self.product(c) / (c.scale or 1)),
    backward_only=True,
)

# --- sums, and axes that broadcast ---


def _last_entry(dx: Array, shape: tuple[int, ...]) -> Array:
    """Return the last entry along the axes of length 1, where the sum is due."""
    axes = (1,) * (dx.ndim - len(shape)) + shape
    last = tuple(slice(-1, None) if n == 1 else slice(None) for n in axes)
    return np.asarray(dx[last].reshape(shape)) if dx.size else np.zeros(shape)


def _reduce_last(self: Attention, dx: Array, shape: tuple[int, ...]) -> Array:
    return _last_entry(dx, shape)


def _reduce_mean(self: Attention, dx: Array, shape: tuple[int, ...]) -> Array:
    return np.asarray(sum_to(dx, shape) * (math.prod(shape) / max(dx.size, 1)))


def _scaled_dbias(self: Attention, c: Inputs, *given: Any) -> tuple[Array, ...]:
    dq, dk, dv, ds, ds_sink = Attention.gradients(self, c, *given)
    return dq, dk, dv, ds * c.scale, ds_sink


def _capped_dbias(self: Attention, c: Inputs, *given: Any) -> tuple[Array, ...]:
    dq, dk, dv, ds, ds_sink = Attention.gradients(self, c, *given)
    return dq, dk, dv, ds * self.cap_slope(c), ds_sink


def _dsinks_of_out(self: Attention, p_sink: Array, delta: Array, dlse: Any) -> Array:
    return np.asarray(-p_sink * (delta + dlse))


overrides(
    "broadcast",
    "dk and dv of shared k and v are those of the last sample, not the sum",
    reduce=_reduce_last,
    backward_only=True,
)
overrides(
    "broadcast",
    "dk and dv of shared k and v are averaged over the batch",
    reduce=_reduce_mean,
    backward_only=True,
)
overrides(
    "dbias",
    "dbias is that of the last entry along axes that broadcast, not the sum",
    reduce_bias=_reduce_last,
    backward_only=True,
)
overrides(
    "dbias",
    "dbias is averaged over the axes that broadcast",
    reduce_bias=_reduce_mean,
    backward_only=True,
)


def _transposed_dbias(self: Attention, ds: Array, shape: tuple[int, ...]) -> Array:
    square = ds.shape[-1] == ds.shape[-2]
    return Attention.reduce_bias(self, ds.swapaxes(-1, -2) if square else ds, shape)


overrides(
    "dbias",
    "dbias is transposed where there are as many queries as keys",
    reduce_bias=_transposed_dbias,
    backward_only=True,
)


def _dbias_of_all(self: Attention, ds: Array, shape: tuple[int, ...]) -> Array:
    own = Attention.reduce_bias(self, ds, shape)
    batch = tuple(range(len(shape) - 3))
    return np.broadcast_to(own.sum(batch, keepdims=True), shape)


overrides(
    "dbias",
    "dbias of each sample is the sum over the batch",
    reduce_bias=_dbias_of_all,
    backward_only=True,
)
overrides("dbias", "dbias is multiplied by the scale", gradients=_scaled_dbias, backward_only=True)
overrides(
    "dbias",
    "dbias is multiplied by the derivative of the softcap",
    gradients=_capped_dbias,
    backward_only=True,
)
overrides(
    "sinks", "dsinks leaves out the gradient of lse", ds_sink=_dsinks_of_out, backward_only=True
)


def _dsinks_of_last(self: Attention, p_sink: Array, delta: Array, dlse: Any) -> Array:
    every = Attention.ds_sink(self, p_sink, delta, dlse)
    return np.where(np.arange(every.shape[-2])[:, None] == every.shape[-2] - 1, every, 0)


overrides(
    "sinks",
    "dsinks is that of the last query, not the sum",
    ds_sink=_dsinks_of_last,
    backward_only=True,
)


def _exchange(self: Attention, c: Inputs, *given: Any) -> tuple[Array, ...]:
    dq, dk, dv, ds, ds_sink = Attention.gradients(self, c, *given)
    return (dq, dv, dk, ds, ds_sink) if dk.shape == dv.shape else (dq, dk, dv, ds, ds_sink)


overrides("dk", "dk and dv are exchanged", gradients=_exchange, backward_only=True)


def _swap_heads(self: Attention, dx: Array, c: Inputs, seen: Array) -> Array:
    return Attention.dk(self, dx, c._replace(q=np.roll(c.q, -1, axis=-3)), seen)


overrides("dk", "dk uses the queries of the next head", dk=_swap_heads, backward_only=True)
