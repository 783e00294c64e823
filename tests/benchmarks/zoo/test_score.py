"""Score of the judge: mutants killed, false alarms, and the report of both."""

import json
import math
import os
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest

from benchmarks.zoo.__main__ import _open_executor
from benchmarks.zoo.correct import CORRECT
from benchmarks.zoo.mutants import MUTANTS
from benchmarks.zoo.score import Row, Zoo, judge_mutant, zoo
from benchmarks.zoo.witness import witness
from npattn.errors import OptionError
from npattn.mistakes import base, base_backward
from npattn.testing.rules import PROPERTIES

FEW = ("scale-twice", "state-kept", "tf32")  # two mutants, one that is right
RULES = {"empty-row", "agreement-o", "agreement-dq", "repeatable"}


class Answers(Executor):
    """Knows the rows, or the errors that come in their place."""

    def __init__(self, rows):
        self.rows, self.names = rows, []

    def submit(self, _, task):
        self.names.append(task.name)
        answer, future = self.rows[task.name], Future()
        (future.set_result if isinstance(answer, Row) else future.set_exception)(answer)
        return future


@pytest.fixture(scope="module", autouse=True)
def few_rules():
    """Judge tf32 by four rules only: test_correct.py judges it by all of them."""
    few = replace(CORRECT["tf32"], breaks=tuple(set(PROPERTIES) - RULES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CORRECT, "tf32", few)
        yield


@pytest.fixture(scope="module")
def small(few_rules):
    return zoo(only=FEW, rules="killers", examples=8)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_mutants_are_killed_and_correct_passes(small):
    rows = {row.name: row for row in small.rows}
    assert rows["scale-twice"].right
    assert "agreement-o" in rows["scale-twice"].detected_by
    assert rows["state-kept"].right
    assert rows["tf32"].kind == "correct"
    assert rows["tf32"].statuses == dict.fromkeys(rows["tf32"].statuses, "passed")
    assert set(rows["tf32"].statuses) == RULES
    assert small.passed
    assert small.verdict.startswith("2 of 2 mutants killed (100 %), 0 false alarms on 1 correct")


@pytest.mark.thorough
def test_matrix_has_a_row_per_implementation(small):
    text = str(small)
    assert "  1 structure" in text or "  1 shape-dtype" in text or "agreement-o" in text
    for name in FEW:
        assert any(line.startswith(name) for line in text.splitlines())


@pytest.mark.thorough
def test_json_has_every_row(small, tmp_path):
    small.to_json(tmp_path / "zoo.json")
    whole = json.loads((tmp_path / "zoo.json").read_text())
    assert whole["passed"]
    assert {row["name"] for row in whole["rows"]} == {row.name for row in small.rows}
    assert all(row["right"] for row in whole["rows"])
    names = ["name", "kind", "family", "statuses", "wanted", "told", "seconds", "right", "lost"]
    assert all(list(row) == names for row in whole["rows"])


def row(**fields):
    return Row(**({"name": "x", "kind": "mutant", "family": "f", "statuses": {}} | fields))


@pytest.mark.parametrize(
    ("status", "rule", "right"),
    [
        ("failed", "agreement-o", True),
        ("error", "agreement-o", False),  # a crash does not prove the rule
        ("suspect", "agreement-o", False),
        ("passed", "agreement-o", False),
        ("failed", "agreement-dq", False),  # detected, but not by a killer
    ],
)
def test_only_a_failing_killer_kills(status, rule, right):
    assert row(statuses={rule: status}, killers=("agreement-o",)).right == right


def test_suspicion_kills_if_aggregate_is_a_killer():
    assert row(statuses={"aggregate": "suspect"}, killers=("aggregate",)).right


@pytest.mark.parametrize("status", ["failed", "error", "suspect"])
def test_detection_in_a_correct_implementation_is_a_false_alarm(status):
    alarmed = row(kind="correct", statuses={"views": status}, alarm="views: moved")
    whole = Zoo((alarmed,), 1.0)
    assert not whole.passed
    assert whole.false_alarms == [alarmed]
    assert "FALSE ALARM: views: moved" in str(whole)


def test_survivor_is_reported():
    whole = Zoo((row(statuses={"agreement-o": "passed"}, killers=("agreement-o",)),), 1.0)
    assert not whole.passed
    assert "SURVIVED: none of agreement-o failed" in str(whole)


def test_defect_of_the_judge_costs_one_row(monkeypatch):
    def fails(*args, **kwargs):
        raise KeyError("max_score")

    monkeypatch.setattr("benchmarks.zoo.score.check", fails)
    whole = zoo(only=["scale-twice"], kind="mutant", rules="killers", examples=1)
    assert not whole.passed
    assert "NOT JUDGED: the judge raised KeyError: 'max_score' (test_score.py:" in str(whole)


@pytest.mark.parametrize(("name", "kind"), [("scale-twice", "mutant"), ("tf32", "correct")])
def test_lost_row_fails_the_zoo(name, kind):
    whole = zoo(only=[name], kind=kind, executor=Answers({name: BrokenProcessPool("gone")}))
    assert not whole.passed
    assert not whole.survivors + whole.false_alarms
    assert f"{name}    NOT JUDGED: BrokenProcessPool: gone" in str(whole)
    assert ", 1 not judged, " in whole.verdict


@pytest.mark.thorough
def test_rows_keep_their_order(small):
    """Correct implementations take the longest, and are judged first."""
    executor = Answers({row.name: row for row in small.rows})
    assert zoo(only=FEW, executor=executor).rows == small.rows
    assert executor.names[0] == "tf32"


@pytest.mark.thorough
def test_two_processes_give_the_same_rows(small):
    with _open_executor(2, None) as executor:
        both = zoo(only=FEW, kind="mutant", rules="killers", examples=8, executor=executor)
    rows, reference = ([replace(r, seconds=0) for r in z.of_kind("mutant")] for z in (both, small))
    assert rows == reference
    assert len(rows) == 2


def statuses_of(name, monkeypatch):
    """Return the statuses of a mutant by its killers, and how often it was judged."""
    times = []

    def judge(task, **settings):
        times.append(settings)
        return judge_mutant(task, **settings)

    monkeypatch.setattr("benchmarks.zoo.score.judge_mutant", judge)
    (row,) = zoo(only=[name], kind="mutant", rules="killers", examples=8).rows
    return row, times


def test_a_mutant_is_found_by_the_first_killer_that_fails(monkeypatch):
    """Its other killers are not asked."""
    row, times = statuses_of("causal-backward-top-left", monkeypatch)
    assert row.right
    assert len(row.killers) == 3
    assert row.detected_by == ("agreement-dq",)
    assert len(times) == 1


def test_a_mutant_whose_first_failure_is_an_error_is_asked_the_rest(monkeypatch):
    """An error proves no rule: another of its killers may."""
    mutant = MUTANTS["scale-twice"]

    def fails_on_one_key(q, k, v, **options):
        if k.shape[-2] == 1 < q.shape[-2]:
            raise KeyError("one key")  # which refuses nothing
        return mutant.forward(q, k, v, **options)

    names = ("one-key", "agreement-o")
    both = replace(mutant, forward=fails_on_one_key, killed_by=names, dtypes=("float64",))
    monkeypatch.setitem(MUTANTS, "scale-twice", both)
    row, times = statuses_of("scale-twice", monkeypatch)
    assert row.right
    assert row.statuses["one-key"] == "error"
    assert row.statuses["agreement-o"] == "failed"
    assert len(times) == 2


def test_progress_is_called_per_row():
    calls = []
    zoo(only=["scale-twice"], rules="killers", examples=2, progress=lambda *x: calls.append(x))
    assert calls == [("scale-twice", 1, 1)]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["mutant", "correct"])
def test_kind_selects_rows(kind):
    result = zoo(only=["scale-twice", "tf32"], kind=kind, rules="killers", examples=1)
    assert [row.kind for row in result.rows] == [kind]


@pytest.mark.parametrize(
    "arguments", [{"only": ["no-such-animal"]}, {"rules": "some"}, {"kind": "ox"}]
)
def test_unknown_name_rules_or_kind_is_an_error(arguments):
    with pytest.raises(OptionError, match=r"no-such-animal|some|ox"):
        zoo(**arguments)


def test_witness_is_far_beyond_the_tolerance():
    found = witness(MUTANTS["scale-twice"])
    assert found is not None
    assert found[1] > 10


@pytest.mark.thorough
def test_correct_implementation_has_no_witness():
    right = replace(MUTANTS["scale-twice"], forward=base, backward=base_backward)
    assert witness(right, tries=40) is None


def test_crash_is_no_witness():
    def crashing(q, k, v):
        if q.shape[-2] > 2:
            raise FloatingPointError("more than two queries")
        return base(q, k, v)

    crashes = replace(MUTANTS["scale-twice"], forward=crashing, backward=None)
    assert witness(crashes, tries=9) is None


def test_witness_of_changed_bits_has_ratio_inf():
    found = witness(MUTANTS["input-changed"])
    assert found is not None
    assert found[1] == math.inf


def test_each_process_has_one_thread_of_blas(monkeypatch):
    """Two processes with two threads each take half as long again on two cores."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    with _open_executor(2, None) as executor:
        assert executor.submit(os.getenv, "OPENBLAS_NUM_THREADS").result() == "1"
    assert os.environ["OPENBLAS_NUM_THREADS"] == "5"
