"""Ways in which one call has its keys: in a cache or in pages, with new keys, turned, padded.

What a function takes beside the places of its sequences is drawn anew for each shape of a problem,
so that it is called with and without it. Rotary tables hold quarter turns alone, whose products
are exact: nothing of it takes a tolerance, and the cache is compared bit by bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from npattn.arrays import Array
from npattn.problem import Problem
from npattn.testing.adapters.base import inexpressible
from npattn.testing.adapters.storage import Storage

__all__ = ["MISREADINGS", "Draw", "Way", "draw_turns", "turn"]

COSINES, SINES = np.array([1, 0, -1, 0]), np.array([0, 1, 0, -1])
BEHIND = 3
"""Positions of a rotary table behind those that anyone needs."""

MISREADINGS = {
    "pairs": "it turns pairs of features i and i + R/2 where 2i and 2i + 1 are asked, or these "
    "where those are",
    "direction": "it turns by the negative angle: the sign of the sine",
    "start of keys": "it turns new keys by positions that begin at 0, not at the length of the "
    "cache",
    "start of queries": "it turns queries by positions that begin at 0, not at the length of the "
    "cache",
    "queries": "it turns all queries by the first position with causal, or each by its own without",
    "start": "it turns by positions that begin at 0, not at the length of the cache",
    "padded start": "it turns by positions that leave the left padding out",
    "columns": "it reads a packed mask by columns",
    "order": "it reads pages (N, P, K, D) as (N, K, P, D), or these as those",
}
"""Misreadings that a judge can share, to find out if they explain a wrong result."""


@dataclass(frozen=True)
class Way:
    """Features of one call on sequences, which its problem leaves open.

    Attributes
    ----------
    keys : {"packed", "cache", "pages"}
    heads_first : bool
        Pages are (N, K, P, D).
    orders : bool
        It is told so.
    new : int
        Number of new keys of each sequence; 0 passes none.
    turns : int array (positions, R/2) or None
        Quarter turns of each pair of features.
    adjacent : bool
        Features 2i and 2i + 1 are a pair; else i and i + R/2.
    along : bool
        Each query is turned by its own position; else all by the first.
    left : tuple of int or None
        Slots before the keys of each sequence.
    rows : int array or None
        Row of the cache of each sequence.
    misread : str
        One of `MISREADINGS`, which is then shared; "" is none.
    """

    keys: Literal["packed", "cache", "pages"]
    heads_first: bool = False
    orders: bool = False
    new: int = 0
    turns: Array | None = None
    adjacent: bool = True
    along: bool = True
    left: tuple[int, ...] | None = None
    rows: Array | None = None
    misread: str = ""

    def tables(self, dtype: Any) -> dict[str, Array]:
        """Return the cosines and sines that are passed."""
        if self.turns is None:
            return {}
        return {
            "cosines": COSINES[self.turns].astype(dtype),
            "sines": SINES[self.turns].astype(dtype),
        }

    def turn_back(self, x: Array, length: int, left: int, queries: bool) -> Array:
        """Return what the implementation turns to x (T, H, D), of a sequence of a length."""
        if self.turns is None:
            return x
        own = "start of queries" if queries else "start of keys"
        start = {"start": 0, own: 0, "padded start": length - left}.get(self.misread, length)
        along = not queries or self.along != (self.misread == "queries")
        at = start + (np.arange(len(x)) if along else np.zeros(len(x), int))
        turns = self.turns[at] if self.misread == "direction" else -self.turns[at]
        return turn(x, turns, self.adjacent != (self.misread == "pairs"))


def turn(x: Array, turns: Array, adjacent: bool) -> Array:
    """Turn pairs of features of x (T, H, D) by quarter turns (T, R/2)."""
    half = turns.shape[1]
    first = np.arange(half) * (2 if adjacent else 1)
    second = first + (1 if adjacent else half)
    a, b = x[..., first], x[..., second]
    number = (turns % 4)[:, None, :]
    out = x.copy()
    out[..., first] = np.choose(number, [a, -b, -a, b])
    out[..., second] = np.choose(number, [b, a, -b, -a])
    return out


def draw_turns(rng: np.random.Generator, D: int, positions: int) -> Array:
    """Return quarter turns of R ≤ D features, R a multiple of 16 if D is at least that."""
    blocks = D // 16
    size = 16 * (blocks if rng.integers(2) else rng.integers(1, blocks + 1)) if blocks else D
    return rng.integers(0, 4, (positions + BEHIND, size // 2))


@dataclass
class Draw:
    """Choice of what a call has, by the shape of its problem.

    Attributes
    ----------
    takes, required, without : frozenset of str
        Meanings of parameters: those there are, those that are always passed, and those that are
        not, to find out if one explains a wrong result.
    """

    takes: frozenset[str]
    required: frozenset[str]
    without: frozenset[str]
    rng: np.random.Generator

    @classmethod
    def of(cls, problem: Problem, storage: Storage) -> Draw:
        """Return the choice for a problem: other contents of its arrays change nothing."""
        shapes = [getattr(problem, name).shape for name in "qkv"]
        options = (bool(problem.causal), problem.window, problem.scale, problem.softcap)
        key = zlib.crc32(repr((shapes, options, problem.mask is None)).encode())
        rng = np.random.default_rng([storage.seed, 43, key])
        return cls(storage.takes, storage.required, storage.without, rng)

    def wants(self, meaning: str, chance: float) -> bool:
        """Return True if it is passed this time."""
        drawn = self.rng.random() < chance
        if meaning in self.required:
            return True
        return drawn and meaning in self.takes and meaning not in self.without

    def count_new(self, T: int, lengths: Sequence[int], several: bool) -> int:
        """Return the number of new keys: one for each query, or with `several` any number."""
        most = min(lengths, default=T)
        other, number = self.rng.random() < 0.25, int(self.rng.integers(1, max(most, 1) + 1))
        wanted = self.wants("new keys", 0.85)
        count = number if several and most and (other or most < T) else T
        if count > most or not count:
            if "new keys" in self.required:
                raise inexpressible("sequences with fewer keys than new ones")
            return 0
        return count if wanted else 0

    def turns_exactly(self, problem: Problem, lengths: Sequence[int]) -> bool:
        """Return True if quarter turns are exact, and windows are shorter than all sequences.

        NaN stays in its row, all of whose scores it makes NaN; 0 times inf would be new.
        """
        if problem.D < 2 or any(np.isinf(x).any() for x in (problem.q, problem.k)):
            return False
        sides = [n for n in problem.window or () if n is not None]
        return all(n < min(lengths, default=0) for n in sides)
