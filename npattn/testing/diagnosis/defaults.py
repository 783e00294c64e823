"""Translation between declared conventions and the default ones, which known mistakes keep.

A known mistake is made with mask, window, heads and the like as the default conventions mean them,
but for the alignment of causal, which it takes from the implementation. Scores that hidden keys
keep (`hidden_fill`), a cap after the bias, and rows that are the mean of the values stay as they
are: problems that have none of them are predicted all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from npattn.conventions import Conventions
from npattn.conventions.cap import scale_of
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array, sum_to
from npattn.testing.diagnosis.evidence import Arrays


def translate_problem(problem: Problem, conventions: Conventions) -> Problem:
    """Return the problem as the default conventions mean it.

    A number that is added to hidden scores is a bias.
    """
    own = conventions.translate_options(problem)
    mask, add = own.mask_array, conventions.addend(problem)
    if mask is None or add is None:
        return own
    bias = 0.0 if own.bias_array is None else own.bias_array
    with np.errstate(over="ignore"):
        hidden = np.where(mask, bias, np.asarray(bias) + add).astype(problem.q.dtype)
    return own.replace(mask=None, bias=hidden)


def translate_cotangents(
    problem: Problem, cotangents: Cotangents, conventions: Conventions
) -> Cotangents:
    """Return the cotangents of results of the default conventions."""
    dlse, dweights = cotangents.dlse, cotangents.dweights
    _, dlse, dweights = _plain(conventions).cotangents(problem, cotangents.dout, dlse, dweights)
    return Cotangents(cotangents.dout, dlse, dweights)


def translate_results(problem: Problem, found: Arrays, conventions: Conventions) -> Arrays:
    """Translate results of the translated problem back."""
    plain, translated = _plain(conventions), dict(found)
    if "lse" in found:
        back = (plain.results(problem, x, x)[1] for x in found["lse"])
        translated["lse"] = _in_dtype_of(found["lse"], back)
    if "weights" in found:
        filled = (np.zeros(x.shape[:-1]) for x in found["weights"])  # of no empty row
        whole = map(partial(plain.returned_weights, problem), found["weights"], filled)
        translated["weights"] = _in_dtype_of(found["weights"], whole)
    return translated


def translate_gradients(problem: Problem, found: Arrays, conventions: Conventions) -> Arrays:
    """Translate gradients of the translated problem back."""
    translated, bias = dict(found), problem.bias_array
    if conventions.kv_head == "tile":
        for name, x in (("dk", problem.k), ("dv", problem.v)):
            back = (conventions.sum_shared_heads(dx, problem, x.shape) for dx in found[name])
            translated[name] = _in_dtype_of(found[name], back)
    if bias is not None and "dbias" in found:
        factor = scale_of(problem) if conventions.bias == "before_scale" else 1
        back = (factor * sum_to(dx, bias.shape) for dx in found["dbias"])
        translated["dbias"] = _in_dtype_of(found["dbias"], back)
    return translated


@cache
def _plain(conventions: Conventions) -> Conventions:
    """Return the conventions without the fields that are not translated."""
    return replace(
        conventions, hidden_fill=None, softcap="before_bias", empty_row="zero", empty_row_bias=None
    )


def _in_dtype_of(arrays: Sequence[Array], others: Iterable[Array]) -> list[Array]:
    return [np.asarray(y).astype(x.dtype) for x, y in zip(arrays, others, strict=True)]
