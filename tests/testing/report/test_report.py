"""Reports: what is untested first, then a table, then every failure with its problem."""

import json

import numpy as np
import pytest

from npattn import Problem
from npattn.testing import Outcome, Report

PROBLEM = Problem(np.zeros((1, 2)), np.zeros((3, 2)), np.zeros((3, 4)))


def outcome(rule="agreement-o", status="passed", dtype="float32", **kwargs):
    return Outcome(rule, "1-10", "o agrees with the oracle.", dtype, status, **kwargs)


def report(*outcomes, untested=(), strict=False):
    facts = {"seed": 7, "examples": 3, "versions": {"npattn": "0"}}
    return Report("mine:f", tuple(outcomes), tuple(untested), facts, strict)


FAILED = outcome(
    status="failed",
    worst=12.5,
    message="o[0, 1]: got 1, want 2\nlse[0]: got 3, want [4]",
    problem=PROBLEM,
    recipe="Recipe(...).problem()",
    script_text="print('shown')",
)


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
    assert "FAILED: nothing tested" in str(report())


def test_report_lists_untested_table_failures_in_order():
    text = str(report(FAILED, untested=["no backward= was given"]))
    places = [
        text.index(part)
        for part in (
            "npattn check mine:f",
            "seed 7  examples 3",
            "not tested",
            "no backward= was given",
            "rule",
            "agreement-o[float32] failed: o agrees with the oracle. [semantics 1-10]",
            "  o[0, 1]: got 1, want 2",
            "  lse[0]: got 3, want [4]",
            "  on Problem(q=float64 (1, 2)",
            "  sampled as Recipe(...).problem()",
            "FAILED: 1 failed",
        )
    ]
    assert places == sorted(places)
    assert "versions" not in text


def test_complete_report_has_no_untested_line():
    assert "not tested" not in str(report(outcome()))


def test_recipe_line_is_never_wrapped():
    long = "Recipe(" + "x=1, " * 100 + ").problem()"
    text = str(report(outcome(status="failed", message="m", problem=PROBLEM, recipe=long)))
    assert long in text


def test_table_has_dtypes_as_columns_and_rules_as_rows():
    lines = str(
        report(
            outcome(worst=0.25),
            outcome(dtype="bfloat16", worst=float("inf"), status="failed"),
            outcome("views", dtype="bfloat16"),
        )
    ).splitlines()
    assert next(x for x in lines if x.startswith("rule")).split() == [
        "rule",
        "§",
        "float32",
        "bfloat16",
    ]
    row = next(x for x in lines if x.startswith("agreement-o "))
    assert "passed 0.25" in row
    assert row.rstrip().endswith("failed")
    assert next(x for x in lines if x.startswith("views")).split() == ["views", "1-10", "passed"]


def test_table_has_reason_of_rule_not_applicable():
    text = str(report(outcome(), outcome("views", "not applicable", message="refuses [all] views")))
    assert "– refuses [all] views" in text
    assert "passed: 1 passed" in text


def test_suspect_is_reported_with_its_message():
    text = str(report(outcome(status="suspect", message="rather far off")))
    assert "agreement-o[float32] suspect" in text
    assert "rather far off" in text
    assert "passed: 1 suspect" in text


def test_outcome_has_id_and_script():
    assert FAILED.id == "agreement-o[float32]"
    assert FAILED.script() == "print('shown')"
    assert "shown" not in repr(FAILED)


def test_json_holds_everything(tmp_path):
    path = tmp_path / "report.json"
    endless = outcome("views", "failed", worst=float("inf"), message="m")
    report(FAILED, endless, outcome(dtype="float64"), untested=["lse"]).to_json(path)
    data = json.loads(path.read_text())
    assert data["target"] == "mine:f"
    assert data["passed"] is False
    assert data["untested"] == ["lse"]
    assert data["facts"]["seed"] == "7"
    first, second, third = data["outcomes"]
    assert first["script"] == "print('shown')"
    assert first["problem"].startswith("Problem(q=float64 (1, 2)")
    assert (first["worst"], second["worst"]) == (12.5, "inf")
    assert (third["status"], third["problem"]) == ("passed", "")


def test_json_is_valid_for_non_finite_worst(tmp_path):
    path = tmp_path / "report.json"
    report(outcome(worst=float("nan"), status="failed")).to_json(path)

    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(path.read_text(), parse_constant=no_constant)["outcomes"]


def test_html_is_a_page_with_the_same_text(tmp_path):
    path = tmp_path / "report.html"
    report(FAILED, untested=["dq < dk"]).to_html(path)
    page = path.read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "agreement-o" in page
    assert "dq &lt; dk" in page
    assert "FAILED: 1 failed" in page
