"""Verdicts of tests: some test fails exactly if the report does."""

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from npattn.conventions import Conventions
from npattn.testing.power import Power
from npattn.testing.report.cause import Cause
from npattn.testing.report.outcome import Status
from npattn.testing.report.verdicts import Verdict, rest_verdict, rule_verdict
from tests.testing.report.test_report import FAILED, outcome, report

RULES = ("structure", "agreement-o", "nan-query")


def verdicts(record, dtypes=("float32",)):
    """Return the verdicts of all tests, by rule and dtype."""
    found = {(r, d): rule_verdict(record, r, d, RULES) for r in RULES for d in dtypes}
    return found | {"report": rest_verdict(record)}


def one(record, rule="agreement-o"):
    return rule_verdict(record, rule, "float32", RULES)


@pytest.mark.parametrize("expected", [{}, {"agreement-o": "why"}, {"nan-query[float32]": "why"}])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("missing", [(), ("mask",)])
def test_some_test_fails_exactly_if_the_report_does(expected, strict, missing):
    for first, second in product(get_args(Status), repeat=2):
        record = replace(
            report(
                outcome(status=first),
                outcome("nan-query", second, level="non-finite"),
                strict=strict,
            ),
            expected=expected,
            missing=missing,
        )
        failed = any(v.status == "failed" for v in verdicts(record).values())
        assert failed is not record.passed, (first, second)


def test_what_no_test_is_named_after_belongs_to_structure():
    record = report(outcome("option-mask", "error", message="ValueError"), outcome())
    assert one(record, "structure").status == "failed"
    assert one(record, "structure").text.startswith("ValueError\noption-mask[float32] error")
    assert one(record).status == "passed"


def test_structure_without_a_finding_is_right():
    assert one(report(outcome()), "structure") == Verdict("passed")
    worse = [outcome("structure", level="edges"), replace(FAILED, rule="structure")]
    assert one(report(*worse), "structure").status == "failed"
    twice = [replace(FAILED, rule="structure", message=text) for text in ("one", "two")]
    assert one(report(*twice), "structure").text.count("\n\ntwo\n") == 1


def test_the_cause_comes_first_then_got_and_want():
    cause = Cause("causal is aligned\n  top-left", ("agreement-o[float32]",), step="visible",
                  where="causal", passes_when="fails only where T > S",
                  conventions=Conventions(causal="top_left"))  # fmt: skip
    record = replace(report(FAILED), causes=(cause,))
    lines = one(record).text.splitlines()
    assert lines[0] == "causal is aligned top-left"
    assert lines[1:3] == FAILED.message.splitlines()
    assert lines[3] == "fails only where T > S"
    assert lines[4] == "agreement-o[float32] failed: o agrees with the oracle. [semantics 1-10]"
    assert lines[6:] == [
        "  sampled as Recipe(...).problem()",
        "  passes with conventions=npattn.Conventions(causal='top_left')",
    ]
    assert one(record).script == "print('shown')"
    assert one(report(FAILED)).text.splitlines()[:2] == FAILED.message.splitlines()


def test_control_characters_of_a_message_are_escaped():
    assert "\x1b" not in one(report(replace(FAILED, message="\x1b[31mred"))).text


def test_what_costs_nothing_is_xfailed_with_its_reason():
    bad = replace(FAILED, message="too far")
    loose = replace(report(bad), require=("edges",))
    assert one(loose).status == "xfailed"
    assert one(loose).text.startswith("not required: too far\n")
    assert one(loose).script == bad.script()
    expected = replace(report(bad), expected={"agreement-o": "issue 17"})
    assert one(expected).text.startswith("expected: issue 17\ntoo far\n")
    promised = replace(report(bad), taken_back={"agreement-o": "its manual"})
    assert one(promised).text.startswith("not promised: its manual\ntoo far\n")
    suspect = report(outcome(status="suspect", message="rather far"))
    assert one(suspect).text.startswith("suspect: rather far\n")


def test_what_does_not_apply_is_skipped_with_its_reason():
    record = report(outcome(status="not applicable", message="has no mask"))
    assert one(record) == Verdict("skipped", "has no mask")


def test_what_was_not_asked_is_skipped():
    assert one(report(outcome("nan-query", "failed"))).text == "not asked, after an earlier failure"
    stopped = report(outcome(status="failed"))  # before another dtype was asked
    assert rule_verdict(stopped, "structure", "float16", RULES).status == "skipped"
    record = replace(
        report(outcome("structure", "not applicable", message="raises")),
        refused=("float64: nothing: other", "float32: nothing: even the plainest problem fails"),
    )
    assert one(record) == Verdict("skipped", record.refused[1])
    assert verdicts(record)["report"].text.splitlines() == [
        "no verdict: nothing tested",
        *record.refused,
    ]


@pytest.mark.parametrize("status", ["passed", "not applicable"])
def test_an_expected_failure_that_did_not_fail_is_an_error(status):
    record = report(outcome(status=status), outcome("nan-query", "failed"))
    record = replace(record, expected={"agreement-o": "why"})
    text = "expected failure agreement-o did not fail: remove it"
    assert one(record) == Verdict("failed", text)
    assert verdicts(record)["report"].status == "passed"


def test_an_expected_failure_of_no_rule_is_an_error_of_the_report():
    record = replace(report(outcome()), expected={"agreement-x": "why"}, missing=("dq", "mask"))
    assert one(record).status == "passed"
    assert verdicts(record)["report"].text.splitlines() == [
        "expected failure agreement-x matches no rule that was checked: remove it",
        "no verdict: not tested, and asked for: dq, mask",
    ]


def test_dtypes_are_told_apart():
    record = report(outcome(), replace(FAILED, dtype="float16"))
    found = verdicts(record, ("float32", "float16"))
    assert found["agreement-o", "float32"].status == "passed"
    assert found["agreement-o", "float16"].status == "failed"


def test_a_result_that_one_rule_judges_is_judged():
    """A rule with steep problems alone leaves no result open that agreement has judged."""
    weak = Power(factors=(50.0,), elements=8, nonzero=8, doubled=1)
    zero = Power(elements=8, nonzero=0)
    steep = outcome("model-sizes", "not judged", powers={"dq": weak})
    for power, unjudged in ((replace(weak, factors=(0.1,), doubled=8), ()), (zero, ("dq",))):
        beside = outcome("agreement-dq", "passed", powers={"dq": power})
        assert report(steep, beside).unjudged == unjudged
