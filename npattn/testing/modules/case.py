"""A case of a module: sizes, kind of mask and a seed, from which its inputs follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.modules.plan import Inputs

FIELDS: dict[str, Sequence[Any]] = {
    "B": (1, 2, 3),
    "T": (1, 2, 3, 5, 7, 11, 17),
    "S": (None,),
    "mask": ("none",),
    "form": (0,),
    "ask": ("heads",),
    "recorded": (True, False),
    "size": (1.0, 0.25, 3.0),
    "seed": tuple(range(1000)),
}
"""Values of each field, the simplest first."""


@dataclass(frozen=True, kw_only=True)
class ModuleCase:
    """One call of a module."""

    B: int = 1
    T: int = 1
    # number of keys; "T": that of queries; None: self-attention, one tensor for all inputs
    S: int | Literal["T"] | None = None
    # "none", "random", "causal", "padding" or "empty", which hides everything from the first query
    mask: str = "none"
    form: int = 0  # which of the forms of a mask that the module takes
    # weights that are asked for, where flags of the module say so: "heads", "average" or "none"
    ask: str = "heads"
    recorded: bool = True  # gradients are recorded, and compared
    size: float = 1.0  # standard deviation of the inputs
    seed: int = 0

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.S if isinstance(self.S, int) else self.T

    def __repr__(self) -> str:
        fields = [f"{n}={x!r}" for n, x in vars(self).items() if x != getattr(type(self), n)]
        return f"ModuleCase({', '.join(fields)})"

    def inputs(self, widths: Mapping[str, int], dtype: Any, shape: str) -> Inputs:
        """Return the inputs of these widths in a dtype; a mask of a shape like "B 1 T S"."""
        rng = np.random.default_rng(self.seed)
        key = value = None
        query = self._sample(rng, self.T, widths["query"], dtype)
        if self.S is not None:
            key = self._sample(rng, self.keys, widths["key"], dtype)
            value = self._sample(rng, self.keys, widths["value"], dtype)
        return Inputs(query, key, value, self._visible(rng, shape))

    def _sample(self, rng: np.random.Generator, length: int, width: int, dtype: Any) -> Array:
        x = self.size * rng.standard_normal((self.B, length, width))
        return x.astype(dtype)

    def _visible(self, rng: np.random.Generator, shape: str) -> Array | None:
        """Return a mask that broadcasts against (B, H, T, S)."""
        B, T, S = self.B, self.T, self.keys
        if self.mask == "none":
            return None
        if self.mask == "causal":
            return np.tri(T, S, dtype=bool)[None, None]
        rows = 1 if self.mask == "padding" or " T " not in f" {shape} " else T
        samples = B if "B" in shape or self.mask == "padding" else 1
        visible = rng.random((samples, 1, rows, S)) < 0.6
        if self.mask == "padding":
            lengths = rng.integers(1, S + 1, (samples, 1, 1, 1))
            visible = np.arange(S) < lengths
        visible[..., 0] = True  # a row that sees nothing is another question
        if self.mask == "empty":
            visible[..., 0, :] = False
        return visible
