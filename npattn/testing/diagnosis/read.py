"""The intermediate quantities of a black box, read from its results on chosen arrays.

    v = I     o is P: the weights that the forward uses
    do = I    dv is Pᵀ: the weights that the backward uses
    do of one query    dk[s] = scale · dS[t, s] · q[t]: the gradient of the scores

The identity ties two indices, a key and a column of v. So each unit column is put at two random
places: what is wrong at the same keys in both belongs to P, anything else to o. Shapes stay as they
are, so that nothing is refused or compiled again: the keys are read E at a time.
docs/diagnosis.md derives what is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from npattn.oracle.api import evaluate
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array, finfo
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.diagnosis.evidence import group, observe, rounding_of, scores_shape
from npattn.testing.trial import Trial

MOST_CALLS = 400
"""Most calls of a reading."""
LARGEST = 2**21
"""Elements of the largest quantity that is read."""
BLOCK = 2**18
"""Elements of unit columns of v that are evaluated at once, as a cache holds: of 8192 keys, 32."""
ROWS = 12
"""Queries whose dS is read, those at the edges of tiles first."""


class Unreadable(Exception):
    """A quantity cannot be read; the text says why."""


@dataclass(frozen=True, eq=False)
class Quantity:
    """A quantity as it was read, beside the exact one."""

    name: str  # as in dense.py: "p", "o", "lse", "dv", "ds", …
    axes: str  # letters of its axes: "bhts"
    got: Array  # float64, as `want` and `tolerance`; it may be NaN
    want: Array
    tolerance: Array
    known: Array  # elements that were read

    @cached_property
    def wrong(self) -> Array:
        """Elements out of tolerance."""
        same = (self.got == self.want) | (np.isnan(self.got) & np.isnan(self.want))
        with np.errstate(invalid="ignore"):
            near = abs(self.got - self.want) <= self.tolerance
        return np.asarray(self.known & ~same & ~near)

    @property
    def wrong_rows(self) -> Array:
        """Rows with an element out of tolerance."""
        return np.asarray(self.wrong.any(-1))


def half_ulp_of(x: Array, dtype: Any) -> Array:
    """Largest rounding of values that are delivered in a dtype."""
    info = finfo(dtype)
    return np.asarray(abs(x) * float(info.eps) / 2 + float(info.smallest_subnormal) / 2)


def _disagree(first: Array, second: Array, tolerance: Array, rounding: float) -> Array:
    """Return True where two readings differ by more than a tolerance and their own rounding."""
    with np.errstate(invalid="ignore"):
        slack = tolerance + rounding * np.maximum(abs(first), abs(second))
        apart = ~(abs(first - second) <= slack)
    return np.asarray(apart & ~(np.isnan(first) & np.isnan(second)))


class Reader:
    """Reader of the quantities of one implementation on one problem, in a memory layout `view`.

    If the implementation is called in several ways, `way` says which of the results with one name
    is read.
    """

    def __init__(
        self,
        trial: Trial,
        problem: Problem,
        cotangents: Cotangents,
        view: str = "contiguous",
        way: int = 0,
    ) -> None:
        self.trial = replace(trial, memo={})
        self.forward = replace(trial, gradients=frozenset(), memo={})
        self.problem, self.cotangents = problem, cotangents
        self.view, self.way = view, way
        self.B = math.prod(problem.lead)
        self.rng = np.random.default_rng(7)
        self.rounding = rounding_of(trial, problem)
        if trial.implementation.output is not None:
            raise Unreadable("o is stored in 8 bits")
        if self.B * problem.H * problem.T * problem.S > LARGEST:
            raise Unreadable("the problem is too large")

    # --- shapes ---

    def flat(self, x: Array) -> Array:
        """Return a result with query heads as (B, H, T, ...), float64."""
        x = np.real(np.asarray(x))
        x = x if x.dtype.kind == "f" else x.astype(np.float64)
        p = self.problem
        tail = x.shape[0 if p.headless else len(p.lead) + 1 :]
        return np.asarray(x, np.float64).reshape(self.B, p.H, *tail)

    @cached_property
    def key_lead(self) -> tuple[int, ...]:
        """Leading axes of k and v together, without the heads."""
        return () if self.problem.headless else self.problem.v.shape[:-3]

    @cached_property
    def kv_head(self) -> Array:
        """Key/value head of each query head."""
        h = np.arange(self.problem.H)
        if self.trial.conventions.kv_head == "tile":
            return h % max(self.problem.K, 1)
        return h // max(self.problem.H // max(self.problem.K, 1), 1)

    def by_query_head(self, x: Array, axes: int = 1) -> Array:
        """Return an array of the keys, (*lead of v, K, ...), as (B, H, ...)."""
        return self.by_head(x, self.kv_head, axes)

    def by_head(self, x: Array, heads: Array, axes: int = 1) -> Array:
        """Return an array of the keys as (B, H, ...), of the key head of each query head."""
        tail = x.shape[len(x.shape) - axes :]
        x = x.reshape(*self.key_lead, self.problem.K, *tail)
        x = np.broadcast_to(x, (*self.problem.lead, self.problem.K, *tail))
        return x.reshape(self.B, self.problem.K, *tail)[:, heads]

    # --- the forward ---

    @cached_property
    def p(self) -> tuple[Quantity, Array]:
        """The weights by v = I, and True where two placements of the units disagree."""
        problem = self.without_gate(self.problem)
        first, second = (read(self.kv_head) for read, _ in self.readings)
        want, tolerance = self.exact_weights(problem)
        whole = np.ones(want.shape, bool)
        apart = _disagree(first, second, 2 * tolerance, self.rounding)
        return Quantity("p", "bhts", first, want, tolerance, whole), apart

    @cached_property
    def readings(self) -> list[tuple[Callable[..., Array], Array]]:
        """Two readings of o at unit columns of v.

        Each is a function of whose values a head takes, and the sum of all columns, (B, H, T).
        """
        problem = self.without_gate(self.problem)
        return [self._read_weights(problem) for _ in range(2)]

    @cached_property
    def foreign_values(self) -> dict[tuple[int, int], list[tuple[int, int, Array]]]:
        """For (b, h) that take values of another sample or head: which may be, and P by these."""
        tolerance = self.p[0].tolerance
        B, K = self.B, self.problem.K
        bad = {(int(b), int(h)) for b, h, *_ in np.argwhere(self.p[1])}
        samples = range(B) if math.prod(self.key_lead) == B else (None,)
        found: dict[tuple[int, int], list[tuple[int, int, Array]]] = {}
        for sample, head in ((b, k) for b in samples for k in range(K)):
            heads = np.full(self.problem.H, head)
            order = None if sample is None else np.full(B, sample)
            pair = [(read(heads, order), total) for read, total in self.readings]
            apart = _disagree(pair[0][0], pair[1][0], 2 * tolerance, self.rounding)
            for weights, total in pair:  # nothing of o may be left over
                slack = 2 * tolerance.sum(-1)
                apart |= _disagree(weights.sum(-1), total, slack, self.rounding)[..., None]
            for b, h in bad:
                own = (b if sample is None else sample, head)
                if own != (b, int(self.kv_head[h])) and not apart[b, h].any():
                    found.setdefault((b, h), []).append((*own, pair[0][0][b, h]))
        return found

    def exact_weights(self, problem: Problem) -> tuple[Array, Array]:
        """Return the weights that meet v, after dropout, and their tolerance."""
        S = problem.S
        rows = max(math.prod(problem.v.shape[:-1]), 1)
        width = max(1, min(S, BLOCK // rows))
        columns = (range(n, min(n + width, S)) for n in range(0, max(S, 1), width))
        units = (np.eye(S, len(part), -part.start) for part in columns)
        read = [self._exact_columns(problem, x) for x in units]
        want, tolerance = (np.concatenate(x, -1) for x in zip(*read, strict=True))
        return want, tolerance + half_ulp_of(want, problem.q.dtype)

    def _exact_columns(self, problem: Problem, units: Array) -> tuple[Array, Array]:
        """Return o and its tolerance for v of some unit columns, (S, n), as (B, H, T, n)."""
        v = np.broadcast_to(units, (*problem.v.shape[:-1], units.shape[-1]))
        own = problem.replace(v=v.astype(problem.v.dtype, order="C"), gate=None)  # BLAS needs it
        o_shape = (*self._o_shape(problem)[:-1], units.shape[-1])
        zeros = Cotangents(np.zeros(o_shape, problem.q.dtype), None)
        exact, allowed = (self.flat(x["o"]) for x in self.forward.oracle(own, zeros))
        return exact, allowed

    def _o_shape(self, problem: Problem) -> tuple[int, ...]:
        return (*scores_shape(problem)[:-1], problem.E)

    def without_gate(self, problem: Problem) -> Problem:
        if problem.gate is None:
            return problem
        return problem.replace(gate=np.ones_like(np.asarray(problem.gate)))

    def _read_weights(self, problem: Problem) -> tuple[Callable[..., Array], Array]:
        """Call with unit columns of v; return P (B, H, T, S) as a function of heads and samples."""
        S, E = problem.S, problem.E
        if not E or not S:
            raise Unreadable("v has no columns" if not E else "there is no key")
        calls = -(-S // E)
        if calls > MOST_CALLS // 2:
            raise Unreadable(f"reading takes {calls} calls")
        shape = (math.prod(self.key_lead), problem.K)
        place = np.argsort(self.rng.random((*shape, calls * E)), -1)[..., :S]  # of each key
        call, column = place // E, place % E
        results = np.empty((calls, self.B, problem.H, problem.T, E))
        for n in range(calls):
            unit = (call == n)[..., None] & (column[..., None] == np.arange(E))
            v = unit.reshape(problem.v.shape).astype(problem.v.dtype)
            results[n] = self.flat(self._call(problem.replace(v=v), v))
        b, h, t = (x[..., None] for x in np.ogrid[: self.B, : problem.H, : problem.T])

        def weights(heads: Array, samples: Array | None = None) -> Array:
            calls_of, columns = (self.by_head(x.reshape(-1, S), heads) for x in (call, column))
            if samples is not None:
                calls_of, columns = calls_of[samples], columns[samples]
            return np.asarray(results[calls_of[:, :, None], b, h, t, columns[:, :, None]])

        return weights, results.sum((0, -1))

    def _call(self, problem: Problem, v: Array) -> Array:
        """Return o; raise Unreadable if its values v, (..., K, S, E), cannot be chosen."""
        f = self.trial.implementation
        fitted = f.fit(problem)
        if not np.array_equal(np.asarray(fitted.v, np.float64), np.asarray(v, np.float64)):
            raise Unreadable("v cannot be chosen")
        try:
            results = f.forward(fitted, self.view)
        except ImplementationError as err:
            raise Unreadable(f"it raised {err}") from err
        found = [x for name, x in results.pairs if name == "o"]
        o = found[min(self.way, len(found) - 1)]
        if o.shape != self._o_shape(problem):
            raise Unreadable(f"o has shape {o.shape}")
        return o

    def ignores_v(self, o: Array) -> bool:
        """Return True if the same q and k give the same bits of o with any values."""
        other = self.problem.replace(v=-np.asarray(self.problem.v))
        try:
            same = np.array_equal(self._call(other, other.v), o, equal_nan=True)
        except Unreadable:
            return False
        return bool(same and np.any(o))

    def knows_other_queries(self) -> bool:
        """Return True if o is right with other queries: what was kept is not read then."""
        fresh = self.problem.replace(q=-np.asarray(self.problem.q))
        try:
            return "o" not in observe(self.forward, fresh, self.cotangents, self.view).wrong
        except ImplementationError:
            return False

    # --- the backward ---

    def gradients(self, problem: Problem, cotangents: Cotangents) -> dict[str, Array]:
        """Return the gradients of one call by name."""
        try:
            results = self.trial.implementation.gradients(problem, cotangents, self.view)
        except ImplementationError as err:
            raise Unreadable(f"it raised {err}") from err
        return {name: arrays[0] for name, arrays in group(results).items()}

    def _rows_of(self, name: str, problem: Problem, do: Array) -> Array:
        """Return dk or dv of cotangents of o, (B, H, T, E), by query heads, (B, H, S, …)."""
        do = do.reshape(self._o_shape(problem)).astype(problem.q.dtype)
        found = self.gradients(problem, Cotangents(do, self._zero_dlse())).get(name)
        if found is None or found.shape != getattr(problem, name[1:]).shape:
            raise Unreadable(f"{name} is not returned")
        return self.by_query_head(np.asarray(found, np.float64), 2)

    def _zero_dlse(self) -> Array | None:
        dlse = self.cotangents.dlse
        return None if dlse is None else np.zeros_like(dlse)

    @cached_property
    def q_is_shared(self) -> bool:
        """True if k or v has fewer samples than o: its gradient sums over them."""
        return (
            math.prod(self.key_lead) != self.B
            or math.prod(self.problem.k.shape[: -2 if self.problem.headless else -3]) != self.B
        )

    def _sources(self) -> Iterator[tuple[Array, Array]]:
        """Yield sets of (b, h) whose gradients of k and v do not meet in a sum."""
        H, K = self.problem.H, self.problem.K
        for g in range(H // max(K, 1)):
            heads = np.array([np.flatnonzero(self.kv_head == k)[g] for k in range(K)])
            if self.q_is_shared:
                for b in range(self.B):
                    yield np.array([b]), heads
            else:
                yield np.arange(self.B), heads

    @cached_property
    def p_of_backward(self) -> tuple[Quantity, Array]:
        """The weights by do = I, as dv shows them, and True where two placements disagree."""
        problem = self.without_gate(self.problem)
        T, E = problem.T, problem.E
        want, _ = self.exact_weights(problem)
        tolerance = self._tolerance_of_units(problem)
        sources = list(self._sources())
        calls = -(-T // max(E, 1))
        if not E or 2 * calls * len(sources) > MOST_CALLS:
            raise Unreadable(f"reading takes {2 * calls * len(sources)} calls")
        first, second = (self._read_by_dv(problem, sources, calls) for _ in range(2))
        apart = _disagree(first, second, 4 * tolerance, self.rounding)
        whole = np.ones(want.shape, bool)
        return Quantity("p", "bhts", first, want, 2 * tolerance, whole), apart

    def _tolerance_of_units(self, problem: Problem) -> Array:
        """Return the tolerance of dv at do = I, of all heads together, as (B, H, T, S)."""
        T = problem.T
        v = np.zeros((*problem.v.shape[:-1], T), problem.v.dtype)
        do = np.broadcast_to(np.eye(T, dtype=problem.q.dtype), (*self._o_shape(problem)[:-1], T))
        own = problem.replace(v=v, gate=None)
        cotangents = Cotangents(np.array(do), self._zero_dlse())
        exact, allowed = (x["dv"] for x in self.trial.oracle(own, cotangents))
        allowed = allowed + half_ulp_of(exact, problem.q.dtype)
        return self.by_query_head(allowed, 2).swapaxes(-1, -2)

    def _read_by_dv(
        self, problem: Problem, sources: list[tuple[Array, Array]], calls: int
    ) -> Array:
        """Return P, (B, H, T, S), from dv at unit columns of do, by groups (samples, heads)."""
        B, H, T, S, E = self.B, problem.H, problem.T, problem.S, problem.E
        place = np.argsort(self.rng.random((B, H, calls * E)), -1)[..., :T]
        call, column = place // E, place % E
        found = np.full((B, H, T, S), np.nan)
        for bs, hs in sources:
            mine = np.zeros((B, H, 1), bool)
            mine[np.ix_(bs, hs)] = True
            for n in range(calls):
                here = mine & (call == n)
                do = here[..., None] & (column[..., None] == np.arange(E))
                rows = self._rows_of("dv", problem, do)  # (B, H, S, E)
                at = np.broadcast_to(column[:, :, None], (B, H, S, T))
                values = np.take_along_axis(rows, at, -1).swapaxes(-1, -2)
                found = np.where(here[..., None], values, found)
        return found

    @cached_property
    def ds(self) -> Quantity:
        """dS of some queries, as dk shows it: dk[s] = scale · dS[t, s] · q[t]."""
        problem, B, H = self.problem, self.B, self.problem.H
        T, S = problem.T, problem.S
        scale = problem.scale
        latent = self.trial.implementation.latent is not None
        if latent or problem.score_mod is not None or not scale or not problem.D:
            raise Unreadable("dk does not tell dS")
        sources = list(self._sources())
        rows = self._rows(T, max(1, MOST_CALLS // 4 // max(len(sources), 1)))
        got, known = np.zeros((B, H, T, S)), np.zeros((B, H, T, S), bool)
        q = self.queries
        norm = (q * q).sum(-1)
        # A row adds no more to the error of dk than all rows together.
        allowed = self.by_query_head(self._tolerance_of_dk(), 2)
        with np.errstate(all="ignore"):
            tolerance = np.einsum("bhsd,bhtd->bhts", allowed, abs(q)) / norm[..., None] / abs(scale)
        for bs, hs in sources:
            where: Any = np.ix_(bs, hs)
            for t in rows:
                place = np.ix_(bs, hs, np.array([t]))
                do: Array = np.zeros((B, H, T, problem.E))
                do[place] = self._dout[place]
                own = self._rows_of("dk", problem, do)[where]
                with np.errstate(all="ignore"):
                    value = np.einsum("bhsd,bhd->bhs", own, q[where][:, :, t])
                    value = value / norm[where][:, :, t][..., None] / scale
                got[place] = value[:, :, None]
                known[place] = (norm[where][:, :, t] > 0)[..., None, None]
        exact = self.exact_steps
        want = exact["p"] * (exact["keep"] * exact["dp"] - exact["delta"][..., None])
        return Quantity(
            "ds", "bhts", got, want * exact["slope"], np.where(known, tolerance, np.inf), known
        )

    def _tolerance_of_dk(self) -> Array:
        cotangents = Cotangents(self.cotangents.dout, self._zero_dlse())
        exact, allowed = (x["dk"] for x in self.trial.oracle(self.problem, cotangents))
        return np.asarray(2 * allowed + half_ulp_of(exact, self.problem.q.dtype))

    @cached_property
    def _dout(self) -> Array:
        return self.flat(self.cotangents.dout)

    @staticmethod
    def _rows(T: int, most: int) -> list[int]:
        """Return queries to read, those at the edges of tiles first."""
        edges = [0, T - 1, T // 2, *(m + d for m in (16, 32, 64, 128) for d in (-1, 0))]
        rows = [t for t in dict.fromkeys([*edges, *range(T)]) if 0 <= t < T]
        return sorted(rows[: min(most, ROWS)])

    @cached_property
    def exact_steps(self) -> dict[str, Array]:
        """Exact quantities of the problem in the terms of dense.py, (B, H, T, S) but for δ."""
        fwd = evaluate(self.problem, self.trial.conventions)
        p, keep = self.flat(fwd.weights), self.flat_scores(1.0)
        if self.problem.dropout_mask is not None:
            kept = self.flat_scores(np.asarray(self.problem.dropout_mask, float))
            keep = kept / (1 - self.problem.dropout_rate)
        do = self._dout
        if self.problem.gate is not None:
            gate = np.asarray(self.problem.gate, float)
            do = do * np.broadcast_to(gate, self._o_shape(self.problem)).reshape(do.shape)
        v = self.by_query_head(np.nan_to_num(np.asarray(self.problem.v, float)), 2)
        dp = np.einsum("bhte,bhse->bhts", do, v)
        slope: Array | float = 1.0
        if self.problem.softcap is not None:
            scale, cap = self.problem.scale, self.problem.softcap
            slope = 1 - np.tanh(scale * self.products / cap) ** 2
        delta = (p * keep * dp).sum(-1)
        return {"p": p, "keep": keep, "dp": dp, "delta": delta, "slope": np.asarray(slope)}

    @cached_property
    def products(self) -> Array:
        """q kᵀ, unscaled, (B, H, T, S)."""
        with np.errstate(all="ignore"):
            return np.asarray(np.einsum("bhtd,bhsd->bhts", self.queries, self.keys))

    @cached_property
    def queries(self) -> Array:
        """q as (B, H, T, D), float64."""
        p = self.problem
        q = np.broadcast_to(p.q, (*scores_shape(p)[:-1], p.D))
        return q.reshape(self.B, p.H, p.T, p.D).astype(np.float64)

    @cached_property
    def keys(self) -> Array:
        """k of each query head, (B, H, S, D), float64."""
        p = self.problem
        k = np.asarray(p.k, np.float64)
        lead = () if p.headless else k.shape[:-3]
        k = np.broadcast_to(k.reshape(*lead, p.K, p.S, p.D), (*p.lead, p.K, p.S, p.D))
        return k.reshape(self.B, p.K, p.S, p.D)[:, self.kv_head]

    def flat_scores(self, x: Array | float) -> Array:
        """Return an array that broadcasts against the scores as (B, H, T, S)."""
        p = self.problem
        return np.broadcast_to(x, scores_shape(p)).reshape(self.B, p.H, p.T, p.S)

    @cached_property
    def dv_without_dout(self) -> Array:
        """dv of a dout of zeros, which is 0."""
        zero = np.zeros(self._o_shape(self.problem), self.problem.q.dtype)
        dv = self.gradients(self.problem, Cotangents(zero, self._zero_dlse())).get("dv")
        return np.zeros(1) if dv is None else np.nan_to_num(np.asarray(dv, np.float64))
