"""Rotary positions of one attention: of its queries and its keys, which must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike

from npattn.errors import OptionError
from npattn.positions.frequencies import Frequencies
from npattn.positions.rotary import BASE, Layout
from npattn.problem.arrays import diagonal
from npattn.problem.checks import check_alignment
from npattn.problem.options import Alignment

__all__ = ["Rotary"]


@dataclass(frozen=True, eq=False)
class Rotary:
    """Options of `rope` for the queries and the keys of one attention.

    Passed as ``rope=`` to `npattn.MultiHeadAttention.forward`, which projects queries and keys
    itself and turns them then.

    Parameters
    ----------
    layout, base, size, frequencies, sections
        As in `rope`, for queries and keys alike.
    positions : array_like, optional
        Positions of the queries, as in `rope`; and of the keys, unless `key_positions` are given.
        Default: keys have 0, 1, … S − 1, and query t that of the key beside it.
    key_positions : array_like, optional
        Positions of the keys.
    alignment : {"bottom_right", "top_left"}, default "bottom_right"
        Key beside query t where no positions are given: t + (S − T), as in decoding with a cache,
        or t.

    Raises
    ------
    OptionError
        If `alignment` is not one of the two, or `key_positions` come without `positions`. The other
        options are checked in the call.

    Examples
    --------
    >>> from npattn import positions
    >>> positions.Rotary(base=500000.0).arguments(T=1, S=5)[0]["offset"]
    4
    """

    layout: Layout = "half"
    base: float = BASE
    size: int | None = None
    frequencies: Frequencies | None = None
    sections: Sequence[int] | None = None
    positions: ArrayLike | None = None
    key_positions: ArrayLike | None = None
    alignment: Alignment = "bottom_right"

    def __post_init__(self) -> None:
        check_alignment(self.alignment)
        if self.key_positions is not None and self.positions is None:
            raise OptionError("got key_positions without positions; pass those of the queries too")

    def arguments(self, T: int, S: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the keyword arguments of `rope` for T queries, and those for S keys.

        Raises
        ------
        OptionError
            If `positions` are given without `key_positions`, and T is not S.
        """
        names = ("layout", "base", "size", "frequencies", "sections")
        shared = {name: getattr(self, name) for name in names}
        positions, keys = self.positions, self.key_positions
        if positions is not None and keys is None:
            if T != S:
                raise OptionError(
                    f"got positions of {T} queries for {S} keys; pass key_positions= to Rotary too"
                )
            keys = positions
        offset = diagonal(T, S, self.alignment) if positions is None else 0
        queries = {**shared, "positions": positions, "offset": offset}
        return queries, {**shared, "positions": keys, "offset": 0}


def check_rotary(rope: Any) -> None:
    """Check that rope is a `Rotary` or None."""
    if rope is not None and not isinstance(rope, Rotary):
        raise OptionError(
            f"rope is {rope!r}, must be a npattn.positions.Rotary: Rotary(base=10000.0)"
        )
