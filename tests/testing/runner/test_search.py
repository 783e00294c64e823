"""The examples of a rule in parts, what relations leave to agreement, and the first failure."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from npattn.mistakes import Attention
from npattn.testing import Implementation, check
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules import PROPERTIES
from npattn.testing.rules.register import Property
from npattn.testing.runner.rounds import Judge, Round, round_sizes
from npattn.testing.runner.search import RuleSearch
from npattn.testing.targets.numpy import naive
from npattn.testing.trial import Trial, Violation
from tests.testing.rules.relations import MaskOfFirstSample, trial_of

pytestmark = pytest.mark.unmeasured  # other tests run these lines

SEED = 3


def counting_rule(fails_at):
    """A rule that fails on the n-th recipe, and on every second has nothing to show."""
    seen = []

    def check(trial, recipe):
        seen.append(recipe)
        if len(seen) == fails_at:
            raise Violation("wrong", trial.problem(recipe))
        return None if len(seen) % 2 else len(seen) / 100

    return Property("counting", "1", check), seen


@pytest.mark.parametrize("fails_at", [7, 10_000])
def test_parts_try_the_recipes_of_the_whole(fails_at):
    rule, seen = counting_rule(fails_at)
    trial = trial_of(Attention())
    whole = RuleSearch(rule, trial, 20, shrinks=False)
    whole.run(SEED)
    other_rule, seen_in_parts = counting_rule(fails_at)
    standing = None
    for count in (2, 3, 20):
        part = RuleSearch(other_rule, trial.fresh(), 20, False, standing)
        part.run(SEED, count)
        standing = part.standing
        if part.failure is not None:
            break
    assert seen_in_parts == seen
    assert standing == whole.standing
    assert (part.failure is None) == (whole.failure is None) == (fails_at > 1000)


def test_a_rule_stops_at_its_share_of_the_problems_of_all():
    rule, seen = counting_rule(10_000)
    RuleSearch(rule, trial_of(Attention()), 50, shrinks=False).run(SEED)
    first, few = counting_rule(10_000)
    search = RuleSearch(first, trial_of(Attention()), 50, shrinks=False, most=7)
    for count in (3, 50):
        search.run(SEED, count)
    assert search.standing.tried == 7
    assert few == seen[: len(few)]


SHARES = {
    "agreement-o": 83,
    "inputs-unchanged": 41,
    "agreement-weights": 20,
    "value-linear": 20,
    "model-sizes": 34,  # it has problems of its own
}


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [1, 2])
def test_rules_are_asked_their_share(processes):
    report = check(
        Implementation(naive, spec="npattn.testing.targets.numpy:naive"),
        examples=83,  # of fewer, no rule is asked less than another
        seed=SEED,
        processes=processes,
        diagnosis=False,
        shrink=False,
    )
    asked = {outcome.rule: outcome.examples for outcome in report.outcomes}
    assert {name: asked[name] for name in SHARES} == SHARES


@pytest.mark.thorough
def test_a_rule_that_is_named_is_asked_all():
    report = check(naive, examples=20, seed=SEED, only=["value-linear", "shape-dtype"])
    asked = {outcome.rule: outcome.examples for outcome in report.outcomes}
    assert (asked["value-linear"], asked["shape-dtype"]) == (20, 20)


def test_every_share_is_of_a_known_size():
    shares = {rule.share for rule in PROPERTIES.values()}
    assert shares == {1, 2, 4, 10}
    assert {name for name, rule in PROPERTIES.items() if rule.share == 1} == {
        f"agreement-{name}" for name in ("o", "lse", "max-score", "dq", "dk", "dv")
    }


def test_rounds_end_with_all_examples():
    assert [round_sizes(n) for n in (1, 4, 5, 100)] == [[1], [4], [4, 5], [4, 20, 100]]


@pytest.mark.parametrize(
    ("ends", "last"),
    [((), "two-threads"), (("conduct",), "same-bits-again"), (("same-bits-again",), "two-threads")],
)
def test_what_does_not_end_the_questions_is_asked_last(ends, last):
    names = ["views", "same-bits-again", "two-threads"]
    trial = trial_of(Attention())
    judge = Judge(trial, 7, SEED, lambda *_: None, False, stops_at=frozenset(ends))
    groups = Round(judge, [], names).groups()
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert groups[-1] == [last]


# --- relations ------------------------------------------------------------------------------------


class DkTooLarge(Attention):
    """dk lacks the scale; keys, samples and queries round differently by their place."""

    def dk(self, dx, c, seen):
        dk = super().dk(dx, c._replace(scale=1.0), seen)
        place = np.arange(dk.shape[-2])[:, None] + dk.shape[0]
        return dk * (1 + 2.0**-22 * place)


RELATIONS = ("permute-keys", "batch-alone", "padded-keys")


@pytest.mark.parametrize("rule", RELATIONS)
def test_relation_leaves_wrong_results_to_agreement(rule):
    trial = trial_of(DkTooLarge())
    recipe = Recipe(lead=(2,), T=5, S=7, D=3, scale=0.0)
    recipes = [replace(recipe, seed=seed) for seed in range(30)]
    with pytest.raises(Violation) as caught:  # the tolerance is 0 here
        list(map(partial(PROPERTIES[rule].check, trial), recipes))
    assert caught.value.related == {"dk"}
    search = RuleSearch(PROPERTIES[rule], trial, 10, shrinks=False)
    list(map(search.try_recipe, recipes))
    assert search.failure is None
    assert search.standing.left_to == {"dk"}


def test_relation_with_nothing_else_is_not_applicable():
    count = itertools.count(2)

    def drifting(q, k, v):
        return np.float32(next(count)) * Attention().forward(q, k, v)

    report = check(drifting, only=["permute-keys"], sizes={"S": (5,)}, examples=3)
    (outcome,) = report.outcomes
    assert (outcome.status, outcome.message) == ("not applicable", "agreement fails there")
    assert outcome.left_to == {"o"}
    assert not report.passed


@pytest.mark.thorough
def test_relation_fails_where_agreement_was_not_shown():
    """Problems that relations leave are red elsewhere: else they are asked of all."""
    wrong = MaskOfFirstSample()
    implementation = Implementation(wrong.forward, backward=wrong.backward, framework="numpy")
    report = check(
        implementation,
        only=["permute-batch", "agreement-o"],
        sizes={"B": (3,), "H": (1,), "K": (1,), "T": (3,), "S": (5,), "D": (2,), "E": (2,)},
        examples=3,
        seed=9,
        shrink=False,
    )
    statuses = {o.rule: o.status for o in report.outcomes}
    assert statuses == {"permute-batch": "failed", "agreement-o": "passed"}


# --- the first failure ----------------------------------------------------------------------------


def twice(q, k, v, mask=None):
    return 2 * Attention().forward(q, k, v, mask)


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.unmeasured
def test_fail_fast_stops_at_the_first_failure(processes):
    implementation = Implementation(twice, spec=f"{__name__}:twice")
    report = check(
        implementation,
        examples=20,
        fail_fast=True,
        shrink=False,
        processes=processes,
        only=["empty-row", "agreement-o", "hidden-finite", "rows-sum-to-one", "views"],
    )
    assert [o.status for o in report.outcomes].count("failed") == 1
    assert "what comes after the first failure (fail_fast)" in report.untested


@pytest.mark.thorough
def test_expected_failure_does_not_stop():
    report = check(twice, examples=3, fail_fast=True, shrink=False,
                   only=["agreement-o", "rows-sum-to-one"],
                   expect={"agreement-o[float32]": "twice"})  # fmt: skip
    assert {o.rule for o in report.outcomes} == {"agreement-o", "rows-sum-to-one"}


def test_trial_names_the_results_that_disagree():
    trial: Trial = trial_of(DkTooLarge())
    assert trial.disagreements(Recipe(T=5, D=3)) == {"dk"}
