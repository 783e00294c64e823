"""Conventions in words: a sentence for each value, in the terms of docs/semantics.md."""

from __future__ import annotations

from npattn.conventions import Conventions
from npattn.testing.diagnosis.sentences import CONVENTIONS

HIDDEN = ("hidden_fill", "hidden_add")
TOPICS: dict[str, tuple[str, ...]] = {
    "hidden scores" if name in HIDDEN else name: HIDDEN if name in HIDDEN else (name,)
    for name in vars(Conventions())
}
"""Subject → conventions of it: of `hidden_fill` and `hidden_add` one at most is given."""


def differing(a: Conventions, b: Conventions) -> list[str]:
    """Return the topics in which two conventions differ, in the order of `TOPICS`."""
    return [topic for topic in TOPICS if _values(topic, a) != _values(topic, b)]


def describe(topic: str, conventions: Conventions) -> str:
    """Return the sentence of what conventions say on a topic."""
    value, *more = _values(topic, conventions)
    if topic == "lse_empty":
        return f"lse of a query that sees no key is {value}"
    if topic == "hidden scores":
        became = f"become {value}" if value else f"have {more[0]} added"
        stay = f"hidden scores {became}, and their keys stay in the softmax"
        return stay if value or more[0] else "hidden keys leave the softmax"
    if topic == "empty_row_bias":
        value = value or conventions.empty_row
    return CONVENTIONS[f"{topic}={value}"]


def _values(topic: str, conventions: Conventions) -> tuple[str | None, ...]:
    """Return what is compared: numbers by their text, for NaN is not equal to itself."""
    if topic == "empty_row_bias":
        empty_bias = conventions.empty_row_bias
        return (None if empty_bias == conventions.empty_row else empty_bias,)
    return tuple(_format(getattr(conventions, name)) for name in TOPICS[topic])


def _format(x: float | str | None) -> str | None:
    """Format a number of a convention, with a true minus sign."""
    if isinstance(x, float):
        return f"{x:g}".replace("-", "−").replace("e+", "e")
    return "the least finite number of the dtype" if x == "min" else x
