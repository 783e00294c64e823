"""A process of a worker, and what it started, are gone when its connection is closed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from npattn.testing.worker import connection
from npattn.testing.worker.connection import Connection

LEAVES = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(300)"
STARTS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LEAVES!r}])"


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the system does not tell")
def test_close_waits_for_what_it_kills(monkeypatch):
    """A process that is killed runs until it is scheduled again, here 0.2 s later."""
    kill = os.kill
    late = []

    def kill_late(pid, number):
        late.append(threading.Timer(0.2, suppressed, [pid, number]))
        late[-1].start()

    def suppressed(pid, number):
        with contextlib.suppress(ProcessLookupError):  # gone by an earlier one
            kill(pid, number)

    started = Connection([sys.executable, "-c", STARTS], None, None)
    with os.fdopen(os.dup(started.process.stdout.fileno())) as output:
        pid = int(output.readline())
    monkeypatch.setattr(connection.os, "kill", kill_late)
    started.close()
    for timer in late:
        timer.cancel()
    assert late
    assert pid not in connection._running()
    assert started.process.pid not in connection._running()


def test_a_process_that_cannot_be_killed_is_waited_for_a_while(monkeypatch):
    kill = os.kill
    monkeypatch.setattr(connection, "END_SECONDS", 0.1)
    monkeypatch.setattr(connection.os, "kill", lambda pid, number: None)
    monkeypatch.setattr(connection.os, "killpg", lambda pid, number: None)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as process:
        connection._end_family(process.pid, [process.pid])
        assert process.poll() is None
        kill(process.pid, signal.SIGKILL)
