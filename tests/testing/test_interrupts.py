"""Ctrl-C at a prompt: the report of what is known is printed, and the prompt is back."""

import os
import signal
import subprocess
import sys
import time

import pytest

from npattn.testing import check
from npattn.testing.targets.numpy import naive

SLOW = """\
import time
from npattn.testing.targets.numpy import naive

count = 0

def f(q, k, v):
    global count
    count += 1
    time.sleep(0.01)
    if count == 20:
        open({asked!r}, "w").close()
    return naive(q, k, v)
"""
PROMPT = """\
import signal, sys
_ = signal.signal(signal.SIGINT, signal.default_int_handler)
from npattn.testing import check
import slow
check(slow.f, framework="numpy", {arguments})
print("prompt", sys.last_value.report.interrupted)
"""


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix", reason="needs groups of processes")
@pytest.mark.parametrize("arguments", ["", "isolate=True", "processes=2"])
def test_interrupt_prints_the_report_and_returns_to_the_prompt(arguments, tmp_path):
    asked = tmp_path / "asked"
    (tmp_path / "slow.py").write_text(SLOW.format(asked=str(asked)))
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    process = subprocess.Popen([sys.executable, "-i", "-q"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": path},
                               start_new_session=True)  # fmt: skip
    process.stdin.write(PROMPT.format(arguments=arguments))
    process.stdin.flush()
    patience = time.monotonic() + 300
    while not asked.exists():
        assert time.monotonic() < patience
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all that it runs
    out, err = process.communicate(timeout=300)
    assert out == "prompt True\n"
    assert err.count("KeyboardInterrupt") == 1
    assert err.count("\nnpattn check ") == 1
    assert err.count("no verdict: interrupted") == 2  # the first line, and the last


def test_interrupt_has_the_report_without_the_frames_of_the_judge():
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        check(naive, examples=2, progress=interrupt)
    assert caught.value.__notes__ == [str(caught.value.report)]
    assert [entry.name for entry in caught.traceback][1:] == ["check"]
