"""keras.ops.dot_product_attention on each of Keras's backends, of which a process has one."""

from __future__ import annotations

import os
import sys
from typing import Any

from npattn.errors import MissingExtraError, OptionError

__all__ = ["on_jax", "on_numpy", "on_torch"]


def _attend(backend: str, *arrays: Any, **options: Any) -> Any:
    """Call it on a backend.

    Raises
    ------
    OptionError
        If Keras was loaded with another one.
    """
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = backend
    try:
        import keras  # type: ignore[import-not-found, unused-ignore]
    except ImportError as err:
        raise MissingExtraError(
            f"the target keras.{backend} needs keras and {backend}; npattn itself does not: "
            f"pip install 'npattn[keras]' {backend}"
        ) from err
    loaded = keras.config.backend()
    if loaded != backend:
        raise OptionError(
            f"the target keras.{backend} needs Keras with the backend {backend}, and this process "
            f"has loaded it with {loaded}: judge it in a process of its own, as npattn check does"
        )
    return keras.ops.dot_product_attention(*arrays, **options)


def on_numpy(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> Any:
    """Call it on NumPy, where it has no gradients."""
    return _attend("numpy", query, key, value, bias, mask, scale, is_causal)


def on_jax(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> Any:
    """Call it on JAX."""
    return _attend("jax", query, key, value, bias, mask, scale, is_causal)


def on_torch(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> Any:
    """Call it on PyTorch."""
    return _attend("torch", query, key, value, bias, mask, scale, is_causal)
