"""Rule about many small errors together [1, 13]: χ² of all, and fits of mistakes that explain them.

One element of a 16-bit result may err by a percent. Thousands of them, each in units of its own
standard deviation, have a mean square near 1, and no correlation with the effect of a wrong scale,
a gain or a missing key. This holds on plain inputs that the judge samples itself, so that a finding
is a suspicion and not a failure. docs/tolerance.md §7 derives the estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.adapters.latent import tie
from npattn.testing.bounds.allowed import BoundTask, bounds_and_deviations
from npattn.testing.bounds.rounding import Rounding, Units
from npattn.testing.bounds.ulp import excess, half_ulp
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.rules.mistake_effects import mistake_effects
from npattn.testing.rules.register import rule
from npattn.testing.trial import Evaluation, Suspicion, Trial

TENSORS = ("o", "lse", "dq", "dk", "dv")
CERTAIN = 8.0
"""Standard errors beyond which an estimate is significant, as for single elements."""
COMMON = 8
"""Roundings that all scores, or all results of a row, may share: of the scale, of its root on q and
on k, of log₂e, of the row's maximum, sum, quotient and lse."""
EXCESSIVE = 1.5
"""Least mean square error that is suspected, in units of the model's variance. No quantile of χ²:
the elements of a row share their weights, so that the degrees of freedom are fewer and unknown."""
EXCESSIVE_HEAD = 2.0
"""The same of one head, which has fewer rows."""


@dataclass(frozen=True)
class Fit:
    """Size at which one mistake explains the errors of one tensor best."""

    tensor: str
    mistake: str
    # the estimate and its standard error; a size of 1 is the whole mistake, for scale and gain the
    # relative error
    size: float
    error: float
    allowed: float  # size that correct implementations may have

    @property
    def significant(self) -> bool:
        return abs(self.size) > CERTAIN * self.error + self.allowed

    @property
    def certainty(self) -> float:
        """Standard errors between the size and the allowed size."""
        beyond = max(abs(self.size) - self.allowed, 0.0)
        return beyond / self.error if self.error else math.inf * bool(beyond)

    def __str__(self) -> str:
        if self.mistake in ("scale", "gain"):
            size = f"{100 * self.size:+.3g} % ± {100 * self.error:.1g} %"
        else:
            size = f"{self.size:+.3g} ± {self.error:.1g}"
        return f"{self.mistake} of {self.tensor} {size}"


@dataclass(frozen=True)
class ErrorSample:
    """Results of one plain problem, and the standard deviation of their errors."""

    evaluation: Evaluation
    # standard deviation of each element before it is delivered, under the rounding model
    sigma: Mapping[str, Array]
    # worst case of each element under the rounding model; empty if nobody asks for it
    hard: Mapping[str, Array] = field(default_factory=dict)

    def names(self) -> Iterator[str]:
        for name in TENSORS:
            result, exact = self.evaluation.results.get(name), self.evaluation.exact.get(name)
            if result is None or exact is None or result.shape != exact.shape:
                continue
            if result.size:
                yield name

    def scores(self, name: str) -> Array:
        """Return the errors as `standardize` does; the error of a NaN is infinite.

        What is not finite, and must not be, has no error: NaN, as for lse of rows that see no key.
        """
        result, exact = self.evaluation.results[name].astype(float), self.evaluation.exact[name]
        with np.errstate(invalid="ignore"):  # inf − inf
            error = np.where(np.isnan(result - exact), np.inf, result - exact)
        error = self.standardize(name, error)
        right = ~np.isfinite(exact) & ((result == exact) | (np.isnan(result) & np.isnan(exact)))
        return np.where(right, np.nan, error)

    def standardize(self, name: str, x: Array) -> Array:
        """Return x, for elements of a result, in units of the standard deviation of their errors.

        NaN where that is 0 or not finite.
        """
        # Delivery adds an error that is uniform within half the gap to the neighbours.
        unit = np.hypot(self.sigma[name], half_ulp(self.evaluation.results[name]) / math.sqrt(3))
        inside = np.isfinite(unit) & (unit > 0)
        return np.where(inside, x / np.where(inside, unit, 1), np.nan)


def plain_recipes(space: Space, seed: int) -> list[Recipe]:
    """Plain problems to judge together: normal inputs, at most one of causal and an ALiBi bias."""
    base = space.base()
    free = {letter: letter not in space.sizes for letter in "BHKTSDE"}
    shapes = [
        {"B": 2, "H": 4, "K": 4, "T": 64, "S": 64, "D": 64, "E": 64},
        {"B": 2, "H": 4, "K": 2, "T": 32, "S": 257, "D": 32, "E": 32},
        {"B": 1, "H": 2, "K": 2, "T": 33, "S": 1025, "D": 64, "E": 64},
    ]
    recipes = []
    for number, shape in enumerate(shapes[:1] if space.few_shapes else shapes):
        sizes: dict[str, Any] = {x: n for x, n in shape.items() if free[x] and x in "TSDE"}
        if free["H"] and free["K"] and base.lead is not None:
            sizes |= {
                "H": shape["H"],
                "K": shape["K"] if "K < H" in space.structure else shape["H"],
            }
        recipe = replace(base, **sizes, seed=seed + number)
        if "T != S" not in space.structure:
            recipe = replace(recipe, S=recipe.T)
        if "E != D" not in space.structure:
            recipe = replace(recipe, E=recipe.D)
        if free["B"] and recipe.lead is not None and len(recipe.lead) == 1:
            recipe = replace(recipe, lead=(shape["B"],))
        recipes.append(recipe)
        if number == 0 and "causal" in space.features:
            recipes.append(replace(recipe, causal=True, seed=seed + 7))
        if number == 0 and "bias" in space.features:
            recipes.append(replace(recipe, bias="alibi", seed=seed + 11))
    return recipes


def measure_errors(trial: Trial, recipe: Recipe, rounding: Rounding | None = None) -> ErrorSample:
    """Evaluate the implementation on a plain problem, with the deviation of every element."""
    evaluation = trial.evaluation(recipe)
    cot = evaluation.cotangents
    task = BoundTask(
        evaluation.problem,
        evaluation.problem.q.dtype,
        rounding or trial.rounding,
        cot.dout.astype(float) if trial.gradients else None,
        None if cot.dlse is None else cot.dlse.astype(float),
        None,
        trial.conventions,
    )
    hard, sigma = bounds_and_deviations(task)
    if trial.implementation.latent is not None and "dk" in sigma:
        hard, sigma = (tie(x, x["dv"]) for x in (hard, sigma))
    shapes = {name: result.shape for name, result in evaluation.results.items()}
    hard, sigma = ({n: x for n, x in y.items() if x.shape == shapes.get(n)} for y in (hard, sigma))
    return ErrorSample(evaluation, sigma, hard)


def chi_square(sample: ErrorSample, name: str) -> Array:
    """Mean square error in units of its variance, by head: (..., H)."""
    z = sample.scores(name)
    axes = tuple(range(-1 if name == "lse" else -2, 0))
    count = (~np.isnan(z)).sum(axes)
    return np.where(count > 0, np.nansum(z**2, axes) / np.maximum(count, 1), np.nan)


# --- mistakes that might explain the errors -------------------------------------------------------


def excessive(sample: ErrorSample, name: str) -> float | None:
    """Return χ² of a tensor, or of its worst head, if it exceeds that of roundings and of chance.

    That of few rows may be large by chance, since the elements of a row share their weights: it
    has to exceed 1 by eight of the standard errors that a mean of 1 would have by their spread.
    """
    heads, rows = chi_square(sample, name), np.asarray(sample.scores(name) ** 2)
    rows = rows[..., None] if name == "lse" else rows  # the last axis is that of columns
    if np.isnan(heads).all():
        return None
    mean_ratio, worst = float(np.nanmean(heads)), int(np.nanargmax(heads))
    if mean_ratio > EXCESSIVE and _is_certain(mean_ratio, rows):
        return mean_ratio
    head = tuple(int(i) for i in np.unravel_index(worst, heads.shape))
    most = float(heads[head])
    return most if most > EXCESSIVE_HEAD and _is_certain(most, rows[head]) else None


def _is_certain(square: float, squares: Array) -> bool:
    """Return True if a mean of squared errors is beyond 1 by more than chance."""
    if not math.isfinite(square):
        return True
    count = (~np.isnan(squares)).sum(-1)
    rows = (np.nansum(squares, -1) / np.maximum(count, 1))[count > 0]
    # Their spread if the mean were 1. Few rows may be alike by chance: no mean is better than that
    # of independent errors.
    spread = float(rows.std(ddof=1)) / square / math.sqrt(len(rows)) if len(rows) > 1 else 0.0
    return square - 1 > CERTAIN * max(spread, math.sqrt(2 / count.sum()))


def fits(sample: ErrorSample, trial: Trial) -> list[Fit]:
    """Fit every known mistake to every tensor that it would show in."""
    problem = sample.evaluation.problem
    unit = Units.of(trial.rounding, problem.q.dtype)
    shared = COMMON * unit.u + unit.exp
    results = []
    for name in sample.names():
        effects = dict(mistake_effects(sample.evaluation, trial, name))
        common = [effects[x] for x in ("gain", "scale") if x in effects]
        for mistake, effect in effects.items():
            fit = _fit(sample, name, mistake, effect, common, shared)
            if fit is not None:
                results.append(fit)
    return results


def _fit(
    sample: ErrorSample, name: str, mistake: str, effect: Array, common: list[Array], shared: float
) -> Fit | None:
    """Fit by weighted least squares; its error is robust to correlation in a row or a column.

    effect and those in common have the shape of the result. The allowed size is that of a fit to a
    factor 1 + shared that all results, or all scores, have in common.
    """
    error, effect = sample.scores(name), sample.standardize(name, effect)
    inside = ~np.isnan(error) & np.isfinite(effect)
    if not np.isfinite(error[inside]).all():
        return None  # no factor explains inf or NaN
    effect, error = np.where(inside, effect, 0), np.where(inside, error, 0)
    power = float((effect**2).sum())
    if power == 0:
        return None
    shares = effect**2 if name == "lse" else (effect**2).sum(-1)
    if power**2 < CERTAIN * float((shares**2).sum()):
        return None  # too few rows decide for an error that is taken from their spread
    size = float((effect * error).sum()) / power
    residual = effect * (error - size * effect)
    # Errors are alike along a row, whose weights they share, and along a column, whose operands.
    sums = [residual] if name == "lse" else [residual.sum(-1), residual.sum(-2)]
    scaled = (np.where(inside, sample.standardize(name, x), 0) for x in common)
    overlaps = [(effect * x).sum() / power for x in scaled]
    allowed = shared * math.hypot(*overlaps)
    # If few rows decide, their residuals are small because they were fitted: no estimate is
    # better than independent errors of these variances make it.
    square = max(power, *(float((x**2).sum()) for x in sums))
    return Fit(name, mistake, size, math.sqrt(square) / power, allowed)


# --- verdicts -------------------------------------------------------------------------------------


def tightest_model(trial: Trial, recipes: list[Recipe]) -> tuple[Rounding, float] | None:
    """Return the tightest preset, or else the declared model, that explains the errors; and χ²."""
    dtype = trial.space.dtype
    models = [Rounding.upcast(), Rounding.fused(), Rounding.eager()]
    models.append(replace(Rounding.undeclared(dtype), name="undeclared"))
    quantized = trial.implementation.quantized is not None
    if (
        quantized or trial.rounding.needs_whole_rows
    ):  # it may explain errors that no preset here does
        models.append(trial.rounding)
    for model in models:
        squares: list[Array] = []
        for recipe in recipes:
            sample = measure_errors(trial, recipe, model)
            of_sample = [chi_square(sample, name) for name in sample.names()]
            if not _within_bounds(trial, sample) or any(_is_large(x) for x in of_sample):
                break
            squares += of_sample
        else:
            if squares:
                return model, float(np.nanmean(np.concatenate([x.ravel() for x in squares])))
    return None


def _is_large(squares: Array) -> bool:
    """Return True if a mean square error by head is larger than a model explains."""
    return bool(np.isfinite(squares).any() and np.nanmean(squares) > EXCESSIVE)


def describe_fit(model: Rounding, square: float) -> str:
    """Name a model, and how large the errors are beside those that it predicts: the root of χ²."""
    return f"{model.name}: errors are {math.sqrt(square):.2g} of those that it predicts"


def _within_bounds(trial: Trial, sample: ErrorSample) -> bool:
    evaluation = sample.evaluation
    required = {"o", *(["lse"] if trial.implementation.returns_lse else ()), *trial.gradients}
    if {n for n in required & set(TENSORS) if evaluation.exact[n].size} - set(sample.names()):
        return False  # a result is not real, or has the wrong shape
    return all(
        bool((excess(evaluation.results[n], evaluation.exact[n]) <= sample.hard[n]).all())
        for n in sample.names()
    )


def _correlated_errors(trial: Trial) -> str | None:
    """Return why errors under the rounding model are no matter of chance."""
    if trial.implementation.output is not None:
        return "o in 8 bits errs by half of their gap, whatever else is rounded"
    if trial.rounding.accumulator == "truncated":
        return "accumulators that cut off all err to one side"
    if trial.rounding.row_sum != "accumulator":
        return "a row sum that is stored again and again stops to grow"
    if trial.rounding.lse != "accumulator":
        return "a stored lse errs alike for all keys of a row"
    return None


@rule(
    "aggregate",
    "1, 13",
    unless=_correlated_errors,
    recipes=lambda trial, seed, examples: plain_recipes(trial.space, seed)[:examples],
    last=True,
)
def aggregate(trial: Trial, recipe: Recipe) -> float:
    """Errors of plain inputs are as large as roundings make them, and look like no mistake.

    Roundings are as good as independent, so that thousands of elements have a mean square error
    near that of the model, and their errors are not those of a scale, gain or key that is slightly
    wrong. The rule finds mistakes that no single element shows: truncation for rounding, a scale
    that is wrong by a thousandth in bfloat16, a key of zeros that takes weight. A finding is a
    suspicion: the estimate rests on randomness, not on a worst case. Broken by weights cut off as
    they are stored, by constants with too few digits, by padding that is not hidden.
    """
    sample = measure_errors(trial, recipe)
    messages = []
    for name in sample.names():
        beyond = excessive(sample, name)
        if beyond is not None:
            size = f"{math.sqrt(beyond):.3g} × those that {trial.rounding.name} predicts"
            messages.append(f"{name}: errors are {size} (root mean square)")
    significant = (fit for fit in fits(sample, trial) if fit.significant)
    messages += map(str, sorted(significant, key=lambda fit: -fit.certainty)[:4])
    if messages:
        evaluation = sample.evaluation
        raise Suspicion("\n".join(messages), evaluation.problem, evaluation.cotangents)
    return 0.0
