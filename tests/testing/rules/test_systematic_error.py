"""Small mistakes that no element shows are named, with their size; what is right is not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from npattn.conventions import Conventions
from npattn.mistakes import Attention
from npattn.testing import Implementation, check
from npattn.testing.bounds.rounding import Rounding, Units
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Space
from npattn.testing.rules.systematic_error import (
    COMMON,
    Sample,
    chi_square,
    excessive,
    fits,
    model_of,
    plain,
    sampled,
)
from npattn.testing.trial import Trial
from npattn.zoo.correct import CORRECT

SIZE = 2.0**-9


def trial_of(made: Any, dtype: str = "float32", rounding: Rounding | None = None) -> Trial:
    implementation = Implementation(made.forward, backward=made.backward)
    space = Space(features=implementation.features, dtype=dtype)
    model = rounding or Rounding.undeclared(dtype)
    gradients = frozenset({"dq", "dk", "dv"})
    return Trial(implementation, Conventions(), model, space, gradients)


def found(made: Any, dtype: str = "float32", rounding: Rounding | None = None) -> list[Any]:
    trial = trial_of(made, dtype, rounding)
    return [f for r in plain(trial.space, 0) for f in fits(sampled(trial, r), trial) if f.found]


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
def test_a_small_mistake_is_named_with_its_size(
    mistake: Any, tensor: str, name: str, size: float
) -> None:
    named = [f for f in found(mistake()) if (f.tensor, f.mistake) == (tensor, name)]
    assert named
    for fit in named:
        # A key that is missing from every row is exactly that; the rest is of first order.
        assert fit.size == pytest.approx(size, rel=0.05)
        assert fit.error < 0.1 * abs(fit.size)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_what_is_right_is_not_suspected(dtype: str) -> None:
    report = check(
        Attention().forward, backward=Attention().backward, dtypes=(dtype,), only=["aggregate"]
    )
    assert [o.status for o in report.outcomes] == ["passed"]


def test_a_suspicion_fails_a_report_only_where_it_is_strict() -> None:
    # 2⁻⁹ is half a unit of bfloat16: no element shows it to whoever allows P to be stored.
    words: dict[str, Any] = {"dtypes": ("bfloat16",), "only": ["agreement-o", "aggregate"]}
    made = _Gain()
    report = check(made.forward, backward=made.backward, examples=20, **words)
    status = {o.rule: o.status for o in report.outcomes}
    assert status == {"agreement-o": "passed", "aggregate": "suspect"}
    assert report.passed
    told = next(o.message for o in report.outcomes if o.rule == "aggregate")
    assert "gain of o +0.19" in told
    strict = check(made.forward, backward=made.backward, examples=20, strict=True, **words)
    assert not strict.passed


def test_errors_larger_than_the_model_are_suspected_by_their_size() -> None:
    class Noisy(Attention):
        """Every result is off by a unit of float32 or two, up or down."""

        def results(self, c: Any) -> Any:
            o, lse, p = super().results(c)
            noise = np.random.default_rng(o.size).standard_normal(o.shape)
            return o * (1 + 2.0**-20 * noise), lse, p

    trial = trial_of(Noisy(), rounding=Rounding.upcast())
    sample = sampled(trial, plain(trial.space, 0)[0])
    assert np.nanmean(chi_square(sample, "o")) > 1.5
    assert np.nanmean(chi_square(sample, "dv")) < 1.5


@pytest.mark.parametrize(
    ("dtype", "name"), [("float32", "upcast"), ("bfloat16", "upcast"), ("float16", "upcast")]
)
def test_the_tightest_model_is_named(dtype: str, name: str) -> None:
    trial = trial_of(Attention(), dtype)
    model = model_of(trial, plain(trial.space, 0))
    assert model is not None
    assert model[0].name == name
    assert model[1] < 1.5


def test_the_report_says_which_model_it_behaves_as() -> None:
    report = check(Attention().forward, dtypes=("bfloat16",), only=["aggregate"])
    assert report.facts["behaves as"]["bfloat16"].startswith("upcast, χ² 0.")
    assert "bfloat16 behaves as upcast" in str(report)


def test_what_no_model_explains_is_said_to_be_so() -> None:
    report = check(_Scaled().forward, only=["aggregate"])
    assert report.facts["behaves as"]["float32"].startswith("no model")


@pytest.mark.parametrize("sizes", [{"D": (16,), "T": (5, 7)}, {"H": (3,), "K": (1,)}, {"S": (13,)}])
def test_plain_problems_keep_to_the_sizes_that_a_kernel_takes(sizes: dict[str, Any]) -> None:
    recipes = plain(Space(sizes=sizes), 0)
    assert recipes
    for recipe in recipes:
        for letter, legal in sizes.items():
            assert getattr(recipe, letter) in legal


def test_plain_problems_have_one_option_at_most_of_those_that_there_are() -> None:
    assert [(r.causal, r.bias) for r in plain(Space(), 0)] == [
        (False, None), (True, None), (False, "alibi"), (False, None), (False, None)
    ]  # fmt: skip
    assert all(r.bias is None for r in plain(Space(features=frozenset({"causal"})), 0))


def test_plain_problems_may_have_no_batch() -> None:
    space = Space(structure=frozenset({"rank 3", "K < H", "T != S"}))
    assert {r.lead for r in plain(space, 0)} == {()}


def test_plain_problems_are_of_the_structure_that_was_accepted() -> None:
    space = Space(features=frozenset(), structure=frozenset({"rank 2", "D % 8"}))
    for recipe in plain(space, 0):
        assert recipe.lead is None
        assert recipe.T == recipe.S
        assert recipe.D == recipe.E
        assert not recipe.causal


@pytest.mark.parametrize(
    ("heads", "told"),
    [([1.0, 1.1], None), ([1.4, 1.8], 1.6), ([0.9, 0.9, 0.9, 2.1], 2.1), ([np.nan, np.nan], None)],
)
def test_what_is_excessive_is_so_on_average_or_in_one_head(heads: Any, told: float | None) -> None:
    assert excessive(np.array(heads)) == (None if told is None else pytest.approx(told))


# --- one fit of errors that are made up -----------------------------------------------------------


def fitted(error: Any, T: int = 11, mistake: str = "mean") -> list[Any]:
    """What errors of o, of variance 1, are taken for; 3 · 2 · T rows, 13 columns."""
    trial = trial_of(Attention(), rounding=Rounding.upcast())
    recipe = Recipe(lead=(3,), H=2, K=2, T=T, S=7, D=5, E=13)
    judged = sampled(trial, recipe).judged
    want = judged.want["o"]
    made = replace(judged, results={"o": want + error})
    return [f for f in fits(Sample(made, {"o": np.ones_like(want)}), trial) if f.mistake == mistake]


@pytest.mark.parametrize("common", [(3, 2, 11, 1), (3, 2, 1, 13)], ids=["row", "column"])
def test_what_a_row_or_a_column_has_in_common_counts_once(common: tuple[int, ...]) -> None:
    error = np.random.default_rng(0).standard_normal(common)
    (fit,) = fitted(error)
    assert fit.size == pytest.approx(error.mean())
    assert fit.error == pytest.approx(np.std(error) / math.sqrt(error.size))


def test_an_estimate_is_never_better_than_independent_errors_make_it() -> None:
    (fit,) = fitted(0.0)
    assert fit.error == pytest.approx(1 / math.sqrt(3 * 2 * 11 * 13))


def test_what_fewer_than_eight_rows_decide_is_left_out() -> None:
    assert fitted(0.0, T=1) == []
    assert len(fitted(0.0, T=2)) == 1


def test_a_gain_of_roundings_that_all_results_share_is_allowed() -> None:
    unit = Units.of(Rounding.upcast(), "float32")
    (fit,) = fitted(0.0, mistake="gain")
    assert fit.allowed >= COMMON * unit.u + unit.exp
    assert not replace(fit, size=fit.allowed).found


@pytest.mark.parametrize(
    "model",
    [{"accumulator": "truncated"}, {"row_sum": "input"}, {"lse": "input"}],
    ids=lambda model: next(iter(model)),
)
def test_a_model_whose_errors_are_no_chance_is_not_asked_of_many(model: dict[str, str]) -> None:
    rounding = replace(Rounding.fused(), **model)
    report = check(
        Attention().forward, only=["aggregate"], dtypes=("bfloat16",), rounding=rounding, examples=2
    )
    (outcome,) = report.outcomes
    assert outcome.status == "not applicable"


def test_operands_that_are_rounded_once_for_all_rows_are_no_mistake() -> None:
    one = CORRECT["tf32"]
    words = {"only": ["aggregate"], "rounding": one.rounding, "examples": 8, "shrink": False}
    report = check(one.implementation(), **words)
    assert [o.status for o in report.outcomes] == ["passed"]
