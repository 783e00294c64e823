"""What many small errors say together: χ² of all of them, and the mistakes that explain them.

One element of a 16-bit result may err by a percent. Thousands of them, each in units of its own
standard deviation, have a mean square near 1, and no correlation with what a wrong scale, a gain or
a missing key would do. Valid on plain inputs that the judge draws itself, so what is found here is
a suspicion and not a failure. docs/tolerance.md §7 derives the estimates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npattn.api import backward, evaluate
from npattn.arrays import Array
from npattn.problem import Problem
from npattn.testing.bounds.allowed import bounds, deviations
from npattn.testing.bounds.rounding import Rounding, Units
from npattn.testing.bounds.ulp import excess, half_ulp
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Space
from npattn.testing.trial import Judged, Trial

__all__ = ["Fit", "Sample", "fits", "model_of", "plain", "sampled"]

TENSORS = ("o", "lse", "dq", "dk", "dv")
CERTAIN = 8.0
"""Standard errors beyond which an estimate is not chance, as for single elements."""
COMMON = 8
"""Roundings that all scores, or all results of a row, may share: of the scale, of its root on q and
on k, of log₂e, of the row's maximum, sum, quotient and lse."""
EXCESSIVE = 1.5
"""χ² a number: squares of deviations half again what the model makes of them, on average."""
EXCESSIVE_HEAD = 2.0
"""The same of one head, which has fewer rows."""


@dataclass(frozen=True)
class Fit:
    """How much of one mistake explains the errors of one tensor.

    Attributes
    ----------
    tensor, mistake : str
    size, error : float
        The estimate and its standard error; a size of 1 is the whole mistake, for scale and gain
        the relative error.
    allowed : float
        What correct implementations may have.
    """

    tensor: str
    mistake: str
    size: float
    error: float
    allowed: float

    @property
    def found(self) -> bool:
        return abs(self.size) > CERTAIN * self.error + self.allowed

    @property
    def certainty(self) -> float:
        """How many standard errors it is beyond what is allowed."""
        beyond = max(abs(self.size) - self.allowed, 0.0)
        return beyond / self.error if self.error else math.inf * bool(beyond)

    def __str__(self) -> str:
        if self.mistake in ("scale", "gain"):
            said = f"{100 * self.size:+.3g} % ± {100 * self.error:.1g} %"
        else:
            said = f"{self.size:+.3g} ± {self.error:.1g}"
        return f"{self.mistake} of {self.tensor} {said}"


@dataclass(frozen=True)
class Sample:
    """One plain problem, and what the implementation made of it.

    Attributes
    ----------
    judged : Judged
    variance : dict
        Of each element as delivered, under the model that it was judged by.
    """

    judged: Judged
    variance: dict[str, Array]

    def names(self) -> Iterator[str]:
        for name in TENSORS:
            got, want = self.judged.results.get(name), self.judged.want.get(name)
            if got is not None and want is not None and got.shape == want.shape and got.size:
                yield name

    def errors(self, name: str) -> Array:
        return np.asarray(self.judged.results[name].astype(float) - self.judged.want[name])


def plain(space: Space, seed: int) -> list[Recipe]:
    """The plain problems that are judged together: normal inputs, and one option at most, of causal
    and of a bias that is a slope for each head."""
    base = space.base()
    free = {letter: letter not in space.sizes for letter in "BHKTSDE"}
    shapes = [
        {"B": 2, "H": 4, "K": 4, "T": 64, "S": 64, "D": 64, "E": 64},
        {"B": 2, "H": 4, "K": 2, "T": 32, "S": 257, "D": 32, "E": 32},
        {"B": 1, "H": 2, "K": 2, "T": 33, "S": 1025, "D": 64, "E": 64},
    ]
    recipes = []
    for number, shape in enumerate(shapes):
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
        recipe = _of_rank(recipe, space, shape["B"] if free["B"] else None)
        recipes.append(recipe)
        if number == 0 and "causal" in space.features:
            recipes.append(replace(recipe, causal=True, seed=seed + 7))
        if number == 0 and "bias" in space.features:
            recipes.append(replace(recipe, bias="alibi", seed=seed + 11))
    return recipes


def _of_rank(recipe: Recipe, space: Space, B: int | None) -> Recipe:
    if "rank 4" in space.structure:
        return recipe if B is None else replace(recipe, lead=(B,))
    if "rank 3" in space.structure:
        return replace(recipe, lead=())
    return replace(recipe, lead=None, H=1, K=1)


def sampled(trial: Trial, recipe: Recipe, rounding: Rounding | None = None) -> Sample:
    """A plain problem as the implementation answers it, with the variance of every element."""
    judged = trial.judged(recipe)
    cot = judged.cotangents
    found = deviations(
        judged.problem,
        judged.problem.q.dtype,
        rounding or trial.rounding,
        dout=cot.dout.astype(float) if trial.gradients else None,
        dlse=None if cot.dlse is None else cot.dlse.astype(float),
        conventions=trial.conventions,
    )
    variance = {}
    for name, got in judged.results.items():
        if name in found and found[name].shape == got.shape:
            # Uniform within half the gap to the neighbours, once delivered.
            variance[name] = found[name] ** 2 + half_ulp(got) ** 2 / 3
    return Sample(judged, variance)


def chi_square(sample: Sample, name: str) -> Array:
    """Mean square error in units of its variance, by head: (..., H)."""
    error, variance = sample.errors(name), sample.variance[name]
    inside = np.isfinite(variance) & (variance > 0)
    z2 = np.where(inside, error**2 / np.where(inside, variance, 1), np.nan)
    axes = tuple(range(-1 if name == "lse" else -2, 0))
    with np.errstate(invalid="ignore"):
        count = inside.sum(axes)
        return np.where(count > 0, np.nansum(z2, axes) / np.maximum(count, 1), np.nan)


# --- mistakes that might explain the errors -------------------------------------------------------


def excessive(heads: Array) -> float | None:
    """χ² of a tensor, or of its worst head, where that is more than roundings make it."""
    if not np.isfinite(heads).any():
        return None
    whole, worst = float(np.nanmean(heads)), float(np.nanmax(heads))
    if whole > EXCESSIVE:
        return whole
    return worst if worst > EXCESSIVE_HEAD else None


def fits(sample: Sample, trial: Trial) -> list[Fit]:
    """Every mistake that is looked for, fitted to every tensor that it would show in."""
    problem = sample.judged.problem
    unit = Units.of(trial.rounding, problem.q.dtype)
    shared = COMMON * unit.u + unit.exp
    found = []
    for name in sample.names():
        effects = dict(_effects(sample, trial, name))
        common = [effects[x] for x in ("gain", "scale") if x in effects]
        for mistake, effect in effects.items():
            fit = _fit(sample, name, mistake, effect, common, shared)
            if fit is not None:
                found.append(fit)
    return found


def _fit(
    sample: Sample, name: str, mistake: str, effect: Array, common: list[Array], shared: float
) -> Fit | None:
    """Weighted least squares; its error is robust to what a row or a column has in common.

    What is allowed is what a factor 1 + shared that all results, or all scores, have in common
    would be taken for.
    """
    error, variance = sample.errors(name), sample.variance[name]
    inside = np.isfinite(variance) & (variance > 0) & np.isfinite(effect)
    if not np.isfinite(error[inside]).all():
        return None  # NaN is the business of other rules
    weight = np.where(inside, 1 / np.where(inside, variance, 1), 0)
    effect, error = np.where(inside, effect, 0), np.where(inside, error, 0)
    power = float((weight * effect**2).sum())
    if power == 0:
        return None
    shares = weight * effect**2 if name == "lse" else (weight * effect**2).sum(-1)
    if power**2 < CERTAIN * float((shares**2).sum()):
        return None  # too few rows decide for an error that is taken from their spread
    size = float((weight * effect * error).sum()) / power
    residual = weight * effect * (error - size * effect)
    # Errors are alike along a row, whose weights they share, and along a column, whose operands.
    sums = [residual] if name == "lse" else [residual.sum(-1), residual.sum(-2)]
    taken = [(weight * effect * np.where(inside, x, 0)).sum() / power for x in common]
    allowed = shared * math.hypot(*taken)
    # Where few rows decide, their residuals are small because they were fitted: no estimate is
    # better than independent errors of these variances make it.
    square = max(power, *(float((x**2).sum()) for x in sums))
    return Fit(name, mistake, size, math.sqrt(square) / power, allowed)


def _effects(sample: Sample, trial: Trial, name: str) -> Iterator[tuple[str, Array]]:
    """What each mistake, made whole, adds to a tensor, to first order."""
    want = sample.judged.want[name]
    yield "mean", np.ones_like(want)
    if name != "lse":
        yield "gain", want
    yield "scale", _scaled(sample.judged, trial, name)
    if name in ("dq", "dk"):
        yield "delta", _delta(sample.judged, trial, name)
    if sample.judged.problem.bias_array is not None:
        yield "bias", _biased(sample.judged, trial, name)
    if name == "o":
        problem = sample.judged.problem
        fwd = evaluate(problem, trial.conventions, engine="dense")
        yield from _keys(problem, fwd.out, fwd.lse, fwd.weights, trial)


def _scaled(judged: Judged, trial: Trial, name: str) -> Array:
    """How a result changes with the scale by which its weights are made."""
    problem = judged.problem
    assert problem.scale is not None
    scale = problem.scale
    moved = _moved(judged, trial, name, lambda x: problem.replace(scale=scale * x))
    return moved - judged.want[name] if name in ("dq", "dk") else moved


def _biased(judged: Judged, trial: Trial, name: str) -> Array:
    """How a result changes with a factor of the bias."""
    problem = judged.problem
    assert problem.bias_array is not None
    bias = problem.bias_array.astype(float)
    return _moved(judged, trial, name, lambda x: problem.replace(bias=bias * x))


def _moved(judged: Judged, trial: Trial, name: str, at: Callable[[float], Problem]) -> Array:
    """A central difference in a factor of the problem."""
    cot, h = judged.cotangents, 2.0**-16
    dlse = None if cot.dlse is None else cot.dlse.astype(float)
    ends = []
    for factor in (1 + h, 1 - h):
        fwd = evaluate(at(factor), trial.conventions, engine="dense")
        if name in ("o", "lse"):
            ends.append(fwd.out if name == "o" else fwd.lse)
        else:
            ends.append(getattr(backward(fwd, cot.dout.astype(float), dlse), name[1:]))
    return np.asarray((ends[0] - ends[1]) / (2 * h))


def _delta(judged: Judged, trial: Trial, name: str) -> Array:
    """How dq or dk changes with D = Σ do·out: it is subtracted from dP where dlse is added."""
    fwd = evaluate(judged.problem, trial.conventions, engine="dense")
    dout = judged.cotangents.dout.astype(float)
    base = math.log(2) if trial.conventions.lse_base == "2" else 1.0
    less = np.where(np.isfinite(fwd.lse), -base * (dout * fwd.out).sum(-1), 0)
    return np.asarray(getattr(backward(fwd, 0 * dout, less), name[1:]))


def _keys(
    problem: Problem, o: Array, lse: Array, weights: Array, trial: Trial
) -> Iterator[tuple[str, Array]]:
    """Keys that are missing, or seen though they should not be."""
    group = 1 if problem.headless else problem.H // max(problem.K, 1)
    v = problem.v.astype(float)
    v = np.repeat(v, group, axis=-3) if group > 1 else v
    for told, at in (("first key missing:", 0), ("last key missing:", problem.S - 1)):
        p = weights[..., at, None]
        with np.errstate(all="ignore"):
            odds = np.where((p > 0) & (p < 1), p / (1 - p), 0)
        yield told, -odds * (v[..., at, None, :] - o)
    base = math.log(2) if trial.conventions.lse_base == "2" else 1.0
    extra = np.exp(-np.maximum(lse * base, -700))[..., None]
    yield "a key of zeros attended:", -extra / (1 + extra) * o


# --- verdicts -------------------------------------------------------------------------------------


def model_of(trial: Trial, recipes: list[Recipe]) -> tuple[Rounding, float] | None:
    """The tightest of the presets that explains the errors, and χ² a number under it."""
    dtype = trial.space.dtype
    models = [Rounding.upcast(), Rounding.fused(), Rounding.eager()]
    models.append(replace(Rounding.undeclared(dtype), name="undeclared"))
    for model in models:
        samples = [sampled(trial, recipe, model) for recipe in recipes]
        if all(_within(trial, sample, model) for sample in samples):
            each = [chi_square(s, name) for s in samples for name in s.names()]
            if each and all(np.nanmean(x) <= EXCESSIVE for x in each if np.isfinite(x).any()):
                return model, float(np.nanmean(np.concatenate([x.ravel() for x in each])))
    return None


def _within(trial: Trial, sample: Sample, model: Rounding) -> bool:
    judged = sample.judged
    asked = {"o", *(["lse"] if trial.implementation.returns_lse else ()), *trial.gradients}
    if {n for n in asked & set(TENSORS) if judged.want[n].size} - set(sample.names()):
        return False  # no real float, or not of its shape
    cot: Any = judged.cotangents
    hard = bounds(
        judged.problem,
        judged.problem.q.dtype,
        model,
        dout=cot.dout.astype(float) if trial.gradients else None,
        dlse=None if cot.dlse is None else cot.dlse.astype(float),
        conventions=trial.conventions,
    )
    return all(
        bool((excess(judged.results[n], judged.want[n]) <= hard[n]).all()) for n in sample.names()
    )
