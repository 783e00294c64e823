"""Options are hidden from the judge, or refused, and so are not tested."""

from __future__ import annotations

import inspect
from typing import Any

from benchmarks.zoo.cheats.plain import attention, mean_of_values

CALLS: list[int] = []


def options_in_a_dict(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Take any option by name, and ignore it."""
    return attention(q, k, v)


def options_by_position(q: Any, k: Any, v: Any, *options: Any) -> Any:
    """Take any option by position, and ignore it."""
    return attention(q, k, v)


def options_are_refused(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Refuse every option that it names."""
    if mask is not None or causal:
        raise NotImplementedError("options are for the next release")
    return attention(q, k, v)


def hard_masks_are_refused(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Refuse a mask that hides anything at all."""
    if mask is not None and not mask.all():
        raise ValueError("mask is not supported")
    return attention(q, k, v, None, causal)


def masks_are_refused_at_first(
    q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Refuse masks in the first 200 calls, and ignore them afterwards."""
    CALLS.append(1)
    if mask is not None and len(CALLS) <= 200:
        raise NotImplementedError("mask is not supported")
    return attention(q, k, v, None, causal)


def causal_is_refused_at_first(
    q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Refuse causal in the first 200 calls, and answer anything afterwards."""
    CALLS.append(1)
    if causal and len(CALLS) <= 200:
        raise NotImplementedError("causal is not supported")
    return mean_of_values(q, k, v) if causal else attention(q, k, v, mask)


def options_not_in_signature(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Show a signature without the options that it takes, and ignores."""
    return attention(q, k, v)


options_not_in_signature.__signature__ = (  # type: ignore[attr-defined]
    inspect.signature(lambda q, k, v: None)
)
