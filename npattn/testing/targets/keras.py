"""Attention of Keras on each of its backends, of which a process has one."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

from npattn.errors import OptionError, optional_import
from npattn.testing.targets.wrapping import rename

BACKENDS = ("numpy", "jax", "torch")


@functools.cache
def _load(backend: str) -> Any:
    """Return Keras with a backend."""
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = backend  # read when Keras is loaded
    extras = ",".join(dict.fromkeys(("keras", backend))).removesuffix(",numpy")
    try:
        with optional_import(f"the target keras.{backend} needs", f"keras and {backend}", extras):
            import keras
    finally:
        os.environ.pop("KERAS_BACKEND")
        if before is not None:
            os.environ["KERAS_BACKEND"] = before
    loaded = keras.config.backend()
    if loaded != backend:
        raise OptionError(
            f"the target keras.{backend} needs Keras with the backend {backend}, and this process "
            f"has loaded it with {loaded}: judge it in a process of its own, as npattn check does"
        )
    return keras


def _name(function: Any, name: str, options: tuple[str, ...]) -> Any:
    """Return a function under its name; on JAX it is compiled, for each value of its options.

    Else each call is traced anew.
    """
    rename(function, name)
    if not name.endswith("_jax"):
        return function

    @functools.cache
    def find_compiled() -> Any:
        import jax

        return jax.jit(function, static_argnames=options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _load("jax")
        return find_compiled()(*args, **kwargs)

    return call


def _cache_layer(build: Any) -> Any:
    """Return what builds a layer once, with variables of no function that is being compiled."""

    @functools.lru_cache(maxsize=64)
    def build_once(keras: Any, *settings: Any) -> Any:
        if keras.config.backend() != "jax":
            return build(keras, *settings)
        import jax

        with jax.ensure_compile_time_eval():
            return build(keras, *settings)

    return build_once


def _on(backend: str) -> Any:
    """Return keras.ops.dot_product_attention on a backend, with the parameters that Keras names."""

    def attend(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        scale: float | None = None,
        is_causal: bool = False,
    ) -> Any:
        operation = _load(backend).ops.dot_product_attention
        return operation(query, key, value, bias, mask, scale, is_causal)

    return _name(attend, f"on_{backend}", ("scale", "is_causal"))


# --- layers.Attention -----------------------------------------------------------------------------


def _attention_on(backend: str) -> Any:
    """Return keras.layers.Attention on a backend, called for every head."""

    def attend(
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        return_weights: bool = False,
    ) -> Any:
        """Return out, (B, H, T, E), and weights if asked; heads are samples of the layer."""
        keras = _load(backend)
        if query.ndim != 4 or key.shape[:2] != query.shape[:2]:
            raise ValueError("query, key and value must be (B, H, T, D), of the same heads")
        (B, H, T, D), S, E = query.shape, key.shape[2], value.shape[-1]
        if mask is not None:
            if mask.ndim != 4 or mask.shape[1:3] != (1, 1):
                raise ValueError("the mask of a layer's values is (B, S): for keys alone")
            mask = keras.ops.broadcast_to(mask, (B, H, 1, S)).reshape(B * H, S)
        q, k, v = (x.reshape(B * H, *x.shape[2:]) for x in (query, key, value))
        scale = scale if scale is not None else 1 / math.sqrt(D) if D else 1.0
        layer = _attention_layer(keras, scale, keras.backend.standardize_dtype(query.dtype))
        o, weights = layer(
            [q, v, k],
            mask=None if mask is None else [None, mask],
            return_attention_scores=True,
            use_causal_mask=is_causal,
        )
        o, weights = o.reshape(B, H, T, E), weights.reshape(B, H, T, S)
        return (o, weights) if return_weights else o

    return _name(attend, f"attention_{backend}", ("scale", "is_causal", "return_weights"))


@_cache_layer
def _attention_layer(keras: Any, scale: float, dtype: str) -> Any:
    layer = keras.layers.Attention(use_scale=True, dtype=dtype)
    layer.build([(1, 1, 1)] * 3)  # its one variable is the scale, whatever the shapes
    layer.scale.assign(scale)
    return layer


# --- layers.MultiHeadAttention --------------------------------------------------------------------


def _mha_on(backend: str) -> Any:
    """Return keras.layers.MultiHeadAttention on a backend, its projections the identity.

    It returns scores, and so computes them itself: without, it is `ops.dot_product_attention`. A
    product with the identity is exact for numbers; a NaN in one feature goes to all.
    """

    def attend(
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        *,
        use_causal_mask: bool = False,
        return_weights: bool = False,
    ) -> Any:
        """Return out, (B, T, H, E), and scores if asked, from arrays of this layout."""
        keras = _load(backend)
        if query.ndim != 4 or key.shape[2] != query.shape[2] or value.shape[2] != query.shape[2]:
            raise ValueError("query, key and value must be (B, T, H, D), of the same heads")
        sizes = (*query.shape[2:], value.shape[-1])
        if 0 in sizes:
            raise ValueError("no heads or features: its identity has none")
        if attention_mask is not None and attention_mask.ndim == 3:
            attention_mask = attention_mask[None]  # for the layer rank 3 is (B, T, S)
        layer = _mha_layer(keras, *sizes, keras.backend.standardize_dtype(query.dtype))
        q, k, v = (x.reshape(*x.shape[:2], -1) for x in (query, key, value))
        o, weights = layer(
            *(q, v, k),
            attention_mask=attention_mask,
            use_causal_mask=use_causal_mask,
            return_attention_scores=True,
        )
        o = o.reshape(*query.shape[:3], sizes[-1])
        return (o, weights) if return_weights else o

    return _name(attend, f"mha_{backend}", ("use_causal_mask", "return_weights"))


@_cache_layer
def _mha_layer(keras: Any, H: int, D: int, E: int, dtype: str) -> Any:
    layer = keras.layers.MultiHeadAttention(
        *(H, D, E), use_bias=False, output_shape=H * E, dtype=dtype
    )
    layer.build((1, 1, H * D), (1, 1, H * E), (1, 1, H * D))
    for dense in (layer.query_dense, layer.key_dense, layer.value_dense, layer.output_dense):
        shape = dense.kernel.shape
        size = shape[0] if len(shape) == 3 and shape[0] == math.prod(shape[1:]) else shape[-1]
        dense.kernel.assign(keras.ops.reshape(keras.ops.eye(size, dtype=dtype), shape))
    return layer


on_numpy, on_jax, on_torch = map(_on, BACKENDS)
attention_numpy, attention_jax, attention_torch = map(_attention_on, BACKENDS)
mha_numpy, mha_jax, mha_torch = map(_mha_on, BACKENDS)
