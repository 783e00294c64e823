"""Arrays of a call whose sequences are packed, in a cache or in pages, and its results.

Slots that no sequence has hold large numbers, or NaN. Rotary tables hold quarter turns alone, whose
products are exact: nothing of it takes a tolerance, and the cache is compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ResultError
from npattn.testing.adapters.storage import Storage, Stored

LARGE = 64.0
"""Factor of values that nobody may read, so that one of them is seen in any result."""
COSINES, SINES = np.array([1, 0, -1, 0]), np.array([0, 1, 0, -1])
SPARE = 2
"""Pages, and slots at the end of a cache, that no sequence has."""


@dataclass(frozen=True)
class Arrangement:
    """Places of a problem's samples in the arrays of a call."""

    storage: Storage
    sequences: tuple[Stored, ...]  # in the order of the call
    pages: tuple[Array, ...]  # pages of each sequence
    spare: Array  # pages that no sequence has
    # (T, S'): the mask of each sequence, where it is a packed one
    masks: tuple[Array, ...] | None = None
    keys: Literal["packed", "cache", "pages"] = "packed"
    heads_first: bool = False  # pages are (N, K, P, D)
    orders: bool = False  # it is told so
    new: int = 0  # number of new keys of each sequence; 0 passes none
    turns: Array | None = None  # (positions, R/2): quarter turns of each pair of features
    adjacent: bool = True  # features 2i and 2i + 1 are a pair; else i and i + R/2
    along: bool = True  # each query is turned by its own position; else all by the first
    left_padding: tuple[int, ...] | None = None  # slots before the keys of each sequence
    rows: Array | None = None  # row of the cache of each sequence

    def arrays(
        self, problem: Problem, factors: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Return the arrays of a call: q, k, v, and those that say where the sequences are.

        Factors of heads get those of the sequences beside the samples; those of tokens are stored
        as q, k or v is.
        """
        found = {"q": self._store_queries(self._turn_back_queries(problem))}
        found |= {name: self._store_keys(getattr(problem, name), name) for name in "kv"}
        found |= (
            self._store_new_keys(problem) if self.new or "new keys" in self.storage.required else {}
        )
        found |= self.tables(problem.q.dtype)
        values = {name: x for name, x in self._values().items() if name in self.storage.takes}
        found |= {name: x for name, x in values.items() if isinstance(x, np.ndarray)}
        found |= {name: self._store_factors(name, x) for name, x in (factors or {}).items()}
        return found | ({"sinks": np.array(problem.sinks)} if problem.sinks is not None else {})

    def _store_factors(self, meaning: str, factors: Array) -> Array:
        """Return the factors of each sequence; others have larger ones."""
        if "tokens of" in meaning:
            name, column = meaning[-1], factors[..., None]
            stored = self._store_keys(column, name) if name in "kv" else self._store_queries(column)
            return np.asarray(abs(stored[..., 0]))
        others = np.full(factors.shape[1:], 8 * factors.max(initial=1), factors.dtype)
        rows = [others if x.sample is None else factors[x.sample] for x in self.sequences]
        return np.stack(rows) if rows else factors

    def numbers(self) -> dict[str, Any]:
        """Return what says where the sequences are and is no array."""
        values = {name: x for name, x in self._values().items() if name in self.storage.takes}
        return {name: x for name, x in values.items() if not isinstance(x, np.ndarray)}

    def _values(self) -> dict[str, Any]:
        """Return everything that may say where the sequences are, by its meaning."""
        values = self._places()
        if self.keys != "pages":
            values = {name: x for name, x in values.items() if not name.startswith("page ")}
        if self.masks is not None:
            order: Any = "F" if self.storage.misread == "columns" else "C"
            values["packed mask"] = np.concatenate(
                [np.zeros(0, bool), *(x.ravel(order) for x in self.masks)]
            )
        if self.turns is not None:
            values["adjacent pairs"] = self.adjacent
        if self.left_padding is not None:
            values["left padding"] = np.array(self.left_padding, np.int32)
        if self.rows is not None:
            values["rows of the cache"] = self.rows.astype(np.int32)
        if self.orders:
            values["order of pages"] = "HND" if self.heads_first else "NHD"
        return values

    def _places(self) -> dict[str, Any]:
        """Return lengths, offsets and page tables of all sequences, by their meaning."""
        queries, keys = ([getattr(x, n) for x in self.sequences] for n in "TS")
        before = [s - self.new + slots for s, slots in zip(keys, self._padding, strict=True)]
        count, P = [len(x) for x in self.pages], self.storage.page_size
        width = max(count, default=0) + 1  # no sequence needs the last entry
        table = np.full((len(keys), width), self.spare[0], np.int32)
        for row, pages in zip(table, self.pages, strict=True):
            row[: len(pages)] = pages
        last = [s - P * (n - 1) if n else 0 for s, n in zip(keys, count, strict=True)]
        listed = np.concatenate([*self.pages, self.spare[:0]])
        return {
            "offsets of both": _sum(queries),
            "offsets of queries": _sum(queries),
            "offsets of keys": _sum(keys),
            "longest of both": max((*queries, *keys), default=0),
            "longest queries": max(queries, default=0),
            "longest keys": max(keys, default=0),
            "lengths of queries": np.array(queries, np.int32),
            "lengths of keys": np.array(before, np.int32),
            "page table": table,
            "page offsets": _sum(count),
            "page list": listed.astype(np.int32),
            "keys on last page": np.array(last, np.int32),
            "page size": P,
        }

    @property
    def _padding(self) -> tuple[int, ...]:
        return self.left_padding or (0,) * len(self.sequences)

    def tables(self, dtype: Any) -> dict[str, Array]:
        """Return the cosines and sines that are passed."""
        if self.turns is None:
            return {}
        return {
            "cosines": COSINES[self.turns].astype(dtype),
            "sines": SINES[self.turns].astype(dtype),
        }

    def turn_back(self, x: Array, length: int, slots: int, queries: bool) -> Array:
        """Return what the implementation turns to x (T, H, D), of a sequence of a length."""
        if self.turns is None:
            return x
        start_meaning = "start of queries" if queries else "start of keys"
        misread = self.storage.misread
        start = {"start": 0, start_meaning: 0, "padded start": length - slots}.get(misread, length)
        along = not queries or self.along != (misread == "queries")
        at = start + (np.arange(len(x)) if along else np.zeros(len(x), int))
        turns = self.turns[at] if misread == "direction" else -self.turns[at]
        return turn(x, turns, self.adjacent != (misread == "pairs"))

    # --- to the implementation's arrays ---

    def store_cotangent(self, array: Array, factor: float) -> Array:
        """Store a cotangent (B, H, T, X) of o; behind a sequence's queries it is 0.

        Other sequences have numbers of the size of a factor, which is 0 where what comes back from
        all of them is summed.
        """
        return self._store_queries(array, factor, 0.0)

    def _store_queries(self, array: Array, factor: float = 1.0, rest: float = 1.0) -> Array:
        """Store an array (B, H, T, X) of the queries; `rest` is the size of what nobody reads."""
        _, H, T, X = array.shape
        parts = self._parts(array, (H, X), [x.T for x in self.sequences], factor)
        if self.storage.queries == "packed":
            return np.concatenate([*parts, np.empty((0, H, X), array.dtype)])
        capacity = T if self.storage.queries == "batch" else self._capacity("T")
        stored = self._fill((len(parts), capacity, H, X), array.dtype, rest, 0)
        for row, part in zip(stored, parts, strict=True):
            row[: len(part)] = part
        return stored

    def _capacity(self, letter: Literal["T", "S"]) -> int:
        """Return the number of places for each sequence, where they are not packed."""
        lengths = [getattr(x, letter) for x in self.sequences]
        lengths += self.storage.only.get(letter, ()) if self.storage.few_shapes else ()
        return max(lengths, default=0) + SPARE

    def store_lse(self, array: Array, factor: float) -> Array:
        """Store an array (B, H, T), as a cotangent of lse."""
        stored = self.store_cotangent(array[..., None], factor)[..., 0]
        return (
            stored if self.storage.lse_heads_last else np.ascontiguousarray(stored.swapaxes(-1, -2))
        )

    def _turn_back_queries(self, problem: Problem) -> Array:
        """Return q as it is passed, where the implementation turns it."""
        if self.turns is None:
            return problem.q
        q = problem.q.copy()
        for sequence, slots in zip(self.sequences, self._padding, strict=True):
            if sequence.sample is not None:
                sample_q = q[sequence.sample].swapaxes(0, 1)  # (T, H, D)
                length = sequence.S - self.new + slots
                turned = self.turn_back(sample_q, length, slots, queries=True)
                q[sequence.sample] = turned.swapaxes(0, 1)
        return q

    def _store_new_keys(self, problem: Problem) -> dict[str, Array]:
        """Return the new keys and values, (B, n, K, D) and (B, n, K, E)."""
        found, new = {}, self.new
        for name, meaning in (("k", "new keys"), ("v", "new values")):
            array = getattr(problem, name)
            rows = [x[len(x) - new :] for x in self._key_parts(array, name)]
            if name == "k":
                rows = [
                    self.turn_back(x, sequence.S - new + slots, slots, queries=False)
                    for x, sequence, slots in zip(rows, self.sequences, self._padding, strict=True)
                ]
            _, K, _, X = array.shape
            found[meaning] = np.stack(rows) if rows else np.zeros((0, new, K, X), array.dtype)
        return found

    def arrays_after(self, problem: Problem) -> dict[str, Array]:
        """Return k and v as they are after the call; empty if it writes nothing."""
        if not self.new:
            return {}
        return {name: self._store_keys(getattr(problem, name), name, True) for name in "kv"}

    def _key_parts(self, array: Array, name: str) -> list[Array]:
        """Return what each sequence has of k or v, (S', K, X)."""
        _, K, _, X = array.shape
        return self._parts(array, (K, X), [x.S for x in self.sequences], self._factor(name))

    def _factor(self, name: str) -> float:
        return LARGE if name == "v" else 1.0

    def _store_keys(self, array: Array, name: str, written: bool = False) -> Array:
        """Store k or v, (B, K, S, X), without the new keys or with them."""
        _, K, _, X = array.shape
        parts = self._key_parts(array, name)
        if self.keys == "packed":
            return np.concatenate([*parts, np.empty((0, K, X), array.dtype)])
        lead = (self._rows, self._capacity("S") + max(self._padding, default=0))
        if self.keys == "pages":
            count = self.storage.first_page + sum(map(len, self.pages)) + SPARE
            lead = (count, self.storage.page_size)
        stored = self._fill((*lead, K, X), array.dtype, self._factor(name), 0)
        for part, slots in zip(parts, self._slots(), strict=True):
            count = len(part) - (0 if written else self.new)
            row, slot = slots
            stored[row[:count], slot[:count]] = part[:count]
        return self._order(stored)

    @property
    def _rows(self) -> int:
        """Number of rows of the cache."""
        return len(self.sequences) + (0 if self.rows is None else SPARE)

    def _order(self, stored: Array) -> Array:
        """Return pages in the order in which they are passed, or back."""
        first = self.heads_first != (self.storage.misread == "order")
        if self.keys != "pages" or not first:
            return stored
        return np.ascontiguousarray(stored.swapaxes(1, 2))

    def _parts(
        self, array: Array, sizes: tuple[int, int], lengths: Iterable[int], factor: float
    ) -> list[Array]:
        """Return what each sequence has of an array, (T, H, X) or (S', K, X)."""
        parts = []
        for n, (sequence, length) in enumerate(zip(self.sequences, lengths, strict=True)):
            if sequence.sample is None:
                parts.append(self._fill((length, *sizes), array.dtype, factor, n + 1))
                continue
            sample_rows = array[sequence.sample].swapaxes(0, 1)
            parts.append(sample_rows if length == len(sample_rows) else sample_rows[sequence.keys])
        return parts

    def _fill(self, shape: tuple[int, ...], dtype: Any, factor: float, number: int) -> Array:
        """Return what nobody may read: of the sequence of a number, or for 0 of the slots."""
        if factor == 0:
            return np.zeros(shape, dtype)
        if self.storage.unread == "nan":
            return np.full(shape, np.nan, dtype)
        renewed = self.storage.renewed == ("sequences" if number else "slots")
        factor = LARGE if renewed else factor
        rng = np.random.default_rng([self.storage.seed, number, 37 + renewed])
        return (rng.choice((-1.0, 1.0), shape) * rng.uniform(0.5, 1, shape) * factor).astype(dtype)

    def _slots(self) -> list[tuple[Array, Array]]:
        """Return the row or page, and the slot, of each key of each sequence."""
        P, found = self.storage.page_size, []
        rows = np.arange(len(self.sequences)) if self.rows is None else self.rows
        for n, (sequence, pages) in enumerate(zip(self.sequences, self.pages, strict=True)):
            s = np.arange(sequence.S)
            in_cache = np.full(sequence.S, rows[n]), s + self._padding[n]
            found.append((pages[s // P], s % P) if self.keys == "pages" else in_cache)
        return found

    # --- and back ---

    def restore(self, name: str, array: Any, problem: Problem) -> Any:
        """Return a result as (B, H, T, X), (B, K, S, X) or (B, H, T), of the samples alone.

        Gradients of keys that no sequence has are 0.

        Raises ResultError if it has another shape than the array that it belongs to.
        """
        if name == "lse":
            swaps = array.ndim > 1 and not self.storage.lse_heads_last
            stored = array.swapaxes(-1, -2) if swaps else array
            return self._restore_queries(name, stored, (problem.H,), problem.T)
        if name in ("o", "dq"):
            sizes = (problem.H, problem.E if name == "o" else problem.D)
            return self._restore_queries(name, array, sizes, problem.T)
        if name in ("dk", "dv"):
            return self._restore_keys(name, array, problem)
        return array

    def _restore_queries(self, name: str, array: Any, sizes: tuple[int, ...], T: int) -> Any:
        """Return a result by query, stored packed or by sequence, as (B, H, T, ...)."""
        lengths = [x.T for x in self.sequences]
        packed = self.storage.queries == "packed"
        rows = T if self.storage.queries == "batch" else self._capacity("T")
        lead = (sum(lengths),) if packed else (len(lengths), rows)
        _check_shape(name, array, (*lead, *sizes))
        offsets = _sum(lengths)
        found = [
            array[offsets[n] : offsets[n + 1]] if packed else array[n][:T]
            for n, sequence in enumerate(self.sequences)
            if sequence.sample is not None
        ]
        stacked = np.stack(found) if found else np.empty((0, T, *sizes), array.dtype)
        return stacked.swapaxes(1, 2)

    def _restore_keys(self, name: str, array: Any, problem: Problem) -> Any:
        like = problem.k if name == "dk" else problem.v
        _check_shape(name, array, self._store_keys(like, name[1]).shape)
        found, array = np.zeros(like.shape, array.dtype), self._order(array)
        offsets = _sum([x.S for x in self.sequences])
        for n, sequence in enumerate(self.sequences):
            if sequence.sample is None:
                continue
            packed = self.keys == "packed"
            part = array[offsets[n] : offsets[n + 1]] if packed else array[self._slots()[n]]
            found[sequence.sample][:, sequence.keys] = part.swapaxes(0, 1)
        return found


def _check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    if tuple(array.shape) != shape:
        raise ResultError(f"{name} has shape {tuple(array.shape)}, must be {shape}")


def _sum(lengths: Iterable[int]) -> Array:
    """Return offsets: the sum of the lengths before each, and of all."""
    return np.cumsum([0, *lengths], dtype=np.int32)


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
