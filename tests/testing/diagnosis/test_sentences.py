"""Sentences of causes, and the lines of dense.py that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from npattn import engines
from npattn.testing.diagnosis.sentences import LINES, WORDS, line_of, say
from npattn.testing.report.cause import STEPS

DENSE = (Path(engines.__path__[0]) / "dense.py").read_text("utf-8").splitlines()


@pytest.mark.parametrize("step", LINES)
@pytest.mark.every
def test_a_step_has_one_line_of_dense(step):
    found = [n for n, x in enumerate(DENSE, 1) if x.strip().startswith(LINES[step][1])]
    assert found == [line_of(step)]


def test_what_no_line_computes_has_none():
    assert {line_of(step) for step in set(STEPS) - set(LINES)} == {0}
    assert set(LINES) | set(WORDS) <= set(STEPS)


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (("delta", "t ≥ 128", "δ is 0"), "δ is wrong where t ≥ 128: δ is 0"),
        (("p", "everywhere", "rows sum to 2"), "the weights p are wrong everywhere: rows sum to 2"),
        (("s", "", ""), "the scores s are wrong"),
        (
            ("visible", "backward: mask", "hidden keys take weight"),
            "the mask is wrong in the backward, and right in the forward, where mask: hidden keys "
            "take weight",
        ),
        (("dq", "e ≥ 8", "0"), "dq is 0 where e ≥ 8"),
        (("nan", "mask", "o is NaN"), "results are not finite where mask: o is NaN"),
        (("nan", "", "o is finite where it must be NaN"),
         "a NaN is swallowed: o is finite where it must be NaN"),
        (("nan", "hidden keys and contents", "o is NaN or infinite where no such input reaches it"),
         "results are not finite where NaN or infinite values are hidden: "
         "o is NaN or infinite where no such input reaches it"),
        (("nan", "contents", "dk is NaN or infinite where no such input reaches it"),
         "results are not finite: dk is NaN or infinite where no such input reaches it"),
        (("nan", "contents", "o is NaN or infinite"),
         "results are not finite for some values of q and k, and right for others: "
         "o is NaN or infinite"),
        (("s", "contents", ""),
         "the scores s are wrong for some values of q and k, and right for others"),
        (("o", "h ≥ 1 and weights", "values of head 0"),
         "o is wrong where h ≥ 1 and weights: values of head 0"),
        (("dsinks", "sinks", "0"), "dsinks is 0 where sinks"),
        (("dgate", "", ""), "dgate is wrong"),
        (("layout", "everywhere", "BTHD"), "results are arranged otherwise: BTHD"),
        (("precision", "", ""), "results are less precise than the dtype allows"),
        (("state", "everywhere", "depends on earlier calls"),
         "results depend on earlier calls"),
        (("", "", ""), "no step was found: results are out of tolerance"),
    ],
)  # fmt: skip
def test_sentence(cause, text):
    line = line_of(cause[0])
    place = line and f" [{LINES[cause[0]][0]}; oracle: npattn/engines/dense.py:{line}]"
    assert say(*cause) == text + (place or "")


@pytest.mark.parametrize(
    ("place", "words"),
    [("hidden keys", "at hidden keys"), ("rows that see no key", "in rows that see no key"),
     ("T > 3", "where T > 3")],
)  # fmt: skip
def test_a_noun_is_no_condition(place, words):
    assert say("p", place, "× 2").startswith(f"the weights p are wrong {words}: × 2 [")
