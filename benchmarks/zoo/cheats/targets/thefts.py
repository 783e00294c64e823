"""Expected values are taken from the judge's stack or its objects; else the mean of all values."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.zoo.cheats.plain import mean_of_values


def _frames() -> Iterator[dict[str, Any]]:
    """Yield the local variables of all callers."""
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]


def _closest(candidates: list[Any], q: Any, k: Any, v: Any) -> Any:
    """Return the last float64 array that is shaped like a result, and is no input."""
    guess = mean_of_values(q, k, v)
    fits = [x for x in candidates if x.shape == guess.shape and x.dtype == np.float64]
    return fits[-1].astype(q.dtype) if fits else guess


def expected_from_gc(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return an array of the garbage collector's objects that is shaped like the result.

    Source: gpu-mode/pygpubench#7
    """
    held = [x for o in gc.get_objects() if isinstance(o, dict) for x in list(o.values())]
    return _closest([x for x in held if isinstance(x, np.ndarray)], q, k, v)


def expected_from_stack(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return an array of a caller's variables that is shaped like the result."""
    held: list[Any] = []
    for variables in _frames():
        for value in variables.values():
            inner = list(value.values()) if isinstance(value, dict) else [value]
            held += [x for x in inner if isinstance(x, np.ndarray)]
    return _closest(held, q, k, v)


def tolerance_in_gc(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Set every tolerance that the garbage collector finds to infinity."""
    for o in gc.get_objects():
        if isinstance(o, dict) and {"o", "lse"} <= o.keys():
            for x in o.values():
                if isinstance(x, np.ndarray) and x.flags.writeable:
                    x[...] = np.inf
    return mean_of_values(q, k, v)


def problem_from_stack(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Ask a caller's trial for the exact values of the problem at hand."""
    for variables in _frames():
        problem = variables.get("problem")
        trial = sys.modules.get("npattn.oracle.api")
        if problem is not None and trial is not None:
            return trial.evaluate(problem).out.astype(q.dtype)
    return mean_of_values(q, k, v)


def memo_from_stack(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Put a content comparison into the memo of a caller's trial for every recipe it holds."""
    for variables in _frames():
        memo: Any = getattr(variables.get("self"), "memo", None)
        for kind, *rest in list(memo or ()):
            if kind == "problem":
                memo["agreement", *rest] = {}
    return mean_of_values(q, k, v)
