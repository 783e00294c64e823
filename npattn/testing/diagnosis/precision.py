"""The precision in which an implementation computes, told from its errors on plain problems.

A result that is rounded to a narrower dtype on the way is told from its elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.bounds.rounding import Rounding, unit_roundoff
from npattn.testing.bounds.ulp import real
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.comparison import compare_arrays
from npattn.testing.diagnosis.evidence import Candidate, Evidence
from npattn.testing.diagnosis.place import EVERYWHERE
from npattn.testing.diagnosis.sentences import BACKWARD
from npattn.testing.rules.systematic_error import (
    EXCESSIVE,
    ErrorSample,
    chi_square,
    describe_fit,
    excessive,
    fits,
    measure_errors,
    plain_recipes,
    tightest_model,
)
from npattn.testing.trial import Trial

FORMATS = {"float32": "float32", "tf32 or float16": "float16", "bfloat16": "bfloat16"}
"""Formats that may be narrower than the input's, by name → storage of the model, the widest first.
The fractions of tf32 and float16 are equally long, so that their roundings look alike."""
PLACES = {
    "the weights": ("weights",),
    "the gradients of the scores": ("dscores",),
    "the weights and the gradients of the scores": ("weights", "dscores"),
}
"""Names of what may be rounded while all else is exact → storages of the model."""
PRODUCTS = {"weights": {"o", "dv"}, "dscores": {"dq", "dk"}}
"""Results of which what is rounded is a factor: one of them is wrong, whatever follows from it."""
LEAST = 0.5
"""Least mean square error, in units of its variance, if one of them is rounded."""
LENGTHS = 2
"""Lengths of plain problems at which errors must be larger than roundings to be everywhere."""
MOST = 8.0
"""Largest mean square error of an implementation that computes in a format, in units of the
variance that rounding the factors of each product gives. One that rounds exp alone has 0.15 of it,
one that rounds every operation 1.5. The least is 1/8: a format with three bits less has 64 times
the variance."""


def explain_rounding(trial: Trial, recipe: Recipe | None = None) -> Rounding | None:
    """Return the model that explains its output on a plain problem: that of the dtype, or narrower.

    Within the worst case of a narrow format nearly every error of a wider one fits too, so that a
    narrower format has to explain the mean square of the errors.

    Raises ImplementationError if it raises on a plain problem.
    """
    recipe, dtype = recipe or trial.space.base(), trial.space.dtype
    forward = replace(trial, gradients=frozenset(), memo={})
    evaluation = forward.evaluation(recipe)
    result, exact = evaluation.results.get("o"), evaluation.exact["o"]
    if result is None or result.shape != exact.shape:
        return None
    if compare_arrays("o", result, exact, evaluation.tolerance["o"]).passed:
        return trial.rounding
    for model in map(_computing_in, _formats(dtype)):
        sample = measure_errors(forward, recipe, _rounding_factors(model.name))
        if _mean_square(sample, "o") <= MOST:
            return model
    return None


def _formats(dtype: str) -> Iterator[str]:
    own = unit_roundoff(dtype)
    return (name for name, storage in FORMATS.items() if unit_roundoff(storage) > own)


def _computing_in(name: str) -> Rounding:
    """Return the model that rounds everything to a format narrower than the input's."""
    stored = "operands", "queries", "scores", "weights", "row_sum", "lse", "dweights", "dscores"
    return Rounding(
        name=name,
        accumulator="float32",
        exp_error=4 * unit_roundoff(FORMATS[name]),
        gradient_roundings=2,
        out_roundings=2,
        **dict.fromkeys((*stored, "shared"), FORMATS[name]),  # type: ignore[arg-type]
    )


def _rounding_factors(name: str) -> Rounding:
    """Return the model that rounds the factors of each product to a format."""
    return _rounding(name, "operands", "weights", "dscores")


def _rounding(name: str, *storages: str) -> Rounding:
    """Return the model that rounds what enters a product to a format."""
    stored = dict.fromkeys(storages, FORMATS[name])
    return Rounding(name=name, fuses=True, **stored)  # type: ignore[arg-type]


def precision_candidates(trial: Trial) -> Iterator[Candidate]:
    """Yield the narrower format, and what is rounded to it, if they explain a plain problem.

    The errors must have the size of its roundings, and no part that a wrong scale, gain or key
    explains, for a small mistake is within the bounds of a narrow format too.
    """
    recipe = plain_recipes(trial.space, 0)[0]
    try:
        sample = measure_errors(trial, recipe)
    except ImplementationError:
        return
    evaluation = sample.evaluation
    wrong = [
        name
        for name in sample.names()
        if not compare_arrays(
            name, evaluation.results[name], evaluation.exact[name], evaluation.tolerance[name]
        ).passed
    ]
    if not wrong:
        return

    def fit(model: Rounding, least: float, most: float) -> bool:
        sample = measure_errors(trial, recipe, model)
        alike = all(least <= _mean_square(sample, name) <= most for name in wrong)
        return alike and not any(x.significant for x in fits(sample, trial))

    names = ", ".join(wrong)
    for name in _formats(trial.space.dtype):
        for what, storages in PLACES.items():
            model = _rounding(name, *storages)
            enters = all(PRODUCTS[x] & {*wrong} for x in storages)
            if enters and fit(model, LEAST, EXCESSIVE):
                text = f"the errors of {names} are as large as rounding {what} to {name} makes them"
                yield _candidate(model, f"{what} in {name}", text)
                return
    if {"dq", "dk"} <= {*wrong} and "dv" in {*sample.names()} - {*wrong}:
        return  # no rounding of dout leaves dv right
    for name in _formats(trial.space.dtype):
        if fit(_rounding_factors(name), 1 / MOST, MOST):
            text = f"the errors of {names} are as large as computing in {name} makes them"
            yield _candidate(_computing_in(name), name, text)
            return


def where_rounded(trial: Trial) -> str:
    """Return "everywhere" if one head without options errs by more than roundings at each length.

    It is of the backward if all gradients do, and the forward does not; "" if nothing holds.
    """
    plain = [r for r in plain_recipes(trial.space, 0) if not options_on(r)][:LENGTHS]
    alone = [replace(r, lead=r.lead and (1,), H=1, K=1) for r in plain]
    taken = [a if trial.space.takes(a) else r for a, r in zip(alone, plain, strict=True)]
    try:
        samples = [measure_errors(trial, recipe) for recipe in taken]
    except ImplementationError:
        return ""
    wrong = [{x for x in s.names() if excessive(s, x) is not None} for s in samples]
    if not all(wrong):
        return ""
    of_backward = all(x == {"dq", "dk", "dv"} for x in wrong)
    return f"{BACKWARD} {EVERYWHERE}" if of_backward else EVERYWHERE


def _mean_square(sample: ErrorSample, tensor: str) -> float:
    """Return χ² of a tensor; inf if no element of it has a finite one."""
    heads = chi_square(sample, tensor)
    return float(np.nanmean(heads)) if not np.isnan(heads).all() else np.inf


def _candidate(model: Rounding, name: str, text: str) -> Candidate:
    return Candidate(name, text, partial(_rounds_alike, model), "precision")


def _rounds_alike(model: Rounding, evidence: Evidence) -> bool:
    """Return True if all results are within the tolerance of a model."""
    trial = replace(evidence.trial, rounding=model, memo={})
    tolerance = trial.tolerance(evidence.problem, evidence.cotangents, evidence.exact)
    return evidence.is_within(evidence.exact, tolerance)


def describe_precision(trial: Trial, seed: int) -> str:
    """Describe the precision in the trial's dtype, and in float64 where that is less."""
    dtype = trial.space.dtype
    words = [f"{dtype} computed in {trial.rounding.name}"]
    if trial.rounding == Rounding.undeclared(dtype):
        taken = [r for r in plain_recipes(trial.space, seed) if _takes(trial, r)]
        model = tightest_model(trial, taken)
        words = [f"{dtype} as {describe_fit(*model) if model else 'none'}"]
    if dtype != "float64":
        words += _describe_float64(trial)
    return "; ".join(words)


def _takes(trial: Trial, recipe: Recipe) -> bool:
    """Return False if the implementation raises on a problem: it may take another kind of bias."""
    try:
        trial.evaluation(recipe)
    except ImplementationError:
        return False
    return True


def _describe_float64(trial: Trial) -> list[str]:
    space = replace(trial.space, dtype="float64")
    wide = replace(trial, space=space, rounding=Rounding.undeclared("float64"), memo={})
    try:
        model = explain_rounding(wide)
    except ImplementationError as err:
        return [f"float64 refused ({err})"]
    if model is None:
        return ["float64 agrees in no precision"]
    return [] if model == wide.rounding else [f"float64 computed in {model.name}"]


NARROW = ("float32", "float16", "bfloat16")
"""Dtypes, the widest first: what is a number of one may be one of the next as well."""
PARTIAL_SUMS = 8
"""Most roundings of partial sums by which such a result may be off."""


def dtype_candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Yield each dtype narrower than the dtype of the inputs, the narrowest first."""
    names = ", ".join(sorted(evidence.wrong))
    for dtype in reversed(NARROW):
        if unit_roundoff(dtype) > unit_roundoff(evidence.problem.q.dtype):
            text = f"{names} is rounded to {dtype} on the way: each element is a {dtype} number"
            yield Candidate(f"{names}: {dtype}", text, partial(_explains_dtype, dtype), "precision")


def _explains_dtype(dtype: str, evidence: Evidence) -> bool:
    return all(
        _is_rounded(array, evidence.exact[name], dtype)
        for name in evidence.wrong
        for array in evidence.observed[name]
    )


def _is_rounded(array: Array, exact: Array, dtype: str) -> bool:
    """Return True if each element is a number of a dtype, and near the exact one."""
    array = real(array)
    if array.shape != exact.shape or not np.isfinite(exact).all():
        return False
    with np.errstate(over="ignore"):
        same = array.astype(dtype).astype(array.dtype) == array
    allowed = PARTIAL_SUMS * unit_roundoff(dtype) * abs(exact).max(initial=0.0)
    return bool(same.all() and (abs(array - exact) <= allowed).all())
