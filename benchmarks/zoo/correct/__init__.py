"""Correct implementations that round and order differently, against which false alarms are counted.

`Kernel` has its choice of roundings and orders; the others are the oracles, and frameworks if they
are installed.
"""

from benchmarks.zoo.correct import (  # each module registers its own
    gated,
    jax,
    kernels,
    onnx,
    oracles,
    torch,
)
from benchmarks.zoo.correct.kernel import Kernel
from benchmarks.zoo.correct.register import CORRECT, Correct, correct

__all__ = [
    "CORRECT",
    "Correct",
    "Kernel",
    "correct",
    "gated",
    "jax",
    "kernels",
    "onnx",
    "oracles",
    "torch",
]
