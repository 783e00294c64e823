"""Reading keras.layers.MultiHeadAttention and GroupQueryAttention."""

from __future__ import annotations

from typing import Any

from npattn.errors import OptionError
from npattn.multihead import MultiHeadAttention
from npattn.weights.reading import check_kind, from_kernels, loaded_package, refuse

__all__ = ["from_keras"]


def from_keras(layer: Any) -> MultiHeadAttention:
    """Read the weights of a ``keras.layers.MultiHeadAttention`` or ``GroupQueryAttention``.

    Parameters
    ----------
    layer : keras.layers.Layer
        Keras 3, on any backend, built: called once, or ``layer.build(query_shape, value_shape)``.
        Its call takes (query, value, key), `MultiHeadAttention.forward` (query, key, value).
        Its call decides on dropout; without ``training=True`` there is none. The gate of
        ``use_gate=True`` becomes wg and bg.

    Returns
    -------
    MultiHeadAttention

    Raises
    ------
    OptionError
        If layer is something else, a subclass with its own call, not built, quantised, or has a
        sliding window or attention over several axes.
    ShapeError
        If its output has several axes.
    MissingExtraError
        If keras is not installed.

    Examples
    --------
    >>> import keras
    >>> layer = keras.layers.MultiHeadAttention(num_heads=2, key_dim=3, value_dim=5)
    >>> layer.build((None, None, 7), (None, None, 11))
    >>> mha = from_keras(layer)
    >>> mha.wq.shape, mha.wv.shape, mha.wo.shape
    ((7, 6), (11, 10), (10, 7))
    """
    layers = loaded_package("keras", "from_keras").layers
    kinds = {
        f"keras.layers.{name}": getattr(layers, name)
        for name in ("MultiHeadAttention", "GroupQueryAttention")
    }
    check_kind("layer", layer, kinds, ("call", "_compute_attention", "_masked_softmax"))
    if not layer.built:
        raise OptionError("layer is not built, must be: layer.build(query_shape, value_shape)")
    config = layer.get_config()
    dense = {name: getattr(layer, f"_{name}_dense") for name in ("query", "key", "value")}
    dense["out"] = layer._output_dense
    if config.get("use_gate"):
        dense["gate"] = layer._gate_dense
    rank = len(dense["query"].equation.split(",")[0])
    axes = getattr(layer, "attention_axes", None)
    refuse(
        ("sliding_window", config.get("sliding_window"), "a window is given to forward"),
        ("attention_axes", axes if axes not in (None, (rank - 2,)) else None, "flatten the axes"),
        *((f"{n}.quantization_mode", d.quantization_mode, "dequantise") for n, d in dense.items()),
    )
    # A variable's value is a tensor of the backend; a kernel with LoRA is one already.
    kernels = {n: getattr(d.kernel, "value", d.kernel) for n, d in dense.items()}
    biases = {n: getattr(d.bias, "value", d.bias) for n, d in dense.items()}
    return from_kernels(kernels, biases)
