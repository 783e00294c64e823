"""Plain NumPy arrays as a framework."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np

from npattn.arrays import Array, finfo
from npattn.errors import OptionError
from npattn.testing.adapters.base import ImplementationError, ResultError

__all__ = ["READABLE", "NumPy"]

_NARROW = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
READABLE = frozenset(map(np.dtype, (*_NARROW, *"?bhilBHILefdFD")))
"""Dtypes of results; those that a worker sends are the same."""


class NumPy:
    """Plain NumPy arrays; gradients come from an explicit backward."""

    name = "numpy"
    differentiates = False
    compiles = immutable = False

    def __init__(self, device: str | None = None) -> None:
        if device is not None:
            raise OptionError(f"device is {device!r}, must be None for NumPy arrays")

    def one_thread(self) -> AbstractContextManager[None]:
        return nullcontext()

    def threads(self, count: int) -> AbstractContextManager[None] | None:
        return None  # BLAS sets its number of threads when it is loaded

    def finish(self) -> None:
        pass

    def device_works(self) -> bool:
        return True

    def allowing(self, dtype: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def give(self, array: Array) -> Array:
        return array

    def take(self, value: Any) -> Array:
        if not isinstance(value, (np.ndarray, np.generic)):
            raise ResultError(
                f"returned {type(value).__module__}.{type(value).__qualname__}, "
                "must be a NumPy array (or name framework=)"
            )
        if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
            # One may compute when it is read, hide elements, or change with a file.
            raise ResultError(
                f"returned {type(value).__module__}.{type(value).__qualname__}, a subclass of "
                "numpy.ndarray, must be a plain array (np.asarray(o))"
            )
        if value.dtype.hasobject or value.dtype.kind in "SUMm":
            raise ResultError(f"returned an array of dtype {value.dtype}, must hold numbers")
        if value.dtype not in READABLE:
            raise ResultError(f"returned an array of dtype {value.dtype}")
        return np.array(value)

    def memory(self, value: Any) -> Array | None:
        return value if isinstance(value, np.ndarray) else None

    def add_mask(self, mask: Array, q: Array) -> Array:
        added: Array = np.where(mask, 0, finfo(q.dtype).min).astype(q.dtype)
        return added

    def hide(self, bias: Array, mask: Array) -> Array:
        return np.where(mask, bias, bias.dtype.type(-np.inf))

    def gradients(self, *_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        raise ImplementationError("a NumPy function is differentiated by its backward=")

    def gradients_twice(self, *_: Any) -> dict[str, Any]:
        raise ImplementationError("a NumPy function is differentiated by its backward=, once")
