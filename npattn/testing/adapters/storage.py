"""Sequences that are not stored as (B, H, T, D): packed behind each other, in a cache, in pages.

    packed   q (total, H, D), k and v (total, K, D); sequence i is [offsets[i], offsets[i + 1])
    cache    k and v (B, capacity, K, D); sequence b has the first lengths[b] slots
    pages    k and v (N, P, K, D); key s of a sequence is slot s % P of its page s // P

Beside a cache or pages q may be packed too, or (B, T, H, D), with lengths of its own or without. A
problem's samples are stored between other sequences, whose lengths differ and whose results nobody
reads, so that every offset, longest length and table matters. Keys that a mask of shape
(B, 1, 1, S) hides are left out: that is how samples get lengths of their own, 0 included. Slots
that no sequence has hold large numbers, or NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from npattn.arrays import Array
from npattn.errors import OptionError
from npattn.options import STORED
from npattn.problem import Problem
from npattn.testing.adapters.base import ResultError, inexpressible
from npattn.testing.adapters.signature import Signature

__all__ = ["UNSTORED", "Arrangement", "Storage", "Stored", "read_storage"]

LARGE = 64.0
"""Factor of values that nobody may read, so that one of them is seen in any result."""
UNSTORED = ("bias", "dropout_mask", "gate")
"""Options of each query, and key or column of o, which sequences of other lengths have not."""
SPARE = 2
"""Pages, and slots at the end of a cache, that no sequence has."""


@dataclass(frozen=True)
class Storage:
    """How an implementation takes its sequences.

    Attributes
    ----------
    queries : {"batch", "cache", "packed"}
        (B, T, H, D), all of one length or with lengths, or (total, H, D) with offsets.
    keys : {"packed", "cache", "pages"}
    takes : frozenset of str
        The meanings among `npattn.options.STORED` that it has a parameter for.
    lse_heads_last : bool
        lse is (total, H) or (B, T, H) instead of (H, total) or (B, H, T).
    page_size : int
    seed : int
        Of the sequences beside the samples, and of the order of pages; 0 has one on each side of a
        sample, and neither is empty.
    least : int
        Least length of those sequences, where there is a seed.
    only : mapping of letter to sizes
        The T and S that it takes; default: any.
    beside : bool
        False leaves those sequences out.
    unread : {"large", "nan"}
        What those sequences hold, and slots that no sequence has.
    renewed : {"", "slots", "sequences"}
        Which of the two hold other numbers.
    few_shapes : bool
        One sequence beside each sample, and one capacity: it is compiled for each shape.
    """

    queries: Literal["batch", "cache", "packed"]
    keys: Literal["packed", "cache", "pages"]
    takes: frozenset[str]
    lse_heads_last: bool = False
    page_size: int = 4
    seed: int = 0
    least: int = 1
    only: Mapping[str, Sequence[int]] = field(default_factory=dict)
    beside: bool = True
    unread: Literal["large", "nan"] = "large"
    renewed: Literal["", "slots", "sequences"] = ""
    few_shapes: bool = False

    @property
    def words(self) -> str:
        """The storage in words."""
        q = "q (total, H, D)" if self.queries == "packed" else "q (B, T, H, D)"
        keys = {
            "packed": "(total, K, D)",
            "cache": "(B, capacity, K, D)",
            "pages": "(N, P, K, D)",
        }
        return f"{q}, k and v {keys[self.keys]}, other sequences beside each"

    def arrange(self, problem: Problem, mask_true: str = "attend") -> Arrangement:
        """Place the samples of a problem among other sequences.

        Raises
        ------
        ImplementationError
            A refusal, if the problem cannot be stored so: if it is not of rank 4, has an option of
            each query and key, or hides keys whose number causal and windows count.
        """
        _check(problem)
        (B,), T, S = problem.lead, problem.T, problem.S
        visible = np.ones((B, S), bool)
        if problem.mask is not None:
            mask = np.asarray(problem.mask)
            shown = ~mask if mask_true == "hide" else mask
            visible = np.broadcast_to(shown, (B, 1, 1, S))[:, 0, 0]
        rng = np.random.default_rng([self.seed, 31])
        sequences: list[Stored] = []
        for b in range(B):
            sequences += self._draw_beside(rng, T, S)
            sequences.append(Stored(b, T, np.flatnonzero(visible[b])))
        sequences += self._draw_beside(rng, T, S) if B else []
        if "offsets of both" in self.takes and any(len(x.keys) != x.T for x in sequences):
            raise inexpressible("sequences with more or fewer keys than queries")
        counts = [-(-len(x.keys) // self.page_size) for x in sequences]
        order = rng.permutation(sum(counts) + SPARE)
        pages = np.split(order, np.cumsum(counts, dtype=int))
        return Arrangement(self, tuple(sequences), tuple(pages[:-1]), pages[-1])

    def _draw_beside(self, rng: np.random.Generator, T: int, S: int) -> list[Stored]:
        """Draw other sequences; without a seed one, of other lengths than the problem's."""
        if not self.beside:
            return []
        lengths = [(T + 2, S + 5)] if rng.integers(2) else [(max(T - 1, 1), S + 2)]
        if self.seed:
            count = 1 if self.few_shapes else rng.integers(3)
            drawn = rng.integers(0, (T + 3, S + 6), (count, 2))
            drawn = np.maximum(np.where(rng.random(drawn.shape) < 0.25, 0, drawn), self.least)
            lengths = [(int(t), int(s)) for t, s in drawn]
        if self.queries == "batch" or T == 1:  # what takes one new token may take no more
            lengths = [(T, s) for _, s in lengths]
        lengths = [(self._nearest("T", t), self._nearest("S", s)) for t, s in lengths]
        if "offsets of both" in self.takes:
            lengths = [(t, t) for t, _ in lengths]
        return [Stored(None, t, np.arange(s)) for t, s in lengths]

    def _nearest(self, letter: str, length: int) -> int:
        """Return the nearest length that it takes."""
        return min(self.only.get(letter) or (length,), key=lambda n: abs(n - length))


def _check(problem: Problem) -> None:
    """Refuse what cannot be stored as sequences of their own lengths."""
    if problem.q.ndim != 4 or len(problem.lead) != 1:
        raise inexpressible(f"arrays of {problem.q.ndim} axes")
    if len({x.shape[0] for x in (problem.q, problem.k, problem.v)}) > 1:
        raise inexpressible("a sample of k and v for several of q")
    for name in UNSTORED:
        if getattr(problem, name) is not None:
            raise inexpressible(f"a {name} of sequences of other lengths")
    if problem.mask is not None:
        shape = np.shape(problem.mask)
        if len(shape) != 4 or shape[1:3] != (1, 1):
            raise inexpressible(f"a mask of shape {shape}: it takes lengths alone")
        if problem.causal or problem.window is not None:
            raise inexpressible("hidden keys beside causal or a window, which would count them")


@dataclass(frozen=True)
class Stored:
    """One sequence: a sample of the problem, or None for one beside them.

    Attributes
    ----------
    sample : int or None
    T : int
        Number of queries.
    keys : int array (S',)
        The sample's keys that it has.
    """

    sample: int | None
    T: int
    keys: Array

    @property
    def S(self) -> int:
        """Number of keys."""
        return len(self.keys)


@dataclass(frozen=True)
class Arrangement:
    """Places of a problem's samples in the arrays of a call.

    Attributes
    ----------
    storage : Storage
    sequences : tuple of Stored
        In the order of the call.
    pages : tuple of int array
        Pages of each sequence.
    spare : int array
        Pages that no sequence has.
    """

    storage: Storage
    sequences: tuple[Stored, ...]
    pages: tuple[Array, ...]
    spare: Array

    def arrays(
        self, problem: Problem, factors: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Return the arrays of a call: q, k, v, and those that say where the sequences are.

        Factors of heads get those of the sequences beside the samples; those of tokens are stored
        as q, k or v is.
        """
        found = {"q": self._store_queries(problem.q)}
        found |= {name: self._store_keys(getattr(problem, name), name) for name in "kv"}
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

    def numbers(self) -> dict[str, int]:
        """Return what says where the sequences are and is no array."""
        values = {name: x for name, x in self._values().items() if name in self.storage.takes}
        return {name: x for name, x in values.items() if isinstance(x, int)}

    def _values(self) -> dict[str, Array | int]:
        """Return everything that may say where the sequences are, by its meaning."""
        queries, keys = ([getattr(x, n) for x in self.sequences] for n in "TS")
        count, P = [len(x) for x in self.pages], self.storage.page_size
        width = max(count, default=0) + 1  # no sequence needs the last entry
        table = np.full((len(keys), width), self.spare[0], np.int32)
        for row, own in zip(table, self.pages, strict=True):
            row[: len(own)] = own
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
            "lengths of keys": np.array(keys, np.int32),
            "page table": table,
            "page offsets": _sum(count),
            "page list": listed.astype(np.int32),
            "keys on last page": np.array(last, np.int32),
            "page size": P,
        }

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

    def _store_keys(self, array: Array, name: str) -> Array:
        """Store k or v, (B, K, S, X)."""
        _, K, _, X = array.shape
        factor = LARGE if name == "v" else 1.0
        parts = self._parts(array, (K, X), [x.S for x in self.sequences], factor)
        if self.storage.keys == "packed":
            return np.concatenate([*parts, np.empty((0, K, X), array.dtype)])
        lead = (len(parts), self._capacity("S"))
        if self.storage.keys == "pages":
            lead = (sum(map(len, self.pages)) + SPARE, self.storage.page_size)
        stored = self._fill((*lead, K, X), array.dtype, factor, 0)
        for part, slots in zip(parts, self._slots(), strict=True):
            stored[slots] = part
        return stored

    def _parts(
        self, array: Array, sizes: tuple[int, int], lengths: Iterable[int], factor: float
    ) -> list[Array]:
        """Return what each sequence has of an array, (T, H, X) or (S', K, X)."""
        parts = []
        for n, (sequence, length) in enumerate(zip(self.sequences, lengths, strict=True)):
            if sequence.sample is None:
                parts.append(self._fill((length, *sizes), array.dtype, factor, n + 1))
                continue
            own = array[sequence.sample].swapaxes(0, 1)
            parts.append(own if length == len(own) else own[sequence.keys])
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

    def _slots(self) -> list[Any]:
        """Return the place of each sequence's keys in a cache or pages, as an index."""
        P, found = self.storage.page_size, []
        for n, (sequence, pages) in enumerate(zip(self.sequences, self.pages, strict=True)):
            s = np.arange(sequence.S)
            found.append((pages[s // P], s % P) if self.storage.keys == "pages" else (n, s))
        return found

    # --- and back ---

    def restore(self, name: str, array: Any, problem: Problem) -> Any:
        """Return a result as (B, H, T, X), (B, K, S, X) or (B, H, T), of the samples alone.

        Gradients of keys that no sequence has are 0.

        Raises
        ------
        ResultError
            If it has another shape than the array that it belongs to.
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
        whole = np.stack(found) if found else np.empty((0, T, *sizes), array.dtype)
        return whole.swapaxes(1, 2)

    def _restore_keys(self, name: str, array: Any, problem: Problem) -> Any:
        like = problem.k if name == "dk" else problem.v
        _check_shape(name, array, self._store_keys(like, name[1]).shape)
        found = np.zeros(like.shape, array.dtype)
        offsets = _sum([x.S for x in self.sequences])
        for n, sequence in enumerate(self.sequences):
            if sequence.sample is None:
                continue
            packed = self.storage.keys == "packed"
            part = array[offsets[n] : offsets[n + 1]] if packed else array[self._slots()[n]]
            found[sequence.sample][:, sequence.keys] = part.swapaxes(0, 1)
        return found


def _check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    if tuple(array.shape) != shape:
        raise ResultError(f"{name} has shape {tuple(array.shape)}, must be {shape}")


def _sum(lengths: Iterable[int]) -> Array:
    """Return offsets: the sum of the lengths before each, and of all."""
    return np.cumsum([0, *lengths], dtype=np.int32)


# --- from a signature -----------------------------------------------------------------------------


def read_storage(signature: Signature, name: str) -> Storage | None:
    """Return how a callable takes its sequences by the parameters that it has; None if padded.

    Of several ways that it has for keys, that which it cannot be called without is taken, or else
    pages, then a cache, then packed.

    Raises
    ------
    OptionError
        If its parameters leave open where the sequences are.
    """
    theirs = {meaning: n for n, meaning in signature.meanings.items() if meaning in STORED}
    if not theirs:
        return None
    takes = frozenset(theirs)
    if takes <= {"longest of both", "longest queries", "longest keys", "page size"}:
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
    left = UNUSED[keys] - required
    left |= {"lengths of queries"} - required if queries == "packed" else set()
    return Storage(queries, keys, takes - left, heads_last)


def _open(name: str, theirs: Iterable[str]) -> str:
    return (
        f"{name} has {', '.join(theirs)}, which leaves open where each sequence is: it must have "
        "offsets of queries and of keys (cu_seqlens_q, cu_seqlens_k), lengths of keys "
        "(cache_seqlens), those with a page table (block_table), or kv_indptr, kv_indices and "
        "last_page_len; rename={theirs: ours} says what a parameter is"
    )


_PAGED = {"page table", "page offsets", "page list", "keys on last page", "page size"}
UNUSED = {
    "packed": {"lengths of keys", *_PAGED},
    "cache": {"offsets of keys", *_PAGED},
    "pages": {"offsets of keys"},
}
"""Meanings of parameters that keep their default beside one storage of keys."""
