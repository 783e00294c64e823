"""The precision in which an implementation computes, told from its errors on plain problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from npattn.testing.adapters.base import ImplementationError
from npattn.testing.bounds.rounding import Rounding, unit_roundoff
from npattn.testing.cases.recipe import Recipe
from npattn.testing.compare import compare_arrays
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.evidence import Evidence
from npattn.testing.rules.systematic_error import (
    EXCESSIVE,
    ErrorSample,
    chi_square,
    fits,
    measure_errors,
    plain_recipes,
    tightest_model,
)
from npattn.testing.trial import Trial

__all__ = ["describe_precision", "explain_rounding", "precision_candidates"]

NARROWER = {"float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Formats in which an implementation may compute instead of the input's → unit roundoff."""
FAINT = 2.0**-6
"""Least mean square error in units of a format's variance: below it, the roundings are those of a
format with three more bits, which is another one."""


def explain_rounding(trial: Trial, recipe: Recipe | None = None) -> Rounding | None:
    """Return the model that explains its output on a plain problem: that of the dtype, or narrower.

    Within the worst case of a narrow format nearly every error of a wider one fits too, so that a
    narrower format has to explain the mean square of the errors.

    Raises
    ------
    ImplementationError
        If it raises on a plain problem.
    """
    recipe, dtype = recipe or trial.space.base(), trial.space.dtype
    forward = replace(trial, gradients=frozenset(), memo={})
    evaluation = forward.evaluation(recipe)
    result, exact = evaluation.results.get("o"), evaluation.exact["o"]
    if result is None or result.shape != exact.shape:
        return None
    if compare_arrays("o", result, exact, evaluation.tolerance["o"]).passed:
        return trial.rounding
    for model in _narrower_than(dtype):
        if _mean_square(measure_errors(forward, recipe, model), "o") <= EXCESSIVE:
            return model
    return None


def _narrower_than(dtype: str) -> Iterator[Rounding]:
    """Yield the models that compute in a format narrower than a dtype, the widest first."""
    return (_computing_in(name) for name, u in NARROWER.items() if u > unit_roundoff(dtype))


def _computing_in(name: str) -> Rounding:
    """Return the model that rounds everything to a format narrower than the input's."""
    stored = "operands", "queries", "scores", "weights", "row_sum", "lse", "dweights", "dscores"
    return Rounding(
        name=name,
        accumulator="float32",
        exp_error=4 * NARROWER[name],
        gradient_roundings=2,
        out_roundings=2,
        **dict.fromkeys((*stored, "shared"), name),  # type: ignore[arg-type]  # names of formats
    )


def precision_candidates(trial: Trial) -> Iterator[Candidate]:
    """Yield the narrower format, if one explains all errors of a plain problem.

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
    for model in _narrower_than(trial.space.dtype) if wrong else ():
        sample = measure_errors(trial, recipe, model)
        if all(_looks_rounded(sample, name) for name in wrong):
            if not any(fit.significant for fit in fits(sample, trial)):
                yield _candidate(model, wrong)
            return


def _looks_rounded(sample: ErrorSample, tensor: str) -> bool:
    """Return True if the errors of a tensor have the size that the sample's model gives them."""
    return FAINT <= _mean_square(sample, tensor) <= EXCESSIVE


def _mean_square(sample: ErrorSample, tensor: str) -> float:
    """Return χ² of a tensor; inf if no element of it has a finite one."""
    heads = chi_square(sample, tensor)
    return float(np.nanmean(heads)) if not np.isnan(heads).all() else np.inf


def _candidate(model: Rounding, wrong: list[str]) -> Candidate:
    be = "are" if len(wrong) > 1 else "is"
    where = f"{', '.join(wrong)} {be} computed in {model.name}"
    text = f"{where}: the errors have the size of its roundings"
    return Candidate("precision", model.name, text, partial(_rounds_alike, model), "precision")


def _rounds_alike(model: Rounding, evidence: Evidence) -> bool:
    """Return True if all results are within the tolerance of a model."""
    trial = replace(evidence.trial, rounding=model, memo={})
    tolerance = trial.tolerance(evidence.problem, evidence.cotangents, evidence.exact)
    return all(
        compare_arrays(name, array, evidence.exact[name], tolerance[name]).passed
        for name, arrays in evidence.observed.items()
        for array in arrays
    )


def describe_precision(trial: Trial, seed: int) -> str:
    """Describe the precision in the trial's dtype, and in float64 where that is less."""
    dtype = trial.space.dtype
    words = [f"{dtype} computed in {trial.rounding.name}"]
    if trial.rounding == Rounding.undeclared(dtype):
        taken = [r for r in plain_recipes(trial.space, seed) if _takes(trial, r)]
        model = tightest_model(trial, taken)
        words = [f"{dtype} as {model[0].name}, χ² {model[1]:.2g}" if model else f"{dtype} as none"]
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
