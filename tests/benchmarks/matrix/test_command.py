"""python -m benchmarks.matrix on the command line."""

import json

import pytest
from click.testing import CliRunner
from rich.console import Console

import benchmarks.matrix.__main__ as command
from benchmarks.matrix.progress import ProgressLines
from benchmarks.matrix.result import read_matrix
from benchmarks.matrix.run import Status
from npattn.testing.units.unit import Result, Unit
from tests.benchmarks.matrix.test_run import answer_of
from tests.testing.units.inline import Inline

TINY = ("--targets", "numpy.flash,numpy.naive", "--only", "agreement-o", "--examples", "2")


def run(*arguments):
    return CliRunner().invoke(command.matrix_command, [*map(str, arguments)])


@pytest.fixture
def inline(monkeypatch):
    """Let the command judge nothing; the executors that it made."""
    made = []

    def local(n):
        made.append(Inline(answer_of))
        return made[-1]

    monkeypatch.setattr(command, "ThreadPoolExecutor", local)
    return made


@pytest.mark.thorough
def test_two_tiny_targets_give_json_table_and_page(tmp_path):
    paths = [tmp_path / f"matrix.{kind}" for kind in ("json", "md", "html")]
    outputs = ("--json", paths[0], "--markdown", paths[1], "--html", paths[2])
    done = run(*TINY, "--dtype", "float32", "-n2", *outputs)
    assert (done.exit_code, done.stderr) == (0, "")
    matrix = read_matrix(paths[0])
    assert [run.report["passed"] for run in matrix.runs] == [True, True]
    assert paths[1].read_text("utf-8") == done.stdout
    assert [run.target for run in matrix.runs] == ["numpy.flash", "numpy.naive"]
    assert matrix.settings["examples"] == 2
    assert matrix.targets[0].versions["npattn"] == matrix.version
    assert f"| numpy.flash | {matrix.version} | float32 | 1 ✓ |" in done.stdout
    text = paths[2].read_text("utf-8")
    assert text.count("<td class=p>✓<i>") == 2
    read = run("--read", paths[0], "--html", tmp_path / "again.html")
    assert (read.exit_code, read.stdout) == (0, done.stdout)
    assert (tmp_path / "again.html").read_text("utf-8") == text


def test_nothing_is_asked_beside_a_matrix_to_read(tmp_path, inline):
    path = tmp_path / "matrix.json"
    run(*TINY, "--json", path)
    done = run("--read", path, "--journal", tmp_path / "journal", "--seed", "3")
    assert done.exit_code == 2
    assert "beside --read" in " ".join(done.stderr.split())
    assert not (tmp_path / "journal").exists()


def test_a_journal_is_resumed(tmp_path, inline):
    path = tmp_path / "journal"
    first = run(*TINY, "--seed", "11", "--journal", path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))
    later = run("--resume", path, "-n2", "--json", tmp_path / "matrix.json")
    assert later.stdout == first.stdout
    assert later.stderr == f"goes on with {path}: 1 done\n"
    assert [len(executor.done) for executor in inline] == [4, 3]
    assert read_matrix(tmp_path / "matrix.json").settings["seed"] == 11


def test_an_interrupted_matrix_tells_what_it_knows(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "ThreadPoolExecutor", lambda n: Inline(answer_of, ends_after=1))
    done = run(*TINY, "--journal", tmp_path / "journal")
    assert done.exit_code == 130
    assert done.stdout.count("not run: interrupted") == 3
    assert "--resume" in done.stderr


def test_an_interrupt_before_any_work_ends_it(monkeypatch):
    def interrupt(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_matrix", interrupt)
    assert (run(*TINY).exit_code, run(*TINY).stdout) == (130, "")


def test_a_crash_of_the_judging_fails_the_command(monkeypatch):
    crash = Inline(lambda _: Result("crashed", "gone"))
    monkeypatch.setattr(command, "ThreadPoolExecutor", lambda n: crash)
    done = run(*TINY)
    assert (done.exit_code, done.stdout.count("crashed: gone")) == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--targets", "numpy.flsh"), "did you mean numpy.flash"),
        (("--only", "agrement"), "'agrement' is not a rule"),
        (("--memory", "lots"), "--memory is 'lots'"),
        (("--json", "nowhere/matrix.json"), "the folder of nowhere/matrix.json does not exist"),
    ],
)
def test_wrong_usage_leaves_no_journal(arguments, message, tmp_path, inline):
    path = tmp_path / "journal"
    done = run(*arguments, "--journal", path)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert not path.exists()


def test_nothing_stands_beside_a_journal_to_resume(tmp_path, inline):
    path = tmp_path / "journal"
    run(*TINY, "--journal", path)
    done = run("--resume", path, "--examples", "3")
    assert done.exit_code == 2
    assert "got --examples beside --resume" in " ".join(done.stderr.split())


def test_progress_says_what_runs_and_what_is_left():
    units = tuple(Unit(target=f"t{i}", dtype="float32") for i in range(11))
    console = Console(force_terminal=True, width=60, height=20)
    with console.capture() as capture, ProgressLines(console) as progress:
        progress(Status(units, 3, 17))
    text = capture.get()
    assert "0 s  t0 float32" in text
    assert "and 3 more" in text
    assert "3 of 17 done, 11 in work, 3 to come" in text


def test_progress_is_silent_elsewhere():
    console = Console(force_terminal=False)
    with console.capture() as capture, ProgressLines(console) as progress:
        progress(Status((), 3, 17))
    assert capture.get() == ""
    assert json.dumps(progress.began) == "{}"
