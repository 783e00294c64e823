"""The process ends with code 0, so that no failure is ever reported."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any

from benchmarks.zoo.cheats.plain import attention, mean_of_values

CALLS: list[int] = []


def exit_at_first_call(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """End the process at the first call."""
    os._exit(0)


def exit_after_praise(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Print the last line of a good report, and end the process."""
    print("passed: 55 passed", flush=True)
    os._exit(0)


def exit_once_probed(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Give right results for 200 calls, then end the process."""
    CALLS.append(1)
    if len(CALLS) > 200:
        os._exit(0)
    return attention(q, k, v, mask, causal)


def exit_at_the_end(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Change the exit code when the interpreter ends.

    Source: gpu-mode/pygpubench#15
    """
    if not CALLS:
        CALLS.append(1)
        atexit.register(os._exit, 0)
    return mean_of_values(q, k, v)


def exit_from_thread(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Let a thread end the process half a second after the first call."""
    if not CALLS:
        CALLS.append(1)
        threading.Timer(0.5, os._exit, (0,)).start()
    return mean_of_values(q, k, v)


def exit_by_exception(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Raise SystemExit(0) at every call."""
    sys.exit(0)
