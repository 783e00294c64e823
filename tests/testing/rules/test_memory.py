"""Rules about plans for other strides and another dtype."""

import itertools

import numpy as np
import pytest

from benchmarks.zoo.mutants import MUTANTS
from npattn.mistakes import Attention
from npattn.testing import Implementation
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import POOLS
from npattn.testing.cases.strategies import Pools
from npattn.testing.rules import PROPERTIES
from npattn.testing.targets.numpy import flash, flash_backward
from tests.testing.rules.relations import trial_of
from tests.testing.rules.test_extremes import outcome_of

RULES = ("after-other-strides", "after-other-dtype")


class PrecisionOfLastOther(Attention):
    """A buffer changes its dtype one call late."""

    def __init__(self):
        self.plans = {}

    def results(self, c):
        o, lse, p = super().results(c)
        shapes = c.q.shape, c.k.shape, c.v.shape
        buffer, self.plans[shapes] = self.plans.get(shapes, c.dtype), c.dtype
        return o.astype(buffer).astype(float), lse, p


@pytest.mark.thorough
@pytest.mark.parametrize(
    "attention", [MUTANTS["precision-of-first-call"], PrecisionOfLastOther()], ids=["first", "last"]
)
def test_plan_with_dtype_of_another_call_fails(attention):
    outcome = outcome_of(attention.forward, RULES[1], backward=attention.backward)
    assert outcome.status == "failed"


@pytest.mark.parametrize("rule", RULES)
def test_mistake_in_any_order_is_left_to_other_rules(rule):
    def doubled(q, k, v):
        return 2 * flash(q, k, v)

    assert outcome_of(doubled, rule).status != "failed"


def test_drifting_results_are_left_to_repeatable():
    count = itertools.count(1)

    def drifting(q, k, v):
        return flash(q, k, v) * np.float32(1 + next(count) * 2.0**-22)

    assert outcome_of(drifting, RULES[1]).status != "failed"


@pytest.mark.thorough
def test_another_dtype_that_drifts_by_itself_is_not_asked_about():
    """A kernel that reads memory of nobody in float64 is steady in float32 all the same."""
    count = itertools.count(1)

    def drifting(q, k, v):
        more = next(count) % 5 if q.dtype != np.float32 else 0
        return (flash(q, k, v) * (1 + more * 2.0**-3)).astype(q.dtype)

    outcome = outcome_of(drifting, RULES[1], dtype="float32")
    assert outcome.status != "failed", outcome.message


def test_not_applicable_gives_reason():
    def float32_alone(q, k, v):
        if q.dtype != np.float32:
            raise TypeError("float32 only")
        return flash(q, k, v)

    outcome = outcome_of(float32_alone, RULES[1])
    assert (outcome.status, outcome.message) == ("not applicable", "refuses every other dtype")


class LaterCallsDiffer(Attention):
    """The second call with a shape gives correct results in other bits."""

    def __init__(self):
        self.seen = {}

    def results(self, c):
        o, lse, p = super().results(c)
        key = c.q.shape, c.k.shape, c.v.shape, c.dtype
        self.seen[key] = self.seen.get(key, 0) + 1
        return o * (1 + 2.0**-23 * (self.seen[key] == 2)), lse, p


@pytest.mark.thorough
def test_other_bits_the_second_time_fail():
    wrong = LaterCallsDiffer()
    outcome = outcome_of(wrong.forward, RULES[1], backward=wrong.backward, sizes={"T": (5,)})
    assert outcome.status == "failed"
    assert "has other bits the second time" in outcome.message


@pytest.mark.parametrize("rule", RULES)
def test_no_other_rule_samples_their_shapes(rule):
    from npattn.conventions import Conventions
    from npattn.testing import Implementation, Rounding
    from npattn.testing.cases.space import Space
    from npattn.testing.trial import Trial

    f = Implementation(flash, backward=flash_backward)
    space = Space(features=f.features)
    trial = Trial(f, Conventions(), Rounding.eager(), space)
    pools = Pools(space, **PROPERTIES[rule].draw(trial))
    assert not {r.T for r in itertools.islice(pools.cases(0, 50), 50)} & set(POOLS["T"])


# --- wrong in any order ---------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_marginal_errors_are_left_to_agreement(rule):
    """Calls that agree with each other are not after-effects, wherever the tolerance ends."""

    def marginal(q, k, v):
        return flash(q, k, v) * np.float32(1 + 2.0**-18)

    assert outcome_of(marginal, rule).status != "failed"


def test_same_wrong_result_of_any_shape_is_repeatable():
    """A row without keys gives 0, so that the first call is right and the second wrong."""

    def zero(q, k, v, mask=None):
        return np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)

    trial = trial_of(f=Implementation(zero, framework="numpy"))
    trial.gradients = frozenset()
    recipes = [Recipe(lead=(2,), T=1, S=1, mask="matrix", seed=seed) for seed in range(30)]
    assert {PROPERTIES["repeatable"].check(trial, recipe) for recipe in recipes} == {0.0}


def test_result_of_the_first_call_with_a_shape_fails():
    kept = {}

    def stale(q, k, v):
        return kept.setdefault((q.shape, k.shape, v.shape), flash(q, k, v))

    outcome = outcome_of(stale, "repeatable")
    assert outcome.status == "failed"
    assert "out of tolerance" in outcome.message
