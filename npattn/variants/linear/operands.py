"""Operands of the forms of linear attention, and their gradients."""

from typing import NamedTuple

from npattn.problem.arrays import Array


class LinearOperands(NamedTuple):
    """Features, values, logarithms of decay and a state; or the gradients of these.

    F is the number of features, G that of the query heads that share a state.
    """

    q: Array  # (..., K, G, T, F) features of the queries, times scale
    k: Array  # (..., K, S, F) features of the keys
    v: Array  # (..., K, S, E) with normalisation a last column of 1
    g: Array  # (..., K, S, F or 1) logarithms of decay
    state: Array  # (..., K, F, E) before the first key
    beta: Array | None  # (..., K, S, 1) of the delta rule
    causal: bool
