"""Arrays that many tests make."""

from typing import Any

import numpy as np


def normal(*shape: int, seed: int = 0) -> Any:
    """Return standard normal numbers, the same for a seed."""
    return np.random.default_rng(seed).standard_normal(shape)
