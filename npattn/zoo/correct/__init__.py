"""Correct implementations that round and order differently, against which false alarms are counted.

`Kernel` is one that can be told what to round and in which order; the others are the oracles, and
frameworks where they are installed.
"""

from npattn.zoo.correct import (  # each module registers its own
    jax,
    kernels,
    onnx,
    oracles,
    torch,
)
from npattn.zoo.correct.kernel import Kernel
from npattn.zoo.correct.register import CORRECT, Correct, correct

__all__ = [
    "CORRECT",
    "Correct",
    "Kernel",
    "correct",
    "jax",
    "kernels",
    "onnx",
    "oracles",
    "torch",
]
