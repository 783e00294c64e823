"""Shared by targets that wrap a function of a library: its name, and heads side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from npattn.problem.arrays import Array

F = TypeVar("F", bound=Callable[..., Any])


def rename(function: F, name: str) -> F:
    """Return a function made in a function, under the name by which other processes import it."""
    function.__name__ = function.__qualname__ = name
    return function


def merge_heads(x: Array) -> Array:
    """(B, H, T, D) → (B, T, H · D)."""
    B, H, T, D = x.shape
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(B, T, H * D)


def split_heads(x: Array, H: int) -> Array:
    """(B, T, H · D) → (B, H, T, D)."""
    return x.reshape(*x.shape[:-1], H, -1).swapaxes(1, 2)
