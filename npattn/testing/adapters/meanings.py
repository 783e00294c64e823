"""Meanings that depend on other parameters: packed arrays come first, new keys beside a cache."""

from __future__ import annotations

from collections.abc import Mapping

from npattn.meanings import LATENT, PACKED, PLACES, STORED

__all__ = ["HEADS_FIRST", "PARTS", "read_beside_places", "read_leading"]

HEADS_FIRST = "heads before slots"
PARTS = dict(zip(LATENT, (LATENT[0], "q", "v", "k"), strict=True))
"""Meanings of the four parts of latent attention → names of the arrays of a call."""
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


def read_leading(
    meanings: Mapping[str, str],
) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """Return the meaning of a packed array, the arrays that come first, and the parts of latents.

    The first is "" where no array is packed, and the parts are empty where there are none.

    Parameters
    ----------
    meanings : mapping
        Of the positional parameters, in order.
    """
    first = dict(list(meanings.items())[: len(LATENT)])
    if {*first.values()} == {*LATENT}:
        return "", tuple(PARTS[meaning] for meaning in first.values()), first
    for place, meaning in enumerate(list(meanings.values())[:2]):
        if meaning in PACKED and len(PACKED[meaning]) == 3 - place:
            return meaning, (*"q"[:place], PACKED[meaning]), {}
    return "", ("q", "k", "v"), {}
