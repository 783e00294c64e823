"""Meanings that depend on other parameters: packed arrays come first, new keys beside a cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from npattn.options import PACKED, PLACES, STORED

__all__ = ["HEADS_FIRST", "read_beside_places", "read_leading"]

HEADS_FIRST = "heads before slots"
PAIRS = (("new keys", "new values"), ("cosines", "sines"))
"""Meanings that come together, or not at all."""


def read_beside_places(meanings: Mapping[str, str]) -> dict[str, str]:
    """Return meanings without those that only functions on sequences have, where it is none.

    A mask is then no packed one. New keys need lengths of a cache, and a rotary table new keys.
    """
    has = {x.removesuffix(" of any number") for x in meanings.values()}
    if not has & {*PLACES}:
        plain = {n: "mask" if x == "packed mask" else x for n, x in meanings.items()}
        return {theirs: x for theirs, x in plain.items() if x not in STORED}
    without = {name for pair in PAIRS if not {*pair} <= has for name in pair}
    if "lengths of keys" not in has:
        without |= {*PAIRS[0], "left padding", "rows of the cache"}
    if without & {*PAIRS[0]}:
        without |= {*PAIRS[1]}
    without |= {"adjacent pairs"} if without & {*PAIRS[1]} else set()
    without |= {f"{name} of any number" for name in without}
    return {theirs: x for theirs, x in meanings.items() if x not in without}


def read_leading(meanings: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Return the meaning of a packed array, "" if there is none, and the arrays that come first.

    Parameters
    ----------
    meanings : iterable of str
        Of the first two parameters.
    """
    for place, meaning in enumerate(meanings):
        if meaning in PACKED and len(PACKED[meaning]) == 3 - place:
            return meaning, (*"q"[:place], PACKED[meaning])
    return "", ("q", "k", "v")
