"""The scripts of docs/findings.md print what the page says, without npattn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

PAGE = Path(__file__).parent.parent / "docs" / "findings.md"
FINDINGS = re.findall(
    r"### (.*?)\n.*?```python\n(.*?)```\n```text\n(.*?)```", PAGE.read_text(), re.S
)


def test_there_are_findings_and_each_has_a_script():
    assert len(FINDINGS) == PAGE.read_text().count("\n### ") >= 4


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the page speaks of PyTorch 2.13"
)
@pytest.mark.parametrize(
    ("script", "printed"), [f[1:] for f in FINDINGS], ids=[f[0] for f in FINDINGS]
)
def test_a_finding_is_real(script, printed):
    assert "npattn" not in script
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == printed
