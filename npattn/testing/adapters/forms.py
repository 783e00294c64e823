"""Forms of inputs: how arrays of a problem are passed, and how results come back.

    latent       parts of q and k, with values that are a part of the keys
    key lists    masks as lists of keys
    quantized    q, k, v and o of 8 bits, with factors
    layout       queries before heads
    storage      sequences that are packed, in a cache or in pages
    packing      several of q, k and v in one array

A call takes its forms in this order, and reads results in the opposite one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.problem.meanings import LATENT


class Form:
    """A form in which an implementation takes its inputs.

    Arrays and numbers of a call are known by npattn's names, or by their meaning among
    `npattn.problem.meanings.MEANINGS`. Each method leaves as it is what the form says nothing of.
    """

    @property
    def words(self) -> str:
        """The form in words."""
        raise NotImplementedError

    def fit(self, problem: Problem, mask_true: str) -> Problem:
        """Return the problem with contents that the form can hold."""
        return problem

    def store(
        self, problem: Problem, arrays: Mapping[str, Array], mask_true: str
    ) -> tuple[Problem, Mapping[str, Array]]:
        """Return the problem for later forms, and arrays of a call, of any shape, in this form.

        Raises ImplementationError, a refusal, if the form cannot hold the problem.
        """
        return problem, arrays

    def numbers(self, problem: Problem, mask_true: str) -> dict[str, Any]:
        """Return what else a call passes that is no array."""
        return {}

    def narrow(self, name: str, array: Array) -> Array:
        """Return a stored array in the dtype in which it is passed."""
        return array

    def restore(self, name: str, array: Any, problem: Problem, mask_true: str) -> Mapping[str, Any]:
        """Return one result as npattn has it, or several that it holds, by name.

        Raises ResultError if it has not this form.
        """
        return {name: array}

    def join(self, pairs: Sequence[tuple[str, Any]], problem: Problem) -> list[tuple[str, Any]]:
        """Return all results, with those joined that are parts of one."""
        return list(pairs)


@dataclass(frozen=True)
class Layout(Form):
    """Order of the axes of heads and queries, (B, H, T, D) or (B, T, H, D)."""

    # "BHTD" or "BTHD": of q, k, v and their gradients, and of o; Hugging Face's functions have two
    inputs: str
    output: str
    lse_heads_last: bool = False  # lse is (B, T, H)
    one_head: bool = False  # keys have no axis of heads

    def swaps(self, name: str, axes: int) -> bool:
        """Return True if an array of npattn's names has its queries before its heads."""
        layout = self.output if name == "o" else self.inputs
        without = self.one_head and name in "kv"
        return layout == "BTHD" and axes == 4 and name in (*"qkvo", LATENT[0]) and not without

    def restore(
        self, name: str, array: Any, problem: Problem | None, mask_true: str
    ) -> Mapping[str, Any]:
        """Return a result with heads before queries."""
        if name == "lse":
            return {name: self.swap_lse(array)}
        input_name = name if name == "o" else name.removeprefix("d")
        swaps = (name == "o" or input_name != name) and self.swaps(input_name, array.ndim)
        return {name: array.swapaxes(-2, -3) if swaps else array}

    def swap_lse(self, lse: Any) -> Any:
        """Return lse, or its cotangent, from or to this layout."""
        return lse.swapaxes(-1, -2) if self.lse_heads_last and lse.ndim == 3 else lse

    def apply(self, name: str, array: Any) -> Any:
        """Return a tensor in this layout."""
        return array.swapaxes(-2, -3).contiguous() if self.swaps(name, array.ndim) else array
