"""Arrays and classes that many tests make."""

from typing import Any

import numpy as np


def normal(*shape: int, seed: int = 0) -> Any:
    """Return standard normal numbers, the same for a seed."""
    return np.random.default_rng(seed).standard_normal(shape)


def make_changed(base: Any, name: str, cause: str | None = "", **attributes: Any) -> Any:
    """Return a class that is `base` but for some attributes, and the cause that a report names."""
    return type(name, (base,), {"cause": cause, "__module__": base.__module__} | attributes)
