"""python -m benchmarks.zoo on the command line, and its journal."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
from click.testing import CliRunner

from benchmarks.journal import Journal
from benchmarks.zoo import __main__ as command
from benchmarks.zoo.correct import CORRECT
from benchmarks.zoo.mutants import MUTANTS
from benchmarks.zoo.score import judge_mutant
from npattn.testing.rules import PROPERTIES

FEW = ("scale-twice", "bias-scaled")


def invoke(*arguments):
    return CliRunner().invoke(command.zoo_command, [*map(str, arguments)])


def run(*arguments):
    return invoke("scale-twice", "--rules", "killers", *arguments)


def test_the_command_asks_the_cluster(monkeypatch):
    places = []

    @contextmanager
    def open_cluster(where):
        places.append(where)
        with ThreadPoolExecutor(1) as executor:
            yield executor, 1

    monkeypatch.setattr(command, "open_cluster", open_cluster)
    done = run("--cluster", "local:3", "--examples", "3")
    assert done.exit_code == 0, done.output
    assert "1 of 1 mutants killed (100 %)" in done.stdout
    assert places == ["local:3"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--cluster", "local:3", "-j", "2"), "got -j beside --cluster"),
        (("--cluster", "local"), "cluster is 'local', must be local:N"),
    ],
)
def test_wrong_usage_of_a_cluster(arguments, error):
    done = run(*arguments)
    assert done.exit_code == 2
    assert error in " ".join(done.stderr.split())


def print_of(*arguments, code=0):
    done = invoke(*arguments)
    assert done.exit_code == code, done.output
    return done.stdout


KILL = ("scale-twice", "tf32", "--rules", "killers", "--examples", 3)


@pytest.fixture
def few_rules(monkeypatch):
    """A few rules for the correct kernels: test_correct.py asks them all."""
    breaks = tuple(set(PROPERTIES) - {"agreement-o", "empty-row"})
    monkeypatch.setitem(CORRECT, "tf32", replace(CORRECT["tf32"], breaks=breaks))


@pytest.mark.thorough
def test_zoo_prints_kills_and_writes_json(few_rules, tmp_path):
    path = tmp_path / "zoo.json"
    output = print_of(*KILL, "--json", path)
    assert "1 of 1 mutants killed (100 %), 0 false alarms on 1 correct" in output
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == ["scale-twice", "tf32"]


@pytest.mark.thorough
def test_surviving_mutant_has_exit_code_1():
    words = ("bias-scaled", "--rules", "killers", "--examples", 1)
    assert "SURVIVED: none of agreement-o failed" in print_of(*words, code=1)


def test_zoo_list_names_everything(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    names = {line.split("  ")[0] for line in print_of("--list").splitlines()}
    assert names >= {*MUTANTS, *CORRECT}


def test_unknown_zoo_name_is_wrong_usage():
    assert "unicorn" in invoke("unicorn").stderr


# --- the journal ----------------------------------------------------------------------------------


def record_names(monkeypatch):
    """Return a list that takes the names of the mutants that are judged."""
    names = []

    def judge(task, **settings):
        names.append(task.name)
        return judge_mutant(task, **settings)

    monkeypatch.setattr("benchmarks.zoo.score.judge_mutant", judge)
    return names


@pytest.mark.thorough
def test_a_journal_is_resumed(tmp_path, monkeypatch):
    names, path = record_names(monkeypatch), tmp_path / "journal"
    arguments = [*FEW, "--rules", "killers", "--examples", "8"]
    first = invoke(*arguments, "--journal", path)
    assert (first.exit_code, names) == (0, ["bias-scaled", "scale-twice"])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:7])
    later = invoke("--resume", path, "--json", tmp_path / "zoo.json")
    assert names[2:] == ["scale-twice"]
    assert later.exit_code == 0
    assert later.stdout.rpartition(",")[0] == first.stdout.rpartition(",")[0]  # but for the time
    assert later.stderr == f"goes on with {path}: 1 done\n"
    assert path.read_bytes().splitlines(keepends=True)[:2] == lines[:2]
    assert json.loads((tmp_path / "zoo.json").read_text())["passed"]


def test_an_interrupted_zoo_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.zoo.score.judge_mutant", interrupt)
    path = tmp_path / "journal"
    done = run("--journal", path)
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr == f"python -m benchmarks.zoo --resume {path} goes on\n"
    assert run().exit_code == 130


def test_a_lost_row_is_judged_again(tmp_path, monkeypatch):
    names = record_names(monkeypatch)
    path = tmp_path / "journal"
    with monkeypatch.context() as patch:
        patch.setattr("benchmarks.zoo.score.check", lambda *_, **__: 1 / 0)
        done = run("--journal", path)
    assert done.exit_code == 1
    assert "NOT JUDGED: the judge raised ZeroDivisionError" in done.stdout
    assert invoke("--resume", path).exit_code == 0
    assert names == ["scale-twice"] * 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--examples", "3"), "got --rules, --examples, NAMES beside --resume"),
        (("--journal", "other"), "got --rules, --journal, NAMES beside --resume"),
    ],
)
def test_nothing_is_asked_beside_a_journal_to_resume(arguments, error, tmp_path):
    path = tmp_path / "journal"
    run("--journal", path, "--examples", "2")
    done = run("--resume", path, *arguments)
    assert done.exit_code == 2
    assert error in " ".join(done.stderr.split())


def test_a_journal_of_a_matrix_is_none_of_the_zoo(tmp_path):
    path = tmp_path / "journal"
    Journal.create("matrix", path, {}).begin()
    done = invoke("--resume", path)
    assert done.exit_code == 2
    assert "is no journal of benchmarks.zoo" in " ".join(done.stderr.split())
