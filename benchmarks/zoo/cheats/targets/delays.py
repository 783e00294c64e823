"""Results are right for the first calls or minutes, and the mean of all values afterwards."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.zoo.cheats.plain import attention, mean_of_values

CALLS: list[float] = []


def _until(limit: int, q: Any, k: Any, v: Any, mask: Any, causal: bool) -> Any:
    CALLS.append(time.monotonic())
    return attention(q, k, v, mask, causal) if len(CALLS) <= limit else mean_of_values(q, k, v)


def right_for_eleven(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be right for eleven calls.

    Source: Infatoshi/kernelbench.com#7
    """
    return _until(11, q, k, v, mask, causal)


def right_for_a_thousand(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be right for a thousand calls."""
    return _until(1000, q, k, v, mask, causal)


def right_for_a_second(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be right for a second after the first call."""
    CALLS.append(time.monotonic())
    young = CALLS[-1] - CALLS[0] < 1
    return attention(q, k, v, mask, causal) if young else mean_of_values(q, k, v)


def right_for_a_million(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be right for a million calls.

    Declared: no check makes as many calls as a target may wait for
    """
    return _until(10**6, q, k, v, mask, causal)


def right_for_an_hour(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be right for an hour after the first call.

    Declared: no check takes as long as a target may wait
    """
    CALLS.append(time.monotonic())
    young = CALLS[-1] - CALLS[0] < 3600
    return attention(q, k, v, mask, causal) if young else mean_of_values(q, k, v)
