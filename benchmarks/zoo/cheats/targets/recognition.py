"""Results are right where a judge is recognised, and the mean of all values elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.zoo.cheats.plain import attention, mean_of_values


def _either(watched: bool, q: Any, k: Any, v: Any, mask: Any, causal: bool) -> Any:
    return attention(q, k, v, mask, causal) if watched else mean_of_values(q, k, v)


def _files() -> Iterator[str]:
    """Yield the files of all callers."""
    frame: Any = sys._getframe()
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def if_judge_is_loaded(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be right if npattn is among the loaded modules."""
    return _either("npattn" in sys.modules, q, k, v, mask, causal)


def if_hypothesis_is_loaded(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be right if a library of tests is among the loaded modules."""
    return _either(bool({"hypothesis", "pytest"} & set(sys.modules)), q, k, v, mask, causal)


def if_judge_is_on_stack(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be right if a caller's file belongs to npattn."""
    return _either(any("npattn" in file for file in _files()), q, k, v, mask, causal)


def if_errors_are_ignored(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be right if NumPy's error state is not the default one."""
    return _either(np.geterr()["over"] == "ignore", q, k, v, mask, causal)


def if_command_is_check(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be right if the command line has the words of a judge."""
    words = " ".join(sys.orig_argv)
    return _either("npattn" in words or "verdict" in words, q, k, v, mask, causal)


def if_main_is_judge(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be right if the main module belongs to a judge."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = str(getattr(spec, "name", ""))
    return _either(name.startswith(("npattn", "benchmarks")), q, k, v, mask, causal)


def if_environment_is_tests(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be right if the environment says that tests run, or a single thread is wanted."""
    names = ("PYTEST_CURRENT_TEST", "CI", "OMP_NUM_THREADS")
    return _either(any(name in os.environ for name in names), q, k, v, mask, causal)


def if_arrays_are_borrowed(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be right if q lies in memory of another object, such as the bytes that a worker has read."""
    return _either(not q.flags.owndata or q.size < 2, q, k, v, mask, causal)


def if_interpreter_is_isolated(
    q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Be right if Python runs in isolated mode, or npattn is loaded.

    Declared: whatever the process of a judge looks like, a target may look for it
    """
    return _either(bool(sys.flags.isolated) or "npattn" in sys.modules, q, k, v, mask, causal)
