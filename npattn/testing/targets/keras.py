"""keras.ops.dot_product_attention on each of Keras's backends, of which a process has one."""

from __future__ import annotations

import os
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
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = backend  # read when Keras is loaded
    try:
        import keras  # type: ignore[import-not-found, unused-ignore]
    except ImportError as err:
        raise MissingExtraError(
            f"the target keras.{backend} needs keras and {backend}; npattn itself does not: "
            f"pip install 'npattn[keras]' {backend}"
        ) from err
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
    return keras.ops.dot_product_attention(*arrays, **options)


def _on(backend: str) -> Any:
    """Return the function on a backend, with the parameters that Keras names."""

    def attend(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        scale: float | None = None,
        is_causal: bool = False,
    ) -> Any:
        return _attend(backend, query, key, value, bias, mask, scale, is_causal)

    attend.__name__ = attend.__qualname__ = f"on_{backend}"  # by which other processes import it
    return attend


on_numpy, on_jax, on_torch = map(_on, ("numpy", "jax", "torch"))
