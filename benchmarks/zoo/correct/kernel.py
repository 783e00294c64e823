"""A correct implementation with its choice of roundings and orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.zoo.correct.choices import Choices
from benchmarks.zoo.correct.run import Run
from benchmarks.zoo.correct.signature import with_every_option
from npattn.problem import Problem
from npattn.problem.arrays import Array


def forward(
    self: Kernel,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    **options: Any,
) -> Any:
    """Return out, or the tuple of out and those of lse and weights that are requested."""
    results = self(Problem(q, k, v, mask, alignment="bottom_right", **options))
    names = ["o"] + ["lse"] * return_lse + ["weights"] * return_weights
    requested = tuple(results[name] for name in names)
    return requested if len(requested) > 1 else requested[0]


@dataclass(frozen=True, kw_only=True)
class Kernel(Choices):
    """A correct implementation of every option but the gate, with the given choices."""

    def __call__(
        self,
        problem: Problem,
        dout: Array | None = None,
        dlse: Array | None = None,
        dweights: Array | None = None,
    ) -> dict[str, Array]:
        """Return o, lse, weights and, with dout, the gradients, by name."""
        return self.run(problem).results(dout, dlse, dweights)

    def run(self, problem: Problem) -> Run:
        return Run(self, problem)

    forward = with_every_option("gate")(forward)

    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        *,
        dlse: Array | None = None,
        dweights: Array | None = None,
        **options: Any,
    ) -> dict[str, Array]:
        """Return the gradients by input name; out and lse are recomputed, to the last bit."""
        results = self(Problem(q, k, v, alignment="bottom_right", **options), dout, dlse, dweights)
        return {
            n[1:]: results[n]
            for n in ("dq", "dk", "dv", "dbias", "dsinks", "dgate")
            if n in results
        }
