"""The worst case: how far the steps of a rounding model can take each result from the exact one.

    u    unit roundoff of the accumulators       γ(n) = n u / (1 − n u), n roundings in a row
    A    error of the argument of exp            R = exp(A) − 1, relative error of a weight
    z    dropout multiplier (1 without)          D = Σ p dp, "delta"

scores.py carries the error of each score through its stages, forward.py those of the weights, out
and lse, backward.py those of the gradients. docs/tolerance.md derives every line. No number here is
fitted: each is a count of roundings, a unit roundoff, or a constant of the calculus.
"""

from npattn.testing.bounds.worst_case.backward import (
    DeltaErrorSums,
    DqErrorSums,
    TopErrorSums,
    WorstCase,
)
from npattn.testing.bounds.worst_case.forward import VAST, OutErrorSums, WeightSums
from npattn.testing.bounds.worst_case.scores import Operands, are_tame, finite, row_sum, swing

__all__ = [
    "VAST",
    "DeltaErrorSums",
    "DqErrorSums",
    "Operands",
    "OutErrorSums",
    "TopErrorSums",
    "WeightSums",
    "WorstCase",
    "are_tame",
    "finite",
    "row_sum",
    "swing",
]
