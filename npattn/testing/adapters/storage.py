"""Sequences that are not stored as (B, H, T, D): packed behind each other, in a cache, in pages.

    packed   q (total, H, D), k and v (total, K, D); sequence i is [offsets[i], offsets[i + 1])
    cache    k and v (B, capacity, K, D); sequence b has the first lengths[b] slots
    pages    k and v (N, P, K, D); key s of a sequence is slot s % P of its page s // P

Beside a cache or pages q may be packed too, or (B, T, H, D), with lengths of its own or without.
Keys that a mask of shape (B, 1, 1, S) hides are left out: that is how samples get lengths of their
own, 0 included. Other masks need a parameter of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from npattn.errors import OptionError
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.problem.meanings import PLACES, STORED
from npattn.testing.adapters.signature import Signature

UNSTORED = ("bias", "dropout_mask", "gate")
"""Options of each query, and key or column of o, which sequences of other lengths have not."""
LENGTHS = frozenset({"offsets of keys", "lengths of keys", "page offsets"})
"""Meanings by which samples have lengths of their own."""


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
class Storage:
    """How an implementation takes its sequences."""

    # (B, T, H, D), all of one length or with lengths, or (total, H, D) with offsets
    queries: Literal["batch", "cache", "packed"]
    keys: Literal["packed", "cache", "pages"]
    # the meanings among `npattn.problem.meanings.STORED` that it has a parameter for
    takes: frozenset[str]
    # lse is (total, H) or (B, T, H) instead of (H, total) or (B, H, T)
    lse_heads_last: bool = False
    page_size: int = 4
    # of the sequences beside the samples, and of the order of pages; 0 has one on each side of a
    # sample, and neither is empty
    seed: int = 0
    least: int = 1  # least length of those sequences, where there is a seed
    # letter to sizes: the T and S that it takes; default: any
    only: Mapping[str, Sequence[int]] = field(default_factory=dict)
    beside: bool = True  # False leaves those sequences out
    # what those sequences hold, and slots that no sequence has
    unread: Literal["large", "nan"] = "large"
    # which of them hold other numbers; masks are those of the sequences
    renewed: Literal["", "slots", "sequences", "masks"] = ""
    # one sequence beside each sample, and one capacity: it is compiled for each shape
    few_shapes: bool = False
    # those of `takes` that are always passed, and that are never
    required: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    either: bool = False  # it takes a cache as well as pages
    heads_first: bool = False  # pages are (N, K, P, D)
    several: bool = False  # new keys may be more or fewer than queries
    first_page: int = 0  # number of pages before the first that a sequence has
    misread: str = ""  # one of `MISREADINGS`, which is then shared; "" is none

    @property
    def words(self) -> str:
        """The storage in words."""
        q = "q (total, H, D)" if self.queries == "packed" else "q (B, T, H, D)"
        pages = "(N, K, P, D)" if self.heads_first else "(N, P, K, D)"
        both = f"{pages} or (B, capacity, K, D)" if self.either else pages
        keys = {"packed": "(total, K, D)", "cache": "(B, capacity, K, D)", "pages": both}
        new = ", new keys behind them" if self.appends else ""
        return f"{q}, k and v {keys[self.keys]}{new}, other sequences beside each"

    @property
    def appends(self) -> bool:
        """True if it writes new keys into its cache."""
        return "new keys" in self.takes

    @property
    def has_lengths(self) -> bool:
        """True if samples have lengths of their own."""
        return bool(self.takes & LENGTHS)

    def fit(self, problem: Problem, mask_true: str) -> Problem:
        """Return the problem with its hidden keys where causal and windows do not count them.

        These begin at the last query and the last key that a sample has, or at the first ones: what
        a mask of shape (B, 1, 1, S) hides comes first then, or last. Where new keys must come, as
        many are visible. Other problems stay.
        """
        if not hides_keys(problem) or not self.has_lengths:
            return problem
        if "new keys" in self.required and not self.several:
            problem = _show_at_least(problem, problem.T, mask_true)
        counts = looks_along(problem) and "packed mask" not in self.takes
        if not counts or self.lets_stay(problem, mask_true):
            return problem
        moved = _move_hidden(problem, mask_true)
        return problem.replace(mask=~moved if mask_true == "hide" else moved)

    def lets_stay(self, problem: Problem, mask_true: str) -> bool:
        """Return True if the keys that a problem hides are where `fit` puts them."""
        return np.array_equal(_move_hidden(problem, mask_true), read_shown(problem, mask_true))

    def nearest(self, letter: str, length: int) -> int:
        """Return the nearest length that it takes."""
        return min(self.only.get(letter) or (length,), key=lambda n: abs(n - length))


@dataclass(frozen=True)
class Stored:
    """One sequence: a sample of the problem, or None for one beside them."""

    sample: int | None
    T: int  # number of queries
    keys: Array  # (S',): the sample's keys that it has

    @property
    def S(self) -> int:
        """Number of keys."""
        return len(self.keys)


def _show_at_least(problem: Problem, count: int, mask_true: str) -> Problem:
    """Return the problem with a number of keys visible, the first ones, where there are fewer."""
    shown = read_shown(problem, mask_true)
    few = shown.sum(-1, keepdims=True) < min(count, problem.S)
    if not few.any():
        return problem
    more = np.where(few, np.arange(problem.S) < count, shown)
    return problem.replace(mask=~more if mask_true == "hide" else more)


def _move_hidden(problem: Problem, mask_true: str) -> Array:
    """Return a mask that shows as many keys of each sample, at the end where causal begins."""
    count = read_shown(problem, mask_true).sum(-1, keepdims=True)
    s, last = np.arange(problem.S), problem.alignment == "bottom_right"
    return np.asarray(s >= problem.S - count if last else s < count)


def looks_along(problem: Problem) -> bool:
    """Return True if queries stand behind each other, by causal or a window."""
    return bool(problem.causal) or problem.window not in (None, (None, None))


def hides_keys(problem: Problem) -> bool:
    """Return True for a mask of shape (B, 1, 1, S), which lengths can hold."""
    mask = problem.mask_array
    shape = () if mask is None else mask.shape
    return len(shape) == 4 and shape[1:3] == (1, 1)


def read_shown(problem: Problem, mask_true: str) -> Array:
    """Return the mask of a problem that has one, True for what may be seen."""
    mask = np.asarray(problem.mask_array)
    return ~mask if mask_true == "hide" else mask


# --- from a signature -----------------------------------------------------------------------------


def read_storage(signature: Signature, name: str) -> Storage | None:
    """Return how a callable takes its sequences by the parameters that it has; None if padded.

    Of several ways that it has for keys, that which it cannot be called without is taken, or else
    pages, then a cache, then packed.
    """
    named = {meaning: n for n, meaning in signature.meanings.items() if meaning in STORED}
    if not named:
        return None
    theirs = {SEVERAL.get(meaning, meaning): n for meaning, n in named.items()}
    takes = frozenset(theirs)
    places = takes & {*PLACES}
    if places <= {"longest of both", "longest queries", "longest keys", "page size"}:
        raise OptionError(_open(name, theirs.values()))
    required = {meaning for meaning, n in theirs.items() if n in signature.required}
    offsets = takes & {"offsets of both", "offsets of keys"}
    lengths = takes & {"lengths of keys", "offsets of keys"}
    listed = {"page offsets", "page list", "keys on last page"} <= takes
    pages = listed or ("page table" in takes and lengths)
    queries: Any = "cache" if "lengths of queries" in takes else "batch"
    queries = "packed" if takes & {"offsets of both", "offsets of queries"} else queries
    keys: Any = "cache" if "lengths of keys" in takes else None
    if pages and ("page table" in required or not offsets & required):
        keys = "pages"
    elif offsets and (offsets & required or keys is None):
        keys = "packed"
    if keys is None or (keys == "packed" and queries == "batch"):
        raise OptionError(_open(name, theirs.values()))
    heads_last = "lse (B, T, H) without gradient" in signature.meanings.values()
    unused = UNUSED[keys] - required
    unused |= {"lengths of queries"} - required if queries == "packed" else set()
    takes -= unused
    return Storage(
        *(queries, keys, takes, heads_last),
        required=frozenset(required & takes),
        either=keys == "pages" and bool(takes & OF_ROWS) and not {"page table"} & required,
        heads_first=signature.heads_first,
        several=bool(named.keys() & SEVERAL.keys()),
    )


def _open(name: str, theirs: Iterable[str]) -> str:
    return (
        f"{name} has {', '.join(theirs)}, which leaves open where each sequence is: it must have "
        "offsets of queries and of keys (cu_seqlens_q, cu_seqlens_k), lengths of keys "
        "(cache_seqlens), those with a page table (block_table), or kv_indptr, kv_indices and "
        "last_page_len; rename={theirs: ours} says what a parameter is"
    )


SEVERAL = {"new keys of any number": "new keys", "new values of any number": "new values"}
OF_ROWS = frozenset({"left padding", "rows of the cache"})
"""Meanings that need a cache, and no pages."""
_PAGED = {
    *("page table", "page offsets", "page list", "keys on last page", "page size"),
    "order of pages",
}
_APPENDED = {"new keys", "new values", "cosines", "sines", "adjacent pairs"}
UNUSED = {
    "packed": {"lengths of keys", *_PAGED, *_APPENDED, *OF_ROWS},
    "cache": {"offsets of keys", *_PAGED},
    "pages": {"offsets of keys"},
}
"""Meanings of parameters that keep their default beside one storage of keys."""
