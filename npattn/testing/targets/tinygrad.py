"""tinygrad's Tensor.scaled_dot_product_attention on NumPy arrays."""

from __future__ import annotations

import numpy as np

from npattn.errors import optional_import
from npattn.problem.arrays import Array

with optional_import("the target tinygrad needs", "tinygrad"):
    from tinygrad import Tensor


def attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Array:
    """Return tinygrad's result, (B, H, T, E), for query (B, H, T, D), value (B, K, S, E)."""
    q, k, v = (Tensor(x) for x in (query, key, value))
    mask = None if attn_mask is None else Tensor(attn_mask)
    out = q.scaled_dot_product_attention(
        k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=enable_gqa
    )
    return np.array(out.numpy())


def attention_backward(
    dout: Array,
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> dict[str, Array]:
    """Gradients by Tensor.gradient, in the inputs' shapes; that of a float attn_mask is bias."""
    leaves = {n: Tensor(x) for n, x in zip("qkv", (query, key, value), strict=True)}
    mask = None if attn_mask is None else Tensor(attn_mask)
    if attn_mask is not None and attn_mask.dtype != bool:
        leaves["bias"] = mask
    out = leaves["q"].scaled_dot_product_attention(
        leaves["k"], leaves["v"], attn_mask=mask, is_causal=is_causal, enable_gqa=enable_gqa
    )
    grads = out.gradient(*leaves.values(), gradient=Tensor(dout))
    return {name: np.array(g.numpy()) for name, g in zip(leaves, grads, strict=True)}
