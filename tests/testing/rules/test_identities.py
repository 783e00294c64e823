"""Identities of the forward hold for correct implementations, and not for mistakes."""

import itertools
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.zoo.mutants import MUTANTS
from npattn.conventions import Conventions
from npattn.mistakes import MISTAKES, Attention, base
from npattn.problem import Problem
from npattn.problem.arrays import finfo
from npattn.testing import Implementation, Recipe
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools
from npattn.testing.rules import PROPERTIES
from npattn.testing.rules.estimates import Estimate, agree, exact, round_to_grid
from npattn.testing.rules.relate import settle
from npattn.testing.rules.terms import value_range
from npattn.testing.targets.numpy import flash
from npattn.testing.trial import GRADIENTS, Evaluation, Trial, Violation
from tests.testing.rules.relations import script_output

OF_GRADIENTS = ("dbias-rows", "unseen-keys", "key-gradient-sum", "value-euler", "query-key-euler")
OF_GRADIENTS += ("cotangent-linear", "lse-gradient", "directional")


# --- trials and their results ---------------------------------------------------------------------


def trial_of(f, backward=None, dtype="float32", conventions=None, **space):
    """Make the trial of an implementation that accepts every structure."""
    implementation = Implementation(f, backward=backward)
    space = Space(**{"features": implementation.features, "dtype": dtype} | space)
    gradients = frozenset() if backward is None else frozenset(GRADIENTS)
    rounding = Rounding.undeclared(dtype)
    return Trial(implementation, conventions or Conventions(), rounding, space, gradients)


def ratios(rule, trial, examples):
    """Ratios of the first problems that exercise the rule."""
    rule = PROPERTIES[rule]
    assert rule.unless(trial) is None
    recipes = Pools(trial.space, **rule.draw(trial)).cases(7, 60)
    quick = (r for r in recipes if math.prod(r.whole) * (r.D + r.E) < 2**14)
    values = (rule.check(trial, recipe) for recipe in quick)
    return list(itertools.islice((x for x in values if x is not None), examples))


def violation(rule, trial, examples=60):
    """Return the Violation of a wrong implementation."""
    with pytest.raises(Violation) as raised:
        ratios(rule, trial, examples)
    assert raised.value.ratio > 1
    return raised.value


# --- mistakes -------------------------------------------------------------------------------------

WRONG = {
    "bias-shift": ("softcap-over-bias", "bias-scaled", "lse-without-maximum", "no-max-subtracted"),
    "one-key": ("jacobian-without-rank-1-term", "mask-inverted", "hidden-score-finite"),
    "convex-hull": ("softmax-over-queries", "mask-added-as-number", "window-one-wider"),
    "sink-key": ("sink-scaled", "lse-without-sink", "dsinks-zero", "dsinks-without-dlse"),
    "equal-scores": ("mask-after-softmax", "window-one-narrower"),
}


@pytest.mark.parametrize(("rule", "name"), [(rule, n) for rule in WRONG for n in WRONG[rule]])
def test_mutants_fail_and_the_script_shows_it(rule, name):
    mutant = MUTANTS[name]
    trial = trial_of(mutant.forward, mutant.backward, sizes={"D": (3, 5), "E": (2, 3)})
    error = violation(rule, trial)
    assert "WRONG" in script_output(rule, trial, error)


class ValuesSaturate(Attention):
    """Values are stored in a format that ends at 2."""

    def results(self, c):
        return super().results(c._replace(v=np.clip(c.v, -2, 2)))


class NothingWithoutChannels(Attention):
    """An early exit where q is empty, as if there were no queries."""

    def results(self, c):
        o, lse, p = super().results(c)
        return (0 * o, lse, p) if c.q.size == 0 else (o, lse, p)


class SumInTheInputDtype(Attention):
    """The weights of a row are added in the dtype of q, one by one."""

    def softmax(self, s, c, live):
        p, p_sink, lse = super().softmax(s, c, live)
        e = np.where(live, np.exp(s - lse), 0).astype(c.dtype)
        total = np.add.accumulate(e, axis=-1, dtype=c.dtype)[..., -1:].astype(float)
        return p / np.where(total == 0, 1, total), p_sink, lse


class Unnormalised(Attention):
    """The rescaling of an online softmax is forgotten for the last key."""

    def softmax(self, s, c, live):
        p, p_sink, lse = super().softmax(s, c, live)
        return p * np.where(np.arange(s.shape[-1]) == s.shape[-1] - 1, 2, 1), p_sink, lse


class NaNOut(Attention):
    """The last column of out is never written."""

    def results(self, c):
        o, lse, p = super().results(c)
        o[..., -1:] = np.nan
        return o, lse, p


@pytest.mark.parametrize(
    ("rule", "wrong", "dtype", "sizes"),
    [
        ("value-linear", lambda: MISTAKES["values-ignored"], "float32", {"D": (3,), "E": (3,)}),
        ("value-linear", ValuesSaturate, "float32", {"D": (3,), "E": (2,)}),
        ("value-linear", NaNOut, "float32", {"D": (3,), "E": (2,)}),
        ("equal-scores", NothingWithoutChannels, "float32", {"E": (2,)}),
        ("equal-scores", SumInTheInputDtype, "bfloat16", {"D": (3,), "E": (2,), "S": (257, 513)}),
        ("convex-hull", Unnormalised, "float32", {"D": (3,), "E": (2,)}),
        ("convex-hull", NaNOut, "float32", {"D": (3,), "E": (2,)}),
        ("one-key", NaNOut, "float32", {"D": (3,), "E": (2,)}),
        ("sink-key", NaNOut, "float32", {"D": (3,), "E": (2,)}),
    ],
)
def test_mistakes_fail_and_the_script_shows_it(rule, wrong, dtype, sizes):
    trial = trial_of(wrong().forward, wrong().backward, dtype, sizes=sizes)
    error = violation(rule, trial, examples=300)
    assert "WRONG" in script_output(rule, trial, error)


def test_doubled_values_pass_value_linear():
    def f(q, k, v):
        return 2 * flash(q, k, v)

    assert max(ratios("value-linear", trial_of(f), examples=9)) <= 1


# --- conditions -----------------------------------------------------------------------------------


def plain(q, k, v):
    return flash(q, k, v)


def causal(q, k, v, causal=False):
    return flash(q, k, v, causal=causal)


def window(q, k, v, window=None):
    return flash(q, k, v, window=window)


@pytest.mark.parametrize(
    ("rule", "reason"), [("bias-shift", "has no bias"), ("sink-key", "has no sinks and no bias")]
)
def test_missing_option_is_not_applicable(rule, reason):
    assert PROPERTIES[rule].unless(trial_of(plain)) == reason


@pytest.mark.parametrize("rule", ["bias-shift", "one-key", "convex-hull", "equal-scores"])
def test_hidden_fill_is_not_applicable(rule):
    trial = trial_of(base, conventions=Conventions(hidden_fill=-1e4))
    assert PROPERTIES[rule].unless(trial) == "hidden_fill lets hidden keys matter"


def test_sink_key_needs_a_free_number_of_keys():
    for space in ({"sizes": {"S": (64, 128)}}, {"structure": frozenset({"rank 4", "D % 8"})}):
        trial = trial_of(flash, **space)
        assert PROPERTIES["sink-key"].unless(trial) == "takes no further key"


def test_sink_key_needs_an_unscaled_bias():
    trial = trial_of(base, conventions=Conventions(bias="before_scale"))
    assert PROPERTIES["sink-key"].unless(trial) == "conventions scale the bias"


@pytest.mark.parametrize("f", [plain, causal, window], ids=lambda f: f.__name__)
def test_one_key_works_with_any_hiding_option(f):
    assert max(ratios("one-key", trial_of(f), examples=9)) <= 1

    def wrong(q, k, v, **options):
        return f(q, k, v, **options) * np.float32(1.01)

    trial = trial_of(f)
    trial.implementation.f = wrong
    assert violation("one-key", trial, examples=9).problem.D > 0


def test_one_key_without_hiding_options_needs_s_of_1():
    structure = frozenset({"rank 4", "D % 8"})
    apart, tied = trial_of(plain), trial_of(plain, structure=structure)
    assert {r.S for r in recipes_of("one-key", apart)} == {1}
    assert {(r.T, r.S) for r in recipes_of("one-key", tied)} == {(1, 1)}
    for trial in (trial_of(plain, sizes={"S": (8, 64)}),
                  trial_of(plain, structure=structure, sizes={"T": (8,)})):  # fmt: skip
        assert PROPERTIES["one-key"].unless(trial) == "nothing leaves a query with one key"


def recipes_of(rule, trial):
    return list(Pools(trial.space, **PROPERTIES[rule].draw(trial)).cases(7, 20))


def test_identities_keep_to_the_sizes_of_the_user():
    sizes = {"T": (128,), "D": (64,)}
    for rule in ("bias-shift", "convex-hull", "value-linear"):
        recipes = recipes_of(rule, trial_of(flash, sizes=sizes))
        assert {(r.T, r.D) for r in recipes} == {(128, 64)}


# --- estimates ------------------------------------------------------------------------------------

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 2**32 - 1), power=st.integers(-30, 12))
def test_sum_on_a_grid_is_exact(dtype, seed, power):
    rng = np.random.default_rng(seed)
    size = 2.0 ** max(power, math.log2(float(finfo(dtype).smallest_subnormal)) + 2)
    x, y = (size * rng.standard_normal((2, 7, 5))).clip(-400, 400).astype(dtype)
    a, b, both = round_to_grid(x, y)
    assert a.dtype == b.dtype == both.dtype == np.dtype(dtype)
    wide = [n.astype(float) for n in (a, b, both)]
    assert np.array_equal(wide[0] + wide[1], wide[2])
    top = max(abs(x.astype(float)).max(), abs(y.astype(float)).max())
    for near, far in zip(wide, (x, y), strict=False):
        least = float(finfo(dtype).smallest_subnormal)
        assert (abs(near - far.astype(float)) <= 4 * finfo(dtype).eps * top + least).all()


def one_result(value, exact, allowed, dtype="float32"):
    """Judge one result o."""
    o, exact, allowed = np.array(value, dtype), np.array(exact, float), np.array(allowed, float)
    problem = Recipe(seed=1).problem()
    cotangents = Recipe(seed=1).cotangents(problem)
    return Evaluation(problem, cotangents, {"o": o}, {"o": exact}, lambda: {"o": allowed})


def test_estimate_error_is_tolerance_and_rounding():
    o = Estimate.of(one_result([1.0, -2.0], [1, -2], [0.25, 0.5]), "o")
    assert np.array_equal(o.value, [1, -2])
    assert np.array_equal(o.error, [0.25 + 2.0**-24, 0.5 + 2.0**-23])


def test_estimate_errors_add():
    x = Estimate(np.array([1.0, 2.0, 4.0]), np.array([0.5, 0.25, 0.0]))
    total = x.times(np.array([-2.0, 4.0, 1.0])).over(lambda a: a.sum(keepdims=True))
    assert total.value == 10
    assert 2 <= total.error < 2 + 1e-13
    assert x.minus(x).value.tolist() == [0, 0, 0]
    assert np.allclose(x.plus(x).error, 2 * x.error, rtol=0, atol=1e-14)


def test_estimate_requires_nothing_of_overflow_and_undefined_values():
    o = Estimate.of(one_result([np.inf, 1, np.inf], [65e3, np.nan, 2], [1e3, 1, 1], "float16"), "o")
    assert o.error[0] == o.error[1] == np.inf
    assert o.value[0] == o.value[1] == 0
    assert np.isfinite(o.error[2])  # 2 is no overflow
    assert o.value[2] == np.inf


def test_zero_times_an_unknown_estimate_is_zero():
    unknown = Estimate(np.zeros(2), np.full(2, np.inf))
    assert np.array_equal(unknown.times(np.array([0, 1])).error, [0, np.inf])


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_non_finite_values_never_agree(odd):
    number, wrong = exact(np.ones(2)), Estimate(np.array([1, odd]), np.full(2, 1e9))
    for left, right in ((number, wrong), (wrong, number), (wrong, wrong)):
        assert agree("o", left, right).ratio == np.inf
    assert agree("o", number, wrong.where(np.array([True, False]))).passed


def test_estimate_leaves_other_shapes_to_shape_dtype():
    result = one_result([1.0, 1], [1], [1])
    assert Estimate.of(result, "o") is None
    assert Estimate.of(result, "lse") is None


def test_settle_shows_the_problem_with_wrong_results():
    right, wrong = one_result([1.0], [1], [0.125]), one_result([5.0], [1], [0.125])
    other = replace(wrong, problem=Recipe(seed=2).problem())
    sides = agree("o", exact(np.ones(1)), exact(np.full(1, 5.0)))
    with pytest.raises(Violation) as raised:
        settle([sides], right, other)
    assert raised.value.problem is other.problem
    assert raised.value.ratio == np.inf
    assert settle([], right) is None
    assert settle([agree("o", exact(np.zeros(0)), exact(np.zeros(0)))], right) is None


def test_estimate_of_bfloat16():
    result = one_result([1.0], [1], [0])
    result = replace(result, results={"o": np.array([1.0], ml_dtypes.bfloat16)})
    assert Estimate.of(result, "o").error == 2.0**-8


def test_a_sink_adds_its_value_of_0_to_the_range_of_values():
    rng = np.random.default_rng(11)
    q, k = rng.standard_normal((3, 5, 2)), rng.standard_normal((3, 7, 2))
    v = 1 + rng.random((3, 7, 11))
    keys = np.ones((3, 5, 7), bool)
    keys[..., 0] = False
    trial, plain = trial_of(Attention().forward), Problem(q, k, v)
    low, high = value_range(trial, plain, keys)
    assert np.array_equal(low, np.broadcast_to(v[:, 1:].min(1)[:, None], low.shape))
    assert np.array_equal(high, np.broadcast_to(v[:, 1:].max(1)[:, None], low.shape))
    low, _ = value_range(trial, plain.replace(sinks=np.zeros(3)), keys)
    assert not low.any()
