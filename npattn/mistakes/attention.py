"""Attention that is right, in float64 and in replaceable steps: the base of the mistakes.

    B batch   H query heads   K key/value heads (K divides H)   T queries   S keys
    D query/key size   E value size

Its forward and backward are made of the same steps, so that a mistake in a step is a consistent
one, as in real code: the rule that must fail is then the forward's. Numbers in brackets are the
rules of docs/semantics.md.
"""

import inspect
import math
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, NamedTuple, TypeVar

import numpy as np

from npattn.problem.arrays import Array, sum_to
from npattn.problem.options import Window

TILE = 16  # queries or keys, in the mistakes that have tiles


class Inputs(NamedTuple):
    """Inputs of one call as the steps take them: float64, with a head axis, defaults filled in."""

    q: Array  # (..., H, T, D) with all leading axes
    k: Array  # (..., K, S, D)
    v: Array  # (..., K, S, E)
    mask: Array | None
    causal: bool
    window: Window | None
    bias: Array | float
    scale: float
    softcap: float | None
    sinks: Array  # (H, 1, 1); no sink is a sink of −inf, which weighs nothing
    keep: Array | float  # dropout: 1 / (1 − rate) where kept, 0 where dropped
    dtype: np.dtype[Any]  # of q
    gate: Array | float = 1.0  # of `Gated`, with the axes of o
    returns_weights: bool = False  # kernels take another path if the caller wants the weights


Method = TypeVar("Method", bound=Callable[..., Any])


def with_options_of(*functions: Callable[..., Any]) -> Callable[[Method], Method]:
    """Replace ``**options`` in the signature of a method by the keywords of these functions."""

    def sign(method: Method) -> Method:
        parameters = inspect.signature(method).parameters
        named = [x for f in functions for x in inspect.signature(f).parameters.items()]
        keywords = {n: p for n, p in (*named, *parameters.items()) if p.kind is p.KEYWORD_ONLY}
        positional = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        signature = inspect.Signature([*positional, *keywords.values()])
        method.__signature__ = signature  # type: ignore[attr-defined]
        return method

    return sign


def same_signature(original: Callable[..., Any]) -> Callable[[Method], Method]:
    """Give an override the signature of `original`, from which the judge reads its options."""

    def sign(override: Method) -> Method:
        update_wrapper(override, original)
        return override

    return sign


class Attention:
    """Attention and its gradients in float64, rounded once at the end, in replaceable steps.

    Attributes
    ----------
    alignment : {"bottom_right", "top_left"}
        Of causal and window.
    """

    alignment = "bottom_right"

    # --- inputs

    def inputs(
        self,
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
        sinks: Array | None = None,
        dropout_mask: Array | None = None,
        dropout_rate: float = 0.0,
    ) -> Inputs:
        """Return the inputs of the steps; its parameters are the options of the implementation.

        q is (..., H, T, D), k (..., K, S, D), v (..., K, S, E); or all have rank 2, one head.
        """
        dtype = q.dtype
        q, k, v = (x if x.ndim > 2 else x[None] for x in map(self.read, (q, k, v)))
        lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        logits = np.full(q.shape[-3], -np.inf) if sinks is None else np.asarray(sinks, np.float64)
        return Inputs(
            q=np.broadcast_to(q, (*lead, *q.shape[-3:])),
            k=k,
            v=v,
            mask=mask,
            causal=causal,
            window=window,
            bias=0.0 if bias is None else np.asarray(bias, np.float64),
            scale=self.default_scale(q.shape[-3], q.shape[-1]) if scale is None else scale,
            softcap=softcap,
            sinks=logits[:, None, None],
            keep=1.0 if dropout_mask is None else dropout_mask / (1 - dropout_rate),
            dtype=dtype,
        )

    def read(self, x: Array) -> Array:
        return np.array(x, np.float64)

    def default_scale(self, H: int, D: int) -> float:
        return 1 / math.sqrt(D or 1)

    # --- the two entry points

    @with_options_of(inputs)
    @np.errstate(all="ignore")  # hidden scores may be anything
    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Array | None = None,
        *,
        return_lse: bool = False,
        return_weights: bool = False,
        **options: Any,
    ) -> Any:
        """Return out, or the tuple of out, lse and weights as far as they are requested.

        q is (..., H, T, D), k (..., K, S, D), v (..., K, S, E), out (..., H, T, E).
        """
        c = self.inputs(q, k, v, mask, **options)
        o, lse, p = self.results(c._replace(returns_weights=return_weights))
        wide = np.result_type(q.dtype, np.float32) if q.dtype.kind == "f" else np.float32
        results = [o.astype(self.out_dtype(q.dtype))]
        results += [lse.astype(wide)] if return_lse else []
        results += [p.astype(wide)] if return_weights else []
        results = [x[0] for x in results] if q.ndim == 2 else results
        return results[0] if len(results) == 1 else tuple(results)

    @with_options_of(inputs)
    @np.errstate(all="ignore")
    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        *,
        out: Array,
        lse: Array | None,
        dlse: Array | None = None,
        dweights: Array | None = None,
        mask: Array | None = None,
        **options: Any,
    ) -> dict[str, Array]:
        """Return the gradients of Σ dout·out + Σ dlse·lse + Σ dweights·weights, by input name.

        dout and out are (..., H, T, E), q (..., H, T, D), k (..., K, S, D), v (..., K, S, E).
        """
        bias, sinks = options.get("bias"), options.get("sinks")
        c = self.inputs(q, k, v, mask, **options)
        do = np.asarray(dout, np.float64).reshape(*c.q.shape[:-1], v.shape[-1])
        dl = 0.0 if dlse is None else np.asarray(dlse, np.float64).reshape(*c.q.shape[:-1], 1)
        dw = 0.0 if dweights is None else np.asarray(dweights, np.float64)
        dq, dk, dv, ds, ds_sink = self.gradients(self.recompute(c), do, dl, dw)
        wide = np.result_type(q.dtype, np.float32) if q.dtype.kind == "f" else np.float32
        grads = {"q": sum_to(dq, q.shape).astype(q.dtype)}
        grads["k"] = self.reduce(self.share_back(dk, c.k), k.shape).astype(k.dtype)
        grads["v"] = self.reduce(self.share_back(dv, c.v), v.shape).astype(v.dtype)
        if bias is not None:
            grads["bias"] = self.reduce_bias(ds, bias.shape).astype(wide)
        if sinks is not None:
            grads["sinks"] = sum_to(ds_sink, c.sinks.shape)[:, 0, 0].astype(wide)
        return grads

    def out_dtype(self, dtype: np.dtype[Any]) -> Any:
        return dtype

    # --- shared heads, and axes that broadcast

    def share(self, x: Array, H: int) -> Array:
        """(..., K, S, n) → (..., H, S, n): query head h uses key/value head h // (H / K) [1]."""
        return np.repeat(x, H // max(x.shape[-3], 1), axis=-3)

    def share_back(self, dx: Array, x: Array) -> Array:
        """(..., H, S, n) → (..., K, S, n): sum over the query heads that share a head [13]."""
        *lead, H, S, n = dx.shape
        K = x.shape[-3]
        return np.asarray(dx.reshape(*lead, K, H // max(K, 1), S, n).sum(-3))

    def reduce(self, dx: Array, shape: tuple[int, ...]) -> Array:
        return sum_to(dx, shape)

    def reduce_bias(self, ds: Array, shape: tuple[int, ...]) -> Array:
        return sum_to(ds, shape)

    # --- forward

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        """Return out, lse and weights."""
        s, live = self.scores(c)
        p, _, lse = self.softmax(s, c, live)
        o = self.masked_matmul(p * c.keep, self.share(c.v, c.q.shape[-3]), live)
        return o, lse[..., 0], self.returned_weights(p, c)

    def returned_weights(self, p: Array, c: Inputs) -> Array:
        return p  # before dropout  [9]

    def product(self, c: Inputs) -> Array:
        return np.asarray(c.scale * (c.q @ self.share(c.k, c.q.shape[-3]).swapaxes(-1, -2)))

    def scores(self, c: Inputs) -> tuple[Array, Array]:
        """Return the final scores, −inf where hidden, and a mask of the live ones [1-7]."""
        visible = self.visible(c)
        s = self.final(self.product(c), visible, c)
        return s, np.broadcast_to(visible, s.shape) & (s != -np.inf)

    def final(self, x: Array, visible: Array, c: Inputs) -> Array:
        return self.hide(self.cap(x, c) + self.bias(c), visible)

    def cap(self, x: Array, c: Inputs) -> Array:
        return x if c.softcap is None else np.asarray(c.softcap * np.tanh(x / c.softcap))

    def bias(self, c: Inputs) -> Array | float:
        return c.bias

    def hide(self, s: Array, visible: Array) -> Array:
        return np.where(visible, s, -np.inf)

    def diagonal(self, T: int, S: int) -> Array:
        """Return the aligned key of each query [6]."""
        return np.arange(T)[:, None] + self.offset(T, S)

    def offset(self, T: int, S: int) -> int:
        """Return the aligned key of the first query [6]."""
        return 0 if self.alignment == "top_left" else S - T

    def sides(self, c: Inputs) -> Window:
        """Return the number of visible keys to the left and right of a query [6, 7]."""
        left_keys, right_keys = c.window or (None, None)
        return left_keys, 0 if c.causal else right_keys

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        offsets = np.arange(S) - self.diagonal(T, S)  # (T, S)
        inside = within(offsets, self.sides(c))
        return inside if c.mask is None else inside & self.mask(c.mask, c)

    def mask(self, mask: Array, c: Inputs) -> Array:
        return mask

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        """Return the weights, the weight of the sink, and lse [8, 11]."""
        m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), c.sinks)
        pivot = np.where(m == -np.inf, 0, m)
        e = np.exp(s - pivot)
        e_sink = np.exp(c.sinks - pivot)
        total = e.sum(-1, keepdims=True) + e_sink
        safe = np.where(total == 0, 1, total)
        p = np.where(s == -np.inf, 0, e / safe)  # in a row of a NaN query too: 0 / NaN is NaN
        return p, e_sink / safe, self.lse(pivot, total, e_sink)

    def lse(self, pivot: Array, total: Array, e_sink: Array) -> Array:
        return np.asarray(pivot + np.log(total))

    def masked_matmul(self, w: Array, x: Array, live: Array) -> Array:
        """Return w @ x over the live positions only, since 0 · NaN is NaN [10]."""
        finite = np.isfinite(x)
        touched = live.astype(np.float64) @ ~finite > 0
        return np.where(touched, np.nan, w @ np.where(finite, x, 0))

    # --- backward

    def recompute(self, c: Inputs) -> Inputs:
        """Return the inputs from which backward rebuilds the scores."""
        return c

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        """Return dq, dk, dv by query head, and of scores and sink, for do (..., H, T, E)."""
        H = c.q.shape[-3]
        k, v = self.share(c.k, H), self.share(c.v, H)
        s, live = self.scores(c)
        seen = live.swapaxes(-1, -2)
        p, p_sink = self.rebuild(s, c, live)

        dv = self.masked_matmul((p * c.keep).swapaxes(-1, -2), do, seen)
        dp = np.where(live, self.undrop(do @ v.swapaxes(-1, -2), c) + dw, 0)
        delta = self.delta(p, dp) - self.use_dlse(dlse, live)
        ds = np.where(live, self.jacobian(p, dp, delta, c), 0)
        dx = self.uncap(ds, live, c)
        dq = self.dq_scale(c) * self.masked_matmul(dx, k, live)
        dk = self.dk(dx, c, seen)
        return dq, dk, dv, ds, self.ds_sink(p_sink, delta, dlse)

    def rebuild(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array]:
        """Return the weights, and the weight of the sink, that the gradients use."""
        p, p_sink, _ = self.softmax(s, c, live)
        return p, p_sink

    def undrop(self, dp: Array, c: Inputs) -> Array:
        return dp * c.keep

    def delta(self, p: Array, dp: Array) -> Array:
        return np.asarray((p * dp).sum(-1, keepdims=True))

    def use_dlse(self, dlse: Any, live: Array) -> Any:
        return dlse

    def jacobian(self, p: Array, dp: Array, delta: Array, c: Inputs) -> Array:
        return np.asarray(p * (dp - delta))

    def uncap(self, ds: Array, live: Array, c: Inputs) -> Array:
        return np.where(live, ds * self.cap_slope(c), 0)

    def cap_slope(self, c: Inputs) -> Any:
        return 1.0 if c.softcap is None else 1 - np.tanh(self.product(c) / c.softcap) ** 2

    def dq_scale(self, c: Inputs) -> float:
        return c.scale

    def dk(self, dx: Array, c: Inputs, seen: Array) -> Array:
        return np.asarray(c.scale * self.masked_matmul(dx.swapaxes(-1, -2), c.q, seen))

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        return -p_sink * delta  # delta holds −dlse


def within(offsets: Array, sides: Window) -> Array:
    """Return True for offsets key − query within the left and right side of a window."""
    left_keys, right_keys = sides
    inside = np.ones(offsets.shape, bool)
    inside = inside if left_keys is None else inside & (offsets >= -left_keys)
    return inside if right_keys is None else inside & (offsets <= right_keys)


base = Attention().forward
base_backward = Attention().backward
