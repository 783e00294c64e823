"""The entries of docs/findings.md have one form and a proof; their scripts print what it says."""

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

from npattn.testing.levels import LEVELS
from npattn.testing.rules import PROPERTIES
from npattn.testing.targets.environments import make_environment
from tests.pages import load

pytestmark = pytest.mark.unmeasured  # other tests run these lines

ROOT = Path(__file__).parent.parent
LONGEST, WIDEST = 12, 110  # of a script, in lines and in columns
SLOW = pytest.mark.nightly  # compiling takes long
DISTRIBUTIONS = {
    "Flax": "flax",
    "Haiku": "dm-haiku",
    "JAX": "jax",
    "Keras": "keras",
    "MLX": "mlx",
    "ONNX": "onnx",
    "ONNX Runtime": "onnxruntime",
    "OpenVINO": "openvino",
    "PaddlePaddle": "paddlepaddle",
    "PyTorch": "torch",
    "Transformers": "transformers",
    "fla-core": "fla-core",
    "neuralnetworknumpy": "neuralnetworknumpy",
    "numpy-ml": "numpy-ml",
    "sageattention": "sageattention",
    "tinygrad": "tinygrad",
    "xllamacpp": "xllamacpp",
}
MODULES = {  # where it is not called as its distribution
    "fla-core": "fla",
    "Haiku": "haiku",
    "PaddlePaddle": "paddle",
    "numpy-ml": "numpy_ml",
}
BESIDE = {  # what scripts import beside their system, and what Keras needs for it
    "tensorflow": ("tensorflow-cpu",),
    "openvino": ("openvino", "scipy"),
}
NEEDS = {  # what a system imports and does not ask for
    "Haiku": ("jax",),
    "Keras": ("scipy", "jax"),
}
APART = {  # in environments of their own, with what else they need
    "OpenVINO": (),
    "PaddlePaddle": ("setuptools",),
    "fla-core": ("torch", "triton", "packaging"),
    "neuralnetworknumpy": ("regex",),
    "numpy-ml": (),
    "sageattention": ("torch", "triton"),
    "tinygrad": (),
    "xllamacpp": (),
}


reports = load("reports")
FINDINGS = reports.findings()
EACH_FINDING = pytest.mark.parametrize(
    "finding", FINDINGS, ids=[f"{finding.system}: {finding.title}" for finding in FINDINGS]
)
EACH_SCRIPT = pytest.mark.parametrize(
    "finding",
    [pytest.param(f, marks=SLOW if "torch.compile" in f.script else ()) for f in FINDINGS],
    ids=[f"{finding.system}: {finding.title}" for finding in FINDINGS],
)


# --- the page and the reports ---------------------------------------------------------------------


def test_findings_are_all_in_the_form():
    titles = re.findall(r"^### (.*)$", reports.PAGE.read_text(), re.M)
    assert [finding.title for finding in FINDINGS] == titles
    assert len(titles) >= 30
    assert {finding.system for finding in FINDINGS} == set(DISTRIBUTIONS) == set(reports.TRACKERS)


@pytest.mark.parametrize("part", ["| kind |", "| bug |", "```python proof", "```text"])
def test_an_entry_without_a_part_of_the_form_is_no_finding(part, monkeypatch, tmp_path):
    page = tmp_path / "findings.md"
    page.write_text(reports.PAGE.read_text().replace(part, "", 1))
    monkeypatch.setattr(reports, "PAGE", page)
    assert len(reports.findings()) < len(FINDINGS)


@EACH_FINDING
def test_a_finding_names_its_versions_rules_and_levels(finding):
    assert finding.kind in ("bug", "limit")
    assert f"{finding.system} {finding.version}." in finding.versions
    rules = re.findall(r"`([\w-]+)`", finding.rules)
    levels = finding.level.split(", ")
    assert rules
    assert ", ".join(f"`{rule}`" for rule in rules) == finding.rules
    assert set(levels) <= set(LEVELS)
    probed = [rule for rule in rules if rule == "structure" or rule.startswith("option-")]
    if not probed:  # of those the level depends on the size
        assert set(levels) == {PROPERTIES[rule].level for rule in rules}


@EACH_FINDING
def test_the_script_of_a_finding_is_short_and_shows_what_must_be(finding):
    assert finding.script.count("\n") <= LONGEST
    assert max(map(len, finding.script.splitlines())) <= WIDEST
    assert "npattn" not in finding.script
    assert "must be" in finding.script
    assert any(shows_defect(line) for line in finding.printed.splitlines())


def shows_defect(line):
    """True where what was printed is not what must be."""
    got, must_be, want = line.partition(" must be ")
    return must_be and not any(got.endswith(one) for one in want.split(" or "))


def test_a_line_without_a_defect_shows_none():
    assert shows_defect("FLASH nan must be 1.0")
    assert not shows_defect("MATH 1.0 must be 1.0")
    assert not shows_defect("a 2.0 must be 1.0 or 2.0")


@EACH_FINDING
def test_the_proof_of_a_finding_gives_what_must_be(finding):
    assert re.search(r"\b(forward|backward|mp)\b", finding.proof)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(reports.preamble() + finding.proof, {})
    assert f"must be {printed.getvalue()}" in finding.printed


@EACH_FINDING
def test_each_bug_among_the_findings_has_a_report(finding):
    assert bool(finding.slug) == (finding.kind == "bug")
    assert finding.slug or finding.report == "–"
    if finding.slug:
        report = (reports.REPORTS / f"{finding.slug}.md").read_text()
        assert f"```python\n{finding.script}```" in report
        assert finding.printed in report
        assert finding.versions in report
        assert "npattn" not in report  # it stands alone


def test_reports_of_findings_are_current():
    assert reports.stale() == [], "run: python docs/reports.py --write"


# --- the scripts ----------------------------------------------------------------------------------


def vector_widths():
    """The values of ATEN_CPU_CAPABILITY that this processor can run."""
    path = Path("/proc/cpuinfo")
    flags = set(path.read_text().split()) if path.exists() else set()
    needs = {"default": set(), "avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw"}}
    return [name for name, needed in needs.items() if needed <= flags]


def imports(script, package):
    """True where a script imports a package, in a process of its own too."""
    return re.search(rf"\b(import|from)\b[^\n]*\b{package}\b", script)


TOGETHER = """
import contextlib, io, json, sys, traceback
outputs = []
for script in json.load(sys.stdin):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(script, {"__name__": "__main__"})
        except Exception:
            traceback.print_exc(file=sys.stdout)
    outputs.append(printed.getvalue())
sys.stdout.write(json.dumps(outputs))
"""
"""A process that imports a framework once, and runs its scripts, each with names of its own."""


@functools.cache
def outputs(scripts, **environment):
    """Return what scripts print that one process runs."""
    done = subprocess.run([sys.executable, "-c", TOGETHER], input=json.dumps(scripts),
                          capture_output=True, text=True, check=True,
                          env=os.environ | environment)  # fmt: skip
    return dict(zip(scripts, json.loads(done.stdout), strict=True))


def companions(finding):
    """Scripts that share its process: those of its system with the same backend, if it has one."""
    if "torch.compile" in finding.script:
        return (finding.script,)
    backend = finding.script.partition("KERAS_BACKEND")[2][:20]
    return tuple(
        other.script
        for other in FINDINGS
        if other.system == finding.system
        and backend == other.script.partition("KERAS_BACKEND")[2][:20]
        and "torch.compile" not in other.script
        and lacks(other) == lacks(finding)
    )


def lacks(finding):
    """Return why a script cannot run here, or an empty string."""
    for system, distribution in DISTRIBUTIONS.items():
        module = MODULES.get(system, distribution)
        if (imports(finding.script, module) or system == finding.system) and not find_spec(module):
            return f"{module} is not installed"
    for module in beside(finding):
        if not find_spec(module):
            return f"{module} is not installed"
    if not has_version(finding):
        return f"the page speaks of {finding.system} {finding.version}"
    if "torch.compile" in finding.script and which("c++") is None:
        return "compiling takes a C++ compiler"
    return ""


def beside(finding):
    """Return the modules that a script imports beside its system."""
    own = DISTRIBUTIONS[finding.system]
    return [module for module in BESIDE if imports(finding.script, module) and module != own]


def has_version(finding):
    """Return True if the version that the page speaks of is installed."""
    try:
        return version(DISTRIBUTIONS[finding.system]).startswith(f"{finding.version}.")
    except PackageNotFoundError:
        return False


def run_script(finding, **environment):
    """Return what a script prints; skip it where its package or version is not installed."""
    envs = os.environ.get("NPATTN_ENVS")  # of .ci/nightly
    others = [package for module in beside(finding) for package in BESIDE[module]]
    apart = finding.system in APART or others or not has_version(finding)
    if apart and envs is not None:
        torch = ["torch"] if imports(finding.script, "torch") else []
        own = {"MLX": "mlx[cpu]"}.get(finding.system, DISTRIBUTIONS[finding.system])
        needs = [*NEEDS.get(finding.system, ()), *APART.get(finding.system, ())]
        needs += [
            distribution
            for system, distribution in DISTRIBUTIONS.items()
            if system != finding.system
            and imports(finding.script, MODULES.get(system, distribution))
            and distribution not in ("torch", "mlx")
        ]
        more = dict.fromkeys([*needs, *others, *torch])
        packages = [f"{own}=={finding.version}.*", *more]
        command = [str(make_environment(packages, Path(envs))), "-c", finding.script]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if reason := lacks(finding):
        pytest.skip(reason)
    return outputs(companions(finding), **environment)[finding.script]


def test_a_script_of_a_finding_that_raises_says_so():
    raises, prints = "name = 3\n1 / 0", "print('name' in globals())"
    both = outputs((raises, prints))
    assert "ZeroDivisionError" in both[raises]
    assert both[prints] == "False\n"  # names are not shared


@pytest.mark.thorough
@EACH_SCRIPT
def test_a_finding_is_real(finding):
    assert run_script(finding) == finding.printed


@pytest.mark.nightly
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("width", vector_widths())
@EACH_SCRIPT
def test_findings_hold_for_every_vector_width(finding, width, threads):
    if find_spec("torch") is None or not imports(finding.script, "torch"):
        pytest.skip("PyTorch alone dispatches by ATEN_CPU_CAPABILITY")
    if "torch.compile" in finding.script and width == "default":
        pytest.skip("torch.compile writes vector code that this width does not compile")
    environment = {"ATEN_CPU_CAPABILITY": width, "OMP_NUM_THREADS": threads}
    assert run_script(finding, **environment) == finding.printed
