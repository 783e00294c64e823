"""Conventions in words: a sentence for each value, in the terms of docs/semantics.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npattn.conventions import Conventions
from npattn.testing.diagnosis.sentences import CONVENTIONS

TOPICS: dict[str, tuple[str, ...]] = {
    "causal": ("causal",),
    "window": ("window",),
    "mask_true": ("mask_true",),
    "hidden scores": ("hidden_fill", "hidden_add"),
    "empty_row": ("empty_row",),
    "empty_row_bias": ("empty_row_bias",),
    "bias": ("bias",),
    "softcap": ("softcap",),
    "kv_head": ("kv_head",),
    "lse_base": ("lse_base",),
    "lse_empty": ("lse_empty",),
    "weights": ("weights",),
    "dropout_at_rate_0": ("dropout_at_rate_0",),
}
"""Subject → conventions of it: of `hidden_fill` and `hidden_add` one at most is given."""


def differing(a: Conventions, b: Conventions) -> list[str]:
    """Return the topics in which two conventions differ, in the order of `TOPICS`."""
    return [topic for topic in TOPICS if _values(topic, a) != _values(topic, b)]


def describe(topic: str, conventions: Conventions) -> str:
    """Return the sentence of what conventions say on a topic."""
    if topic in NUMBERS:
        return NUMBERS[topic](conventions)
    value = _values(topic, conventions)[0]
    return CONVENTIONS[f"{topic}={value}"]


def _values(topic: str, conventions: Conventions) -> tuple[Any, ...]:
    """Return what is compared: numbers by their text, for NaN is not equal to itself."""
    if topic == "empty_row_bias":
        empty_bias = conventions.empty_row_bias
        return (None if empty_bias in (None, conventions.empty_row) else empty_bias,)
    values = (getattr(conventions, name) for name in TOPICS[topic])
    return tuple(_format(x) if isinstance(x, float) else x for x in values)


def _describe_hidden(conventions: Conventions) -> str:
    fill, more = conventions.hidden_fill, conventions.hidden_add
    if fill is not None:
        return f"hidden scores become {_format(fill)}, and their keys stay in the softmax"
    if more is not None:
        return f"hidden scores have {_format(more)} added, and their keys stay in the softmax"
    return "hidden keys leave the softmax"


def _describe_empty_bias(conventions: Conventions) -> str:
    value = conventions.empty_row_bias or conventions.empty_row
    return CONVENTIONS[f"empty_row_bias={value}"]


NUMBERS: dict[str, Callable[[Conventions], str]] = {
    "hidden scores": _describe_hidden,
    "lse_empty": lambda c: f"lse of a query that sees no key is {_format(c.lse_empty)}",
    "empty_row_bias": _describe_empty_bias,
}


def _format(x: float | str) -> str:
    """Format a number of a convention, with a true minus sign."""
    if x == "min":
        return "the least finite number of the dtype"
    return f"{x:g}".replace("-", "−").replace("e+", "e")
