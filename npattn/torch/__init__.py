"""npattn on torch tensors: the same names, on any device, differentiable by autograd.

Masks, biases and conventions are the same objects as in npattn.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from npattn.errors import optional_import

with optional_import("npattn.torch needs", "torch", "torch"):
    import torch as _torch  # noqa: F401  checked once, here

from npattn import conventions, errors, masks
from npattn.conventions import Conventions
from npattn.problem import Forward, Gradients
from npattn.torch import biases, cache, positions, quantization, variants
from npattn.torch.api import attention, backward, forward, jvp
from npattn.torch.multihead import MultiHeadAttention
from npattn.torch.problem import Problem
from npattn.torch.second_order import double_backward, hvp

__all__ = [
    "Conventions",
    "Forward",
    "Gradients",
    "MultiHeadAttention",
    "Problem",
    "attention",
    "backward",
    "biases",
    "cache",
    "conventions",
    "double_backward",
    "errors",
    "forward",
    "hvp",
    "jvp",
    "masks",
    "positions",
    "quantization",
    "variants",
]

LATER = ("plot", "profiles", "testing", "weights")
"""Modules of npattn that are slow to load, or need an extra."""


def __dir__() -> list[str]:
    return sorted({*__all__, *LATER})


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in LATER:
            return import_module(f"npattn.{name}")
        raise AttributeError(f"module 'npattn.torch' has no attribute {name!r}")
