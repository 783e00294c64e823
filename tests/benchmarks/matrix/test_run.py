"""Matrices: their plan, their order, what is lost and what goes on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import journal as journals
from benchmarks.journal import Journal
from benchmarks.matrix.markdown import write_table
from benchmarks.matrix.plan import choose_targets
from benchmarks.matrix.result import Run
from benchmarks.matrix.run import run_matrix
from npattn.errors import MissingExtraError, OptionError
from npattn.testing.rules import PROPERTIES
from npattn.testing.targets import TARGETS
from npattn.testing.units.blocks import name_rules
from npattn.testing.units.unit import Result
from tests.testing.units.inline import Inline

TINY = {"targets": ["numpy.flash", "numpy.naive"], "only": ["agreement-o"], "examples": 2}


def answer_of(unit):
    """A unit's result without any work."""
    if unit.asks:
        outcome = {"rule": unit.rules[0], "semantics": "1", "about": "", "dtype": unit.dtype}
        outcome |= {"status": "passed", "worst": 0.5, "examples": 2, "message": "", "left_to": []}
        entry = {"dtype": unit.dtype, "answer": unit.rules[0]}
        return Result("done", answers=({**entry, "outcome": outcome | {"level": "values"}},))
    outcomes = [
        {"rule": "agreement-o", "level": "values", "status": "failed", "semantics": "1"}
        | {"about": "", "given": len(unit.answers), "message": "", "counts": True}
    ]
    return Result("done", report={"outcomes": outcomes, "settings": {"versions": {"npattn": "1"}}})


def plain(matrix):
    runs = tuple(replace(run, seconds=0) for run in matrix.runs)
    return json.dumps(replace(matrix, runs=runs).as_dict())


def test_default_dtypes_are_those_that_a_target_computes_in(monkeypatch):
    executor = Inline(answer_of)
    narrow = replace(TARGETS["numpy.flash"], dtypes=("bfloat16",))
    monkeypatch.setitem(TARGETS, "numpy.flash", narrow)
    run_matrix(["numpy.naive", "torch.sdpa", "numpy.flash"], executor=executor)
    assert executor.done == [
        f"{target} {dtype}"
        for target in ("numpy.naive", "torch.sdpa")
        for dtype in ("float32", "float64")
    ] + ["numpy.flash bfloat16"]


def test_a_dtype_named_twice_is_asked_once():
    executor = Inline(answer_of)
    matrix = run_matrix(["numpy.naive"], dtypes=["float32", "float32"], executor=executor)
    assert executor.done == ["numpy.naive float32"]
    assert [run.state for run in matrix.runs] == ["done"]


def test_targets_that_take_long_come_first(monkeypatch):
    monkeypatch.setitem(TARGETS, "torch.sdpa", replace(TARGETS["torch.sdpa"], timeout=60.0))
    executor = Inline(answer_of)
    matrix = run_matrix(["numpy.naive", "torch.sdpa"], dtypes=["float32"], executor=executor)
    assert executor.done == ["torch.sdpa float32", "numpy.naive float32"]
    assert [run.target for run in matrix.runs] == ["numpy.naive", "torch.sdpa"]


def test_a_report_waits_for_its_blocks():
    executor = Inline(answer_of)
    run_matrix(["numpy.naive"], only=["views", "agreement-o"], blocks=5, executor=executor)
    assert [key.split()[1:] for key in executor.done] == [
        ["float32", "0", "agreement-o"],
        ["float32", "0", "views"],
        ["float64", "0", "agreement-o"],
        ["float64", "0", "views"],
        ["float32"],
        ["float64"],
    ]


def test_a_lost_block_costs_its_row():
    def judge(unit):
        lost = unit.rules[0] == "views" and unit.dtype == "float64"
        return Result("crashed", "signal 9") if lost and unit.asks else answer_of(unit)

    asked = {"only": ["views", "agreement-o"], "blocks": 2, "executor": Inline(judge)}
    float32, float64 = run_matrix(["numpy.naive"], **asked).runs
    assert float32.report["outcomes"][0]["given"] == 2
    assert (float64.state, float64.why, float64.report) == ("crashed", "signal 9", None)


def test_what_cannot_run_here_has_a_row(monkeypatch, tmp_path):
    needy = replace(TARGETS["torch.sdpa"], needs=("no_such_package",), pip=("no-such-package",))
    monkeypatch.setitem(TARGETS, "torch.sdpa", needy)
    executor = Inline(answer_of)
    matrix = run_matrix(["torch."], dtypes=["float32"], executor=executor)
    run = next(run for run in matrix.runs if run.target == "torch.sdpa")
    assert run.state == "not run"
    assert run.why.endswith("pip install 'no-such-package'")
    assert "torch.sdpa float32" not in executor.done
    with pytest.raises(MissingExtraError, match="no-such-package"):
        choose_targets(["torch.sdpa"])
    later = Inline(answer_of)
    asked = {"dtypes": ["float32"], "envs": str(tmp_path), "executor": later}
    (run,) = run_matrix(["torch.sdpa"], **asked).runs
    assert (run.state, later.done) == ("done", ["torch.sdpa float32"])
    monkeypatch.setitem(TARGETS, "torch.sdpa", replace(needy, install="clone it"))
    with pytest.raises(MissingExtraError, match="to install it, clone it"):
        choose_targets(["torch.sdpa"], str(tmp_path))
    on_gpu = replace(needy, device="cuda")
    monkeypatch.setattr("npattn.testing.targets.target.DRIVER", tmp_path / "none")
    monkeypatch.setitem(TARGETS, "torch.sdpa", on_gpu)
    with pytest.raises(MissingExtraError, match="NVIDIA GPU"):
        choose_targets(["torch.sdpa"], str(tmp_path))


def test_a_matrix_goes_on_where_it_was_interrupted(tmp_path):
    asked = {"targets": ["numpy."], "only": ["views", "agreement-o"], "blocks": 2}
    whole, path = run_matrix(**asked, executor=Inline(answer_of)), tmp_path / "journal"
    first = Inline(answer_of, ends_after=7)
    with pytest.raises(KeyboardInterrupt) as caught:
        run_matrix(**asked, executor=first, journal=Journal.create("matrix", path, asked))
    assert [run.why for run in caught.value.matrix.runs].count("interrupted") == 4
    with path.open("ab") as file:
        file.write(b'{"unit": "cut')
    journal, later = Journal.resume("matrix", path), Inline(answer_of)
    assert journal.question == asked
    again = run_matrix(**journal.question, executor=later, journal=journal)
    assert plain(again) == plain(whole)
    assert set(first.done).isdisjoint(later.done)
    assert len(first.done) + len(later.done) == 12
    done = Journal.resume("matrix", path)
    assert plain(run_matrix(**asked, executor=Inline(), journal=done)) == plain(whole)


def test_a_journal_of_something_else_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    path.write_text('{"journal": 1}\n')
    with pytest.raises(OptionError, match=r"no journal of benchmarks\.matrix"):
        Journal.resume("matrix", path)
    with pytest.raises(OptionError, match="exists: continue it"):
        Journal.create("matrix", path, {})
    with pytest.raises(OptionError, match="does not exist; create it first"):
        Journal.create("matrix", tmp_path / "nowhere" / "journal", {})
    with pytest.raises(OptionError, match="cannot be written"):
        Journal("matrix", tmp_path / "nowhere" / "journal", {}).begin()
    Journal.create("matrix", tmp_path / "own", {}).begin()
    monkeypatch.setattr(journals, "versions_here", lambda: {"npattn": "0"})
    with pytest.raises(OptionError, match="was begun with"):
        Journal.resume("matrix", tmp_path / "own")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"targets": ["numpy.flsh"]}, "did you mean numpy.flash"),
        ({"targets": []}, "targets is empty"),
        ({"only": ["agrement"]}, "'agrement' is not a rule"),
        ({"dtypes": ["float31"]}, "dtypes has 'float31'"),
        ({"examples": 0}, "examples is 0, must be 1 or more"),
        ({"blocks": 0}, "blocks is 0, must be 1 or more"),
    ],
)
def test_errors_come_before_any_work(wrong, message):
    executor = Inline()
    with pytest.raises(OptionError, match=message):
        run_matrix(**{**TINY, **wrong}, executor=executor)
    assert executor.done == []


def test_a_matrix_needs_a_rule_that_units_ask():
    with pytest.raises(OptionError, match=r"must name a rule that is asked in units.*list rules"):
        name_rules(["robustness"])


def test_rules_come_by_level():
    assert set(name_rules(None)) == set(PROPERTIES)
    assert name_rules(["views", "agreement-o", "views"]) == ("agreement-o", "views")


def test_specs_of_functions_are_targets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def f(q, k, v):\n    return v.mean(-2, keepdims=True)\n")
    executor = Inline(answer_of)
    matrix = run_matrix(["mine.py:f"], dtypes=["float32"], executor=executor)
    assert executor.done == ["mine.py:f float32"]
    assert matrix.targets[0].name == "mine.py:f"


def test_the_table_counts_by_level():
    matrix = run_matrix(["numpy.naive"], dtypes=["float32"], executor=Inline(answer_of))
    lost = Run("numpy.naive", "float64", "crashed", "a | b\nc")
    late = replace(matrix.runs[0], state="timed out", why="not done after 3 s")
    table = write_table(replace(matrix, runs=(*matrix.runs, lost, late))).splitlines()
    assert table[0].startswith("| target | version | dtype | values | edges |")
    assert table[2] == "| numpy.naive | 1 | float32 | 0 ✓, 1 ✗ |  |  |  |  |  | agreement-o |"
    assert table[3].endswith("|  | crashed: a \\| b c |")
    assert table[4].endswith("| timed out: not done after 3 s; agreement-o |")
