"""Random rounding of the operations of torch, in forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npattn.testing.reference.noise import Noise


class RoundingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Round at random what is computed from the arguments of a function.

    Constants, as the positions of a rotation, stay: a right function has them in full precision.
    """

    def __init__(self, noise: Noise) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.noise = noise
        self.reached: dict[int, Any] = {}  # memory → its owner, so that no other tensor gets it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to be skipped by a compiler, torch would load it, for seconds."""
        return False

    def follow(self, values: Iterable[Any]) -> None:
        """Round what is computed from these tensors."""
        for x in _tensors(list(values)):
            if x.dtype == torch.float64:
                self.reached[_memory(x)] = x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_memory(x) for x in _tensors((args, *(kwargs or {}).values()))}
        if known.isdisjoint(self.reached):
            return result
        for x in _tensors(result):
            if x.dtype == torch.float64:
                memory = _memory(x)
                new = memory not in known or func._schema.is_mutable
                if new and x.numel() and str(func) not in MOVES:
                    self._round(x, _root(func, args, kwargs) if str(func) in SUMS else None)
                self.reached[memory] = x
        return result

    def _round(self, x: Any, terms: Any) -> None:
        own = None if terms is None else terms.detach().cpu().numpy()
        rounded = self.noise.round(x.detach().cpu().numpy(), own)
        x.copy_(torch.from_numpy(np.ascontiguousarray(rounded)).reshape(x.shape))


def _root(func: Any, args: Any, kwargs: Any) -> Any:
    """Return √(Σ term²) of a sum of terms, or of products of its arguments."""
    squares = [x * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    return func(*squares, **(kwargs or {})).sqrt()


SUMS = {
    f"aten.{name}"
    for name in (
        "mm.default", "bmm.default", "mv.default", "dot.default", "addmm.default", "sum.default",
        "sum.dim_IntList", "baddbmm.default", "cumsum.default",
    )
}  # fmt: skip
"""Sums of terms, or of products."""
MOVES = {
    f"aten.{name}"
    for name in (
        "clone.default", "copy_.default", "_to_copy.default", "cat.default", "neg.default",
        "masked_fill.Scalar", "masked_fill.Tensor", "where.self", "stack.default", "fill_.Scalar",
        "index.Tensor", "gather.default", "constant_pad_nd.default", "masked_fill_.Scalar",
        "zero_.default", "zeros_like.default", "tril.default", "triu.default", "flip.default",
        "roll.default", "slice_backward.default", "select_backward.default", "embedding.default",
    )
}  # fmt: skip
"""Operations that compute nothing; a hidden score stays what it is."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for x in value:
            yield from _tensors(x)


def _memory(x: Any) -> int:
    return int(x.untyped_storage().data_ptr())
