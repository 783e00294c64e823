"""Tests of rules in pytest: a test each, judged once a run, red with the cause and the script."""

import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import npattn
import npattn.testing.suite  # here, so that runs in this process do not load it anew
from npattn.testing.diagnosis import causes  # noqa: F401  the same
from npattn.testing.pytest_plugin import HELP
from tests.pages import block, blocks, difference
from tests.pages import run as run_python

pytest_plugins = ["pytester"]

ROOT = Path(npattn.__file__).parent.parent
PLUGIN = "npattn.testing.pytest_plugin"
KERNELS = """
import os
import numpy as np
import npattn.testing

CALLS = os.path.join(os.path.dirname(__file__), "calls")

def right(q, k, v, mask=None):
    with open(CALLS, "a") as file:
        print(os.getpid(), file=file)
    return npattn.attention(q, k, v, mask, dtype=q.dtype)

def wrong(q, k, v, mask=None):  # a query that sees no key gives NaN
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1], dtype=q.dtype)
    s = s if mask is None else np.where(mask, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v

def twice(q, k, v):
    return 2 * npattn.attention(q, k, v, dtype=q.dtype)

FEW = {"only": ("agreement-o", "empty-row", "agreement-dq"), "examples": 3}
"""
NAMES = ["structure", "agreement-o", "empty-row", "agreement-dq"]


def decorate(arguments, name="test_rule"):
    return f"""
from kernels import *
@npattn.testing.parametrize({arguments})
def {name}(rule):
    rule()
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Return a function that runs pytest on a test file, beside a module of kernels."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(kernels=KERNELS)
    pytester.syspathinsert()
    sys.modules.pop("kernels", None)

    def run_pytest(code, *options, process=False):
        pytester.makepyfile(test_it=code)
        kind = pytester.runpytest_subprocess if process else pytester.runpytest_inprocess
        # It is there already where npattn is installed, and asserts nothing.
        quiet = "ignore::pytest.PytestAssertRewriteWarning"
        return kind("-p", PLUGIN, "-p", "no:cacheprovider", "-W", quiet, "-rsxfE", *options)

    return run_pytest


def section(result, name):
    """Return the lines of a failure, up to the next one or the summary, long where CI is set."""
    text = "\n".join(result.outlines)
    return re.split(r"\n[_=]{3,} ", text.split(f" {name} ___")[1])[0].splitlines()[1:]


# --- verdicts -------------------------------------------------------------------------------------


def test_a_right_function_is_green_with_a_test_for_each_rule_and_dtype(run):
    result = run(decorate("right, dtypes=('float32', 'float64'), **FEW"), "-v")
    assert result.parseoutcomes() == {"passed": 7, "skipped": 2}
    ids = re.findall(r"test_rule\[(\S+)\] [PS]", "\n".join(result.outlines))
    assert ids == [*(f"{n}-{d}" for d in ("float32", "float64") for n in NAMES), "report"]
    result.stdout.fnmatch_lines("SKIPPED [[]2[]] test_it.py:2: no backward")


def test_a_wrong_function_is_red_with_the_cause_first(run):
    result = run(decorate("wrong, **FEW"))
    assert result.ret == 1
    assert result.parseoutcomes() == {"failed": 1, "passed": 2, "skipped": 1, "xfailed": 1}
    lines = section(result, "test_rule[empty-row-float32]")
    assert lines[0] == "a query that sees no key gives NaN"
    assert re.match(r"o\[0, .*\]: got nan, want 0, allowed", lines[1])
    assert lines[2].startswith("empty-row[float32] failed: A fully masked query")
    assert lines[5] == "  passes with conventions=npattn.Conventions(empty_row='nan')"
    assert re.match("-+ script that shows it -+", lines[6])
    assert "from kernels import wrong" in Path(lines[7]).read_text()
    assert len(lines) <= 15
    result.stdout.fnmatch_lines("FAILED *empty-row-float32] - Failed: a query that see*")
    result.stdout.fnmatch_lines("XFAIL *structure-float32* - not required: *D = 0*")


@pytest.mark.thorough
def test_no_line_shows_where_npattn_is(run):
    """Neither a traceback nor the place of a skip leads into the package."""
    suite = "class TestIt(npattn.testing.Suite):\n    implementation = wrong\n"
    suite += "    only = FEW['only']\n    examples = 3\n"
    code = decorate("wrong, **FEW") + suite
    result = run(code, "--show-capture=no", "--tb=long")
    assert result.parseoutcomes()["failed"] == 2
    text = "\n".join(result.outlines)
    assert "suite.py" not in text
    assert "Error" not in text
    places = re.findall(r"SKIPPED \[\d\] (\S+): no backward", text)
    assert places == ["test_it.py:2", "test_it.py:5"]
    result = run(code, "--tb=line", "--xfail-tb", "--show-capture=no")
    places = re.findall(r"(test_it.py:\d): Failed: a query that sees no key", result.stdout.str())
    assert places == ["test_it.py:2", "test_it.py:5"]
    result.stdout.fnmatch_lines(["*XFAILURES*", "not required: *D = 0*", "D = 0: o*: got nan*"])
    assert "suite.py" not in result.stdout.str()


def test_what_else_a_test_does_is_shown_as_it_is(run, pytester):
    code = """
from kernels import *
@npattn.testing.parametrize(right, only="agreement-o", examples=3)
def test_rule(rule):
    if rule.name == "structure":
        pytest.skip("mine")
    if rule.name == "report":
        assert rule.dtype == "none"
    rule()
    assert rule.name is None
"""
    result = run("import pytest\n" + code, "-k", "structure or report")
    assert result.parseoutcomes() == {"failed": 1, "skipped": 1, "deselected": 1}
    assert not (pytester.path / "calls").exists()  # nothing was judged for these
    result = run("import pytest\n" + code)
    result.stdout.fnmatch_lines(["*assert rule.dtype == *", "*assert rule.name is None"])
    lines = run("import pytest\n" + code, "--tb=line").outlines
    assert len([x for x in lines if re.search(r"test_it.py:(9|11): .*assert", x)]) == 2


def test_a_test_that_never_calls_its_rule_fails(run):
    """One that skips, is expected to fail or calls the rule ends as it says."""
    code = """
import pytest
from kernels import *
@npattn.testing.parametrize(right, only="empty-row", examples=3)
def test_rule(rule):
    if rule.name == "structure":
        pytest.skip("not here")
    if rule.name == "report":
        rule()
"""
    result = run(code)
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*never called its rule: call rule(), or skip the test*"])


def test_a_failing_rule_is_fifteen_lines_and_its_script_in_a_file(run, pytester):
    code = decorate("twice, only='model-sizes', examples=20, shrink=False, diagnosis=False")
    result = run(code)
    lines = section(result, "test_rule[model-sizes-float32]")
    title = next(i for i, line in enumerate(lines) if "script that shows it" in line)
    assert title < 13
    assert Path(lines[title + 1]).read_text().startswith('"""twice breaks "model-sizes".')
    result = run(code, "--npattn-artifacts", "out/deep")
    own = pytester.path / "out/deep/test_it.py-test_rule"
    names = {path.name for path in own.iterdir()}
    assert names == {"report.html", "report.json", "model-sizes-float32.py"}
    result.stdout.fnmatch_lines(["*script that shows it*", str(own / "model-sizes-float32.py")])


def test_an_expected_failure_that_passes_is_an_error(run):
    expect = "expect={'empty-row': 'divides by 0', 'agreement-o': 'why', 'agreement-q': 'where'}"
    result = run(decorate(f"wrong, {expect}, **FEW"))
    assert result.parseoutcomes() == {"failed": 2, "skipped": 1, "xfailed": 2}
    result.stdout.fnmatch_lines("XFAIL *empty-row-float32* - expected: divides by 0")
    lines = section(result, "test_rule[agreement-o-float32]")
    assert lines[0] == "expected failure agreement-o did not fail: remove it"
    lines = section(result, "test_rule[report]")
    assert lines[0].startswith("expected failure agreement-q matches no rule")
    assert any(line.startswith("FAILED: ") for line in lines)  # of the report itself


def test_what_is_xfailed_fails_with_runxfail(run):
    result = run(decorate("wrong, expect={'empty-row': 'why'}, **FEW"), "--runxfail")
    assert result.parseoutcomes() == {"failed": 2, "passed": 2, "skipped": 1}
    assert (
        section(result, "test_rule[empty-row-float32]")[1] == "a query that sees no key gives NaN"
    )


def test_the_test_of_the_whole_prints_the_report(run):
    result = run(decorate("right, **FEW"), "-rP", "-k", "report")
    assert result.parseoutcomes() == {"passed": 1, "deselected": 4}
    result.stdout.fnmatch_lines(["npattn check right *", "passed: 2 passed"])


def test_nothing_tested_is_red(run):
    code = "def refuses(q, k, v):\n    raise NotImplementedError('nothing')\n"
    result = run("from kernels import *\n" + code + decorate("refuses, **FEW"))
    assert result.parseoutcomes() == {"failed": 1, "skipped": 4}
    assert section(result, "test_rule[report]")[0] == "no verdict: nothing tested"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("right, exampels=3", "exampels is no argument * did you mean examples[?]"),
        ("right, dtypes='fp15'", "dtypes has 'fp15', must be among *"),
        ("right, only='empty-rwo'", "'empty-rwo' is not a rule; did you mean empty-row[?]"),
        ("3", "f is 3, must be a callable *"),
        ("right, expect=3", "expect is 3, must be a mapping, *"),
        ("right)\n@npattn.testing.parametrize(wrong", "test_rule is parametrized 2 times: *"),
    ],
)
def test_what_is_not_legal_is_an_error_in_one_line(run, code, line):
    result = run(decorate(code))
    assert result.ret != 0
    result.stdout.fnmatch_lines(line)
    assert "Traceback" not in "\n".join(result.outlines)


def test_a_defect_of_the_judge_fails_every_rule_with_its_traceback(run):
    """It is raised once, not once a test."""
    code = "def progress(*_):\n    raise RuntimeError('a defect')\n"
    result = run("from kernels import *\n" + code + decorate("right, progress=progress, **FEW"))
    assert result.parseoutcomes() == {"failed": 5}
    assert section(result, "test_rule[report]")[0].startswith("Traceback")
    result.stdout.fnmatch_lines("RuntimeError: a defect")


# --- a class --------------------------------------------------------------------------------------


def test_a_class_has_settings_as_attributes_and_tests_of_its_own(run):
    result = run(
        """
from kernels import *
class TestRight(npattn.testing.Suite):
    implementation = right
    only = ("agreement-o", "agreement-dq")
    examples = 3
    dtypes = ("float16",)
    name = "of its own"
    anything = 7

    def test_other(self, tmp_path):
        assert self.anything == 7

class TestWrong(TestRight):
    implementation = twice
    expect = {"agreement-o": "twice"}
"""
    )
    assert result.parseoutcomes() == {"passed": 7, "skipped": 2, "xfailed": 1}
    result.stdout.fnmatch_lines("XFAIL *TestWrong::test_rule[[]agreement-o-float16] - *: twice")


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("pass", "TestIt has no implementation: set implementation = f"),
        ("implementation = right\n    dtype = 'float16'", "TestIt.dtype is no * mean dtypes[?]"),
    ],
)
def test_a_class_that_is_not_legal_is_an_error(run, body, line):
    result = run(f"from kernels import *\nclass TestIt(npattn.testing.Suite):\n    {body}")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(line)


# --- judged once ----------------------------------------------------------------------------------


def calls(pytester):
    """Return the process ids of all calls, and forget them."""
    path = pytester.path / "calls"
    pids = path.read_text().split()
    path.unlink()
    return pids


@pytest.mark.thorough
def test_several_processes_judge_once(run, pytester):
    code = decorate("right, dtypes=('float32', 'float64'), **FEW")
    one = run(code, process=True)
    alone = calls(pytester)
    two = run(code, "-n", "2", process=True)
    together = calls(pytester)
    assert one.parseoutcomes() == two.parseoutcomes() == {"passed": 7, "skipped": 2}
    assert len(set(alone)) == len(set(together)) == 1
    assert len(alone) == len(together)
    assert run(code, "-n", "2", process=True).ret == 0  # another run judges anew
    assert len(calls(pytester)) == len(alone)


def test_two_tests_of_one_function_judge_twice(run, pytester):
    few = "right, only='agreement-o', examples=3"
    run(decorate(few))
    once = len(calls(pytester))
    result = run(decorate(few) + decorate(few, "test_again"))
    assert result.parseoutcomes() == {"passed": 6}
    assert len(calls(pytester)) == 2 * once


@pytest.mark.thorough
def test_a_function_that_ends_its_process_fails_the_tests_that_are_left(run):
    code = "def ends(q, k, v):\n    os._exit(3)\n"
    code = (
        "from kernels import *\n" + code + decorate("ends, framework='numpy', only='agreement-o'")
    )
    result = run(code, "-n", "1", process=True)
    assert result.parseoutcomes()["failed"] == 3
    result.stdout.fnmatch_lines("*worker 'gw0' crashed*")
    assert "the check was begun in this run and did not end" in result.stdout.str()
    result = run(code.replace("framework", "isolate=True, framework"), process=True)
    assert result.parseoutcomes()["failed"] == 1
    assert "crashed" in "\n".join(section(result, "test_rule[structure-float32]"))


# --- the command line -----------------------------------------------------------------------------


def settings_of(pytester):
    """Return settings and dtypes of the report that was written."""
    [path] = pytester.path.glob("out/*/report.json")
    report = json.loads(path.read_text())
    return report["settings"], {outcome["dtype"] for outcome in report["outcomes"]}


@pytest.mark.thorough
def test_options_replace_what_tests_say(run, pytester):
    expect = "expect={'agreement-o[float32]': 'there', 'agreement-o[float16]': 'here'}"
    few = "only='agreement-o', examples=50, seed=3, dtypes='float32'"
    options = ("--npattn-dtype", "float64", "--npattn-dtype", "float16", "--npattn-examples", "2")
    result = run(decorate(f"twice, {expect}, {few}"), *options, "--npattn-seed", "7",
                 "--npattn-artifacts=out")  # fmt: skip
    assert result.parseoutcomes() == {"failed": 1, "passed": 3, "xfailed": 1}
    settings, dtypes = settings_of(pytester)
    assert (settings["seed"], settings["examples"]) == (7, 2)
    assert dtypes == {"float64", "float16"}
    result.stdout.fnmatch_lines("npattn: seed 7")


@pytest.mark.thorough
def test_a_random_seed_is_printed_and_the_same_in_every_process(run, pytester):
    code = decorate("right, only='agreement-o', examples=2")
    result = run(
        code, "-n", "2", "--npattn-seed", "random", "--npattn-artifacts", "out", process=True
    )
    settings, _ = settings_of(pytester)
    result.stdout.fnmatch_lines(f"npattn: seed {settings['seed']}")
    assert settings["seed"] > 2**32  # of 64 bits


@pytest.mark.parametrize("target", ["kernels:right", "kernels.py:right", "numpy.flash"])
def test_a_target_is_judged_in_place_of_the_function(run, target):
    described = "layout='BTHD', " if target == "numpy.flash" else ""  # which a known target is not
    backward = "backward=lambda dout, q, k, v, *, out, lse: (q, k, v)"
    code = decorate(f"wrong, {described}{backward}, only=('agreement-o', 'empty-row'), examples=3")
    assert run(code).ret == 1
    assert run(code, "--npattn-target", target).ret == 0


def test_a_target_is_called_as_the_function_was(run):
    """Its axes are those of the test, which for a function of other axes is wrong."""
    turned = "def turned(q, k, v):\n    o = right(*(x.swapaxes(1, 2) for x in (q, k, v)))\n"
    turned = "from kernels import *\n" + turned + "    return o.swapaxes(1, 2)\n"
    code = turned + decorate("turned, layout='BTHD', only='agreement-o', examples=3")
    assert run(code).ret == 0
    assert run(code, "--npattn-target", "test_it:turned").ret == 0
    assert run(code, "--npattn-target", "kernels:right").ret == 1


def test_a_target_alone_is_enough_for_a_class(run):
    code = "import npattn.testing\nclass TestIt(npattn.testing.Suite):\n    only = 'agreement-o'\n"
    options = ("--npattn-target", "kernels:right", "--npattn-examples", "3")
    assert run(code, *options).parseoutcomes() == {"passed": 3}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--npattn-target", "numpy.falsh"), "*did you mean numpy.flash*"),
        (("--npattn-dtype", "fp15"), "*'fp15', must be among*"),
        (("--npattn-examples", "0"), "*examples is 0, must be *"),
    ],
)
def test_an_option_that_is_not_legal_is_an_error(run, options, line):
    result = run(decorate("right, **FEW"), *options)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(line)


def test_a_seed_that_is_no_number_is_wrong_usage(run):
    result = run(decorate("right, **FEW"), "--npattn-seed", "x")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines("*--npattn-seed: invalid seed value: 'x'")


def test_the_written_script_shows_the_failure(run, pytester):
    run(decorate("wrong, **FEW"), "--npattn-artifacts", "out")
    folder = pytester.path / "out" / "test_it.py-test_rule"
    done = subprocess.run(
        [sys.executable, folder / "empty-row-float32.py"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{pytester.path}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "WRONG o[" in done.stdout, done.stderr
    run(decorate("right, **FEW"), "--npattn-artifacts", "out")
    assert {path.name for path in folder.iterdir()} == {"report.html", "report.json"}


# --- inert, and loaded once -----------------------------------------------------------------------


@pytest.mark.thorough
def test_it_loads_nothing_and_adds_no_test_until_it_is_used(run):
    code = """
import sys
def test_nothing_is_loaded():
    loaded = {n for n in sys.modules if n.startswith("npattn.testing")}
    assert loaded == {"npattn.testing", "npattn.testing.pytest_plugin"}

def test_others_may_have_a_mark_and_an_argument_of_their_own(rule=3):
    assert rule == 3
"""
    result = run(code, "--strict-markers", process=True)
    assert result.parseoutcomes() == {"passed": 2}


@pytest.mark.thorough
def test_without_pytest_the_error_says_how_to_install_it():
    code = "import sys; sys.modules['pytest'] = None; import npattn.testing as t; t.Suite"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    line = "MissingExtraError: npattn.testing.parametrize and Suite need pytest; npattn itself"
    assert line in done.stderr


@pytest.mark.thorough
def test_it_may_be_loaded_by_every_way_at_once(run, pytester):
    """By its entry point, by -p and by a conftest.py."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    points = config["options.entry_points"]["pytest11"]
    assert [x.strip() for x in points.strip().split("=")] == [PLUGIN, PLUGIN]
    installed = pytester.mkdir("a-0.dist-info")
    (installed / "METADATA").write_text("Name: a\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[pytest11]\n{points.strip()}\n")
    pytester.makeconftest(f"pytest_plugins = ['{PLUGIN}']")
    code = decorate("right, only='agreement-o', examples=2")
    assert run(code, process=True).parseoutcomes() == {"passed": 3}
    done = pytester.runpytest_subprocess("--help")  # by its entry point and conftest.py alone
    assert [name for name in HELP if f"--npattn-{name}" not in done.stdout.str()] == []


@pytest.mark.thorough
def test_the_entry_point_alone_is_enough(run, pytester, monkeypatch):
    installed = pytester.mkdir("a-0.dist-info")
    (installed / "METADATA").write_text("Name: a\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[pytest11]\n{PLUGIN} = {PLUGIN}\n")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{pytester.path}")
    pytester.makepyfile(test_it=decorate("right, only='agreement-o', examples=2"))
    assert pytester.runpytest_subprocess().parseoutcomes() == {"passed": 3}


# --- the pages ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A folder with the files of both pages."""
    for page in ("docs/how-to/pytest.md", "docs/strategies.md"):
        for text in blocks(page, "python"):
            name = re.match(r"# (\w+\.py)\n", text)[1]
            (tmp_path / name).write_text(text)
    return tmp_path


def run_files(folder, *arguments):
    return run_python("-m", "pytest", "-p", PLUGIN, *arguments, cwd=folder)


@pytest.mark.thorough
def test_the_page_shows_what_its_tests_print(folder):
    command, shown = block("docs/how-to/pytest.md", "console", "pytest -rsx").split("\n", 1)
    printed = run_files(folder, "test_kernels.py", *command.split()[2:])
    shown, printed = (re.sub(r" in [\d.]+s.*", "", text) for text in (shown, printed))
    assert difference(shown, re.sub("={3,} ", "", printed)) is None, printed


@pytest.mark.thorough
def test_the_other_files_of_the_pages_run(folder):
    printed = run_files(folder, "test_suite.py", "test_whole.py", "test_invariant.py", "-rx", "-q")
    assert re.search(r"\b1 failed, 8 passed, \d+ skipped, 4 xfailed", printed), printed
    assert "<Report of attention: FAILED: " in printed  # of test_whole.py, in one line
    assert "XFAIL test_suite.py::TestAttention::test_rule[empty-row-float32] - expected" in printed


@pytest.mark.thorough
def test_the_workflow_of_the_page_runs_in_a_shell(folder):
    """Its steps, but for those of GitHub and the first, which installs."""
    text = block("docs/how-to/pytest.md", "yaml", "on:")
    install, test = re.findall(r"- run: (.*)", text)
    assert install == "python -m pip install pytest pytest-xdist npattn"
    [more] = re.findall(r"MORE: \${{ .* && '(.*)' \|\| '' }}", text)
    test = re.sub(r"\${{ matrix.dtype }}", "float32", test)
    test = test.replace("-m pytest", f"-m pytest -p {PLUGIN}")  # as if it were installed
    for nightly in ("", more.replace("1000", "2")):
        done = subprocess.run(
            ["bash", "-ec", f"{test} test_suite.py"],
            cwd=folder,
            env=os.environ | {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "MORE": nightly,
            },
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ("npattn: seed" in done.stdout) is bool(nightly)
        assert nightly or "4 passed, 8 skipped, 2 xfailed" in done.stdout, done.stdout
        [report] = folder.glob("rules/*/report.json")
        examples = json.loads(report.read_text())["settings"]["examples"]
        assert examples == (2 if nightly else 20)
