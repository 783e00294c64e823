"""Contestants by name; their files are loaded only if they can run."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.speed.cases import Task
from npattn.problem.arrays import Array


class Calls(NamedTuple):
    """One contestant on one task, ready to run: converted and compiled."""

    forward: Callable[[], Any]  # computes out
    both: Callable[[], Any] | None  # computes out, dq, dk and dv; None where there is no gradient
    # Converts their results to (out,) or (out, dq, dk, dv), NumPy arrays with npattn's shapes. None
    # for the bounds, whose results are not attention
    read: Callable[[Any], tuple[Array, ...]] | None
    bytes: int  # size of its inputs, masks and biases included


@dataclass(frozen=True)
class Contestant:
    """An implementation to measure, or a bound."""

    name: str
    role: str  # "npattn", "peer", "ceiling" (no engine with such tiles can be faster) or "floor"
    module: str  # location of a function (task, threads) → Calls
    function: str
    needs: str | None  # package that it needs
    about: str

    @property
    def runs_here(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    @property
    def version(self) -> str:
        """Version of the package that it needs."""
        return "" if self.needs is None else importlib.metadata.version(self.needs)

    def start(self, task: Task, threads: int) -> Calls:
        """Convert and compile it for a task."""
        begin: Callable[[Task, int], Calls] = getattr(
            importlib.import_module(self.module), self.function
        )
        return begin(task, threads)


_HERE = "benchmarks.speed"
_ALL = (
    Contestant(
        "npattn.tiled", "npattn", f"{_HERE}.engines", "tiled_engine", None, 'npattn, engine="tiled"'
    ),
    Contestant(
        "npattn.dense", "npattn", f"{_HERE}.engines", "dense_engine", None, 'npattn, engine="dense"'
    ),
    Contestant(
        "numpy.naive", "peer", f"{_HERE}.naive", "naive", None, "the textbook lines, in NumPy"
    ),
    Contestant(
        "torch.fused",
        "peer",
        f"{_HERE}.torch",
        "fused_sdpa",
        "torch",
        "SDPA, FLASH_ATTENTION backend",
    ),
    Contestant("torch.math", "peer", f"{_HERE}.torch", "math_sdpa", "torch", "SDPA, MATH backend"),
    Contestant(
        "jax.jit", "peer", f"{_HERE}.jax", "jit", "jax", "jax.nn.dot_product_attention, compiled"
    ),
    Contestant(
        "onnx.reference",
        "peer",
        f"{_HERE}.onnx",
        "reference",
        "onnx",
        "operator Attention by the reference evaluator; forward only",
    ),
    Contestant(
        "products",
        "ceiling",
        f"{_HERE}.products",
        "products",
        None,
        "the matrix products of npattn.tiled alone",
    ),
    Contestant(
        "products+exp",
        "floor",
        f"{_HERE}.products",
        "products_and_exp",
        None,
        "the same with np.exp of each score",
    ),
)
CONTESTANTS = {contestant.name: contestant for contestant in _ALL}
"""The contestants, by name, in the order of their turns."""
