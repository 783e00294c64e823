"""Flax's attention functions as targets, under ``jax.jit`` as programs run them."""

from __future__ import annotations

import functools
from typing import Any

from npattn.errors import optional_import

with optional_import("Flax targets need", "flax", "flax"):
    import jax
    from flax import linen, nnx
    from jax import numpy as jnp


_WORDS = ("broadcast_dropout", "dropout_rate", "deterministic", "dtype", "precision")
linen_attention = jax.jit(linen.dot_product_attention, static_argnames=_WORDS)
nnx_attention = jax.jit(nnx.dot_product_attention, static_argnames=(*_WORDS, "is_causal"))


@functools.partial(jax.jit, static_argnames="is_causal")
def nnx_weights(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
) -> Any:
    """Call it as nnx.MultiHeadAttention with a dropout does when it is evaluated.

    query is (B, T, H, D), key (B, S, K, D), value (B, S, K, E). Any rate of dropout, though nothing
    is dropped, takes `dot_product_attention_weights` in place of ``jax.nn.dot_product_attention``.
    With ``is_causal`` that raises on a mask of one row for all queries: here it has them all.
    """
    if is_causal and mask is not None:
        scores_shape = (*mask.shape[:-2], query.shape[-3], key.shape[-3])
        mask = jnp.broadcast_to(mask, scores_shape)
    attend: Any = nnx.dot_product_attention
    return attend(
        query, key, value, bias, mask, dropout_rate=0.5, deterministic=True, is_causal=is_causal
    )
