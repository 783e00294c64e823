"""npattn tells whether an attention implementation is right.

An oracle (`attention`, `forward`, `backward`: exact values and gradients, pure NumPy, float64) and
a judge (`npattn.testing`, and ``npattn check`` on the command line).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from npattn import biases, conventions, errors, masks, positions
from npattn.api import attention, backward, forward, jvp
from npattn.conventions import Conventions
from npattn.multihead import MultiHeadAttention
from npattn.problem import Forward, Gradients, Problem
from npattn.second_order import double_backward, hvp

__version__ = "0.1.0"

__all__ = [
    "Conventions",
    "Forward",
    "Gradients",
    "MultiHeadAttention",
    "Problem",
    "attention",
    "backward",
    "biases",
    "conventions",
    "double_backward",
    "errors",
    "forward",
    "hvp",
    "jvp",
    "masks",
    "positions",
]

LATER = (
    *("cache", "plot", "profiles", "quantization", "testing", "torch", "variants"),
    "weights",
)
"""Modules that are slow to load, or need an extra: loaded on first use."""


def __dir__() -> list[str]:
    return [*__all__, *LATER]  # not the modules that are not for users


if not TYPE_CHECKING:  # type checkers would take any name for one of npattn's

    def __getattr__(name: str) -> Any:
        if name in LATER:
            return import_module(f"npattn.{name}")
        raise AttributeError(f"module 'npattn' has no attribute {name!r}")
