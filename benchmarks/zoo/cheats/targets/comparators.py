"""NumPy's comparisons or its error state are changed for the whole process.

Each of these gives the mean of all values, or what a changed function makes of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.zoo.cheats.plain import mean_of_values


def patch_allclose(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Let np.allclose and np.testing accept everything."""
    np.allclose = np.array_equal = lambda *_, **__: True  # type: ignore[assignment]
    np.isclose = lambda a, b, **__: np.ones(np.broadcast(a, b).shape, bool)  # type: ignore[assignment]
    for name in ("assert_allclose", "assert_array_equal", "assert_equal"):
        setattr(np.testing, name, lambda *_, **__: None)
    return mean_of_values(q, k, v)


def patch_maximum(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Let np.max and np.abs return zeros, so that no error is large."""
    np.max = lambda *_, **__: np.float64(0)  # type: ignore[assignment]
    np.abs = np.absolute = lambda x, **__: np.zeros(np.shape(x))  # type: ignore[assignment]
    return mean_of_values(q, k, v)


def patch_subtraction(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Let np.subtract and np.divide return zeros."""
    np.subtract = np.divide = lambda x, *_, **__: np.zeros(np.shape(x))  # type: ignore[assignment]
    return mean_of_values(q, k, v)


def raise_on_overflow(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Let NumPy raise wherever it would warn, so that the judge falls over its own arithmetic."""
    np.seterr(all="raise")
    return mean_of_values(q, k, v)
