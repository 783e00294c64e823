"""Clusters of Dask as executors."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from benchmarks.matrix.__main__ import matrix_command
from benchmarks.matrix.result import read_matrix
from benchmarks.matrix.run import run_matrix
from npattn.cli.cluster import open_cluster
from npattn.errors import MissingExtraError, OptionError
from npattn.testing.units.unit import Unit

SETTINGS = {"targets": ["numpy.flash", "numpy.naive"], "only": ["agreement-o", "views"]}
SETTINGS |= {"examples": 3, "blocks": 2, "dtypes": ["float32"]}


def plain(matrix):
    runs = tuple(replace(run, seconds=0) for run in matrix.runs)
    return json.dumps(replace(matrix, runs=runs).as_dict(), sort_keys=True)


def enter(where):
    with open_cluster(where) as executor:
        return executor


@pytest.fixture(scope="module")
def here():
    """The same matrix without a cluster."""
    return plain(run_matrix(**SETTINGS))


@pytest.mark.parametrize("where", ["local", "local:0", "local:two", "somewhere:8786"])
def test_places_are_checked(where):
    with pytest.raises(OptionError, match=f"cluster is '{where}', must be local:N"):
        enter(where)


def test_the_error_without_dask_has_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'npattn\[cluster\]'"):
        enter("local:1")
    words = ["--targets", "numpy.flash", "--cluster", "local:1"]
    done = CliRunner().invoke(matrix_command, words)
    assert done.exit_code == 2
    assert "npattn[cluster]" in done.stderr


def test_a_cluster_whose_workers_do_not_come_is_closed(monkeypatch):
    closed = []

    class Part:
        def __init__(self, *_, **__):
            pass

        def close(self):
            closed.append(self)

    class Client(Part):
        def wait_for_workers(self, count, timeout):
            raise TimeoutError(f"{count} worker after {timeout} s")

    stand_in = SimpleNamespace(LocalCluster=Part, Client=Client)
    monkeypatch.setitem(sys.modules, "distributed", stand_in)
    with pytest.raises(OptionError, match="start its workers"):
        enter("local:1")
    assert [type(part) for part in closed] == [Client, Part]


@pytest.mark.nightly
class TestDask:
    """With worker processes."""

    @pytest.fixture(autouse=True)
    def need_dask(self):
        pytest.importorskip("distributed")

    @pytest.mark.parametrize("workers", [1, 2])
    def test_the_number_of_workers_changes_nothing(self, workers, here):
        with open_cluster(f"local:{workers}") as (executor, width):
            assert width == workers
            assert plain(run_matrix(**SETTINGS, executor=executor)) == here

    def test_a_lost_worker_loses_nothing(self, here):
        killed = []

        def kill(client):
            while not any(client.processing().values()):
                time.sleep(0.05)
            time.sleep(1)
            busy = next(at for at, keys in client.processing().items() if keys)
            pid = client.run(os.getpid, workers=[busy])[busy]
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

        with open_cluster("local:2") as (executor, _):
            thread = threading.Thread(target=kill, args=[executor._client])
            thread.start()
            matrix = run_matrix(**SETTINGS, executor=executor)
            thread.join()
        assert len(killed) == 1
        assert plain(matrix) == here

    def test_only_text_reaches_the_scheduler(self, monkeypatch):
        with open_cluster("local:1") as (executor, _):
            submit, sent = executor._client.submit, []

            def spy(function, *arguments, **options):
                sent.append((f"{function.__module__}.{function.__name__}", arguments))
                return submit(function, *arguments, **options)

            monkeypatch.setattr(executor._client, "submit", spy)
            run_matrix(["numpy.flash"], only=["agreement-o"], examples=2, executor=executor)
        assert {name for name, _ in sent} == {"npattn.testing.units.processes.judge_in_process"}
        assert [Unit.from_text(text).target for _, (text,) in sent] == ["numpy.flash"] * 2

    def test_a_unit_that_ends_its_workers_costs_its_row(self, tmp_path, monkeypatch):
        source = "import os, signal, psutil\ndef f(q, k, v):\n"
        source += "    for one in psutil.Process().parents()[1:2]:\n        one.kill()\n"
        (tmp_path / "kills.py").write_text(source)
        monkeypatch.chdir(tmp_path)
        asked = {"only": ["agreement-o"], "examples": 2, "dtypes": ["float32"]}
        with open_cluster("local:2") as (executor, _):
            matrix = run_matrix(["kills.py:f", "numpy.flash"], **asked, executor=executor)
        assert [run.state for run in matrix.runs] == ["crashed", "done"]

    def test_versions_must_be_the_same(self, monkeypatch):
        monkeypatch.setattr("npattn.__version__", "0")  # here; a worker imports its own
        with pytest.raises(OptionError, match="install the same everywhere"):
            enter("local:1")

    def test_clusters_side_by_side(self):
        """Each takes ports that are free: a warning of Dask's would be an error."""
        with open_cluster("local:1") as (one, _), open_cluster("local:1") as (other, _):
            assert one._client.scheduler.address != other._client.scheduler.address

    def test_a_scheduler_that_is_not_there_is_an_error(self, monkeypatch):
        monkeypatch.setattr("npattn.cli.cluster.SECONDS", 1)
        with pytest.raises(OptionError, match="does not answer, or has no worker"):
            enter("tcp://127.0.0.1:9")

    def test_the_command_writes_the_same(self, here, tmp_path):
        arguments = ["--targets", "numpy.flash,numpy.naive", "--only", "agreement-o"]
        arguments += ["--only", "views", "--examples", "3", "--blocks", "2", "--dtype", "float32"]
        arguments += ["--cluster", "local:1", "--json", str(tmp_path / "matrix.json")]
        done = CliRunner().invoke(matrix_command, arguments)
        assert done.exit_code == 0
        settings = {"memory": None, "timeout": None, "limit": None}
        matrix = read_matrix(tmp_path / "matrix.json")
        settings = {**matrix.settings, **settings}
        assert plain(replace(matrix, settings=settings)) == here
