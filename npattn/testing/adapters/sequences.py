"""Places of a problem's samples among other sequences, in one call.

Each sample is stored between other sequences, whose lengths differ and whose results nobody reads,
so that every offset, longest length and table matters.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array, band, diagonal
from npattn.problem.meanings import DESCALES
from npattn.testing.adapters.arrangement import SPARE, Arrangement
from npattn.testing.adapters.base import inexpressible
from npattn.testing.adapters.forms import Form
from npattn.testing.adapters.storage import (
    UNSTORED,
    Storage,
    Stored,
    hides_keys,
    looks_along,
    read_shown,
)


@dataclass(frozen=True)
class Sequences(Form):
    """Samples among other sequences, as a storage has them."""

    storage: Storage

    @property
    def words(self) -> str:
        """The storage in words."""
        return self.storage.words

    def fit(self, problem: Problem, mask_true: str) -> Problem:
        """Return the problem with its hidden keys where causal and windows do not count them."""
        return self.storage.fit(problem, mask_true)

    def store(
        self, problem: Problem, arrays: Mapping[str, Array], mask_true: str
    ) -> tuple[Problem, Mapping[str, Array]]:
        """Return the arrays of a call with the samples among other sequences."""
        factors = {n: x for n, x in arrays.items() if n in DESCALES}
        return problem, arrange(self.storage, problem, mask_true).arrays(problem, factors)

    def store_after(self, problem: Problem, mask_true: str) -> dict[str, Array]:
        """Return k and v as they are after a call that writes to them."""
        return arrange(self.storage, problem, mask_true).arrays_after(problem)

    def store_cotangents(
        self, problem: Problem, cotangents: Cotangents, mask_true: str
    ) -> dict[str, Array]:
        """Return the cotangents of o, and of lse if there is one, as results are stored."""
        places = arrange(self.storage, problem, mask_true)
        factor = 1.0 if problem.sinks is None else 0.0
        stored = {"o": places.store_cotangent(np.array(cotangents.dout), factor)}
        if cotangents.dlse is not None:
            stored["lse"] = places.store_lse(np.array(cotangents.dlse), factor)
        return stored

    def numbers(self, problem: Problem, mask_true: str) -> dict[str, Any]:
        """Return what says where the sequences are and is no array."""
        return arrange(self.storage, problem, mask_true).numbers()

    def restore(self, name: str, array: Any, problem: Problem, mask_true: str) -> Mapping[str, Any]:
        """Return what a result has of the samples."""
        return {name: arrange(self.storage, problem, mask_true).restore(name, array, problem)}


def arrange(storage: Storage, problem: Problem, mask_true: str = "attend") -> Arrangement:
    """Place the samples of a problem among other sequences.

    Raises ImplementationError, a refusal, if the problem cannot be stored so: if it is not of rank
    4, has an option of each query and key that no parameter holds, or hides keys that causal and
    windows count.
    """
    _check(problem)
    (B,), T, S = problem.lead, problem.T, problem.S
    draw = Draw.of(problem, storage)
    shown = None if problem.mask is None else read_shown(problem, mask_true)
    by_matrix = _passes_matrix(storage, problem, draw, mask_true)
    visible = np.ones((B, S), bool)
    if shown is not None and not by_matrix:
        visible = np.broadcast_to(shown, (B, 1, 1, S))[:, 0, 0]
    new = draw.count_new(T, visible.sum(-1).tolist(), storage.several)
    rng = np.random.default_rng([storage.seed, 31])
    sequences: list[Stored] = []
    for b in range(B):
        sequences += _draw_beside(storage, rng, T, S, new)
        sequences.append(Stored(b, T, np.flatnonzero(visible[b])))
    sequences += _draw_beside(storage, rng, T, S, new) if B else []
    if "offsets of both" in storage.takes and any(len(x.keys) != x.T for x in sequences):
        raise inexpressible("sequences with more or fewer keys than queries")
    counts = [-(-len(x.keys) // storage.page_size) for x in sequences]
    order = storage.first_page + rng.permutation(sum(counts) + SPARE)
    pages = np.split(order, np.cumsum(counts, dtype=int))
    drawn = _draw_options(storage, draw, problem, sequences, new)
    masks = _place_masks(storage, problem, shown, sequences) if by_matrix else None
    return Arrangement(storage, tuple(sequences), tuple(pages[:-1]), pages[-1], masks, **drawn)


def _check(problem: Problem) -> None:
    """Refuse what cannot be stored as sequences of their own lengths."""
    if problem.q.ndim != 4 or len(problem.lead) != 1:
        raise inexpressible(f"arrays of {problem.q.ndim} axes")
    if len({x.shape[0] for x in (problem.q, problem.k, problem.v)}) > 1:
        raise inexpressible("a sample of k and v for several of q")
    for name in UNSTORED:
        if getattr(problem, name) is not None:
            raise inexpressible(f"a {name} of sequences of other lengths")


def _passes_matrix(storage: Storage, problem: Problem, draw: Draw, mask_true: str) -> bool:
    """Return True if a packed mask is passed; refuse masks that nothing holds."""
    wanted = draw.wants("packed mask", 0.5)
    if problem.mask is None:
        return "packed mask" in storage.required
    has_matrix = "packed mask" in storage.takes and "packed mask" not in storage.without
    if hides_keys(problem) and storage.has_lengths:
        if not looks_along(problem) or storage.lets_stay(problem, mask_true):
            return wanted
        if not has_matrix:
            raise inexpressible("hidden keys beside causal or a window, which would count them")
    shape = read_shown(problem, mask_true).shape
    if not has_matrix:
        raise inexpressible(f"a mask of shape {shape}: it takes lengths alone")
    if len(shape) > 2 and shape[-3] > 1:
        raise inexpressible("a mask of each head")
    return True


def _draw_beside(
    storage: Storage, rng: np.random.Generator, T: int, S: int, new: int
) -> list[Stored]:
    """Draw other sequences; without a seed one, of other lengths than the problem's."""
    if not storage.beside:
        return []
    lengths = [(T + 2, S + 5)] if rng.integers(2) else [(max(T - 1, 1), S + 2)]
    if storage.seed:
        count = 1 if storage.few_shapes else rng.integers(3)
        drawn = rng.integers(0, (T + 3, S + 6), (count, 2))
        drawn = np.maximum(np.where(rng.random(drawn.shape) < 0.25, 0, drawn), storage.least)
        lengths = [(int(t), int(s)) for t, s in drawn]
    if storage.queries == "batch" or T == 1:  # what takes one new token may take no more
        lengths = [(T, s) for _, s in lengths]
    lengths = [(storage.nearest("T", t), storage.nearest("S", s)) for t, s in lengths]
    if "offsets of both" in storage.takes:
        lengths = [(t, t) for t, _ in lengths]
    return [Stored(None, t, np.arange(max(s, new))) for t, s in lengths]


def _draw_options(
    storage: Storage, draw: Draw, problem: Problem, sequences: list[Stored], new: int
) -> dict[str, Any]:
    """Draw what one call has beside the places of its sequences."""
    rng, count, lengths = draw.rng, len(sequences), [x.S for x in sequences]
    in_cache = storage.either and bool(rng.integers(2))
    keys: Any = "cache" if in_cache else storage.keys
    orders = draw.wants("order of pages", 0.6) and keys == "pages"
    in_rows = keys == "cache" and draw.wants("rows of the cache", 0.5)
    rows = rng.permutation(count + SPARE)[:count] if in_rows else None
    padded = keys == "cache" and draw.wants("left padding", 0.5)
    padding = rng.integers(0, 4, count) if padded else np.zeros(count, int)
    turned, adjacent = draw.wants("cosines", 0.8) and new > 0, bool(rng.integers(2))
    turns = None
    if turned and draw.turns_exactly(problem, lengths):
        room = max(lengths, default=0) + 2 * storage.page_size + 4
        turns = draw_turns(rng, problem.D, room + problem.T + new)
    elif "cosines" in storage.required:
        raise inexpressible("q and k that a rotary table of quarter turns would not leave exact")
    return {
        "keys": keys,
        "heads_first": storage.heads_first if not orders else bool(rng.random() < 0.75),
        "orders": orders,
        "new": new,
        "turns": turns,
        "adjacent": adjacent or "adjacent pairs" not in storage.takes,
        "along": looks_along(problem),
        "left_padding": tuple(padding.tolist()) if padded else None,
        "rows": rows,
    }


def _place_masks(
    storage: Storage, problem: Problem, shown: Array | None, sequences: list[Stored]
) -> tuple[Array, ...]:
    """Return the mask (T, S) of each sequence; causal is in it, for some ignore it beside one."""
    B, T, S = problem.lead[0], problem.T, problem.S
    visible = np.broadcast_to(True if shown is None else shown, (B, 1, T, S))[:, 0]
    if problem.causal:
        aligned = np.arange(T)[:, None] + diagonal(T, S, problem.alignment)
        visible = visible & band(aligned, np.arange(S), None, 0)
    masks = []
    for n, sequence in enumerate(sequences):
        if sequence.sample is not None:
            masks.append(visible[sequence.sample])
            continue
        rng = np.random.default_rng([storage.seed, n, 41 + (storage.renewed == "masks")])
        masks.append(rng.random((sequence.T, sequence.S)) < 0.5)
    return tuple(masks)


BEHIND = 3
"""Positions of a rotary table behind those that anyone needs."""


def draw_turns(rng: np.random.Generator, D: int, positions: int) -> Array:
    """Return quarter turns of R ≤ D features, R a multiple of 16 if D is at least that."""
    blocks = D // 16
    size = 16 * (blocks if rng.integers(2) else rng.integers(1, blocks + 1)) if blocks else D
    return rng.integers(0, 4, (positions + BEHIND, size // 2))


@dataclass
class Draw:
    """Choice of what a call has, by the shape of its problem.

    What a function takes beside the places of its sequences is drawn anew for each shape, so that
    it is called with and without it.
    """

    storage: Storage
    rng: np.random.Generator

    @classmethod
    def of(cls, problem: Problem, storage: Storage) -> Draw:
        """Return the choice for a problem: other contents of its arrays change nothing."""
        shapes = [getattr(problem, name).shape for name in "qkv"]
        options = (bool(problem.causal), problem.window, problem.scale, problem.softcap)
        key = zlib.crc32(repr((shapes, options, problem.mask is None)).encode())
        rng = np.random.default_rng([storage.seed, 43, key])
        return cls(storage, rng)

    def wants(self, meaning: str, chance: float) -> bool:
        """Return True if it is passed this time."""
        drawn = self.rng.random() < chance
        if meaning in self.storage.required:
            return True
        return drawn and meaning in self.storage.takes and meaning not in self.storage.without

    def count_new(self, T: int, lengths: Sequence[int], several: bool) -> int:
        """Return the number of new keys: one for each query, or with `several` any number."""
        most = min(lengths, default=T)
        other, number = self.rng.random() < 0.25, int(self.rng.integers(1, max(most, 1) + 1))
        wanted = self.wants("new keys", 0.85)
        count = number if several and most and (other or most < T) else T
        if count > most or not count:
            if "new keys" in self.storage.required:
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
