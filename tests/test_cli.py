"""The command line: what it takes, what it prints, and its exit code."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import pytest
from click.testing import CliRunner

import npattn
from npattn import testing
from npattn.cli import cli
from npattn.cli.versions import find_version
from npattn.profiles import PROFILES
from npattn.testing.levels import LEVELS
from npattn.testing.rules import PROPERTIES, RULES
from npattn.testing.runner import rounds, search
from npattn.testing.runner.untrusted import name_everything
from npattn.testing.settings import GROUPS, CommandSettings, options
from npattn.testing.targets import TARGETS
from npattn.testing.targets.numpy import naive
from tests.pages import ROOT

FAST = ("--examples", "3")
SMALL = ("--sizes", "T=3,5", "--sizes", "S=4,7")  # a failure is explained in half the time
FINDINGS = Path(npattn.__file__).parent / "testing" / "rules" / "findings.json"
MINE = """
from npattn.testing.targets.numpy import flash, flash_backward

def good(q, k, v, *, return_lse=False):
    return flash(q, k, v, return_lse=return_lse)

def good_backward(dout, q, k, v, *, out, lse, dlse=None):
    return flash_backward(dout, q, k, v, out=out, lse=lse, dlse=dlse)

def wrong_backward(dout, q, k, v, *, out, lse, dlse=None):
    grads = good_backward(dout, q, k, v, out=out, lse=lse, dlse=dlse)
    return grads["k"], grads["k"], 2 * grads["v"]

def doubled(q, k, v):
    return 2 * flash(q, k, v)

def swapped(q, k, v):
    if q.ndim != 4:
        raise ValueError("rank 4 only")
    return flash(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)

def refuses(q: "np.ndarray", k, v):
    raise ValueError("never")
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with an attention of one's own in it, as the working directory."""
    name = f"cli_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


def run(*words, code=0):
    result = CliRunner().invoke(cli, [str(word) for word in words], terminal_width=200)
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def check(*words, code=0):
    """Run `npattn check` in this process, which takes half the time of a worker."""
    return run("check", *words, *FAST, "--in-process", code=code)


def told(output):
    """Output without line breaks, which depend on the width of the terminal."""
    return " ".join(output.replace("│", " ").replace("╭", " ").split())


# --- what is judged -------------------------------------------------------------------------------

OUTPUTS = [
    ((), "agreement-o", 0, ["npattn check numpy.flash", "1 passed"]),
    (("numpy.flash",), "agreement-d", 0, ["5 passed"]),  # a known target comes with its backward
    (
        ("numpy.naive",),
        "empty-row",
        1,
        ["empty-row[float32] failed", "\nFAILED: ", "fails  Recipe("],
    ),
    (("--only", "hidden-nan"), "views", 0, ["4 passed"]),
    (("--verbose",), "nan-query", 0, ["  nan-query  10  passed"]),
    ((), "nan-query", 0, ["1 passed"]),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("words", "rule", "code", "texts"), OUTPUTS)
def test_output(words, rule, code, texts):
    output = run("check", *words, *FAST, "--only", rule, code=code)
    assert [text for text in texts if text not in output] == []
    assert ("  nan-query  " in output) == ("--verbose" in words)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_torch_target_is_judged_under_its_conventions():
    pytest.importorskip("torch")
    words = ("torch.sdpa-math", "--dtype", "float64", "--only", "agreement-o")
    output = check(*words)
    assert "causal='top_left'" in output
    assert "passed" in output


@pytest.mark.thorough
@pytest.mark.parametrize("spec", ["{}:good", "{}.py:good"])
@pytest.mark.broad
def test_function_is_loaded_by_module_or_path(mine, spec):
    assert "passed: 1 passed" in run("check", spec.format(mine), "--only", "agreement-o", *FAST)
    other = spec.format(mine).replace("good", "doubled")
    assert "FAILED" in check(other, "--only", "agreement-o", code=1)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_backward_names_a_function_too(mine):
    good = check(f"{mine}:good", "--backward", f"{mine}:good_backward", "--only", "agreement-d")
    assert "3 passed" in good
    words = (f"{mine}.py:good", "--backward", f"{mine}.py:wrong_backward", "--only", "agreement-dv")
    assert "agreement-dv[float32] failed" in check(*words, code=1)


@pytest.mark.thorough
def test_dtype_may_be_given_twice():
    words = ("--dtype", "float32", "--dtype", "bfloat16", "--only", "agreement-o", "--verbose")
    output = check(*words)
    assert "2 passed" in output
    header = next(line for line in output.splitlines() if line.split()[:1] == ["rule"])
    assert header.split() == ["rule", "§", "float32", "bfloat16"]


@pytest.mark.thorough
def test_sizes_seed_examples_rounding_and_strict_are_passed_on(tmp_path):
    path = tmp_path / "report.json"
    words = ("--sizes", "D=8,16", "--sizes", "T=3", "--seed", "11", "--rounding", "eager")
    check(*words, "--strict", "--only", "agreement-o", "--json", path)
    settings = json.loads(path.read_text())["settings"]
    assert settings["seed"] == 11
    assert settings["examples"] == 3
    assert settings["rounding"] == "eager"


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_sizes_restrict_failing_problems(mine):
    words = ("--sizes", "D=8", "--sizes", "T=4", "--sizes", "S=6")
    output = check(f"{mine}:doubled", *words, "--only", "agreement-o", code=1)
    assert "T=4, S=6, D=8" in output


@pytest.mark.thorough
def test_layout_is_passed_on(mine):
    words = (f"{mine}:swapped", "--only", "agreement-o")
    assert "passed" in check(*words, "--layout", "BTHD")
    assert "FAILED" in check(*words, code=1)


@pytest.mark.thorough
def test_json_and_html_have_the_report(tmp_path):
    paths = tmp_path / "report.json", tmp_path / "report.html"
    words = ("numpy.naive", *SMALL, "--only", "empty-row")
    check(*words, "--json", paths[0], "--html", paths[1], code=1)
    report = json.loads(paths[0].read_text())
    assert report["target"] == "numpy.naive"
    assert report["passed"] is False
    (outcome,) = (o for o in report["outcomes"] if o["rule"] == "empty-row")
    assert outcome["status"] == "failed"
    assert "import numpy as np" in outcome["script"]
    page = paths[1].read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "empty-row" in page


@pytest.mark.thorough
def test_conventions_are_changed_one_by_one(tmp_path):
    words = ("--convention", "causal=top_left", "--convention", "hidden_fill=-1e9")
    path = tmp_path / "report.json"
    check("numpy.flash", *words, "--only", "shape-dtype", "--json", path)
    settings = json.loads(path.read_text())["settings"]
    assert settings["conventions"] == {"causal": "top_left", "hidden_fill": -1e9}


def test_device_is_passed_on(mine):
    message = told(check(f"{mine}:good", "--device", "cuda", code=2))
    assert "device is 'cuda', must be None for NumPy arrays" in message


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_required_levels_are_passed_on():
    words = ("numpy.naive", "--only", "hidden-nan-v", "--only", "repeatable")
    by_name = check(*words, code=1)  # what `only` names is required
    assert "non-finite: 1 of 1 failed\n" in by_name
    few = ("--sizes", "D=3", "--sizes", "S=3", "--sizes", "T=3")
    words = ("numpy.naive", *few, "--require", "conduct")
    output = check(*words)
    assert re.search(r"non-finite: \d of 6 failed \(not required\): hidden-nan-v", output)
    assert "FAILED" in check(*words, "-x", "--require", "all", code=1)


@pytest.mark.thorough
def test_script_of_the_first_failure_is_written(mine, tmp_path):
    path = tmp_path / "shows.py"
    check(f"{mine}:doubled", "--only", "agreement-o", "--script", path, code=1)
    assert 'breaks "agreement-o"' in path.read_text("utf-8")


def test_files_are_written_where_the_command_began(mine, tmp_path):
    source = MINE.replace("    raise ValueError", "    os.chdir('/')\n    raise ValueError")
    (tmp_path / f"{mine}.py").write_text("import os\n" + source)
    run("check", f"{mine}:refuses", "--json", "report.json", *FAST, code=2)
    assert (tmp_path / "report.json").exists()


@pytest.mark.parametrize("flag", ["--json", "--html", "--script"])
def test_folder_of_a_file_is_looked_at_first(tmp_path, flag):
    output = told(check("numpy.flash", flag, tmp_path / "nowhere" / "file", code=2))
    assert "does not exist; create it first" in output


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.parametrize(
    "variables",
    [
        {"COLUMNS": "0", "PYTHONIOENCODING": "ascii"},
        pytest.param({"COLUMNS": "5"}, marks=pytest.mark.nightly),
    ],
)
def test_report_is_printed_to_any_stream(variables):
    words = [
        sys.executable,
        "-m",
        "npattn",
        "check",
        *FAST,
        "numpy.naive",
        *SMALL,
        "--only",
        "empty-row",
    ]
    environment = {**os.environ, **variables}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "empty-row[float32] failed: " in done.stdout
    assert "FAILED: " in done.stdout


# --- nothing tested, wrong usage ------------------------------------------------------------------


def test_exit_code_is_2_if_nothing_was_accepted(mine):
    output = check(f"{mine}:refuses", code=2)
    assert "no verdict: nothing tested" in output
    assert "even the plainest problem is refused (raised ValueError: never (" in output


def test_exit_code_is_2_if_no_rule_applied(mine):
    assert "no verdict: nothing tested" in check(f"{mine}:good", "--only", "agreement-dq", code=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["numpy.flasch"], "did you mean numpy.flash?"),
        (["nowhere:f"], "there is no module 'nowhere'"),
        (["nowhere.py:f"], "there is no file 'nowhere.py'"),
        (["json:nothing"], "has no callable 'nothing', it has"),
        (["numpy.flash", "--only", "nothing"], "'nothing' is not a rule, must be one of"),
        (
            ["numpy.flash", "--only", "agrement"],
            "'agrement' is not a rule; did you mean agreement?",
        ),
        (["numpy.flash", "--sizes", "D"], "must look like D=64,128"),
        (["numpy.flash", "--sizes", "D=a"], "must look like D=64,128"),
        (["numpy.flash", "--sizes", "Q=3"], "must be a letter of B H K T S D E"),
        (["numpy.flash", "--sizes", "D=-3"], "must be a letter of B H K T S D E"),
        (["numpy.flash", "--dtype", "float31"], "'float31', must be among"),
        (["numpy.flash", "--dtype", "bf15"], "'bf15', must be among"),
        (["numpy.flash", "--like", "torch.spda"], "did you mean torch.sdpa"),
        (["numpy.flash", "--rename", "cap"], "must look like THEIRS=OURS"),
        (
            ["numpy.flash", "--features", "mask,causl"],
            "causl is not a feature, must be one of mask",
        ),
        (["numpy.flash", "--rename", "cap=softcap"], "must be parameters of flash (q, k, v,"),
        (["numpy.flash", "--layout", "BDHT"], "'BDHT' is not one of"),
        (["numpy.flash", "--examples", "0"], "0 is not in the range x>=1"),
        (["numpy.flash", "--rounding", "exact"], "'exact' is not one of"),
        (["numpy.flash", "--backward", "nowhere:g"], "there is no module 'nowhere'"),
        (["numpy.flash", "--budget", "soon"], "must look like 60s, 10m or 2h"),
        (["numpy.flash", "--budget", "0s"], "must look like 60s, 10m or 2h"),
        (["numpy.flash", "--resume", "nowhere"], "does not exist"),
        (["numpy.flash", "--expect", "nowhere.toml"], "does not exist"),
        (["numpy.flash", "--fast"], "No such option"),
        (["numpy.flash", "--convention", "causal"], "must be NAME=VALUE"),
        (["numpy.flash", "--convention", "shape=round"], "must be NAME=VALUE"),
        (["numpy.flash", "--convention", "hidden_fill=low"], "must have a number"),
        (["numpy.flash", "--convention", "causal=diagonal"], "causal is 'diagonal'"),
    ],
)
def test_wrong_usage_is_explained_with_exit_code_2(words, message):
    assert message in told(run("check", *words, code=2))


def test_arguments_of_python_are_named_by_their_flags(tmp_path):
    path = tmp_path / "own_flags.py"
    path.write_text("def f(q, k, v, speed): pass\ndef g(q, k, v):\n    raise ValueError('g=1')\n")
    output = told(run("check", f"{path}:g", "--in-process", code=2))
    assert "with --framework numpy or --framework torch or --framework jax" in output
    assert "ValueError: g=1" in output  # no argument of a flag
    assert "say what it is with --rename theirs=ours" in told(run("check", f"{path}:f", code=2))


@pytest.mark.thorough
def test_sizes_of_a_letter_are_given_once():
    message = told(run("check", "numpy.flash", "--sizes", "D=8", "--sizes", "D=16", code=2))
    assert "--sizes has D twice: put all in one, as in D=64,128" in message


@pytest.mark.parametrize("command", [("check", "--in-process"), ("variant", "linear")])
def test_a_module_that_raises_when_it_is_imported_is_no_verdict(command, tmp_path):
    path = tmp_path / "raising_at_once.py"
    path.write_text("import math\n\nmath.sqrt(-1)\n")
    output = told(run(*command, f"{path}:f", code=2))
    assert "cannot be imported: ValueError: math domain error (raising_at_once.py:3)" in output


@pytest.mark.parametrize(("name", "examples"), [("check", 200), ("variant", 100), ("diff", 24)])
def test_help_says_the_default_of_the_command(name, examples):
    assert f"[default: {examples}]" in told(run(name, "--help"))


@pytest.mark.parametrize("name", ["diff", "fingerprint", "variant", "list"])
def test_an_interrupt_is_no_verdict(name, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(click.Command, "invoke", stop)
    words = {"diff": ("a", "b"), "fingerprint": ("a",), "variant": ("linear", "a:b"), "list": ()}
    assert told(run(name, *words[name], code=130)) == "interrupted"


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file without space")


@pytest.mark.thorough
@FULL
@pytest.mark.parametrize(("target", "code"), [("numpy.flash", 2), ("numpy.naive", 1)])
@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_report_that_cannot_be_written_is_printed(target, code, option):
    rule = "agreement-o" if code == 2 else "empty-row"
    output = check(target, *SMALL, "--only", rule, option, "/dev/full", code=code)
    assert (": 1 passed" if code == 2 else ": 1 failed") in output
    assert "/dev/full was not written: No space left on device" in output


# --- expected failures ----------------------------------------------------------------------------


def expecting(tmp_path, text):
    path = tmp_path / "expected.toml"
    path.write_text(text)
    return ("--expect", path)


NAIVE = ("numpy.naive", *SMALL, "--only", "empty-row", "--only", "nan-query")
ZERO = '"structure" = "0 / 0 where D = 0"\n'


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [(), ("--in-process",)])
def test_a_check_is_resumed_from_its_journal_alone(mine, tmp_path, flags):
    asked = (f"{mine}:good", "--only", "one-key", "--only", "agreement-o", *FAST, *flags)
    printed = run("check", *asked, "--journal", "steps")
    steps = (tmp_path / "steps").read_text().splitlines()
    answered = next(i for i, line in enumerate(steps) if "answer" in json.loads(line))
    (tmp_path / "cut").write_text("\n".join(steps[: answered + 1]) + "\n")
    for name, begun in (("steps", "2 rules begun"), ("cut", "1 rules begun")):
        resumed = run("check", "--resume", name, "--json", "report.json")
        assert resumed == f"goes on with {name}: {begun}\n" + printed
        assert json.loads((tmp_path / "report.json").read_text())["passed"]


def test_what_a_journal_has_is_not_said_again(mine):
    run("check", f"{mine}:good", "--only", "one-key", *FAST, "--in-process", "--journal", "steps")
    message = run("check", f"{mine}:good", "--seed", "3", "--resume", "steps", code=2)
    assert "got --seed, TARGET beside --resume" in told(message)
    message = run("check", f"{mine}:good", "--journal", "steps", code=2)
    assert "exists: continue it" in told(message)


@pytest.mark.thorough
def test_a_journal_begun_in_python_is_resumed_there(tmp_path):
    testing.check(naive, only=["one-key"], examples=2, journal=tmp_path / "steps")
    message = run("check", "--resume", tmp_path / "steps", code=2)
    assert "was begun in Python" in told(message)


def test_a_budget_that_is_too_small_does_not_pass(mine, monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count().__next__)  # a second later at each look
    for module in (sys.modules[testing.check.__module__], rounds, search):
        monkeypatch.setattr(module, "time", clock)
    words = ("check", f"{mine}:good", "--budget", "1s", "--in-process", "--only", "views")
    assert "no verdict: incomplete: 1 rule" in told(run(*words, code=2))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["empty-row[float32]", "empty-row"])
@pytest.mark.broad
def test_expected_failure_passes(tmp_path, name):
    output = check(*NAIVE, *expecting(tmp_path, f'{ZERO}"{name}" = "it has no guard"'), code=0)
    assert "expected: empty-row[float32]: it has no guard" in output
    assert "FAILED" not in output
    assert "2 failed (expected)" in output  # the report says what it found all the same


STALE = {
    "nan-query[float32]": "expected failure nan-query[float32] did not fail: remove it",
    "empty-rows": "expected failure empty-rows matches no rule that was checked: remove it",
}


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.parametrize("name", STALE)
def test_expected_failure_that_does_not_happen_is_stale(tmp_path, name):
    text = f'{ZERO}"empty-row" = "it has no guard"\n"{name}" = "it is old"'
    assert STALE[name] in check(*NAIVE, *expecting(tmp_path, text), code=1)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_unexpected_failure_fails(tmp_path):
    words = ("numpy.naive", *SMALL, "--only", "empty-row")
    output = check(*words, *expecting(tmp_path, ""), code=1)
    assert "expected" not in output.split("FAILED")[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"empty-row" = ""', "has empty-row without a reason"),
        ('"empty-row" = "  "', "has empty-row without a reason"),
        ('"empty-row" = 3', "has empty-row without a reason"),
        ('[empty-row]\nreason = "x"', "has empty-row without a reason"),
        ("empty-row: no guard", "is not TOML in UTF-8"),
        ("empty-row: no guard", 'write "rule[dtype]" = "reason"'),
    ],
)
def test_expected_failure_without_reason_is_an_error(tmp_path, text, message):
    assert message in told(check(*NAIVE, *expecting(tmp_path, text), code=2))


# --- list, version, start -------------------------------------------------------------------------


LISTS = {
    "": {*TARGETS, "profiles,"},
    "targets": TARGETS,
    "profiles": PROFILES,
    "rules": {*PROPERTIES, *LEVELS, "double-backward"},
    "installed": {"numpy.flash", "numpy.naive"},
}


@pytest.mark.parametrize("what", LISTS)
def test_list_names_everything_within_80_columns(what, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    output = run("list", *what.split())
    assert set(LISTS[what]) <= set(re.split(r"[\s:]+", output))
    assert "…" not in output
    lines = [line for line in output.splitlines() if not line.startswith("  lacks: ")]  # to copy
    assert max(map(len, lines)) <= 80


def test_list_names_the_missing_extra_of_a_target(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("COLUMNS", "200")
    assert "pip install 'npattn[torch]'" in told(run("list"))


def test_help_names_the_commands_and_the_exit_codes():
    assert {"check", "list", "explain"} <= set(run("--help").split())
    assert "Exit code 0: passed; 1: failed; 2:" in told(run("check", "--help"))


def test_help_of_check_is_grouped_and_fits_two_screens():
    text = CliRunner().invoke(cli, ["check", "--help"], terminal_width=80).output
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 100
    places = [text.index(f"\n{group}:\n") for group in GROUPS]
    assert places == sorted(places)
    assert text.index("npattn check mykernels:attention --backward") < places[0]
    flags = {x for _, one in options(CommandSettings).values() for x in one.flags}
    assert flags <= set(re.findall(r"(?<![\w-])-[\w-]+", text))
    assert "npattn list profiles" in told(text)


# --- explain --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [*RULES, "structure", "robustness", "sweep", "long"])
def test_every_rule_is_explained(rule):
    output = told(run("explain", rule))
    assert output.startswith(f"{rule} (")
    for title in ("demands", "why", "broken by", "real bugs"):
        assert len(output.partition(f" {title} ")[2]) > 8, title
    issue = r"[\w.-]+/[\w.-]+#\d+"
    known = re.findall(issue, RULES[rule].check.__doc__) if rule in RULES else []
    known += [one["title"] for one in json.loads(FINDINGS.read_text("utf-8")).get(rule, ())]
    said = output.partition(" real bugs ")[2]
    assert [x for x in known[:6] if x not in said] == []
    assert ("none known in the wild" in said) == (not known)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("values", "a level of rules"),
        ("train-mode", "npattn check TARGET --module"),
        ("mask", "a mask of any form hides keys"),
    ],
)
def test_levels_and_rules_of_modules_are_explained(name, words):
    assert words in run("explain", name)


def test_what_a_green_report_does_not_say_is_explained_offline():
    """Every row of the table of docs/green.md, without links."""
    output = told(run("explain", "green"))
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/green.md").read_text(), re.M)[1:]
    assert len(rows) >= 10
    assert all(name in output for name in rows)
    assert "found in some draws only; of 48" in output
    assert "](" not in output


def test_explain_of_a_module_rule_has_the_rules_that_begin_so():
    heads = [line.partition("  (")[0] for line in run("explain", "mask").splitlines()]
    assert {"mask", "mask-as-bias"} <= set(heads)


def test_a_beginning_explains_several_rules():
    output = run("explain", "hidden-nan")
    assert [line.split()[0] for line in output.splitlines() if line[:1].strip()] == [
        "hidden-nan-k", "hidden-nan-v", "hidden-nan-kv"
    ]  # fmt: skip
    text = told(run("explain", "agrement-q", code=2))
    assert "the nearest names are agreement-dq, agreement-o, agreement-dv (npattn list" in text


def test_explain_says_what_a_cause_means():
    text = told(run("explain", "unsteady"))
    words = "two calls on the same problem"
    assert text.startswith(f"unsteady (a cause: report.causes) means {words}")


def test_a_bug_is_explained_with_its_page():
    output = told(run("explain", "offset-bias"))
    assert "microsoft/onnxruntime#8549 on GitHub" in output
    assert "PyTorch 2.13.0: A row whose whole bias is −1e9 gives gradients" in output
    assert "(docs/reports/torch-offset-gradient.md)" in output


def test_versions_are_what_a_report_of_a_bug_needs():
    first, *others = run("--version").splitlines()
    assert first == f"npattn {npattn.__version__}"
    said = dict(line.split(" ", 1) for line in others)
    assert said["NumPy"].startswith(np.__version__)
    assert {"Python", "SciPy", "Hypothesis", "torch", "jax", "BLAS", "machine"} <= said.keys()


def test_a_package_that_is_not_installed_has_no_version():
    assert find_version("npattn-absent") == ""


def fingerprint(*words, code):
    result = CliRunner().invoke(cli, ["fingerprint", *words])
    assert result.exit_code == code, result.output
    return result.output


def python(code_or_module, *words):
    return subprocess.run([sys.executable, *code_or_module, *words], capture_output=True, text=True,
                          timeout=60, check=False, env=os.environ | {"COLUMNS": "200"})  # fmt: skip


@pytest.mark.thorough
def test_python_m_npattn():
    done = python(["-m", "npattn"], "list")
    assert done.returncode == 0, done.stderr
    assert "numpy.flash" in done.stdout
    wrong = python(["-m", "npattn"], "check", "nothing")
    assert wrong.returncode == 2
    assert "Usage: npattn check" in wrong.stderr


@pytest.mark.thorough
def test_torch_targets_name_the_missing_extra():
    block = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: "
    block += "None if n == 'torch' else f(n, *a); from npattn.__main__ import main; main()"
    done = python(["-c", block], "check", "torch.sdpa")
    assert done.returncode == 2
    assert "torch.sdpa needs torch" in done.stderr
    assert "pip install 'npattn[torch]'" in done.stderr


@pytest.mark.nightly  # tests/testing/runner/test_schedule.py has the same in Python
def test_number_of_processes_does_not_change_the_report(mine):
    words = ("check", f"{mine}.py:doubled", "--only", "agreement-o", "--only", "views", *FAST)
    assert run(*words, "-n", 2, code=1) == run(*words, code=1)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_target_loaded_by_module_is_judged_in_processes(mine):
    words = ("check", f"{mine}:good", "--backward", f"{mine}:good_backward", *FAST, "--verbose")
    assert "agreement-dq" in run(*words, "--only", "agreement-d", "--processes", 2)


DIES = """
import os
import numpy as np

def f(q, k, v, mask=None, causal=False):
    if mask is not None:
        os._exit(3)
    q, k, v = (x.astype(float) for x in (q, k, v))
    if q.shape[-3:-2] != k.shape[-3:-2]:
        raise ValueError("as many heads")
    s = q @ np.swapaxes(k, -1, -2) / max(q.shape[-1], 1) ** 0.5
    s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -1e9) if causal else s
    p = np.exp(s - s.max(-1, keepdims=True, initial=-1e300))
    return (p / p.sum(-1, keepdims=True) @ v).astype(np.float32)
"""


@pytest.mark.thorough
def test_fingerprint_of_what_crashes(tmp_path):
    (tmp_path / "dies.py").write_text(DIES)
    output = fingerprint(f"{tmp_path}/dies.py:f", code=1)
    assert 'Conventions(causal="top_left")' in output
    (crashed,) = (line for line in output.splitlines() if "mask_true" in line)
    assert crashed.endswith(": crashed")
    (how,) = (line for line in output.splitlines() if line.startswith("crashed"))
    assert "exit code 3" in how


@pytest.mark.thorough
def test_fingerprint_of_what_crashes_in_a_probe_alone(tmp_path):
    """The option is taken where T = S; the crash costs the conventions of its probe."""
    ends = "    if causal and s.shape[-2] != s.shape[-1]:\n        os._exit(3)\n    s = np.where"
    source = DIES.replace("    s = np.where", ends).replace("mask=None, ", "")
    source = source.replace("    if mask is not None:\n        os._exit(3)\n", "")
    (tmp_path / "dies.py").write_text(source)
    output = fingerprint(f"{tmp_path}/dies.py:f", code=1)
    assert "causal, empty_row: crashed" in output
    assert "causal: crashed: its process ended with exit code 3" in output


@pytest.mark.thorough
def test_fingerprint_is_the_same_in_a_worker():
    words = ("numpy.naive", "--dtype", "float64")
    assert fingerprint(*words, code=0) == fingerprint(*words, "--in-process", code=0)


def test_fingerprint_of_what_it_cannot_take(tmp_path):
    assert "--memory need a worker" in fingerprint("--in-process", "--memory", "1G", code=2)
    (tmp_path / "sums.py").write_text("def f(q, k, v):\n    return q + k + v\n")
    assert "in no layout" in fingerprint(f"{tmp_path}/sums.py:f", code=2)


def test_untrusted_code_must_have_every_option_that_it_names():
    implementation = testing.Implementation(
        lambda q, k, v, mask=None, bias=None: q, framework="numpy"
    )
    assert name_everything(implementation) == ("bias", "mask", "dq", "dk", "dv", "dbias")
