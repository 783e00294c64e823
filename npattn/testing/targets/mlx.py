"""mlx.core.fast.scaled_dot_product_attention as a target, on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.errors import optional_import
from npattn.problem.arrays import Array

with optional_import("the target mlx needs", "mlx", "mlx"):
    import mlx.core as mx


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    mask: Array | None = None,
    sinks: Array | None = None,
) -> Array:
    """Return MLX's result, (B, H, T, E), for q (B, H, T, D), k (B, K, S, D), v (B, K, S, E)."""
    if q.shape[-3] == 0:
        raise ValueError("no heads: MLX divides by their number and ends the process")
    arrays: list[Any] = [None if x is None else mx.array(x) for x in (q, k, v, mask, sinks)]
    q, k, v, mask, sinks = arrays
    attend: Any = mx.fast.scaled_dot_product_attention
    return np.array(attend(q, k, v, scale=scale, mask=mask, sinks=sinks))
