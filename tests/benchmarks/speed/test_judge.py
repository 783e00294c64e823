"""benchmarks.speed --judge: which questions are asked, their verdicts, and the history of times."""

import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

from benchmarks.speed import judge
from benchmarks.speed.__main__ import bench_command
from benchmarks.speed.judge import QUESTIONS, Answer, History, Question, Run, ask, read_history
from benchmarks.zoo.mutants import MUTANTS
from npattn.errors import OptionError
from npattn.testing.targets.numpy import flash

ABOUT = {
    "date": "2026-01-31",
    "versions": {"npattn": "0"},
    "cpu": "a processor",
    "cores": 3,
    "jobs": 2,
    "load": [0.1, 0.2],
}


def question(monkeypatch, *, goal=1e9, **changes):
    """Put one question, "python", in place of all."""
    made = Question(**{"name": "python", "about": "a command", "goal": goal} | changes)
    monkeypatch.setattr(judge, "QUESTIONS", {"python": made})
    return made


def invoke(*arguments):
    result = CliRunner().invoke(bench_command, [*map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.parametrize(("goal", "verdict"), [(1e9, "reached"), (0.0, "missed")])
def test_command_is_timed_beside_its_goal(monkeypatch, goal, verdict):
    question(monkeypatch, goal=goal, arguments=("platform",))
    (answer,) = ask().answers
    assert (answer.verdict, answer.goal, answer.note) == (verdict, goal, "")
    assert answer.figure > 0
    assert answer.processor is None or answer.processor > 0


def test_red_report_is_an_answer(monkeypatch, tmp_path):
    (tmp_path / "red.py").write_text("raise SystemExit(1)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    question(monkeypatch, arguments=("red",))
    (answer,) = ask().answers
    assert (answer.verdict, answer.note) == ("reached", "red")


@pytest.mark.thorough
def test_wrong_usage_is_no_answer(monkeypatch):
    question(monkeypatch, arguments=("npattn", "check", "no.such:target"))
    (answer,) = ask().answers
    assert answer.verdict == "no answer"
    assert answer.figure is None
    assert answer.note.startswith("exit code 2: ")


def test_jobs_are_passed(monkeypatch, tmp_path):
    (tmp_path / "jobs.py").write_text("import sys; sys.exit(0 if sys.argv[1] == '3' else 2)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    question(monkeypatch, arguments=("jobs", "{jobs}"))
    assert ask(jobs=3).answers[0].verdict == "reached"
    assert ask(jobs=5).answers[0].verdict == "no answer"


@pytest.mark.parametrize("needs", ["no_such_module", "no_such_folder/"])
def test_question_is_not_asked_without_what_it_needs(monkeypatch, needs):
    question(monkeypatch, needs=needs, arguments=("platform",))
    (answer,) = ask().answers
    assert (answer.figure, answer.verdict) == (None, "not asked")
    assert needs in answer.note


def test_suite_is_asked_here_and_others_in_an_empty_folder(monkeypatch, tmp_path):
    (tmp_path / "tests").mkdir()
    code = "import os, sys; sys.exit(0 if os.path.isdir('tests') else 2)"
    (tmp_path / "here.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    question(monkeypatch, arguments=("here",), needs="tests/")
    assert ask().answers[0].verdict == "reached"
    question(monkeypatch, arguments=("here",))
    assert ask().answers[0].verdict == "no answer"


@pytest.mark.thorough
def test_mutant_is_red_soon():
    every = len(MUTANTS)  # the first alone
    (answer,) = ask(["first-red"], every=every).answers
    assert answer.note.startswith("1 mutants, 0 not red, median ")
    assert answer.figure in (0, 1)
    assert answer.processor > 0


def test_share_counts_mutants_within_three_seconds(monkeypatch):
    times = dict(zip(MUTANTS, [0.5, 3.5, None, 2.9], strict=False))
    monkeypatch.setattr(judge, "time_to_red", times.get)
    (answer,) = ask(["first-red"]).answers
    assert answer.figure == 2 / len(MUTANTS)
    assert answer.verdict == "missed"
    assert f"{len(MUTANTS) - 3} not red" in answer.note
    assert "slowest 3.5 s" in answer.note


def test_no_red_mutant_misses_the_goal(monkeypatch):
    monkeypatch.setattr(judge, "time_to_red", lambda name: None)
    (answer,) = ask(["first-red"], every=11).answers
    assert (answer.figure, answer.verdict) == (0, "missed")


@pytest.mark.thorough
def test_mutant_that_is_not_red_has_no_time(monkeypatch):
    def right(q, k, v):
        return flash(q, k, v)

    mutant = next(m for m in MUTANTS.values() if m.dtypes == ("float32",) and m.rounding is None)
    monkeypatch.setitem(MUTANTS, "right", replace(mutant, forward=right, backward=None))
    assert judge.time_to_red("right") is None


def test_unknown_question_is_an_error():
    with pytest.raises(OptionError, match="'speed' is no question, must be one of flash, sdpa"):
        ask(["speed"])


def test_default_questions_take_minutes():
    names = ["flash", "sdpa", "jax", "jitted", "first-red"]
    assert [q.name for q in QUESTIONS.values() if q.usual] == names


def answers(seconds):
    return (
        Answer("flash", 10, seconds, 2 * seconds, "reached" if seconds <= 10 else "missed"),
        Answer("first-red", 0.95, 0.5, 7.0, "missed", "two mutants"),
        Answer("jax", 300, None, None, "not asked", "needs jax"),
    )


def test_history_is_read_as_written(tmp_path):
    history = History((Run(ABOUT, answers(17)), Run(ABOUT, answers(8.5))))
    history.to_json(tmp_path / "times.json")
    assert read_history(tmp_path / "times.json") == history


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": "other", "runs": []}'])
def test_other_file_is_no_history(tmp_path, text):
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(OptionError, match="is no file of times of the judge"):
        read_history(path)


def test_history_without_runs_is_an_error(tmp_path):
    History(()).to_json(tmp_path / "times.json")
    with pytest.raises(OptionError, match="has no run"):
        read_history(tmp_path / "times.json")


def test_table_has_a_verdict_and_the_ratio_to_earlier_times():
    table = History((Run(ABOUT, answers(8.5)),)).table(Run(ABOUT, answers(17)))
    lines = table.splitlines()
    assert re.search(r"numpy.flash +8.5 s +17.0 s +10.0 s +reached +17.0 s \(0.50 times\)", table)
    assert re.search(r"within 3 s +50% +7.0 s +95% +missed +50% \(1.00 times\) +two mutants", table)
    assert re.search(r"jax.nn .* – +– +300.0 s +not asked +needs jax", lines[-1])


def test_command_keeps_the_history_and_compares(monkeypatch, tmp_path):
    path = tmp_path / "times.json"
    question(monkeypatch, arguments=("platform",))
    assert invoke("--judge", "--json", path)[0] == 0
    code, shown = invoke("--judge", "--questions", "python", "--json", path, "--compare", path)
    assert code == 0
    assert "times)" in shown
    assert "a command" in shown
    assert len(json.loads(path.read_text())["runs"]) == 2


def test_file_of_others_is_not_overwritten(monkeypatch, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("[1, 2]")
    question(monkeypatch, arguments=("platform",))
    code, shown = invoke("--judge", "--json", path)
    assert code == 2
    assert "is no file of times of the judge" in shown
    assert path.read_text() == "[1, 2]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--judge", "--rounds", "3"], "--rounds must be left out with --judge"),
        (["--judge", "--list"], "--list must be left out with --judge"),
        (["--every", "3"], "--every must come with --judge"),
        (["--compare", "x.json"], "--compare must come with --judge"),
        (["--judge", "--questions", "speed"], "'speed' is no question"),
        (["--judge", "--compare", "x.json"], "x.json is no file of times of the judge"),
    ],
)
def test_options_of_the_other_benchmark_are_refused(monkeypatch, arguments, message):
    question(monkeypatch, arguments=("platform",))
    code, shown = invoke(*arguments)
    assert code == 2
    assert message in " ".join(shown.replace("│", " ").split())
