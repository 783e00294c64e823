"""Attention functions of JAX as targets."""

from __future__ import annotations

from typing import Any, cast

from npattn.errors import MissingExtraError

try:
    import jax  # type: ignore[import-not-found, unused-ignore]
except ImportError as err:
    raise MissingExtraError(
        "JAX targets need jax; npattn itself does not: pip install 'npattn[jax]'"
    ) from err

__all__ = ["dot_product_attention"]


def dot_product_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Call ``jax.nn.dot_product_attention``, whose layout is BTHD."""
    q, k, v = (x.swapaxes(-2, -3) for x in (q, k, v))
    attend: Any = jax.nn.dot_product_attention
    options: dict[str, Any] = {"scale": scale, "is_causal": causal}
    if window is not None:  # it has no None for an open side
        end = k.shape[-3] + q.shape[-3]
        options["local_window_size"] = tuple(end if n is None else n for n in window)
    if not return_lse:
        return cast(jax.Array, attend(q, k, v, bias, mask, **options).swapaxes(-2, -3))
    out, lse = attend(q, k, v, bias, mask, return_residual=True, **options)
    return out.swapaxes(-2, -3), lse.swapaxes(-1, -2)


def dot_product_attention_backward(
    dout: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bias: jax.Array | None = None,
    **options: Any,
) -> dict[str, jax.Array]:
    """Return its gradients by ``jax.vjp``, through out alone: its lse is detached."""
    leaves = {"q": q, "k": k, "v": v} | ({} if bias is None else {"bias": bias})
    _, pull = jax.vjp(lambda inputs: dot_product_attention(**inputs, **options), leaves)
    (grads,) = pull(dout)
    return dict(grads)
