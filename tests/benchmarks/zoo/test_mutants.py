"""The judge finds every mutant by one of its killers, and passes the base."""

import itertools
from dataclasses import fields

import pytest
from hypothesis import settings

from benchmarks.zoo.mutants import MUTANTS, Mutant
from benchmarks.zoo.mutants.killers import KILLERS
from benchmarks.zoo.witness import ENOUGH, witness
from npattn.mistakes import MISTAKES, Attention, Mistake, base, base_backward, mistake
from npattn.testing import check
from npattn.testing.rules import PROPERTIES
from tests.testing.alone import judge_alone

pytestmark = pytest.mark.unmeasured  # other tests run these lines

NIGHTLY = settings().max_examples > 1000
PROBLEMS = 1000 if NIGHTLY else 20
FEW = 8 if NIGHTLY else 2
EACH = 1 if NIGHTLY else 29  # of so many, one is judged as a user's is
EXAMPLES = 100  # until one fails
EQUIVALENT = [name for name, mutant in MUTANTS.items() if mutant.equivalent]


@pytest.fixture(scope="module")
def report_on_the_base():
    return check(base, backward=base_backward, examples=FEW)


@pytest.mark.thorough
@pytest.mark.parametrize("rule", PROPERTIES)
def test_base_keeps_the_rule(report_on_the_base, rule):
    (outcome,) = (o for o in report_on_the_base.outcomes if o.rule == rule)
    # In 16 bits, in torch, where something is refused, and of packed or paged sequences.
    absent = ("large-products", "same-bits-threads", "refused-again")
    absent += ("agreement-max-score", "agreement-dgate")  # of the gated base
    elsewhere = rule in (*absent, "other-sequences", "unread-slots", "page-ids")
    status = "not applicable" if elsewhere else "passed"
    assert outcome.status == status, outcome.message
    assert elsewhere or outcome.examples > 0


def test_duplicate_name_is_an_error():
    with pytest.raises(KeyError, match="two mistakes are named scale-twice"):
        mistake("scale-twice", "scores", step="s", where="everywhere")(Attention)


@pytest.mark.thorough
def test_base_passes_every_rule(report_on_the_base):
    assert report_on_the_base.passed
    assert {o.rule for o in report_on_the_base.outcomes} == set(PROPERTIES)


def worst_alone(mutant, rule):
    """Return the largest error / tolerance that a rule finds if it is asked alone, unprobed."""
    worst = 0.0
    for dtype in mutant.dtypes if rule in PROPERTIES else ():
        outcome = judge_alone(mutant, rule, dtype, EXAMPLES)
        if outcome is not None and outcome.status in ("failed", "suspect"):
            worst = max(worst, outcome.worst)
    return worst


@pytest.mark.every
@pytest.mark.unmeasured  # the same rules run on correct implementations, at less expense
@pytest.mark.parametrize("name", MUTANTS)
def test_a_killer_fails_the_mutant_far_beyond_the_tolerance(name):
    mutant = MUTANTS[name]
    whole = list(MUTANTS).index(name) % EACH == 0
    if not whole and any(worst_alone(mutant, rule) > ENOUGH for rule in mutant.killed_by):
        return
    worst = 0.0
    for examples, rule in itertools.product((20, 200), mutant.killed_by):  # one is enough
        report = check(mutant.forward, backward=mutant.backward, only=[rule], dtypes=mutant.dtypes,
                       rounding=mutant.rounding, examples=examples, shrink=False,
                       diagnosis=False)  # fmt: skip
        for o in report.outcomes:
            if (o.rule, o.status) in ((rule, "failed"), ("aggregate", "suspect")):
                worst = max(worst, o.worst)
        if worst > ENOUGH:
            break
    assert worst > 1, str(report)
    # Other problems may show it better.
    assert worst > ENOUGH or witness(mutant) is not None


def test_every_mistake_has_killers_and_the_reverse():
    assert KILLERS.keys() == MISTAKES.keys()
    assert list(MUTANTS) == list(MISTAKES)


def test_killers_are_rules():
    assert all(mutant.killed_by for mutant in MUTANTS.values())
    killers = {rule for mutant in MUTANTS.values() for rule in mutant.killed_by}
    assert killers <= {*PROPERTIES, "structure"}


def test_mutant_is_its_mistake_with_killers():
    known = {f.name: getattr(MUTANTS["scale-twice"], f.name) for f in fields(Mistake)}
    assert Mistake(**known) == MISTAKES["scale-twice"]
    assert Mutant.of(MISTAKES["scale-twice"], "views").killed_by == ("views",)


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", EQUIVALENT)
def test_out_of_an_equivalent_mutant_is_right(name):
    mutant = MUTANTS[name]
    report = check(
        mutant.forward, only=["agreement-o"], examples=PROBLEMS, shrink=False, diagnosis=False
    )
    (outcome,) = (o for o in report.outcomes if o.rule == "agreement-o")
    assert outcome.status == "passed", outcome.message
    assert outcome.examples == PROBLEMS


def test_equivalent_mutants_are_killed_by_more_than_out():
    assert EQUIVALENT
    for name in EQUIVALENT:
        assert any("lse" in rule or rule != "agreement-o" for rule in MUTANTS[name].killed_by)
