"""The commands for kernels without a GPU pass, and the kernels agree with npattn: docs/how-to."""

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import pytest

from npattn.testing import check
from tests.pages import ROOT

pytestmark = pytest.mark.unmeasured  # other tests run these lines

COMMANDS = dict(
    re.findall(
        r"^<!-- run: (\w+) -->\n```bash\npip install [^\n]*\n(.*?)^```",
        "".join(page.read_text() for page in (ROOT / "docs" / "how-to").glob("*.md")),
        re.M | re.S,
    )
)
NEEDS = {"triton": "triton", "pallas": "jax", "numba": "numba", "opencl": "pyopencl"}


def test_every_way_has_a_command():
    assert set(COMMANDS) == set(NEEDS)


@pytest.mark.nightly
@pytest.mark.parametrize("way", NEEDS)
def test_command_of_the_page_passes(way):
    if find_spec(NEEDS[way]) is None:
        pytest.skip(f"{NEEDS[way]} is not installed")
    words = shlex.split(COMMANDS[way].replace("\\\n", ""))
    variables = [word for word in words if re.match(r"[A-Z_]+=", word)]
    command = ["env", *variables, sys.executable, "-m", *words[len(variables) :]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("variable", ["TRITON_INTERPRET", "NUMBA_ENABLE_CUDASIM"])
@pytest.mark.parametrize("isolate", [False, True])
def test_interpreted_kernels_are_not_called_from_two_threads(monkeypatch, variable, isolate):
    from npattn.testing.targets.numpy import naive

    monkeypatch.setenv(variable, "1")
    report = check(naive, only=["two-threads"], examples=1, isolate=isolate)
    (outcome,) = (o for o in report.outcomes if o.rule == "two-threads")
    assert (outcome.status, outcome.message) == (
        "not applicable",
        f"with {variable} kernels run one at a time",
    )
    monkeypatch.setenv(variable, "0")
    report = check(naive, only=["two-threads"], examples=1, isolate=isolate)
    assert [o.status for o in report.outcomes if o.rule == "two-threads"] == ["passed"]
