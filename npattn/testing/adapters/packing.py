"""Several of q, k and v in one array, as fused projections and caches have them.

    parts    (B, T, 3, H, D)    (B, S, 2, K, D)    in pages (N, 2, P, K, D)
    heads    (B, T, H, 3, D)    (B, S, K, 2, D)
    first    (2, …)

Packed sequences have total for B and T. The gradient of such an array is one array too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.problem.meanings import PACKED
from npattn.testing.adapters.base import ResultError, inexpressible
from npattn.testing.adapters.forms import Form
from npattn.testing.adapters.views import lay_out

SHAPES = {
    "parts": {"qkv": "(B, T, 3, H, D)", "kv": "(B, S, 2, K, D)"},
    "heads": {"qkv": "(B, T, H, 3, D)", "kv": "(B, S, K, 2, D)"},
    "first": {"kv": "(2, B, S, K, D)"},
}


@dataclass(frozen=True)
class Packing(Form):
    """Place of q, k and v in one array: which of them, and along which axis."""

    name: Literal["qkv", "kv"]  # name of the array, a letter for each part
    # the parts before the heads, behind them, or before everything
    order: Literal["parts", "heads", "first"]
    pages: bool = False  # the parts of a page are beside each other
    stored: bool = False  # of sequences, whose axes their storage says
    # the parts stand in the other order: to find out if an implementation has it
    swapped: bool = False

    @property
    def parts(self) -> str:
        """Letters of the parts, in the order in which they stand."""
        return self.name[:-2] + "vk" if self.swapped else self.name

    @property
    def axis(self) -> int:
        """Axis of the parts."""
        paged = 1 if self.pages else -3
        return {"parts": paged, "heads": -2, "first": 0}[self.order]

    @property
    def words(self) -> str:
        """The array in words."""
        shape = "" if self.stored else f" {SHAPES[self.order][self.name]}"
        return f"{', '.join(self.name[:-1])} and v as one array{shape}"

    def store(
        self, problem: Problem, arrays: Mapping[str, Array], mask_true: str
    ) -> tuple[Problem, Mapping[str, Array]]:
        """Return the arrays of a call with the parts in one, heads behind the queries."""
        if problem.q.ndim != 4:
            raise inexpressible(f"arrays of {problem.q.ndim} axes")
        apart = {n: lay_out(arrays[n], "contiguous", not self.stored) for n in "qkv"}
        return problem, self.pack({**arrays, **apart})

    def restore(self, name: str, array: Any, problem: Problem, mask_true: str) -> Mapping[str, Any]:
        """Return the gradients of the parts, where one is of the array."""
        return self.unpack(array) if name == f"d{self.name}" else {name: array}

    def pack(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return arrays with the parts in one.

        Raises ImplementationError, a refusal, if the parts have several shapes.
        """
        parts = [arrays[name] for name in self.parts]
        if len({x.shape for x in parts}) > 1:
            raise inexpressible(f"{', '.join(self.name[:-1])} and v of several shapes")
        rest = {name: x for name, x in arrays.items() if name not in {*self.parts}}
        return rest | {self.name: np.stack(parts, self.axis)}

    def unpack(self, array: Any) -> dict[str, Any]:
        """Return the gradients of the parts, by name, from that of the array."""
        axes = tuple(array.shape)
        if len(axes) < 4 or axes[self.axis] != len(self.name):
            raise ResultError(
                f"d{self.name} has shape {axes}, must be that of {self.name} with "
                f"{len(self.name)} parts"
            )
        parts = np.moveaxis(array, self.axis, 0)
        return {f"d{name}": part for name, part in zip(self.parts, parts, strict=True)}


def read_packing(meaning: str) -> Packing | None:
    """Return how an array is packed by the meaning of its parameter; None if it is not."""
    if meaning not in PACKED:
        return None
    name: Any = PACKED[meaning]
    if meaning.endswith("by head"):
        return Packing(name, "heads")
    return Packing(name, "first" if meaning.endswith("the other") else "parts")
