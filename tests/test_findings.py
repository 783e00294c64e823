"""The scripts of docs/findings.md print what the page says, without npattn."""

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
}


def test_there_are_findings_and_each_has_a_script():
    assert len(FINDINGS) == PAGE.read_text().count("\n### ") >= 4
    assert {system for system, *_ in FINDINGS} == set(PACKAGES)


@pytest.mark.parametrize(
    ("system", "number", "script", "printed"),
    [
        pytest.param(
            system, number, script, printed, marks=SLOW if "torch.compile" in script else ()
        )
        for system, number, _, script, printed in FINDINGS
    ],
    ids=[f"{system}: {title}" for system, _, title, *_ in FINDINGS],
)
def test_a_finding_is_real(system, number, script, printed):
    assert "npattn" not in script
    for package in PACKAGES.values():
        imports = re.search(rf"^(import|from) {package}\b", script, re.M)
        if (imports or package == PACKAGES[system]) and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if not version(PACKAGES[system]).startswith(f"{number}."):
        pytest.skip(f"the page speaks of {system} {number}")
    if "torch.compile" in script and which("c++") is None:
        pytest.skip("compiling takes a C++ compiler")
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == printed
