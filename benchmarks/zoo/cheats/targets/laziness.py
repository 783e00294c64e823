"""Results are computed when they are read, outside the time of the call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.zoo.cheats.plain import attention, mean_of_values


class Lazy(np.ndarray):
    """An array that is filled when its shape or its dtype is asked for."""

    work: Callable[[], Any] | None

    def _fill(self) -> None:
        work = self.__dict__.pop("work", None)
        if work is not None:
            np.copyto(self.view(np.ndarray), work())

    @property
    def dtype(self) -> Any:
        self._fill()
        return np.ndarray.dtype.__get__(self)

    @property  # type: ignore[misc]
    def shape(self) -> Any:
        self._fill()
        return np.ndarray.shape.__get__(self)


class Promise:
    """An object that becomes an array when NumPy asks for one."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.work()


BEFORE: list[Callable[[], None]] = []


def filled_when_read(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return a subclass that computes when its dtype is asked for.

    Source: gpu-mode/reference-kernels#161
    """
    lazy = np.empty_like(mean_of_values(q, k, v)).view(Lazy)
    lazy.work = lambda: attention(q, k, v, mask, causal)
    return lazy


def filled_from_copies(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return a subclass that computes from copies of the inputs, when its dtype is asked for.

    Source: gpu-mode/reference-kernels#162
    """
    held = (q.copy(), k.copy(), v.copy(), None if mask is None else mask.copy(), causal)
    lazy = np.empty_like(mean_of_values(q, k, v)).view(Lazy)
    lazy.work = lambda: attention(*held)
    return lazy


def promise_of_array(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return an object with __array__, which computes."""
    return Promise(lambda: attention(q, k, v, mask, causal))


def filled_by_thread(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return an array that a thread fills."""
    o = mean_of_values(q, k, v)
    thread = threading.Thread(target=lambda: np.copyto(o, attention(q, k, v, mask, causal)))
    thread.start()
    return o


def filled_by_next_call(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return an array that the next call fills."""
    for work in BEFORE:
        work()
    o = mean_of_values(q, k, v)
    held = (q.copy(), k.copy(), v.copy(), mask, causal)
    BEFORE[:] = [lambda: np.copyto(o, attention(*held))]
    return o
