"""The scores and the error of each: product, softcap, score_mod, bias; then the argument of exp."""

from __future__ import annotations

import math
from functools import cached_property, reduce
from typing import Any, NamedTuple, cast

import numpy as np

from npattn.conventions import Conventions
from npattn.engines import dense
from npattn.engines.score_mod import call_score_mod, complex_step
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.testing.bounds.integers import IntegerErrors, integer_errors
from npattn.testing.bounds.rounding import EXACT, Rounding, Units

WIDE = 0.25
"""Errors of scores within which a score_mod may turn."""
TAME = 1e100
OWN = Conventions()


def swing(problem: Problem, s: Array, f: Array, error: Array) -> Array:
    """Return how far score_mod moves from f, its value at s, where s moves by the error.

    It is evaluated at both ends and, where the error is wide, also between them, evenly and around
    0, where functions turn.
    """
    at = [s - error, s + error]
    if np.max(error, initial=0, where=np.isfinite(error)) > WIDE:
        at += [s + t * error for t in np.linspace(-1, 1, 18)[1:-1]]
        at += [np.clip(x * 2.0**n, s - error, s + error) for n in range(-3, 8) for x in (-1, 1)]
    return reduce(np.maximum, [abs(call_score_mod(problem, x) - f) for x in at])


def finite(x: Array) -> Array:
    """Replace NaN and inf in x by 0."""
    numbers = np.isfinite(x)
    return x if numbers.all() else np.where(numbers, x, 0)


def row_sum(x: Array) -> Array:
    """Return the sum over the keys of each row."""
    return np.add.reduce(x, -1, keepdims=True)


def are_tame(*arrays: Array) -> bool:
    """Return True for numbers whose squares, and sums of them, are finite."""
    return all(x.min(initial=0) > -TAME and x.max(initial=0) < TAME for x in arrays)


class Stage(NamedTuple):
    """Scores after one stage, the error of each, and their slope in scale · q kᵀ with its error."""

    s: Array
    error: Array
    slope: Any
    slope_error: Any


class Operands(NamedTuple):
    """Arrays of the shapes of q, k and v, heads repeated."""

    q: Array
    k: Array
    v: Array


class ScoreErrors:
    """Scores of a problem under a rounding model, and what the argument of exp errs by.

    `problem` is canonical, `original` what the conventions made it of.

    What belongs to one score and what sums over a row are methods apart: blocks of a row
    (by_row.py) have their own scores, but the sums and the sizes T, S of the whole.
    """

    wanted: frozenset[str] = frozenset(("weights", "max_score"))
    """Results to bound beside o and lse."""
    r: dense.Residuals
    s: Array  # final scores
    m: Array  # row maximum, sink included; 0 on empty rows
    x: Array  # scale · q kᵀ
    reach: Array  # scale · |q| |k|ᵀ
    first: Array | None  # |bias|, where the sum of products may begin with it
    sink: Array | None
    p_sink: Array | None  # the share of the sink in each row
    tanh: Array  # of x / softcap
    modified: Array  # score_mod of the capped scores, and its derivative there
    rate: Array

    def _set_options(
        self,
        problem: Problem,
        rounding: Rounding,
        dtype: Any,
        original: Problem | None,
        conventions: Conventions | None,
    ) -> None:
        """Set what the options alone decide."""
        self.original, self.conventions = original or problem, conventions or OWN
        # Heads that are shared by tiling are expanded in the canonical problem.
        self.tiles = self.original.H // self.original.K if problem.K != self.original.K else 1
        self.problem, self.rounding, self.dtype = problem, rounding, dtype
        self.unit = Units.of(rounding, dtype)
        self.drops = problem.dropout_mask is not None
        gate = self.original.gate
        # A gate that is the same for all columns may multiply the weights, and so be stored.
        self.gates_weights = gate is not None and (gate.shape[-1] == 1 or problem.E == 1)
        self.n_p = 1 + ((self.drops + self.gates_weights) if not rounding.fuses else 0)
        self.stored_do = EXACT if gate is None else self.unit.low  # of gate · dout
        self.in_ds = 0.0 if rounding.fuses else self.unit.p.times(self.n_p)
        self.n_ds = 1 if rounding.fuses else 2
        self.scale = abs(cast(float, problem.scale))  # a number, once the problem is made

    def set_lengths(self, T: int, S: int) -> None:
        """Set the counts of roundings for T queries and S keys; `problem` may be a part of them."""
        self.T, self.S = T, S
        self.blocks = math.ceil(S / 16)  # no online softmax has smaller tiles
        self.chain = self.terms(S) + self.blocks

    def _set_residuals(self, residuals: dense.Residuals) -> None:
        self.r, keep = residuals, residuals.keep
        self.all_live = bool(residuals.live.all())
        self.z = np.ones((1, 1)) if keep is None else np.broadcast_to(keep, self.r.p.shape)

    def terms(self, n: int) -> int:
        """Return how many roundings one term of a sum of n may meet: in any order, or in blocks."""
        block = self.rounding.sum_block
        return n + 4 if block is None else min(n, block + 3 * math.ceil(n / block)) + 4

    @property
    def block(self) -> int:
        """Number of keys in one block of a sum over them."""
        return min(self.S, self.rounding.sum_block or self.S)

    def gamma(self, n: float) -> float:
        """Return the relative error of n roundings in a row."""
        return n * self.unit.u / (1 - n * self.unit.u)

    @cached_property
    def integer_errors(self) -> IntegerErrors | None:
        """Errors of q and k as integers, if they enter their product so."""
        integers = self.rounding.integers
        if integers is None:
            return None
        return integer_errors(integers, finite(self.r.q), finite(self.r.k), self.unit)

    @cached_property
    def tame(self) -> bool:
        return are_tame(self.r.q, self.r.k, self.r.v)

    @cached_property
    def numbers(self) -> Operands:
        """q, k, v with NaN and inf set to 0."""
        return Operands(*(x if self.tame else finite(x) for x in (self.r.q, self.r.k, self.r.v)))

    @cached_property
    def sizes(self) -> Operands:
        """|q|, |k|, |v|."""
        return Operands(abs(self.r.q), abs(self.r.k), abs(self.r.v))

    @cached_property
    def ones(self) -> Array:
        """1 where a score takes part, else 0."""
        return 1.0 * self.r.live

    @cached_property
    def seen_rows(self) -> Array:
        """True for rows, (..., T, 1), with a score that takes part."""
        return np.any(self.r.live, -1, keepdims=True)

    def where_live(self, x: Array) -> Array:
        """Return x with 0 where a score takes no part; x itself, if each of them does."""
        live = self.r.live
        return x if self.all_live and x.shape == live.shape else np.where(live, x, 0)

    def drop(self, x: Array) -> Array:
        """Return x times the dropout multiplier z."""
        return x * self.z if self.drops else x

    def sum_live(self, w: Array, x: Array, live: Array) -> Array:
        """Return `dense.sum_live`, where x is made of q, k or v: nothing is left out of numbers."""
        return w @ x if self.tame else dense.sum_live(w, x, live)

    # --- stage by stage ---------------------------------------------------------------------------

    def _score_errors(self) -> tuple[Array, Array]:
        """Return the final scores and the error of each; keep their slope and its error."""
        problem, unit = self.problem, self.unit
        stage = self._product()
        self.x = stage.s
        if problem.softcap is not None:
            stage = self._softcap(stage, problem.softcap)
        if problem.score_mod is not None:
            stage = self._score_mod(stage)
        if self.conventions.fill(self.original) is not None:
            # A twin's score is its bias: nothing of its query, not even a NaN, is in it.
            names = ("s", "error", "slope", "slope_error")
            stage = Stage(*(np.where(self._twins, 0, getattr(stage, name)) for name in names))
        s, error = stage.s, stage.error
        if problem.bias_array is not None:
            s, error = self._add_bias(s, error, problem.bias_array.astype(float))
            fill = self.conventions.fill(self.original)
            if self._caps_hidden and fill is not None:
                capped = (unit.s.times(2) + unit.exp + 4 * unit.u) * abs(fill)
                error = error + np.where(self._twins, capped, 0)
        self.slope, self.slope_error = stage.slope, stage.slope_error
        if self.bends:
            self.slope_error = np.where(self.r.live, stage.slope_error, 0)
        return s, error

    def _product(self) -> Stage:
        """scale · q kᵀ."""
        unit, u, q, k = self.unit, self.unit.u, self.r.q, self.r.k
        scale, D = self.scale, self.problem.D
        aq, ak, _ = self.sizes
        s = self.problem.scale * (q @ k.swapaxes(-1, -2))
        # D products and sums; the scale may be rounded, its root taken, and put on q and k.
        self.reach = reach = scale * (aq @ ak.swapaxes(-1, -2))
        # q · scale may be stored before the product, and both rounded as they enter it.
        error = (self.gamma(D + 6) + unit.q.u + unit.operands.times(2)) * reach
        error += ((1 + u + unit.s.u) ** 2 - 1) * (abs(s) + error)
        error += unit.s.eta * (1 + scale)
        subnormal = row_sum(aq) + row_sum(ak).swapaxes(-1, -2)
        subnormal += D
        subnormal *= scale * (unit.tiny + unit.operands.eta)
        error += subnormal
        if self.integer_errors is not None:
            error = error + scale * self.integer_errors.of_scores(finite(q), u)
        return Stage(s, error, 1.0, 0.0)

    def _softcap(self, stage: Stage, c: float) -> Stage:
        unit, u, s, error = self.unit, self.unit.u, stage.s, stage.error
        self.tanh = t = np.tanh(s / c) if self.r.tanh is None else self.r.tanh
        moved = (error + (u + unit.s.u) * abs(s)) / c
        # tanh rises by at most (1 − t²) δ + ½ max|tanh″| δ², and by at most δ.
        moved = np.minimum(moved, (1 - t**2) * moved + 2 / 27**0.5 * moved**2)
        moved = moved + (unit.s.times(2) + unit.exp + 4 * u) * abs(t)
        slope_error = 2 * abs(t) * moved + moved**2 + 3 * u + 2 * unit.s.u
        return Stage(c * t, c * moved + unit.s.eta * (2 * c + 1), 1 - t**2, slope_error)

    def _score_mod(self, stage: Stage) -> Stage:
        """Return the stage after score_mod; set its values, and the error of a cap inside it."""
        unit, u, problem = self.unit, self.unit.u, self.problem
        s, error, slope, slope_error = stage
        self.modified = f = call_score_mod(problem, s)
        self.rate = rate = complex_step(problem, s)
        step = swing(problem, s, f, error)
        bent = [abs(complex_step(problem, s + d) - rate) for d in (error, -error)]
        # The roundings inside score_mod are its own: eight operations on numbers of its size.
        inside = 8 * u + 4 * unit.s.u
        rate_error = np.maximum(*bent) + inside * (1 + abs(rate)) + unit.s.eta
        slope_error = slope_error * (abs(rate) + rate_error) + abs(slope) * rate_error
        slope = slope * rate
        error = step + inside * (abs(f) + abs(s * rate)) + unit.s.eta
        if self.original.softcap is not None and self.caps_late:
            c = self.original.softcap
            t = abs(f) / c
            error = error + (unit.exp + 4 * u) * abs(f)
            error = error + inside * self._size_before_cap(s) * (1 - t**2)
            cap_error = 2 * t * (unit.exp + error / c) + (error / c) ** 2 + 3 * u + 2 * unit.s.u
            self.cap_error = np.where(self.r.live, cap_error, 0)
            slope_error = slope_error + 2 * t * unit.exp * abs(rate)
        return Stage(f, error, slope, slope_error)

    def _add_bias(self, x: Array, error: Array, bias: Array) -> tuple[Array, Array]:
        """Return x + bias and its error, (..., H, T, S), from the error of x; bias broadcasts."""
        unit, u = self.unit, self.unit.u
        s = x + bias
        # Where the bias itself is a number of the format, no rounding of the sum moves it
        # further than x does; a padding of −1e9 swallows x, and no more.
        added = (u + unit.s.u) * (abs(s) + error)
        if self.rounds_to_nearest and self.stores_bias:
            added = np.minimum(added, 4 * (abs(x) + error))
        if self.conventions.bias == "before_scale" and not self.caps_late:
            # The sum is rounded, then its product with a rounded scale; or each product is.
            size = abs(x) + np.where(self._twins, 0, abs(bias)) + error
            added = ((1 + u + unit.s.u) ** 3 - 1) * size + unit.s.eta * self.scale
        self.absorbed = np.zeros((), bool)
        if self.adds_to_hidden:
            added, error = self._add_to_hidden(s, x, added, error)
        error = error + added
        self.first = self._first_addend(bias)
        if self.first is not None:
            error = error + self._begun(self.first)
        return s, error + unit.s.eta

    def _begun(self, first: Array) -> Array:
        """Return the roundings of sums of products that begin with the bias."""
        error = self.gamma(self.problem.D) * first
        if self.rounds_to_nearest:
            # That moves a sum by no more than the product that was added.
            error = np.minimum(error, 2 * self.reach)
        none = first == 0  # twins of a NaN key have a reach of NaN
        if self.adds_to_hidden and self.hidden_number is not None:
            # Products below half a unit of the number leave it as it is, each of them.
            none = none | (self.absorbed & self._is_absorbed(self.reach))
        return np.where(none, 0, error)

    def _first_addend(self, bias: Array) -> Array | None:
        """Return the size of the number with which a sum of D products may begin; None if 0.

        A product of matrices that is given the bias to start from adds the products to it, one at
        a time, and rounds as often at its size.
        """
        if self.bends:
            return None
        first = np.where(self._twins, 0, abs(finite(bias)))
        if self.adds_to_hidden and self.hidden_number is not None:
            first = first + np.where(self.hidden_keys, abs(self.hidden_number), 0)
        return first

    def _add_to_hidden(self, s: Array, x: Array, added: Array, error: Array) -> tuple[Array, Array]:
        """Return the roundings of the sums, and the error before them, where hidden keys have more.

        All arrays are (..., H, T, S). The bias and the number are added in either order. A score
        below half a unit of the number leaves it as it is, in any format: then nothing is left of
        the score, nor of its error.
        """
        unit, original = self.unit, self.original
        number = self.hidden_number
        assert number is not None
        self.small = abs(x) + error
        if original.bias_array is not None and not self.caps_late:
            factor = self.scale if self.conventions.bias == "before_scale" else 1.0
            self.small = self.small + factor * abs(finite(original.bias_array.astype(float)))
        twice = ((1 + unit.u + unit.s.u) ** 4 - 1) * (self.small + abs(number))
        if self.rounds_to_nearest and self.stores_bias:
            twice = np.minimum(twice, 4 * self.small)
        hidden = self.hidden_keys
        self.absorbed = hidden & (s == number) & self._is_absorbed(self.small)
        added = np.where(hidden, np.where(self.absorbed, 0, twice), added)
        return added, np.where(self.absorbed, 0, error)

    def _is_absorbed(self, x: Array) -> Array:
        """True where x, added to the number of hidden scores, leaves it as it is."""
        assert self.hidden_number is not None
        return self.rounds_to_nearest & (x <= self.unit.u / 4 * abs(self.hidden_number))

    @property
    def bends(self) -> bool:
        """A softcap or a score_mod gives scores a slope of their own."""
        return self.problem.softcap is not None or self.problem.score_mod is not None

    @property
    def rounds_to_nearest(self) -> bool:
        """Sums are not cut off."""
        return self.rounding.accumulator != "truncated"

    @cached_property
    def hidden_number(self) -> float | None:
        """Number that hidden scores become, or are raised by; None if they leave the softmax."""
        more = self.conventions.addend(self.original)
        return self.conventions.fill(self.original) if more is None else more

    @property
    def adds_to_hidden(self) -> bool:
        """True if the number is added to the final scores, after any cap."""
        return self.conventions.addend(self.original) is not None and not self._caps_hidden

    @property
    def _caps_hidden(self) -> bool:
        """True if hidden scores are capped too."""
        return self.conventions.softcap == "after_mask" and self.original.softcap is not None

    @property
    def _twins(self) -> Array:
        """Canonical keys that stand for hidden ones."""
        return np.arange(self.problem.S) >= self.original.S

    @cached_property
    def hidden_keys(self) -> Array:
        """Hidden positions that take part in the softmax, among the canonical keys."""
        if self.conventions.fill(self.original) is not None:
            return self._twins
        return self.conventions.hidden_positions(self.original)

    def _hidden_error(self) -> Array | float:
        """Error of the number at hidden keys, in rows that have others too.

        It is common to the row's hidden keys. A row that has no other does not notice.
        """
        if self.hidden_rounding == 0:
            return 0.0
        mixed = self._others_live() & self.near_hidden
        return np.where(self.hidden_keys & mixed, self.hidden_rounding, 0)

    def _others_live(self) -> Array | bool:
        """Return True for rows with a visible key or a sink beside the hidden keys: (..., T, 1)."""
        others = np.any(self.r.live & ~self.hidden_keys, -1, keepdims=True)
        return others | (self.sink is not None)

    @property
    def near_hidden(self) -> Array:
        """True for rows, (..., T, 1), in which hidden keys may have any weight at all."""
        assert self.hidden_number is not None
        far = abs(self.hidden_number)
        return abs(self.m - self.hidden_number) <= far / 2 + 1000

    @cached_property
    def hidden_rounding(self) -> float:
        """Error of storing the number of hidden scores, which may be no number of the format."""
        number = self.hidden_number
        if number is None or self._caps_hidden:
            return 0.0
        with np.errstate(over="ignore"):
            stored = float(np.array(number).astype(self.dtype))
        return 0.0 if stored == number else (self.unit.u + self.unit.s.u) * abs(number)

    @property
    def stores_bias(self) -> bool:
        """The format of stored scores holds any bias in the dtype of the inputs."""
        return self.unit.s.u <= self.unit.low.u

    @property
    def caps_late(self) -> bool:
        """The canonical score_mod adds the bias and caps."""
        return self.original.softcap is not None and self.problem.softcap is None

    def _size_before_cap(self, x: Array) -> Array:
        """|score_mod(x)| + |bias|, (..., H, T, S), which meet before a late cap."""
        original, S = self.original, self.original.S
        x = x[..., :S]
        size = abs(x) if original.score_mod is None else abs(call_score_mod(original, x))
        if original.bias_array is not None:
            factor = self.scale if self.conventions.bias == "before_scale" else 1.0
            b = abs(original.bias_array.astype(float)) * factor
            size = size + np.where(np.isfinite(b), b, 0)
        more = self.conventions.addend(original)
        if more is not None and self.conventions.softcap == "after_mask":
            size = size + np.where(self.hidden_keys, abs(more), 0)
        size = np.broadcast_to(size, x.shape)
        return size if self.problem.S == S else np.concatenate([size, 0 * size], -1)

    # --- the argument of exp ----------------------------------------------------------------------

    def _argument_error(self) -> tuple[Array, Any]:
        """A of each key, and of the sink."""
        s, error = self._score_errors()
        shown = s if self.all_live else np.where(self.r.live, s, -np.inf)
        m = shown.max(-1, keepdims=True, initial=-np.inf)
        sinks = self.problem.sinks
        sink = None if sinks is None else sinks.astype(float)[:, None, None]
        m = m if sink is None else np.maximum(m, sink)
        m = np.where(m == -np.inf, 0, m)
        self.s, self.m, self.sink, self.p_sink = s, m, sink, self.r.p_sink
        hidden = self._hidden_error()
        if "max_score" in self.wanted:
            self.t_top = self._max_score_error(s, error + hidden)
        A = error + self._shift(s)
        A = A if self.hidden_rounding == 0 else A + hidden
        return self.where_live(A), self._sink_argument_error()

    def _max_score_error(self, s: Array, error: Array) -> Array:
        """Bound of the largest score of each row: how far the errors may move the maximum."""
        live, u = self.r.live, self.unit.u
        low, most, high = (
            np.max(np.where(live, x, -np.inf), -1, initial=-np.inf)
            for x in (s - error, s, s + error)
        )
        moved = np.maximum(high - most, most - low) + 4 * u * abs(most)  # by log₂e and back
        return np.where(most == -np.inf, 0, moved)

    def _sink_argument_error(self) -> Any:
        if self.sink is None:
            return None
        return np.where(self.sink == -np.inf, 0, self._shift(self.sink))

    def _shift(self, s: Array) -> Array:
        """Error of s − m, with or without a factor log₂e, of exp, and of an online softmax.

        Its rescaling hits all earlier keys alike. s is (..., H, T, S).
        """
        u, unit, m = self.unit.u, self.unit, self.m
        online = unit.exp * (1 + min(self.blocks, 16)) + u * self.blocks
        # (Multiplied by log₂e one by one, s and m lose their difference beyond 2¹⁴: a defect.)
        near_m = 2 * u * np.minimum(abs(m), 2.0**14)
        # u first: a fill of finfo(float64).min, twice, would be −inf.
        size = 2 * u * abs(s - m)
        size += 4 * u * np.minimum(abs(s), 2.0**14)
        size += near_m
        size += online
        return size
