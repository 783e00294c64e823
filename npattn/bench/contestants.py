"""Who takes part: by name, in files of their own that are loaded where they can run."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from npattn.arrays import Array
from npattn.bench.cases import Task

__all__ = ["CONTESTANTS", "Calls", "Contestant"]


class Calls(NamedTuple):
    """One contestant on one task, ready to run: converted, and compiled.

    Attributes
    ----------
    forward : callable
        Computes out.
    both : callable or None
        Computes out, dq, dk and dv; None where there is no gradient.
    read : callable or None
        What they returned → (out,) or (out, dq, dk, dv), as NumPy arrays shaped as npattn's. None
        where nothing is computed that could be right.
    bytes : int
        Of what it was given, masks and biases included.
    """

    forward: Callable[[], Any]
    both: Callable[[], Any] | None
    read: Callable[[Any], tuple[Array, ...]] | None
    bytes: int


@dataclass(frozen=True)
class Contestant:
    """Something that is timed.

    Attributes
    ----------
    name : str
    role : str
        "npattn", "peer", "ceiling" (what no engine of such tiles can beat) or "floor".
    module, function : str
        Where it is: (task, threads) → Calls.
    needs : str or None
        The package without which it cannot run.
    about : str
    """

    name: str
    role: str
    module: str
    function: str
    needs: str | None
    about: str

    @property
    def runs_here(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    @property
    def version(self) -> str:
        """Of the package that it needs."""
        return "" if self.needs is None else importlib.metadata.version(self.needs)

    def start(self, task: Task, threads: int) -> Calls:
        """Make it ready to run."""
        begin: Callable[[Task, int], Calls] = getattr(
            importlib.import_module(self.module), self.function
        )
        return begin(task, threads)


_HERE = "npattn.bench"
_ALL = (
    Contestant(
        "npattn.tiled", "npattn", f"{_HERE}.engines", "tiled", None, 'npattn, engine="tiled"'
    ),
    Contestant(
        "npattn.dense", "npattn", f"{_HERE}.engines", "dense", None, 'npattn, engine="dense"'
    ),
    Contestant(
        "numpy.naive", "peer", f"{_HERE}.naive", "naive", None, "the textbook lines, in NumPy"
    ),
    Contestant(
        "torch.fused", "peer", f"{_HERE}.torch", "fused", "torch", "SDPA, FLASH_ATTENTION backend"
    ),
    Contestant("torch.math", "peer", f"{_HERE}.torch", "math", "torch", "SDPA, MATH backend"),
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
