"""Reports for pipelines, of outcomes that are made here: annotations, Markdown and SARIF."""

import pytest

from npattn.testing import Cause, Outcome, Report
from npattn.testing.report.formats import annotate, markdown, sarif
from npattn.testing.report.place import Place

PLACE = Place("kernels/a,b.py", 7)
MESSAGE = "o[0]: got 1, want 2 (50 % off: all)\nlse[0]: got 3"
WRONG = Outcome("agreement-o", "1", "o agrees.", "float32", "failed", message=MESSAGE)
RIGHT = Outcome("views", "15", "Views.", "float32", "passed", level="conduct")
CAUSE = Cause("o is\n  doubled", (WRONG.id,), "o")


def report(*outcomes, **kwargs):
    return Report("kernels/a,b.py:f", outcomes, (), {}, **kwargs)


def test_annotation_escapes_what_a_workflow_command_would_read():
    line = annotate(report(WRONG, RIGHT, causes=(CAUSE,)), PLACE)
    assert line == (
        "::error file=kernels/a%2Cb.py,line=7,title=npattn%3A o is doubled::"
        "agreement-o[float32]: o[0]: got 1, want 2 (50 %25 off: all); failed: agreement-o"
    )
    assert annotate(report(WRONG), None).startswith(
        "::error title=npattn%3A agreement-o[float32] failed::"
    )


def test_annotation_of_no_verdict_has_its_reason_and_a_green_one_has_none():
    assert annotate(report(RIGHT), PLACE) == ""
    missing = annotate(report(RIGHT, missing=("dq",)), PLACE)
    assert missing.startswith("::error title=npattn::no verdict: not tested, and asked for: dq")


def test_markdown_has_causes_levels_and_refusals_where_there_are_any():
    text = markdown(report(WRONG, RIGHT, causes=(CAUSE,), refused=("float32: K < H: refused",)))
    assert text.startswith("### npattn check `kernels/a,b.py:f`\n\nFAILED: 1 passed, 1 failed\n")
    assert "\n- **o is doubled**\n  agreement-o\\[float32\\]: o\\[0\\]: got 1" in text
    assert "\n| level | result |\n|---|---|\n| values | 1 of 1 failed |\n" in text
    assert "\n| conduct | 1 passed |\n" in text
    assert "<summary>refused</summary>\n\n- float32: K \\< H: refused\n" in text
    green = markdown(report(RIGHT))
    assert "refused" not in green
    assert "**" not in green


@pytest.mark.parametrize("place", [None, PLACE])
def test_sarif_has_an_error_with_its_place_for_each_failed_rule(place):
    [run] = sarif(report(WRONG, RIGHT, causes=(CAUSE,)), place, "7.11")["runs"]
    [result] = run["results"]
    assert (result["ruleId"], result["level"]) == ("agreement-o", "error")
    assert result["message"]["text"].startswith("agreement-o[float32]: o is\n  doubled\no[0]: got")
    assert [x["id"] for x in run["tool"]["driver"]["rules"]] == ["agreement-o"]
    assert run["tool"]["driver"]["version"] == "7.11"
    where = [x["physicalLocation"] for x in result["locations"]]
    assert where == (
        []
        if place is None
        else [{"artifactLocation": {"uri": place.file}, "region": {"startLine": 7}}]
    )
