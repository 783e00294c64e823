"""Lines of a report about the sizes that were asked, and the model sizes that were not."""

from dataclasses import replace

import pytest

from npattn.oracle.api import attention
from npattn.testing import check
from npattn.testing.cases.asked import MODELS, Asked
from npattn.testing.cases.space import STRUCTURE
from npattn.testing.report.outcome import OUT_OF_TIME, Outcome
from npattn.testing.runner.describe import ALL_FROM, describe_skipped
from npattn.testing.runner.rounds import Judge, Round
from tests.testing.rules.relations import trial_of


def recording(seen):
    def f(q, k, v):
        if q.shape[-3:-2] != k.shape[-3:-2]:
            raise NotImplementedError("shared heads")
        seen.append((q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]))
        return attention(q, k, v).astype(q.dtype)

    return f


def test_ranges_are_those_that_were_asked_and_accepted():
    """They are no wider than the calls, and leave out what is refused."""
    seen = []
    report = check(recording(seen), framework="numpy", only=["agreement-o"], examples=7)
    ranges = report.asked["float32"].ranges
    for letter, column in zip("TSDE", zip(*seen, strict=True), strict=True):
        least, largest = ranges[letter]
        assert {least, largest} <= set(column)
    assert ranges["G"] == (1, 1)
    assert f"tested sizes: {report.asked['float32']}; " in " ".join(str(report).split("\n  "))
    assert report.passed


def test_options_gradients_and_lse_that_are_missing_are_said_of_a_green_report():
    report = check(recording([]), framework="numpy", only=["agreement-o"], examples=3)
    text = " ".join(str(report).split())
    assert report.passed
    assert "gradients: no backward= was given; lse: no return_lse parameter; options it" in text
    assert f"; {len(MODELS)} sizes of known models not (--verbose)" in text
    models = f"of the sizes of known models: all {len(MODELS)} (only other rules were asked)"
    assert f"not tested, {models}" in report.text(verbose=True)


def one_round(names=("model-sizes",), examples=ALL_FROM, **space):
    return Round(Judge(trial_of(**space), examples, 0, print, True), [], list(names))


OUTCOME = Outcome("model-sizes", "1", "", "float32", "passed")
NAME, SHAPE = next((n, x) for n, x in MODELS.items() if "K" in x and x["K"] < x["H"])


@pytest.mark.parametrize(
    ("done", "answer", "reason"),
    [
        (one_round(["views"]), None, "only other rules were asked"),
        (one_round(), None, "the check ended before"),
        (one_round(), replace(OUTCOME, status="failed"), "after a failure of model-sizes"),
        (one_round(examples=3), OUTCOME, f"all are asked with {ALL_FROM} examples"),
        (one_round(), OUTCOME, "every problem drawn was refused, or left out"),
        (one_round(structure=frozenset(STRUCTURE) - {"K < H"}), OUTCOME, "no K < H"),
        (one_round(sizes={"H": (6,)}), OUTCOME, "sizes= restricts H"),
        (one_round(structure=frozenset({"rank 2"})), OUTCOME, "q, k and v have rank 2"),
    ],
)
def test_model_size_that_was_not_asked_has_a_reason(done, answer, reason):
    done = replace(done, answers={} if answer is None else {"model-sizes": answer})
    assert describe_skipped(done, Asked())[NAME] == reason
    assert NAME not in describe_skipped(done, Asked(models=frozenset({NAME})))


def test_model_size_that_time_left_out():
    done = one_round()
    done = replace(done, judge=replace(done.judge, deadline=0.0), answers={"model-sizes": OUTCOME})
    assert describe_skipped(done, Asked())[NAME] == OUT_OF_TIME
