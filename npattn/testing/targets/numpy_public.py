"""Attention that others have written in NumPy alone, called as their documentation says."""

from __future__ import annotations

import collections
import collections.abc
from typing import Any

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.targets.wrapping import merge_heads, split_heads


def _check(q: Array, k: Array, v: Array) -> None:
    """Raise unless q, k and v have 4 axes, one batch, the same heads, and no size of 0."""
    lead = q.shape[:-2]
    if q.ndim != 4 or lead != k.shape[:-2] or lead != v.shape[:-2]:
        raise ValueError("q, k and v must be (B, H, T, D) here, with one batch and the same heads")
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise ValueError("no size may be 0 here")


# --- numpy-ml -------------------------------------------------------------------------------------


def _dot_product_attention() -> Any:
    """Return a new DotProductAttention of numpy-ml."""
    # numpy-ml 0.1.2 imports this name from where Python 3.10 has it no more.
    vars(collections).setdefault("Hashable", collections.abc.Hashable)
    from numpy_ml.neural_nets.layers import DotProductAttention

    return DotProductAttention()


def _merge_lead(x: Array) -> Array:
    return x.reshape(-1, *x.shape[-2:])


def numpy_ml(q: Array, k: Array, v: Array) -> Array:
    """Call the layer on (B · H, T, D): its backward raises with more axes (docs/findings.md)."""
    _check(q, k, v)
    out: Array = _dot_product_attention().forward(*map(_merge_lead, (q, k, v)))
    return out.reshape(*q.shape[:-1], v.shape[-1])


def numpy_ml_backward(dout: Array, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    """Gradients of the layer, after a forward."""
    _check(q, k, v)
    layer = _dot_product_attention()
    layer.forward(*map(_merge_lead, (q, k, v)))
    grads = layer.backward(_merge_lead(dout))
    return tuple(grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))


# --- neuralnetlib ---------------------------------------------------------------------------------


def _multi_head_attention(q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Any, Array]:
    """Return neuralnetlib's MultiHeadAttention, its projections the identity, and its result.

    q is (B, H, T, D), k (B, H, S, D), v (B, H, S, E), the result (B, T, H · E).
    """
    from neuralnetlib.layers import MultiHeadAttention

    _check(q, k, v)
    H, D, E = q.shape[1], q.shape[-1], v.shape[-1]
    layer = MultiHeadAttention(H, D, E, use_bias=False, output_shape=H * E)
    layer.initialize_weights((q.shape[0], q.shape[2], H * D))
    projections = {"query": H * D, "key": H * D, "value": H * E, "output": H * E}
    for name, n in projections.items():
        dense = getattr(layer, f"{name}_dense")
        dense.weights, dense.bias = np.eye(n, dtype=q.dtype), np.zeros((1, n), q.dtype)
    out = layer.forward_pass(tuple(map(merge_heads, (q, k, v))), mask, training=False)
    return layer, out


def neuralnetlib(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """Call the layer."""
    _, out = _multi_head_attention(q, k, v, mask)
    return split_heads(out, q.shape[1])


def neuralnetlib_backward(
    dout: Array, q: Array, k: Array, v: Array, mask: Array | None = None
) -> tuple[Array, ...]:
    """Gradients of the layer, after a forward."""
    layer, _ = _multi_head_attention(q, k, v, mask)
    return tuple(split_heads(x, q.shape[1]) for x in layer.backward_pass(merge_heads(dout)))


# --- neuralnetworknumpy ---------------------------------------------------------------------------


def _single_head_attention(q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Any, Array]:
    """Return neuralnetworknumpy's SingleHeadAttention and its result.

    q and k are (..., T, D), v is (..., T, E). q, k and v stand side by side in the features of its
    one input, and each projection takes one of them out.
    """
    from neuralnetworknumpy.layers.SingleHeadAttention import SingleHeadAttention

    _check(q, k, v)
    if q.shape[-2] != k.shape[-2]:
        raise ValueError("q and k must be of one length: the layer has one input")
    D, E = q.shape[-1], v.shape[-1]
    layer = SingleHeadAttention(2 * D + E, D, output_projection=False)
    identity = np.eye(2 * D + E, dtype=q.dtype)
    layer.W_q, layer.W_k, layer.W_v = np.split(identity, [D, 2 * D], axis=1)
    if mask is not None:
        mask = _merge_lead(np.broadcast_to(mask, (*q.shape[:-1], k.shape[-2])))
    out = layer.forward(np.concatenate([_merge_lead(x) for x in (q, k, v)], axis=-1), mask=mask)
    return layer, out


def neuralnetworknumpy(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """Call the layer on the heads of all samples."""
    _, out = _single_head_attention(q, k, v, mask)
    return out.reshape(*q.shape[:-1], v.shape[-1])


def neuralnetworknumpy_backward(
    dout: Array, q: Array, k: Array, v: Array, mask: Array | None = None
) -> tuple[Array, ...]:
    """Gradients of the layer, after a forward."""
    layer, _ = _single_head_attention(q, k, v, mask)
    D = q.shape[-1]
    grads = np.split(layer.backward(_merge_lead(dout)), [D, 2 * D], axis=-1)
    return tuple(grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))


# --- picoGPT --------------------------------------------------------------------------------------


def picogpt(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """Call the function for every head, as its mha does; the mask is added."""
    from gpt2 import attention

    _check(q, k, v)
    added = np.zeros((), q.dtype) if mask is None else mask
    masks = np.broadcast_to(added, (*q.shape[:-1], k.shape[-2]))
    heads = [attention(*one) for one in zip(*map(_merge_lead, (q, k, v, masks)), strict=True)]
    return np.stack(heads).reshape(*q.shape[:-1], v.shape[-1])
