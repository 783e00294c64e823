"""Reports: the verdict, and the files that hold everything."""

from dataclasses import replace

import numpy as np
import pytest

from npattn import Problem
from npattn.testing import Outcome, Report
from npattn.testing.report.cause import Cause

PROBLEM = Problem(np.zeros((1, 2)), np.zeros((3, 2)), np.zeros((3, 4)))


def outcome(rule="agreement-o", status="passed", dtype="float32", **kwargs):
    return Outcome(rule, "1-10", "o agrees with the oracle.", dtype, status, **kwargs)


def report(*outcomes, untested=(), strict=False):
    facts = {"seed": 7, "examples": 3, "versions": {"npattn": "0"}}
    return Report("mine:f", tuple(outcomes), tuple(untested), facts, strict)


FAILED = outcome(status="failed", worst=12.5,
                 message="o[0, 1]: got 1, want 2\nlse[0]: got 3, want [4]", problem=PROBLEM,
                 recipe="Recipe(...).problem()", script_text="print('shown')")  # fmt: skip


@pytest.mark.parametrize(
    ("status", "passed", "strictly"),
    [
        ("passed", True, True),
        ("failed", False, False),
        ("error", False, False),
        ("suspect", True, False),
        ("not applicable", False, False),
    ],
)
def test_report_passes_if_tested_without_failure(status, passed, strictly):
    assert report(outcome(status=status)).passed is passed
    assert report(outcome(status=status), strict=True).passed is strictly
    assert report(outcome(status=status)).tested is (status != "not applicable")


def test_a_report_of_nothing_did_not_pass():
    assert not report().passed
    assert "no verdict: nothing tested" in str(report())


def test_suspect_is_reported_with_its_message():
    text = str(report(outcome(status="suspect", message="rather far off")))
    assert "agreement-o[float32] suspect" in text
    assert "rather far off" in text
    assert "passed: 1 suspect" in text


def test_script_shows_the_failure_with_which_the_report_begins():
    beside = replace(FAILED, rule="same-bits-again", level="reproducible", script_text="beside")
    later = replace(FAILED, rule="views", level="conduct", script_text="later")
    causes = (Cause("beside", (beside.id,)), Cause("later", (later.id,)))
    both = replace(report(beside, later), causes=causes)
    assert both.script() == "later"
    assert replace(report(beside), causes=causes).script() == "beside"
    assert report(replace(later, script_text="")).script() == ""


def test_the_failure_that_is_shown_has_a_script():
    silent = replace(FAILED, rule="structure", script_text="")
    other = replace(FAILED, rule="views", script_text="views")
    both = report(silent, other)
    assert both.groups()[0].smallest is other
    assert both.script() == "views"


def test_outcome_has_id_and_script():
    assert FAILED.id == "agreement-o[float32]"
    assert FAILED.script() == "print('shown')"
    assert "shown" not in repr(FAILED)


def test_the_repr_of_a_report_is_one_line_with_its_first_cause():
    """It is what pytest prints of ``assert report.passed``."""
    assert repr(report(outcome())) == "<Report of mine:f: passed: 1 passed>"
    bad = report(FAILED, outcome("nan-query", "failed", level="non-finite"))
    verdict = "FAILED: 1 failed, 1 failed (not required)"
    assert repr(bad) == f"<Report of mine:f: {verdict}; agreement-o[float32] failed>"
    cause = Cause("causal is aligned\n  top-left", ("agreement-o[float32]",), step="visible")
    known = replace(bad, causes=(cause,))
    assert repr(known) == f"<Report of mine:f: {verdict}; causal is aligned top-left>"
