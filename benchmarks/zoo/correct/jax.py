"""JAX: attention as its users write it, and jax.nn's own.

JAX compiles for every shape, so only a few are sampled. It is imported on the first call.
"""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.correct.register import correct
from benchmarks.zoo.correct.torch import NAN
from npattn.profiles import PROFILES


def eager(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout_mask: Any = None,
    dropout_rate: float = 0.0,
    return_lse: bool = False,
) -> Any:
    import jax  # type: ignore[import-not-found, unused-ignore]
    import jax.numpy as jnp  # type: ignore[import-not-found, unused-ignore]

    groups = q.shape[-3] // max(k.shape[-3], 1)
    k, v = (jnp.repeat(x, groups, axis=-3) for x in (k, v))
    scale = 1 / max(q.shape[-1], 1) ** 0.5 if scale is None else scale
    s = scale * jnp.einsum("bhtd,bhsd->bhts", q, k)
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    s = s if bias is None else s + bias
    T, S = s.shape[-2:]
    left, right = window or (None, None)
    right = 0 if causal else right
    # A side beyond the keys makes no difference, but may overflow int32.
    left, right = (None if side is None else min(side, S + T) for side in (left, right))
    visible = jnp.ones((T, S), bool) if mask is None else mask
    visible = visible if left is None else visible & ~jnp.tri(T, S, S - T - left - 1, bool)
    visible = visible if right is None else visible & jnp.tri(T, S, S - T + right, bool)
    visible = visible & (s != -jnp.inf)
    s = jnp.where(visible, s, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*s.shape[:-1], 1))
        s = jnp.concatenate([s, column], -1)
    # The softmax of an empty row is NaN, and its gradient too, even if masked afterwards.
    empty = (s == -jnp.inf).all(-1, keepdims=True)
    s = jnp.where(empty, 0, s).astype(jnp.promote_types(q.dtype, jnp.float32))
    p = jnp.where(visible, jax.nn.softmax(s, axis=-1)[..., :S].astype(q.dtype), 0)
    w = p if dropout_mask is None else p * dropout_mask / (1 - dropout_rate)
    out = jnp.einsum("bhts,bhse->bhte", w, v)
    if not return_lse:
        return out
    return out, jnp.where(empty[..., 0], -jnp.inf, jax.nn.logsumexp(s, axis=-1))


def own(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bias: Any = None,
    scale: float | None = None,
) -> Any:
    import jax  # type: ignore[import-not-found, unused-ignore]

    q, k, v = (x.swapaxes(-2, -3) for x in (q, k, v))  # its layout is BTHD
    end = k.shape[-3] + q.shape[-3]  # it has no None for an open side
    sides = None if window is None else tuple(end if n is None else n for n in window)
    options: dict[str, Any] = {"scale": scale, "is_causal": causal, "local_window_size": sides}
    return jax.nn.dot_product_attention(q, k, v, bias, mask, **options).swapaxes(-2, -3)


JAX: dict[str, Any] = {
    "framework": "jax",
    "needs": "jax",
    "sizes": {"B": (2,), "H": (4,), "K": (2,), "T": (5,), "S": (7,), "D": (8,), "E": (8,)},
}

correct("jnp eager",
        "One line per equation in the dtype of q; the softmax in float32, as in jax.nn.", eager,
        breaks=NAN, **JAX)  # fmt: skip
correct("jax.nn", "jax.nn.dot_product_attention; in float64 its softmax is float32.", own,
        dtypes=("float32", "float16", "bfloat16"), conventions=PROFILES["jax.nn"].conventions,
        breaks=("nan-query-alone",), **JAX)  # fmt: skip
