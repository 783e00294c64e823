"""Masks as lists of keys: those of each query in any order, with −1 in unused entries.

    visible (..., H | 1, T, S)      lists (..., T, n) that heads share, or (..., H, T, n), int32

A list has the visible keys, shuffled, and unused entries among them; the order is that of the
mask alone, so that forward and backward get the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from npattn.errors import OptionError
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.problem.meanings import LISTS
from npattn.testing.adapters.base import inexpressible
from npattn.testing.adapters.forms import Form
from npattn.testing.adapters.signature import Signature

SPARE = 3
"""Most entries that no list needs."""


@dataclass(frozen=True)
class KeyLists(Form):
    """How an implementation takes lists of keys."""

    meaning: str  # one of `npattn.problem.meanings.LISTS`
    required: bool  # it cannot be called without lists: without a mask they have every key
    beside_mask: bool  # it has a parameter for a mask too, which hides some keys of the lists

    @property
    def words(self) -> str:
        """The form in words."""
        axes = "(B, T, n)" if self.meaning == "key lists" else "(B, H, T, n)"
        return f"lists of visible keys {axes}, −1 in unused entries"

    def store(
        self, problem: Problem, arrays: Mapping[str, Array], mask_true: str
    ) -> tuple[Problem, Mapping[str, Array]]:
        """Return the arrays of a call with the lists, and the mask only beside them."""
        passed = {n: x for n, x in arrays.items() if n != "mask" or self.beside_mask}
        return problem, passed | self.arrays(problem, mask_true)

    def arrays(self, problem: Problem, mask_true: str = "attend") -> dict[str, Array]:
        """Return the lists of a problem by their meaning; none if its mask is given without.

        Raises ImplementationError, a refusal, if heads share lists and the mask is not the same for
        all.
        """
        if problem.mask is None and not self.required:
            return {}
        mask = np.ones((1, 1), bool) if problem.mask is None else np.asarray(problem.mask)
        visible = ~mask if mask_true == "hide" and problem.mask is not None else mask
        heads = () if problem.headless else (problem.H,)
        if self.meaning == "key lists":
            if visible.ndim > 2 and visible.shape[-3] > 1:
                raise inexpressible(f"a mask of shape {visible.shape}: heads share its lists")
            visible = visible[..., 0, :, :] if visible.ndim > 2 else visible
            heads = ()
        visible = np.broadcast_to(visible, (*problem.lead, *heads, problem.T, problem.S))
        rng = np.random.default_rng([visible.size, int(visible.sum()), 41])
        if self.beside_mask:  # lists have some hidden keys too, which the mask hides
            visible = visible | (rng.random(visible.shape) < 1 / 4)
        return {self.meaning: list_keys(visible, rng)}


def list_keys(listed: Array, rng: np.random.Generator) -> Array:
    """List the keys (..., T, n) of each query of `listed` (..., T, S) in a random order.

    Unused entries among them are −1; the longest list has up to `SPARE` of them.
    """
    S, longest = listed.shape[-1], int(listed.sum(-1).max(initial=0))
    n = max(longest + int(rng.integers(SPARE + 1)), 1)
    # Sorted by a random number, or 2 where a key is not listed, each row begins with its keys.
    order = np.argsort(np.where(listed, rng.random(listed.shape), 2.0), axis=-1)[..., :n]
    keys = np.take_along_axis(np.where(listed, np.arange(S), -1), order, -1)  # (..., T, ≤ n)
    unused = np.full((*keys.shape[:-1], n - keys.shape[-1]), -1)
    return rng.permuted(np.concatenate([keys, unused], -1), axis=-1).astype(np.int32)


def read_key_lists(signature: Signature, name: str) -> KeyLists | None:
    """Return how a callable takes lists of keys, by its parameters; None if it has none."""
    theirs = {n: meaning for n, meaning in signature.meanings.items() if meaning in LISTS}
    if not theirs:
        return None
    if len(theirs) > 1:
        raise OptionError(
            f"{name} has {' and '.join(theirs)}, must have one parameter for lists of keys: "
            "rename={theirs: 'key lists'} says which"
        )
    ((parameter, meaning),) = theirs.items()
    required = parameter in signature.required
    return KeyLists(meaning, required, "mask" in signature.names)
