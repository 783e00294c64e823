"""Array operations of the bound by row norms: NumPy's; device/tensors.py has those of torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.engines import dense
from npattn.problem import Problem


class ArrayOps:
    """NumPy in float64. Arrays are Any here: a subclass has arrays of another kind."""

    eps = 2.0**-52
    """Distance from 1 to the next number of the dtype computed in."""

    expm1: Any = staticmethod(np.expm1)
    isfinite: Any = staticmethod(np.isfinite)
    log1p: Any = staticmethod(np.log1p)
    maximum: Any = staticmethod(np.maximum)
    minimum: Any = staticmethod(np.minimum)
    sqrt: Any = staticmethod(np.sqrt)
    where: Any = staticmethod(np.where)
    sum_live: Any = staticmethod(dense.sum_live)

    def evaluate(self, problem: Problem) -> tuple[Any, Any, Any]:
        """Return out, lse and the residuals of `dense`, with a head axis."""
        out, lse, residuals = dense.forward(problem)
        head = (None,) if problem.headless else (...,)
        return out[head], lse[head], residuals

    def wide(self, x: Any) -> Any:
        """Return x in the dtype computed in."""
        return x.astype(float)

    def shows_all(self, problem: Problem, live: Any) -> bool:
        """Return True if every key is visible; False if that is not known."""
        return bool(live.all())

    def all_finite(self, *arrays: Any) -> bool:
        return all(bool(np.isfinite(x).all()) for x in arrays)

    def count(self, live: Any, axis: int) -> Any:
        """Return the number of live entries along an axis, which stays."""
        return live.sum(axis, keepdims=True)

    def top(self, x: Any, axis: int, least: float = 0) -> Any:
        """Return the largest number along an axis, which stays, or `least`."""
        return x.max(axis, keepdims=True, initial=least)

    def farthest(self, x: Any) -> Any:
        """Return the largest |x| of each row, without an array of |x|."""
        top, low = x.max(-1, keepdims=True, initial=0), x.min(-1, keepdims=True, initial=0)
        return np.maximum(top, -low)

    def along(self, *arrays: Any) -> Any:
        """Return the sum of the product along each row, without an array of products."""
        letters = ",".join(["...s"] * len(arrays))
        return np.einsum(f"{letters}->...", *arrays)[..., None]

    def mean(self, x: Any) -> Any:
        """Return the mean of all rows."""
        return x.mean(-2, keepdims=True)

    def square(self, x: Any) -> Any:
        """Return x², in the memory of x."""
        return np.square(x, out=x)
