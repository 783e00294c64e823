"""The scripts of docs/findings.md print what the page says, without npattn."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "findings.md"
SECTIONS = re.findall(r"^## (.*?) (\d+\.\d+),(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
SCRIPT = re.compile(r"^### (.*?)\n.*?^```python\n(.*?)^```\n```text\n(.*?)^```", re.M | re.S)
FINDINGS = [
    (system, number, *found) for system, number, text in SECTIONS for found in SCRIPT.findall(text)
]
SLOW = pytest.mark.nightly  # compiling takes long
PACKAGES = {
    "PyTorch": "torch",
    "JAX": "jax",
    "ONNX": "onnx",
    "ONNX Runtime": "onnxruntime",
    "Keras": "keras",
    "Transformers": "transformers",
}


def test_there_are_findings_and_each_has_a_script():
    assert len(FINDINGS) == PAGE.read_text().count("\n### ") >= 4
    assert {system for system, *_ in FINDINGS} == set(PACKAGES)


EACH_FINDING = pytest.mark.parametrize(
    ("system", "number", "script", "printed"),
    [
        pytest.param(
            system, number, script, printed, marks=SLOW if "torch.compile" in script else ()
        )
        for system, number, _, script, printed in FINDINGS
    ],
    ids=[f"{system}: {title}" for system, _, title, *_ in FINDINGS],
)


def vector_widths():
    """The values of ATEN_CPU_CAPABILITY that this processor can run."""
    path = Path("/proc/cpuinfo")
    flags = set(path.read_text().split()) if path.exists() else set()
    needs = {"default": set(), "avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw"}}
    return [name for name, needed in needs.items() if needed <= flags]


def run_script(system, number, script, **environment):
    """Return what a script prints; skip it where its package or version is not installed."""
    assert "npattn" not in script
    for package in PACKAGES.values():
        imports = re.search(rf"^(import|from) {package}\b", script, re.M)
        if (imports or package == PACKAGES[system]) and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if not version(PACKAGES[system]).startswith(f"{number}."):
        pytest.skip(f"the page speaks of {system} {number}")
    if "torch.compile" in script and which("c++") is None:
        pytest.skip("compiling takes a C++ compiler")
    command = [sys.executable, "-c", script]
    env = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


@EACH_FINDING
def test_a_finding_is_real(system, number, script, printed):
    assert run_script(system, number, script) == printed


@pytest.mark.nightly
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("width", vector_widths())
@EACH_FINDING
def test_findings_hold_for_every_vector_width(system, number, script, printed, width, threads):
    if find_spec("torch") is None or not re.search(r"^(import|from) torch\b", script, re.M):
        pytest.skip("PyTorch alone dispatches by ATEN_CPU_CAPABILITY")
    if "torch.compile" in script and width == "default":
        pytest.skip("torch.compile writes vector code that this width does not compile")
    environment = {"ATEN_CPU_CAPABILITY": width, "OMP_NUM_THREADS": threads}
    assert run_script(system, number, script, **environment) == printed
