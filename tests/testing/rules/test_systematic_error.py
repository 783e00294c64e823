"""Small mistakes that no element shows are found, with their size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.zoo.correct import CORRECT
from npattn.conventions import Conventions
from npattn.mistakes import Attention
from npattn.testing import Implementation, check
from npattn.testing.bounds.rounding import Rounding, Units
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.rules.systematic_error import (
    COMMON,
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

SIZE = 2.0**-9


def trial_of(attention: Any, dtype: str = "float32", rounding: Rounding | None = None) -> Trial:
    implementation = Implementation(attention.forward, backward=attention.backward)
    space = Space(features=implementation.features, dtype=dtype)
    model = rounding or Rounding.undeclared(dtype)
    gradients = frozenset({"dq", "dk", "dv"})
    return Trial(implementation, Conventions(), model, space, gradients)


def significant_fits(
    implementation: Any, dtype: str = "float32", rounding: Rounding | None = None
) -> list[Any]:
    trial = trial_of(implementation, dtype, rounding)
    samples = (measure_errors(trial, recipe) for recipe in plain_recipes(trial.space, 0))
    return [fit for sample in samples for fit in fits(sample, trial) if fit.significant]


class _Scaled(Attention):
    def product(self, c: Any) -> Any:
        return (1 + SIZE) * super().product(c)


class _Biased(Attention):
    def bias(self, c: Any) -> Any:
        return (1 + SIZE) * super().bias(c)


class _DeltaOff(Attention):
    """D is not quite Σ do·out."""

    def delta(self, *args: Any) -> Any:
        return (1 + SIZE) * super().delta(*args)


class _Gain(Attention):
    def results(self, c: Any) -> Any:
        o, lse, p = super().results(c)
        return (1 + SIZE) * o, lse, p


class _Mean(Attention):
    def results(self, c: Any) -> Any:
        o, lse, p = super().results(c)
        return o + SIZE, lse, p


class _LseOff(Attention):
    def lse(self, *args: Any) -> Any:
        return super().lse(*args) + SIZE


class _KeyMissing(Attention):
    at = -1

    def visible(self, c: Any) -> Any:
        visible = np.array(np.broadcast_to(super().visible(c), (c.q.shape[-2], c.k.shape[-2])))
        visible[:, self.at] = False
        return visible


class _FirstMissing(_KeyMissing):
    at = 0


class _ZeroKey(Attention):
    """A key of zeros takes weight: a sink of 0."""

    def inputs(self, *arrays: Any, **options: Any) -> Any:
        inputs = super().inputs(*arrays, **options)
        return inputs._replace(sinks=np.zeros_like(inputs.sinks))


MISTAKES = [
    (_Scaled, "o", "scale", SIZE),
    (_Gain, "o", "gain", SIZE),
    (_Biased, "o", "bias", SIZE),
    (_Biased, "dq", "bias", SIZE),
    (_DeltaOff, "dq", "delta", SIZE),
    (_DeltaOff, "dk", "delta", SIZE),
    (_Mean, "o", "mean", SIZE),
    (_LseOff, "lse", "mean", SIZE),
    (_KeyMissing, "o", "last key missing:", 1),
    (_FirstMissing, "o", "first key missing:", 1),
    (_ZeroKey, "o", "a key of zeros attended:", 1),
]


@pytest.mark.parametrize(
    ("mistake", "tensor", "name", "size"), MISTAKES, ids=lambda x: getattr(x, "__name__", None)
)
@pytest.mark.broad
def test_small_mistake_is_found_with_its_size(
    mistake: Any, tensor: str, name: str, size: float
) -> None:
    named = [f for f in significant_fits(mistake()) if (f.tensor, f.mistake) == (tensor, name)]
    assert named
    for fit in named:
        # A key that is missing from every row is exactly that; the rest is of first order.
        assert fit.size == pytest.approx(size, rel=0.05)
        assert fit.error < 0.1 * abs(fit.size)


@pytest.mark.thorough
@pytest.mark.parametrize("factor", [np.nan, np.inf, 1e300])
@pytest.mark.unmeasured
def test_results_that_are_no_numbers_or_huge_are_suspected(factor: float) -> None:
    report = check(lambda q, k, v: Attention().forward(q, k, v) * factor, framework="numpy",
                   dtypes="float64", only=["aggregate"], examples=2)  # fmt: skip
    (outcome,) = report.outcomes
    assert outcome.status == "suspect"
    assert "those that eager predicts" in outcome.message


@pytest.mark.thorough
def test_suspicion_fails_only_if_strict() -> None:
    # 2⁻⁹ is half a unit of bfloat16: no element shows it to whoever allows P to be stored.
    kwargs: dict[str, Any] = {"dtypes": ("bfloat16",), "only": ["agreement-o", "aggregate"]}
    attention = _Gain()
    report = check(attention.forward, backward=attention.backward, examples=20, **kwargs)
    status = {o.rule: o.status for o in report.outcomes}
    assert status == {"agreement-o": "passed", "aggregate": "suspect"}
    assert report.passed
    message = next(o.message for o in report.outcomes if o.rule == "aggregate")
    assert "gain of o +0.19" in message
    strict = check(
        attention.forward, backward=attention.backward, examples=20, strict=True, **kwargs
    )
    assert not strict.passed


def test_chi_square_of_errors_beyond_the_model() -> None:
    class Noisy(Attention):
        """Every result is off by a unit of float32 or two, up or down."""

        def results(self, c: Any) -> Any:
            o, lse, p = super().results(c)
            noise = np.random.default_rng(o.size).standard_normal(o.shape)
            return o * (1 + 2.0**-20 * noise), lse, p

    trial = trial_of(Noisy(), rounding=Rounding.upcast())
    sample = measure_errors(trial, plain_recipes(trial.space, 0)[0])
    assert np.nanmean(chi_square(sample, "o")) > 1.5
    assert np.nanmean(chi_square(sample, "dv")) < 1.5


@pytest.mark.parametrize(
    ("dtype", "name"), [("float32", "upcast"), ("bfloat16", "upcast"), ("float16", "upcast")]
)
def test_tightest_model(dtype: str, name: str) -> None:
    trial = trial_of(Attention(), dtype)
    model = tightest_model(trial, plain_recipes(trial.space, 0))
    assert model is not None
    assert model[0].name == name
    assert model[1] < 1.5


def test_report_names_the_tightest_model() -> None:
    report = check(Attention().forward, dtypes=("bfloat16",), only=["aggregate"])
    assert report.settings["behaves as"]["bfloat16"].startswith("upcast: errors are 0.")
    assert "precision: bfloat16 like upcast" in str(report)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_report_says_that_no_model_fits() -> None:
    report = check(_Scaled().forward, only=["aggregate"])
    assert report.settings["behaves as"]["float32"].startswith("no known rounding")


@pytest.mark.parametrize("sizes", [{"D": (16,), "T": (5, 7)}, {"H": (3,), "K": (1,)}, {"S": (13,)}])
def test_plain_recipes_keep_to_the_sizes(sizes: dict[str, Any]) -> None:
    recipes = plain_recipes(Space(sizes=sizes), 0)
    assert recipes
    for recipe in recipes:
        for letter, legal in sizes.items():
            assert getattr(recipe, letter) in legal


def test_rows_that_see_no_key_are_no_error() -> None:
    """With 64 queries and 5 keys, most rows have an lse of −inf under causal."""
    trial = trial_of(Attention())
    recipe = Recipe(lead=(2,), H=2, K=2, T=64, S=5, D=8, E=8, causal=True)
    sample = measure_errors(trial, recipe)
    assert np.isinf(sample.evaluation.exact["lse"]).any()
    scores = sample.scores("lse")
    assert np.isnan(scores[..., :59]).all()
    assert np.isfinite(scores[..., 59:]).all()
    results = {"lse": np.zeros(scores.shape, np.float32)}
    wrong = replace(sample, evaluation=replace(sample.evaluation, results=results))
    assert (np.isinf(wrong.scores("lse")) == np.isinf(sample.evaluation.exact["lse"])).all()


def test_plain_recipes_have_at_most_one_option() -> None:
    assert [(r.causal, r.bias) for r in plain_recipes(Space(), 0)] == [
        (False, None), (True, None), (False, "alibi"), (False, None), (False, None)
    ]  # fmt: skip
    assert all(r.bias is None for r in plain_recipes(Space(features=frozenset({"causal"})), 0))


def test_plain_recipes_have_the_rank_that_is_accepted() -> None:
    for rank, lead in (("rank 5", (2, 3)), ("rank 3", ()), ("rank 2", None)):
        assert {r.lead for r in plain_recipes(Space(structure=frozenset({rank})), 0)} == {lead}


def test_plain_recipes_keep_to_accepted_structure() -> None:
    space = Space(features=frozenset(), structure=frozenset({"rank 2", "D % 8"}))
    for recipe in plain_recipes(space, 0):
        assert recipe.lead is None
        assert recipe.T == recipe.S
        assert recipe.D == recipe.E
        assert not recipe.causal


class Scores:
    """Errors in units of their standard deviation, in the place of a sample of them."""

    def __init__(self, heads: Any, rows: int, columns: int) -> None:
        normal = np.random.default_rng(5).standard_normal((len(heads), rows, columns))
        self.z = normal * np.sqrt(heads)[:, None, None]

    def scores(self, name: str) -> Any:
        return self.z[..., 0] if name == "lse" else self.z


@pytest.mark.parametrize("name", ["o", "lse"])
@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ([1.0, 1.1], None),
        ([1.4, 1.8], 1.6),
        ([0.9, 0.9, 0.9, 2.1], 2.1),
        ([np.nan, np.nan], None),
        ([np.inf, np.inf], np.inf),
        ([np.inf, np.nan], np.inf),
    ],
)
def test_excessive_on_average_or_in_one_head(heads: Any, expected: float | None, name: str) -> None:
    sample: Any = Scores(heads, rows=1031, columns=3)
    found = excessive(sample, name)
    assert found == (None if expected is None else pytest.approx(expected, rel=0.1))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 2), (3, 2), (5, 2), (11, 7)])
def test_few_rows_are_excessive_by_chance(rows: int, columns: int) -> None:
    """A mean square of 1.6 may be that of few right errors; one of a thousand is of no errors."""
    for square, certain in ((1.6, False), (1e3, True)):
        sample: Any = Scores([square] * 4, rows, columns)
        assert (excessive(sample, "o") is not None) == certain


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_few_elements_of_a_right_function_are_no_suspicion(seed: int) -> None:
    one = CORRECT["loops"]
    report = check(one.implementation(), dtypes=("float32", "float16", "bfloat16"),
                   rounding=one.rounding, seed=seed, only=["aggregate"],
                   sizes=one.sizes)  # fmt: skip
    assert [o.status for o in report.outcomes] == ["passed"] * 3, str(report)


# --- one fit of artificial errors -----------------------------------------------------------------


def fit_errors(error: Any, T: int = 11, mistake: str = "mean") -> list[Any]:
    """Fit a mistake to errors of o, of variance 1; 3 · 2 · T rows, 13 columns."""
    trial = trial_of(Attention(), rounding=Rounding.upcast())
    recipe = Recipe(lead=(3,), H=2, K=2, T=T, S=7, D=5, E=13)
    evaluation = measure_errors(trial, recipe).evaluation
    exact = evaluation.exact["o"]
    sample = ErrorSample(
        replace(evaluation, results={"o": exact + error}), {"o": np.ones_like(exact)}
    )
    return [fit for fit in fits(sample, trial) if fit.mistake == mistake]


@pytest.mark.parametrize("common", [(3, 2, 11, 1), (3, 2, 1, 13)], ids=["row", "column"])
def test_common_error_of_a_row_or_column_counts_once(common: tuple[int, ...]) -> None:
    error = np.random.default_rng(0).standard_normal(common)
    (fit,) = fit_errors(error)
    assert fit.size == pytest.approx(error.mean())
    assert fit.error == pytest.approx(np.std(error) / math.sqrt(error.size))


def test_standard_error_is_at_least_that_of_independent_errors() -> None:
    (fit,) = fit_errors(0.0)
    assert fit.error == pytest.approx(1 / math.sqrt(3 * 2 * 11 * 13))


def test_fit_needs_eight_rows() -> None:
    assert fit_errors(0.0, T=1) == []
    assert len(fit_errors(0.0, T=2)) == 1


def test_gain_of_shared_roundings_is_allowed() -> None:
    unit = Units.of(Rounding.upcast(), "float32")
    (fit,) = fit_errors(0.0, mistake="gain")
    assert fit.allowed >= COMMON * unit.u + unit.exp
    assert not replace(fit, size=fit.allowed).significant


@pytest.mark.parametrize(
    "model",
    [{"accumulator": "truncated"}, {"row_sum": "input"}, {"lse": "input"}],
    ids=lambda model: next(iter(model)),
)
def test_model_with_correlated_errors_is_not_applicable(model: dict[str, str]) -> None:
    rounding = replace(Rounding.fused(), **model)
    report = check(
        Attention().forward, only=["aggregate"], dtypes=("bfloat16",), rounding=rounding, examples=2
    )
    (outcome,) = report.outcomes
    assert outcome.status == "not applicable"


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_operands_rounded_once_are_not_suspected() -> None:
    one = CORRECT["tf32"]
    kwargs = {"only": ["aggregate"], "rounding": one.rounding, "examples": 8, "shrink": False}
    report = check(one.implementation(), **kwargs)
    assert [o.status for o in report.outcomes] == ["passed"]


def test_fit_is_described_by_the_size_of_errors_not_its_square():
    text = describe_fit(Rounding.upcast(), 0.0625)
    assert text == "upcast: errors are 0.25 of those that it predicts"
