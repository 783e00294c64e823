"""Self-test of a check: a comparison that misses mistakes is a defect of npattn, and said so."""

from __future__ import annotations

import numpy as np
import pytest

import npattn.testing.trial
from npattn.testing import check
from npattn.testing.report.report import Report
from npattn.testing.runner import self_test
from npattn.testing.targets.numpy import flash, flash_backward

ASKED = {"only": ["agreement-o", "agreement-dq"], "examples": 20, "progress": False}


def judge() -> Report:
    return check(flash, backward=flash_backward, **ASKED)


def test_right_kernel_is_tested_with_every_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    find = self_test.find_unseen

    def count(result, exact, tolerance, fails):  # type: ignore[no-untyped-def]
        return find(result, exact, tolerance, lambda x: tried.append(x) is None and fails(x))

    monkeypatch.setattr(self_test, "find_unseen", count)
    assert judge().passed
    assert len(tried) >= 2 * 5


def test_comparison_by_size_alone_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = npattn.testing.trial.compare_result
    monkeypatch.setattr(
        npattn.testing.trial,
        "compare_result",
        lambda name, got, exact, allowed: compare(name, abs(got), abs(exact), allowed),
    )
    report = judge()
    assert report.verdict == "no verdict"
    assert "a defect of npattn in agreement-o[float32]" in report.reason
    assert "it passes the negative result" in report.outcomes[0].message
    assert not report.unjudged


def test_tolerance_that_is_too_wide_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    tolerance = npattn.testing.trial.Trial.tolerance

    def widen(self, problem, cotangents, exact, **options):  # type: ignore[no-untyped-def]
        allowed = tolerance(self, problem, cotangents, exact, **options)
        return allowed | {"dq": np.full_like(exact["dq"], np.inf)} if "dq" in allowed else allowed

    monkeypatch.setattr(npattn.testing.trial.Trial, "tolerance", widen)
    report = judge()
    assert (report.verdict, report.reason) == ("no verdict", "not judged: dq")
    assert not report.passed
    assert report.conclusion.exit_code == 2
    text = str(report)
    assert "dq: twice the result would not have been seen; 0 % of the elements" in text
    assert "--accept dq" in text
    assert text.endswith("no verdict: not judged: dq (1 passed, 1 not judged)\n")
    assert check(flash, backward=flash_backward, accept="dq", **ASKED).passed
