"""The judge finds every mutant by one of its killers, and passes the base."""

from dataclasses import fields, replace
from functools import cache

import pytest
from hypothesis import settings

from benchmarks.zoo.mutants import MUTANTS, Mutant
from benchmarks.zoo.mutants.killers import KILLERS
from benchmarks.zoo.witness import ENOUGH, witness
from npattn.conventions import Conventions
from npattn.mistakes import MISTAKES, Attention, Mistake, base, base_backward, gated, mistake
from npattn.testing import Implementation, Rounding, check
from npattn.testing.capabilities import probe
from npattn.testing.cases.space import Space
from npattn.testing.rules import PROPERTIES
from npattn.testing.runner.rounds import Judge
from npattn.testing.trial import Trial

pytestmark = pytest.mark.unmeasured  # other tests run these lines

PROBLEMS = min(settings().max_examples, 1000)  # a thousand in the nightly profile
FEW = min(settings().max_examples // 15, 8)  # 4; in the nightly profile 8
EACH = 1 if settings().max_examples > 1000 else 29  # of so many, one is judged as a user's is
EXAMPLES = 100
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


@cache
def probed_base(dtype, rounding, with_gate):
    """Return the trial of the base, probed."""
    model = rounding or Rounding.undeclared(dtype)
    model = Rounding.from_name(model) if isinstance(model, str) else model
    forward, backward = (gated.base, gated.base_backward) if with_gate else (base, base_backward)
    implementation = Implementation(forward, backward=backward)
    space = Space(features=implementation.features, dtype=dtype)
    return probe(Trial(implementation, Conventions(), model, space)).trial


def worst_alone(mutant, rule):
    """Return the largest error / tolerance that a rule finds if it is asked alone, unprobed."""
    worst = 0.0
    for dtype in mutant.dtypes if rule in PROPERTIES else ():
        implementation = Implementation(mutant.forward, backward=mutant.backward)
        known = probed_base(dtype, mutant.rounding, "gate" in implementation.features)
        if implementation.features != known.implementation.features:
            continue
        trial = replace(known, implementation=implementation, memo={})
        judge = Judge(trial, EXAMPLES, 0, lambda *_: None, shrinks=False)
        with trial.implementation.framework.one_thread():
            outcome = judge.judge(PROPERTIES[rule], trial)
        if outcome.status in ("failed", "suspect"):
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
    for rule in mutant.killed_by:  # one is enough
        report = check(
            mutant.forward,
            backward=mutant.backward,
            only=[rule],
            dtypes=mutant.dtypes,
            rounding=mutant.rounding,
            shrink=False,
            diagnosis=False,
        )
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
