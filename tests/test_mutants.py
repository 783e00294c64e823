"""The judge finds every mutant of the zoo by a rule that it names, and lets the base pass."""

import pytest

from npattn.testing import check
from npattn.testing.mutants import MUTANTS, base, base_backward
from npattn.testing.properties import PROPERTIES


def failed(report):
    return {outcome.rule for outcome in report.outcomes if outcome.status == "failed"}


@pytest.fixture(scope="module")
def report_on_the_base():
    return check(base, backward=base_backward, examples=8)


@pytest.mark.parametrize("rule", PROPERTIES)
def test_the_base_keeps_the_rule(report_on_the_base, rule):
    (outcome,) = (o for o in report_on_the_base.outcomes if o.rule == rule)
    assert outcome.status == "passed", outcome.message
    assert outcome.examples > 0


def test_nothing_of_the_base_is_wrong_where_it_was_probed(report_on_the_base):
    assert report_on_the_base.passed
    assert {o.rule for o in report_on_the_base.outcomes} == set(PROPERTIES)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_that_the_mutant_names_fails_it(name):
    mutant = MUTANTS[name]
    report = check(mutant.forward, backward=mutant.backward, only=mutant.killed_by, examples=60)
    assert failed(report) & set(mutant.killed_by), str(report)
    assert not report.passed


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_names_rules_that_there_are(name):
    killed_by = MUTANTS[name].killed_by
    assert killed_by
    assert set(killed_by) <= {*PROPERTIES, "structure"}
