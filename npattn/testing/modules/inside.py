"""A module as a function of q, k and v: its projections are set to selections of channels.

With W_q, W_k and W_v that pick channels and W_o that puts them back, a module computes attention of
a few features of each head, and nothing else: the judge of functions applies to it. What is linear
is judged with the module's own weights, by the other rules.

    n groups of G query heads and one key/value head   d features of q and k   e of v
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from npattn.positions.attention import Rotary
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ResultError, catch_foreign
from npattn.testing.adapters.modules import TorchModule
from npattn.testing.modules.call import Call, Form
from npattn.testing.modules.roles import Flat, Reading

FEATURES = 16
"""Features of a head that are judged, at most: more take time and show nothing else."""
LENGTH = 18
"""Tokens of a probe."""
NATS = 6.0
"""Size of the scores from which positions are read, and more than rounding is."""
SEEN = 0.02
"""Weight above which a key of a probe is visible, each of which has 1/18 or more; and how far what
is read may be off, in any dtype."""


class Selection(NamedTuple):
    """Heads and features of a module that a probe uses."""

    # features of a query or key head that carry q and k; the others are 0
    features: tuple[int, ...]
    values: int  # number of features of a value head, the first
    groups: int  # number of key/value heads, the first, each with its query heads


@dataclass
class Inside:
    """A module whose projections are selections."""

    module: TorchModule  # its weights are changed
    call: Call
    flat: Flat
    reading: Reading
    values: Array  # its own weights, as one vector
    scale: float  # what the module multiplies q·k by
    # turn of queries and keys inside, which the function undoes before
    rotary: Rotary | None = None
    length: int = 0  # the only number of tokens that it takes; 0: any
    factor: float = 1.0  # what the module multiplies its output by, 1 or 1/2

    @property
    def group(self) -> int:
        """Number of query heads that share a key/value head."""
        return self.reading.num_heads // self.reading.num_kv_heads

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Number of features of a query or key head, and of a value head."""
        reading = self.reading
        wide = reading.indices["wq"].shape[1], reading.indices["wv"].shape[1]
        return wide[0] // reading.num_heads, wide[1] // reading.num_kv_heads

    def fit(self, features: Sequence[int], values: int = 0) -> Selection | None:
        """Return the selection of most groups for these features; None if none fits.

        `values` is the least number of features of v; 0 for as many as d, or what fits.
        """
        d, E = len(features), self.head_sizes[1]
        least = values or min(d, E)
        width = {n: self.reading.indices["w" + n].shape[0] for n in "qkv"}
        wo = self.reading.indices.get("wo")
        out = self.reading.num_heads * E if wo is None else wo.shape[1]
        for groups in range(self.reading.num_kv_heads, 0, -1):
            parts = {"q": groups * self.group * d, "k": groups * d, "v": 0}
            room = [out // (groups * self.group), E]
            for letters in self.inputs_by_letter:
                remainder = width[letters[0]] - sum(parts[n] for n in letters)
                room.append(remainder // groups if "v" in letters or remainder < 0 else E)
            if min(room) >= least:
                return Selection(tuple(features), min(*room, max(values, FEATURES)), groups)
        return None

    @property
    def inputs_by_letter(self) -> tuple[str, ...]:
        """The letters that come in one input: "qkv" in self-attention."""
        return {1: ("qkv",), 2: ("q", "kv"), 3: ("q", "k", "v")}[len(self.call.inputs)]

    def exact_selection(self) -> tuple[Selection | None, bool]:
        """Return the selection to judge with, and True if its scale is met without a rounding."""
        D = self.head_sizes[0]
        if self.rotary is None:
            found = [(d, self.fit(range(d))) for d in range(max(1, min(D // 2, FEATURES)), 0, -1)]
            exact = [s for d, s in found if s and math.frexp(self._factor(d))[0] == 0.5]
            best = max(exact, key=lambda s: s.groups, default=None)
            return (best, True) if best else (self.fit((0,), 1), False)
        pairs = self.pairs()[: max(1, min(D // 8, FEATURES))]
        both = [i for pair in pairs for i in pair]
        return self.fit(both) or self.fit(both[:2], 1), False

    def count(self, chosen: Selection) -> int:
        """Return the number of features of q that the function has: of a turned pair one."""
        return len(chosen.features) // (1 if self.rotary is None else 2)

    def _factor(self, d: int) -> float:
        """Factor of q with which the module's scale is 1/√d."""
        return float(d**-0.5 / self.scale)

    def pairs(self) -> list[tuple[int, int]]:
        """Return the features that a rotary turn pairs, the first pair turning fastest."""
        assert self.rotary is not None
        return _pair(self.rotary.size or self.head_sizes[0], self.rotary.layout)

    # --- its weights and inputs -------------------------------------------------------------------

    def select(self, chosen: Selection) -> None:
        """Set the projections to selections."""
        values = self.values.copy()
        for index in self.reading.indices.values():
            values[index] = 0
        D, E = self.head_sizes
        heads = {"q": chosen.groups * self.group, "k": chosen.groups, "v": chosen.groups}
        for letters in self.inputs_by_letter:
            channel = itertools.count()  # of the input that the letters share
            for name in letters:
                size, columns = (E, range(chosen.values)) if name == "v" else (D, chosen.features)
                for h, feature in itertools.product(range(heads[name]), columns):
                    values[self.reading.indices["w" + name][next(channel), h * size + feature]] = 1
        wo = self.reading.indices.get("wo")
        if wo is not None:
            for h, i in itertools.product(range(heads["q"]), range(chosen.values)):
                values[wo[h * E + i, h * chosen.values + i]] = 1
        self.module.write(self.flat.split(values))

    def attend(
        self, chosen: Selection, q: Any, k: Any, v: Any, visible: Array | None = None,
        form: Form | None = None,
    ) -> Any:  # fmt: skip
        """Return the output for tensors q (B, nG, T, d), k (B, n, S, d), v (B, n, S, e).

        `visible` (B or 1, 1 or nG, T, S) is passed in a form, for each sample or head apart where
        the form has no such axis.
        """
        if visible is not None and form is not None:
            B, H = q.shape[0], q.shape[1]
            per_sample = visible.shape[0] > 1 and not form.shape.startswith("B")
            per_head = visible.shape[1] > 1 and "H" not in form.shape
            if per_sample:
                parts = [self.attend(chosen, q[b : b + 1], k[b : b + 1], v[b : b + 1],
                                     visible[b : b + 1], form) for b in range(B)]  # fmt: skip
                return self.module.torch.cat(parts)
            if per_head:
                parts = [self.attend(chosen, q, k, v, visible[:, h : h + 1], form)[:, h : h + 1]
                         for h in range(H)]  # fmt: skip
                return self.module.torch.cat(parts, 1)
            if visible.shape[1] > 1:  # heads that are not used see everything
                more = self.reading.num_heads - visible.shape[1]
                visible = np.pad(visible, ((0, 0), (0, more), (0, 0), (0, 0)), constant_values=True)
        inputs = self._inputs({"q": q, "k": k, "v": v})
        out = self.call.invoke(inputs, visible, form) / self.factor
        if out.ndim != 3 or out.shape[:2] != (q.shape[0], q.shape[2]):
            raise ResultError(f"returned shape {tuple(out.shape)}, must be (B, T, C)")
        n, e = chosen.groups * self.group, chosen.values
        if self.reading.indices.get("wo") is None:
            E = self.head_sizes[1]
            out = out.unflatten(-1, (-1, E))[..., :n, :e]
        else:
            out = out[..., : n * e].unflatten(-1, (n, e))
        return out.movedim(-2, 1)

    def _inputs(self, arrays: Mapping[str, Any]) -> list[Any]:
        """Return the inputs (B, length, C) that carry q, k and v."""
        inputs = []
        for letters in self.inputs_by_letter:
            width = self.reading.indices["w" + letters[0]].shape[0]
            parts = [arrays[n].movedim(1, 2).flatten(2) for n in letters]  # (B, length, features)
            rest = width - sum(x.shape[-1] for x in parts)
            parts.append(parts[0].new_zeros(*parts[0].shape[:2], rest))
            inputs.append(self.module.torch.cat(parts, -1))
        return inputs

    # --- as a function ----------------------------------------------------------------------------

    def function(
        self, chosen: Selection, form: Form | None, causal: str
    ) -> tuple[Callable[..., Any], tuple[str, ...]]:
        """Return f(q, k, v, ...), attention as npattn has it, and its options.

        It takes masks in `form`. Where `causal` is "unless_masked", whether it is becomes an
        option: the function adds the triangle to a mask.
        """
        torch, crosses = self.module.torch, self.call.crosses
        factor = self._factor(self.count(chosen))

        def attend(q: Any, k: Any, v: Any, mask: Any, triangle: bool | None) -> Any:
            """Return o, (B, H, T, e), of q (B, H, T, d), k (B, K, S, d) and v (B, K, S, e)."""
            if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or q.shape[0] != k.shape[0]:
                raise NotImplementedError("a module takes (B, T, C)")
            T, S = q.shape[-2], k.shape[-2]
            if 0 in (len(q), T, S):
                raise NotImplementedError("sizes of 0 are asked of functions alone")
            if T != S and not crosses:
                raise NotImplementedError("self-attention: T = S")
            wide = self.module.framework.give(np.zeros(0, self.module.array_dtype)).dtype
            x = self._turn_back(chosen, q.to(wide) * factor, k.to(wide), T, S)
            visible = None if mask is None else mask.detach().cpu().numpy()
            if triangle is not None and (visible is not None or not triangle):
                triangle_mask = np.tri(T, S, dtype=bool) if triangle else np.ones((T, S), bool)
                visible = triangle_mask if visible is None else visible & triangle_mask
            if visible is not None:
                visible = visible.reshape((1,) * (4 - visible.ndim) + visible.shape)
                visible = np.broadcast_to(visible, (*visible.shape[:2], T, S))
            return self.attend(chosen, *x, v.to(wide), visible, form).to(q.dtype)

        def attend_masked(q: torch.Tensor, k: Any, v: Any, mask: Any = None) -> Any:  # type: ignore
            return attend(q, k, v, mask, None)

        def both(q: torch.Tensor, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:  # type: ignore
            return attend(q, k, v, mask, bool(causal))

        has_form = form is not None and form.has_queries
        if causal == "unless_masked" and has_form:
            return both, ("mask", "causal")
        options = (*(("mask",) if has_form else ()), *(("causal",) if causal != "never" else ()))
        return attend_masked, options

    def _turn_back(self, chosen: Selection, q: Any, k: Any, T: int, S: int) -> tuple[Any, Any]:
        """Turn q and k (..., d) back, against the module's rotary positions: (..., 2 d).

        Each feature is the first of a pair: with two, roundings of one would reach the other.
        """
        if self.rotary is None:
            return q, k
        pairs = {pair: i for i, pair in enumerate(self.pairs())}
        turned = []
        places = np.arange(T) + (S - T), np.arange(S)
        for x, at in zip((q, k), places, strict=True):
            parts: list[Any] = []
            for one, two in zip(chosen.features[::2], chosen.features[1::2], strict=True):
                angle = at * self.frequencies[pairs[one, two]]
                both = (f(angle).astype(self.module.array_dtype) for f in (np.cos, np.sin))
                c, s = (self.module.framework.give(table)[:, None] for table in both)
                first = x[..., len(parts) // 2 :][..., :1]
                parts += [first * c, -first * s]
            turned.append(self.module.torch.cat(parts, -1))
        return turned[0], turned[1]

    @property
    def frequencies(self) -> Array:
        """Angle of a step of each pair, in radians."""
        rotary = self.rotary
        assert rotary is not None
        if rotary.frequencies is not None:
            return np.asarray(rotary.frequencies.values, float)
        R = rotary.size or self.head_sizes[0]
        return np.asarray(rotary.base ** (-np.arange(R // 2) * 2 / R))

    # --- what it does -----------------------------------------------------------------------------

    def weights(
        self,
        features: Sequence[int],
        q: Array,
        k: Array,
        T: int,
        size: float = 1.0,
        visible: Array | None = None,
        form: Form | None = None,
    ) -> Array:
        """Return P (B, T, T) of the first head, times `size`.

        q is (B, d), the same for every token; k is too, or (B, T, d).
        """
        chosen = self.fit(features, 1)
        assert chosen is not None  # the caller has asked
        chosen = chosen._replace(groups=1)
        self.select(chosen)
        B, d, e = len(q), len(features), chosen.values
        give, kind = self.module.framework.give, self.module.array_dtype
        heads = np.zeros((B, self.group, T, d), kind), np.zeros((B, 1, T, d), kind)
        heads[0][:] = q[:, None, None]
        heads[1][:] = k[:, None, None] if k.ndim == 2 else k[:, None]
        columns = []
        for start in range(0, T, e):
            v = np.zeros((B, 1, T, e), kind)
            for i in range(min(e, T - start)):
                v[:, :, start + i, i] = size
            with self.module.torch.no_grad(), catch_foreign("raised"):
                o = self.attend(chosen, give(heads[0]), give(heads[1]), give(v), visible, form)
            columns.append(self.module.framework.take(o)[:, 0, :, : T - start].astype(float))
        return np.concatenate(columns, -1)


def _pair(R: int, layout: str) -> list[tuple[int, int]]:
    """Return the features that a rotary turn of R features pairs, the first turning fastest."""
    half = layout == "half"
    return [(i, i + R // 2) if half else (2 * i, 2 * i + 1) for i in range(R // 2)]


class Traits(NamedTuple):
    """Findings of the probes of a module."""

    causal: bool = False  # later keys are hidden where no mask is given
    window: tuple[int | None, int | None] | None = None  # band of visible keys, if it is one
    rotary: Rotary | None = None  # turn of queries and keys, with the frequency that was read
    scale: float = 0.0  # what q·k is multiplied by, 0 if it was not read
    unknown: str = ""  # what no reference expresses; "" if nothing is seen
    factor: float = 1.0  # what a token that sees itself alone is multiplied by


def read_traits(inside: Inside) -> Traits:
    """Probe a module: what its queries see, whether positions turn them, what stands behind."""
    if inside.fit((0,), 1) is None:
        return Traits()
    zeros, ones = np.zeros((1, 1)), np.ones((1, 1))
    # A token alone has a weight of 1, whatever its query is; so have alike ones together.
    alone, twice, other = (
        inside.weights((0,), q, zeros, inside.length or 1, size=x)[0, -1].sum()
        for q, x in ((zeros, 1.0), (zeros, 2.0), (ones, 1.0))
    )
    if np.isfinite([alone, twice, other]).all() and not np.allclose(
        [twice / 2, other], alone, rtol=SEEN
    ):
        return Traits(unknown="a gate or a norm, or another thing that is not linear in the input")
    P = inside.weights((0,), zeros, zeros, inside.length or LENGTH)[0]
    traits = _read_band(P / alone if alone else P)._replace(factor=alone)
    D = inside.head_sizes[0]
    if traits.unknown or D < 2 or D % 2 or abs(alone - 1) > SEEN:
        return traits
    one = size_of(inside) / math.sqrt(NATS) * np.ones((1, 1))  # scores of 1 at most
    row = inside.weights((0,), one, one, inside.length or 3)[0, -1]
    seen = row[row > SEEN]
    if not len(seen) or np.ptp(seen) <= SEEN:
        T = inside.length or 2
        steps = one[:, :, None] * (np.arange(T) > 0)[None, :, None]  # (1, T, 1): key 0 is 0
        P = inside.weights((0,), one, steps, T)[0, -1]
        return traits._replace(scale=_round_off(_log_ratio(P) / float(one[0, 0]) ** 2))
    for R in () if inside.length else (D, D // 2, D // 4):
        for layout in ("half", "interleaved"):
            if R % 2 or (layout == "interleaved" and R == 2):
                continue
            pairs = _pair(R, layout)
            first = _read_turn(inside, pairs[0])
            if first is None:
                continue
            second = _read_turn(inside, pairs[1]) if R > 2 else None
            base = _round_off(second[0] ** (-R / 2) if second else 10000.0)
            size = None if R == D else R
            rotary = Rotary(layout=layout, base=base, size=size)
            if math.isclose(first[0], 1, rel_tol=SEEN):
                slow = _read_turn(inside, pairs[R // 4]) if R > 4 else None
                plain = base ** (-2 * (R // 4) / R)
                scaled = slow is not None and not math.isclose(slow[0], plain, rel_tol=SEEN)
                words = "rotary positions with scaled frequencies (rotary= says them)"
                return traits._replace(
                    rotary=rotary, scale=_round_off(first[1]), unknown=words if scaled else ""
                )
    return traits._replace(unknown="positions move queries and keys, not as plain rotary ones do")


def _read_band(P: Array) -> Traits:
    """Return what a probe with equal scores shows: P (T, T), in units of a token alone."""
    P = np.nan_to_num(P)
    least = SEEN * LENGTH / len(P)
    visible = least < P
    if P[-1].sum() > 1 + SEEN:  # its share falls as tokens are added
        return Traits(unknown="a sink, or keys of its own, take a part of the weights")
    if any(np.ptp(row[seen]) > least for row, seen in zip(P, visible, strict=True) if seen.any()):
        return Traits(unknown="scores have a bias of positions (ALiBi, T5)")
    offset = np.arange(len(P)) - np.arange(len(P))[:, None]  # s − t
    before, after = -int(offset[visible].min(initial=0)), int(offset[visible].max(initial=0))
    causal = after <= 0
    band = np.array_equal(visible, (-before <= offset) & (offset <= after))
    ends = before if before < len(P) - 1 else None, after if after < len(P) - 1 else None
    return Traits(causal, ends if band and ends not in ((None, None), (None, 0)) else None)


def _round_off(x: float) -> float:
    """Return a number that was read with few digits, if it has no more; else as it is."""
    near = {n: float(f"{x:.{n}g}") for n in (3, 4)}
    return next((y for n, y in near.items() if math.isclose(x, y, rel_tol=10.0 ** -(n + 2))), x)


def size_of(inside: Inside) -> float:
    """Return the size of features of q and k with which scores are `NATS` apart."""
    return math.sqrt(NATS / abs(inside.scale)) if inside.scale else 1.0


def _log_ratio(P: Array) -> float:
    """Return the score of the last key of a row less that of the first; 0 if one is hidden."""
    with np.errstate(divide="ignore", invalid="ignore"):
        gap = float(np.log(P[-1] / P[0]))
    return gap if math.isfinite(gap) else 0.0


def _read_turn(inside: Inside, pair: tuple[int, int]) -> tuple[float, float] | None:
    """Return the angle of a step of a pair of features, and the scale; None if they are no pair.

    With q = e_i and k = e_j in every row, s(t, s) is A cos ω(t − s) for j = i and ± A sin ω(t − s)
    for its partner. The scale A is not used: it is judged.
    """
    if pair[1] >= inside.head_sizes[0] or inside.fit(pair, 1) is None:
        return None
    size = size_of(inside)
    q, k = size * np.array([[1.0, 0.0], [1.0, 0.0]]), size * np.array([[1.0, 0.0], [0.0, 1.0]])

    def read(lag: int) -> tuple[float, float, float]:
        """Return the angle, A (cos − 1) and A sin of `lag` steps."""
        P = inside.weights(pair, q, k, lag + 1)[:, -1]
        c, s = (-_log_ratio(row) for row in P)
        return (2 * math.atan(-c / abs(s)) if s else math.nan), c, s

    one, _, sine = read(1)
    if not math.isfinite(one) or one < 1e-5:
        return None
    A = abs(sine) / math.sin(one)
    two = read(2)[1:]
    if not np.allclose(two[0], A * (math.cos(2 * one) - 1), atol=SEEN * A) or not np.allclose(
        abs(two[1]), abs(A * math.sin(2 * one)), atol=SEEN * A
    ):
        return None
    far = max(1, min(LENGTH - 1, int(1 / one)))  # a larger angle is read more sharply
    return read(far)[0] / far, A / size**2
