"""Latent attention as kernels take it: parts of q and k, and values that are a part of the keys.

    q = [latent q | rotary q]   k = [c | rotary k]   v = c

    f(q_nope, q_pe, ckv, kpe)   ckv (..., S, C) and kpe (..., S, R), one key head for all queries
    f(q, k, v, qv=)             scores (q kᵀ + qv vᵀ) · scale, as FlashAttention has them

A problem of latent attention is one whose v is the first C columns of k, and a result dk is the
gradient of [c | rotary k]: through keys and values. Both forms are the same arrays by the same
names here: "q" and "k" are the rotary parts, "v" is c, and "latent queries" has its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn.errors import OptionError
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.problem.meanings import LATENT
from npattn.testing.adapters.base import NotAsked, ResultError, inexpressible
from npattn.testing.adapters.forms import Form
from npattn.testing.adapters.signature import PARTS, Signature

QUERIES = LATENT[0]
SIZES: dict[str, Sequence[int]] = {"D": (13, 24, 19, 40, 65), "E": (5, 8, 12, 3, 1)}
"""Sizes that it is judged at where nobody asks for others: keys are wider than values."""
HEADS: dict[str, Sequence[int]] = {"H": (3, 2, 4, 1), "K": (1,)}


@dataclass(frozen=True)
class LatentInputs(Form):
    """How an implementation takes the parts."""

    # all four parts stand in the place of q, k and v, and keys have no axis of heads
    one_head: bool

    @property
    def words(self) -> str:
        """The form in words."""
        if self.one_head:
            return "q in two parts, keys (..., S, C) and (..., S, R), values are the first"
        return "qv and v as the first columns of q and k"

    @property
    def sizes(self) -> dict[str, Sequence[int]]:
        """Sizes that it is judged at where nobody asks for others."""
        return SIZES | HEADS if self.one_head else SIZES

    def names(self, signature: Signature) -> dict[str, str]:
        """Return the names of its parameters → those of the arrays of a call."""
        named = {**signature.parts, **signature.meanings}
        return {n: PARTS[meaning] for n, meaning in named.items() if meaning in PARTS}

    def fit(self, problem: Problem, mask_true: str = "attend") -> Problem:
        """Return the problem with the first columns of k for v."""
        if problem.E > problem.D or self._is_tied(problem):
            return problem
        return problem.replace(v=problem.k[..., : problem.E].copy())

    def _is_tied(self, problem: Problem) -> bool:
        k, v = (x.astype(np.float64) for x in (problem.k[..., : problem.E], problem.v))
        return k.shape == v.shape and np.array_equal(k, v, equal_nan=True)

    def store(
        self, problem: Problem, arrays: Mapping[str, Array], mask_true: str
    ) -> tuple[Problem, Mapping[str, Array]]:
        """Return the arrays of a call with the parts."""
        return problem, {**arrays, **self.split(problem)}

    def split(self, problem: Problem) -> dict[str, Array]:
        """Return the parts by the names of the arrays of a call.

        Raises ImplementationError, a refusal, if no parts have these sizes.
        """
        C = problem.E
        if problem.D < C:
            raise inexpressible("values that are wider than keys")
        if self.one_head and (problem.headless or problem.K != 1):
            raise inexpressible(f"keys of {problem.K} heads" if problem.K != 1 else "two axes")
        if not self._is_tied(problem):
            raise NotAsked("v is not the first columns of k")
        parts = {
            "q": problem.q[..., C:],
            "k": problem.k[..., C:],
            "v": problem.v,
            QUERIES: problem.q[..., :C],
        }
        if self.one_head:
            parts |= {name: parts[name][..., 0, :, :] for name in "kv"}
        return parts

    def join(self, pairs: Sequence[tuple[str, Any]], problem: Problem) -> list[tuple[str, Any]]:
        """Return results with the gradients of parts joined to dq and dk."""
        parts = {f"d{name}": x.shape for name, x in self.split(problem).items()}
        found = {name: x for name, x in pairs if name in parts}
        for name, x in found.items():
            if tuple(x.shape) != parts[name]:
                raise ResultError(f"{name} has shape {tuple(x.shape)}, must be {parts[name]}")
        joined = [(name, x) for name, x in pairs if name not in parts]
        for name, first, second in (("dq", f"d{QUERIES}", "dq"), ("dk", "dv", "dk")):
            if first in found and second in found:
                joint = np.concatenate([found[first], found[second]], -1)
                adds = self.one_head and name == "dk"
                joined.append((name, joint[..., None, :, :] if adds else joint))
        return joined


@np.errstate(invalid="ignore")  # inf − inf is NaN, as in the implementation
def tie(arrays: Mapping[str, Array], dv: Array) -> dict[str, Array]:
    """Return results, or their tolerances, with that of dk as of one array with v: dk + dv."""
    dk = arrays["dk"].copy()
    dk[..., : dv.shape[-1]] += dv
    return {name: x for name, x in arrays.items() if name != "dv"} | {"dk": dk}


def read_latent(signature: Signature, name: str) -> LatentInputs | None:
    """Return how a callable takes the parts, by its parameters; None if it takes q, k and v."""
    if signature.parts:
        return LatentInputs(one_head=True)
    theirs = [meaning for meaning in signature.meanings.values() if meaning in LATENT]
    if not theirs:
        return None
    if theirs != [QUERIES]:
        raise OptionError(
            f"{name} has {', '.join(theirs)}, must begin with all of {', '.join(LATENT)} in any "
            "order, or have the latent queries alone beside q, k, v"
        )
    return LatentInputs(one_head=False)
