"""paddle.nn.functional.scaled_dot_product_attention on the CPU, on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.errors import optional_import
from npattn.problem.arrays import Array

with optional_import("the target paddle needs", "paddlepaddle"):
    import paddle
    from paddle.nn.functional import scaled_dot_product_attention


def _attend(leaves: dict[str, Array], stop: bool, **options: Any) -> tuple[dict[str, Any], Any]:
    """Return tensors of the arrays, and the result."""
    tensors = {name: paddle.to_tensor(x, stop_gradient=stop) for name, x in leaves.items()}
    mask = options.pop("attn_mask", None)
    if mask is not None and "attn_mask" not in tensors:
        mask = paddle.to_tensor(mask)
    q, k, v = (tensors[n] for n in ("q", "k", "v"))
    return tensors, scaled_dot_product_attention(q, k, v, tensors.get("attn_mask", mask), **options)


def attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Array:
    """Return paddle's result, (B, T, H, E), for query (B, T, H, D), value (B, S, K, E)."""
    leaves = {"q": query, "k": key, "v": value}
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
    _, out = _attend(leaves, True, **options)
    return np.array(out.numpy())


def attention_backward(
    dout: Array,
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> dict[str, Array]:
    """Gradients by paddle.grad, in the inputs' shapes; that of a float attn_mask is named bias."""
    leaves = {"q": query, "k": key, "v": value}
    if attn_mask is not None and attn_mask.dtype != bool:
        leaves["attn_mask"] = attn_mask
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
    tensors, out = _attend(leaves, False, **options)
    grads = paddle.grad(out, list(tensors.values()), paddle.to_tensor(dout), allow_unused=True)
    names = ("bias" if name == "attn_mask" else name for name in tensors)
    arrays = zip(names, tensors.values(), grads, strict=True)
    return {n: np.zeros_like(x.numpy()) if g is None else g.numpy() for n, x, g in arrays}
