"""The zoo in units: the same rows, wherever they are judged."""

import json
import os
import signal
from dataclasses import replace
from functools import partial

import pytest
from click.testing import CliRunner

from npattn.cli import cli
from npattn.matrix.cluster import Cluster
from npattn.matrix.journal import MatrixJournal
from npattn.matrix.processes import Local
from npattn.matrix.unit import Result, Unit, do_unit
from npattn.matrix.zoo import run_in_units
from npattn.zoo.correct import CORRECT
from npattn.zoo.score import judge_mutant, zoo
from tests.matrix.inline import Inline

FEW = {"only": ["scale-twice", "bias-scaled"], "rules": "killers", "examples": 8}


def score(executor=None, **settings):
    run = None if executor is None else partial(run_in_units, lambda: executor)
    return zoo(**FEW | settings, run=run)


def rows(score):
    return [replace(row, seconds=0) for row in score.rows]


@pytest.fixture(scope="module")
def here():
    return rows(score())


class Reversed(Inline):
    """The last unit is done first."""

    def wait(self):
        self.units.reverse()
        return super().wait()


@pytest.mark.thorough
def test_units_give_the_same_rows_in_any_order(here):
    assert rows(score(Reversed())) == here
    assert [row.name for row in here] == ["bias-scaled", "scale-twice"]
    assert all(row.right for row in here)


@pytest.mark.thorough
def test_a_unit_in_a_process_gives_the_same_row(here):
    assert rows(score(Local(1), only=["scale-twice"])) == here[1:]


def test_correct_implementations_are_judged_first():
    units = []

    def judge(unit):
        units.append((unit.kind, unit.target, unit.rules))
        return Result("crashed", "signal 9")

    whole = score(Inline(judge), only=["scale-twice", "tf32"])
    assert units == [("correct", "tf32", None), ("mutant", "scale-twice", ("agreement-o",))]
    assert [row.name for row in whole.rows] == ["scale-twice", "tf32"]
    assert [row.lost for row in whole.rows] == ["crashed: signal 9"] * 2
    assert not whole.passed


def test_what_a_correct_implementation_needs_may_lack_elsewhere(monkeypatch):
    monkeypatch.setitem(CORRECT, "tf32", replace(CORRECT["tf32"], needs="no_such_package"))
    result = do_unit(Unit(kind="correct", target="tf32"))
    assert result.state == "not run"
    assert result.why == "tf32 needs no_such_package, which is not here"


def run(*arguments):
    return CliRunner().invoke(cli, ["zoo", "scale-twice", "--rules", "killers", *arguments])


def test_the_command_asks_the_cluster(monkeypatch):
    places = []

    def cluster(where):
        places.append(where)
        return Inline()

    monkeypatch.setattr("npattn.matrix.zoo.Cluster", cluster)
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


# --- the journal ----------------------------------------------------------------------------------


def record_names(monkeypatch):
    """Return a list that takes the names of the mutants that are judged."""
    names = []

    def judge(task, **settings):
        names.append(task.name)
        return judge_mutant(task, **settings)

    monkeypatch.setattr("npattn.zoo.score.judge_mutant", judge)
    return names


@pytest.mark.thorough
def test_a_journal_is_resumed(tmp_path, monkeypatch):
    names, path = record_names(monkeypatch), tmp_path / "journal"
    arguments = ["zoo", *FEW["only"], "--rules", "killers", "--examples", "8"]
    first = CliRunner().invoke(cli, [*arguments, "--journal", path])
    assert (first.exit_code, names) == (0, ["bias-scaled", "scale-twice"])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:7])
    later = CliRunner().invoke(cli, ["zoo", "--resume", path, "--json", tmp_path / "zoo.json"])
    assert names[2:] == ["scale-twice"]
    assert later.exit_code == 0
    assert later.stdout.rpartition(",")[0] == first.stdout.rpartition(",")[0]  # but for the time
    assert later.stderr == f"goes on with {path}: 1 done\n"
    assert path.read_bytes().splitlines(keepends=True)[:2] == lines[:2]
    assert json.loads((tmp_path / "zoo.json").read_text())["passed"]


def test_an_interrupted_zoo_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("npattn.zoo.score.judge_mutant", interrupt)
    path = tmp_path / "journal"
    done = run("--journal", path)
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr == f"npattn zoo --resume {path} goes on\n"
    assert run().exit_code == 130


def test_a_lost_row_is_judged_again(tmp_path, monkeypatch):
    names = record_names(monkeypatch)
    path = tmp_path / "journal"
    with monkeypatch.context() as patch:
        patch.setattr("npattn.zoo.score.check", lambda *_, **__: 1 / 0)
        done = run("--journal", path)
    assert done.exit_code == 1
    assert "NOT JUDGED: the judge raised ZeroDivisionError" in done.stdout
    assert CliRunner().invoke(cli, ["zoo", "--resume", path]).exit_code == 0
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
    MatrixJournal.create(path, {}).begin()
    done = CliRunner().invoke(cli, ["zoo", "--resume", path])
    assert done.exit_code == 2
    assert "is no journal of npattn zoo" in " ".join(done.stderr.split())


@pytest.mark.nightly
class TestDask:
    """With worker processes."""

    @pytest.fixture(autouse=True)
    def need_dask(self):
        pytest.importorskip("distributed")

    @pytest.mark.parametrize("workers", [1, 2])
    def test_the_number_of_workers_changes_nothing(self, workers, here):
        assert rows(score(Cluster(f"local:{workers}"))) == here

    def test_a_lost_worker_loses_nothing(self):
        """One of two is killed at the first row, in the middle of another."""
        several = {"only": ["scale-"]}
        cluster = Cluster("local:2")
        killed = []

        def kill_one(name, done, total):
            busy = [at for at, keys in cluster.client.processing().items() if keys]
            if not killed and busy:
                pid = cluster.client.run(os.getpid, workers=busy[:1])[busy[0]]
                os.kill(pid, signal.SIGKILL)
                killed.append((pid, done, total))

        whole = score(cluster, **several, progress=kill_one)
        ((_, done, total),) = killed
        assert done < total - 1
        assert rows(whole) == rows(score(**several))
