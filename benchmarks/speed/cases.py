"""Cases by name, and the arrays of a case at one length.

B = 1 batch   H query heads   K key/value heads   T queries, as many keys   D size
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from npattn import biases, masks
from npattn.biases import Bias
from npattn.masks import Mask
from npattn.problem import Problem
from npattn.problem.arrays import Array

WINDOW = 256
DOCUMENTS = 8


@dataclass(frozen=True)
class Case:
    """One kind of attention."""

    name: str
    about: str
    H: int = 8  # query heads, key/value heads and size of a head
    K: int = 8
    D: int = 64
    causal: bool = False
    window: tuple[int, int] | None = None  # as `npattn.attention` takes it
    documents: int = 0  # number of documents that are packed into the sequence, or 0
    alibi: bool = False


_ALL = (
    Case("plain", "every query sees every key"),
    Case("causal", "each query sees the keys up to its own", causal=True),
    Case("window", f"the {WINDOW} keys up to its own", window=(WINDOW - 1, 0)),
    Case("documents", f"{DOCUMENTS} documents of random lengths, packed", documents=DOCUMENTS),
    Case("alibi", "the bias of ALiBi, every key visible", alibi=True),
    Case("gqa", "8 query heads share 2 key/value heads", K=2),
    Case("d128", "as plain, heads of size 128", D=128),
)
CASES = {case.name: case for case in _ALL}
"""The cases, by name."""


class Task(NamedTuple):
    """A case at one length: the input of every contestant."""

    case: Case
    q: Array  # (1, H, T, D), k and v (1, K, T, D), in the dtype of the task
    k: Array
    v: Array
    dout: Array
    mask: Mask | None  # in the form of npattn; causal is not in the mask
    bias: Bias | None
    arrays: Arrays  # the same as arrays, made on first use

    @property
    def T(self) -> int:
        return int(self.q.shape[-2])

    @property
    def scale(self) -> float:
        return float(self.case.D**-0.5)

    @property
    def options(self) -> dict[str, Any]:
        """Options of `npattn.attention`."""
        return {"mask": self.mask, "bias": self.bias, "causal": self.case.causal}

    @property
    def bytes(self) -> int:
        """Size of q, k, v and dout."""
        return sum(x.nbytes for x in (self.q, self.k, self.v, self.dout))

    def problem(self) -> Problem:
        return Problem(self.q, self.k, self.v, dtype=self.q.dtype, **self.options)


class Arrays:
    """Mask and bias as arrays, for systems without such objects."""

    def __init__(self, make: Callable[[], Problem]) -> None:
        self._make = make

    @cached_property
    def mask(self) -> Array | None:
        """Bool array (T, S), without causal."""
        return self._make().mask_array

    @cached_property
    def visible(self) -> Array | None:
        """Bool array (T, S), causal included."""
        return self._make().visible

    @cached_property
    def bias(self) -> Array | None:
        """Array (1, H, T, S) in the dtype of q."""
        problem = self._make()
        array = problem.bias_array
        return None if array is None else array[None].astype(problem.q.dtype)


def make_task(case: Case, T: int, dtype: str, seed: int) -> Task:
    """Make the arrays of a case: normal numbers, the same for the same seed."""
    rng = np.random.default_rng([seed, T])
    shape = (1, case.H, T, case.D)
    shared = (1, case.K, T, case.D)
    q, k, v, dout = (rng.standard_normal(s).astype(dtype) for s in (shape, shared, shared, shape))
    mask: Mask | None = None
    if case.window is not None:
        mask = masks.window(*case.window)
    if case.documents:
        mask = masks.documents(_sample_documents(rng, T, case.documents))
    bias = biases.alibi(case.H) if case.alibi else None
    options: dict[str, Any] = {"mask": mask, "bias": bias, "causal": case.causal}
    arrays = Arrays(lambda: Problem(q, k, v, dtype=q.dtype, **options))
    return Task(case, q, k, v, dout, mask, bias, arrays)


def _sample_documents(rng: np.random.Generator, T: int, documents: int) -> Array:
    """Sample the document of each token: (T,), borders without replacement."""
    borders = rng.choice(np.arange(1, T), min(documents, T) - 1, replace=False)
    starts = np.zeros(T, int)
    starts[borders] = 1
    return np.cumsum(starts)
