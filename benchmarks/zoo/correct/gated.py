"""Kernels with an output gate, applied at one of three places [16].

"last"     gate · o in the accumulator, before o is stored
"apart"    o and gate · dout are stored, as by a kernel of its own after attention
"weights"  the weights are multiplied, and stored again: a gate of heads or rows alone
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from benchmarks.zoo.correct.forward import SavedState
from benchmarks.zoo.correct.kernel import Kernel, forward
from benchmarks.zoo.correct.register import STORES_PRODUCTS, correct
from benchmarks.zoo.correct.run import Run
from benchmarks.zoo.correct.signature import with_every_option
from npattn.mistakes import Gated
from npattn.problem import Problem
from npattn.problem.arrays import Array, sum_to
from npattn.testing.bounds.rounding import Rounding

Place = Literal["last", "apart", "weights"]


@dataclass(frozen=True, kw_only=True)
class GatedKernel(Kernel):
    """A kernel with a gate at a place."""

    place: Place = "last"

    def run(self, problem: Problem) -> Run:
        if problem.gate is None:
            return super().run(problem)
        by_row = self.place == "weights" and problem.gate.shape[-1] == 1
        return RUNS["apart" if self.place == "weights" and not by_row else self.place](
            self, problem
        )

    forward = with_every_option()(forward)


class GatedRun(Run):
    """Run of a kernel that keeps o before the gate, for dgate."""

    o: Array  # (..., H, T, E)

    @property
    def gate(self) -> Array:
        assert self.problem.gate is not None
        return self.problem.gate.astype(self.wide)

    def dgate(self, each: Array) -> dict[str, Array]:
        assert self.problem.gate is not None
        shape = self.problem.gate.shape
        return {"dgate": self.fit(sum_to(each, shape)).astype(self.wide)}


class LastRun(GatedRun):
    """The gate multiplies o in the accumulator."""

    def fill_empty_rows(self, o: Array, v: Array, empty: Array) -> Array:
        self.o = super().fill_empty_rows(o, v, empty)
        return self.fit(self.gate * self.o)

    def backward(self, state: SavedState, dout: Array, *more: Array | None) -> dict[str, Array]:
        do = dout.astype(self.wide).reshape(state.out.shape)
        self.dout, inner = do, self.fit(self.gate * do)
        dgate = self.dgate(self.fit(do * self.o))
        return super().backward(state, inner, *more) | dgate

    def delta(self, state: SavedState, do: Array, dp: Array, dw: Array) -> Array:
        """Contract dout with out after the gate: each has the gate once."""
        return super().delta(state, self.dout, dp, dw)


class ApartRun(GatedRun):
    """The gate multiplies o after it is stored."""

    def results(
        self, dout: Array | None, dlse: Array | None, dweights: Array | None
    ) -> dict[str, Array]:
        """Return o, lse, weights and, with dout, the gradients, by name."""
        problem, head = self.problem, (None,) if self.problem.headless else (...,)
        inner = None
        if dout is not None:
            do = dout.astype(self.wide)[head]
            inner = self.deliver(self.fit(self.gate * do)).reshape(dout.shape)
        results = super().results(inner, dlse, dweights)
        o = results["o"].astype(self.wide)[head]
        if dout is not None:
            results |= self.dgate(self.deliver(self.fit(do * o)))
        gated_o = self.deliver(self.fit(self.gate * o))
        results["o"] = (gated_o[0] if problem.headless else gated_o).astype(self.dtype)
        return results


class WeightsRun(GatedRun):
    """The gate multiplies the weights of whole rows, which are stored once more."""

    def drop(self, p: Array) -> Array:
        factor, self.factor = self.factor, self.wide(1)  # of dropout alone
        dropped = super().drop(p)
        self.factor = factor
        return self.store("weights", self.fit(dropped * self.gate))

    def backward(self, state: SavedState, dout: Array, *more: Array | None) -> dict[str, Array]:
        do = dout.astype(self.wide).reshape(state.out.shape)
        v = state.operands.v.swapaxes(-1, -2)
        dw = self.store("dweights", self.dot(do, v))
        dw = np.where(state.scores.s == -np.inf, self.wide(0), dw)
        dgate = self.dgate(self.sum(self.fit(dw * super().drop(state.p))))
        self.factor = self.gate
        grads = super().backward(state, dout, *more) | dgate
        self.factor = self.wide(1)
        return grads

    factor: Any = 1

    def dropout_factor(self) -> Array:
        """Return the factor of each weight."""
        return np.asarray(super().dropout_factor() * self.factor)


RUNS: dict[str, type[GatedRun]] = {"last": LastRun, "apart": ApartRun, "weights": WeightsRun}

LOW = ("float16", "bfloat16")
EAGER, FUSED = Rounding.eager(), Rounding.fused()
UNDECLARED = Rounding.undeclared("bfloat16")

correct("gated base of the zoo", "Base of the mutants of gates: float64 inside.", Gated().forward,
        Gated().backward, rounding=Rounding.upcast())  # fmt: skip
for _name, _sentence, _dtypes, _kernel in (
    ("gate last", "The gate multiplies o in the accumulator.", ("float64", "float32", *LOW),
     GatedKernel(tile=7)),
    ("gate last, fused", "The same, D from the gated out.", ("float32", *LOW),
     GatedKernel(tile=16, binary=True, rounding=FUSED)),
    ("gate apart", "o, gate · o and gate · dout are stored.", ("float64", "float32", *LOW),
     GatedKernel(place="apart", rounding=EAGER)),
    ("gate apart, fused", "The same around a fused kernel.", ("float32", *LOW),
     GatedKernel(place="apart", tile=16, rounding=FUSED)),
    ("gate on weights", "Gates of heads and rows multiply the weights.",
     ("float64", "float32", *LOW), GatedKernel(place="weights", rounding=EAGER)),
    ("gate apart, undeclared", "The same, with an exp in error by 2⁻¹¹.", LOW,
     GatedKernel(place="apart", rounding=replace(UNDECLARED, name="undeclared"))),
):  # fmt: skip
    correct(
        _name,
        _sentence,
        _kernel.forward,
        _kernel.backward,
        dtypes=_dtypes,
        rounding=None if "undeclared" in _name else _kernel.rounding,
        breaks=STORES_PRODUCTS if _kernel.rounding.scores == "input" else (),
    )
