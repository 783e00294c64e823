"""Conventions in words: a sentence for each value, in the terms of docs/semantics.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npattn.conventions import Conventions

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

SENTENCES = {
    "causal=bottom_right": "the last query sees the last key: query t sees keys s ≤ t + S − T",
    "causal=top_left": "the first query sees the first key alone: query t sees keys s ≤ t",
    "causal=unless_masked": "query t sees keys s ≤ t where no mask is given, and what a mask shows "
    "where one is",
    "window=exclusive": "left counts the keys beside the query",
    "window=inclusive": "left counts the query too",
    "mask_true=attend": "True shows a key",
    "mask_true=hide": "True hides a key",
    "empty_row=zero": "a query that sees no key gives 0",
    "empty_row=nan": "a query that sees no key gives NaN",
    "empty_row=mean": "a query that sees no key gives the mean of all values",
    "empty_row_bias=zero": "a query whose keys all have a bias of −inf gives 0",
    "empty_row_bias=nan": "a query whose keys all have a bias of −inf gives NaN",
    "empty_row_bias=mean": "a query whose keys all have a bias of −inf gives the mean",
    "bias=after_scale": "the bias is added as it is",
    "bias=before_scale": "the bias is multiplied by the scale, as q·k is",
    "softcap=before_bias": "scale · q·k is capped, before the bias is added",
    "softcap=after_bias": "the scores are capped after the bias is added",
    "softcap=after_mask": "the scores are capped after the mask: hidden keys take weight",
    "kv_head=repeat": "query head h uses key/value head h // (H / K)",
    "kv_head=tile": "query head h uses key/value head h % K",
    "lse_base=e": "lse is a natural logarithm",
    "lse_base=2": "lse is a logarithm to base 2",
    "weights=before_dropout": "the weights returned are those before dropout",
    "weights=after_dropout": "the weights returned are those after dropout",
    "dropout_at_rate_0=drop": "a dropout mask beside a rate of 0 drops, without rescaling",
    "dropout_at_rate_0=ignore": "a dropout mask beside a rate of 0 does nothing",
}


def differing(a: Conventions, b: Conventions) -> list[str]:
    """Return the topics in which two conventions differ, in the order of `TOPICS`."""
    return [topic for topic in TOPICS if _values(topic, a) != _values(topic, b)]


def describe(topic: str, conventions: Conventions) -> str:
    """Return the sentence of what conventions say on a topic."""
    if topic in NUMBERS:
        return NUMBERS[topic](conventions)
    value = _values(topic, conventions)[0]
    return SENTENCES[f"{topic}={value}"]


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
    return SENTENCES[f"empty_row_bias={value}"]


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
