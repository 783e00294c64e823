"""keras.ops.dot_product_attention on backends whose tensors the worker does not know."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.errors import optional_import
from npattn.problem.arrays import Array

with optional_import("targets of Keras need", "keras", "keras"):
    import keras


def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> Array:
    """Call it, and return its result as a NumPy array."""
    out = keras.ops.dot_product_attention(query, key, value, bias, mask, scale, is_causal)
    return np.array(keras.ops.convert_to_numpy(out))


def tensorflow_backward(
    dout: Array,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> dict[str, Array]:
    """Gradients by TensorFlow's GradientTape, in the shapes of the inputs, (B, T, H, D)."""
    import tensorflow

    leaves = {"q": query, "k": key, "v": value, "bias": bias}
    tensors = {n: tensorflow.constant(x) for n, x in leaves.items() if x is not None}
    with tensorflow.GradientTape() as tape:
        for x in tensors.values():
            tape.watch(x)
        out = keras.ops.dot_product_attention(
            tensors["q"], tensors["k"], tensors["v"], tensors.get("bias"), mask, scale, is_causal
        )
    zero: Any = tensorflow.UnconnectedGradients.ZERO
    grads = tape.gradient(out, tensors, tensorflow.constant(dout), unconnected_gradients=zero)
    return {name: np.array(g) for name, g in grads.items()}
