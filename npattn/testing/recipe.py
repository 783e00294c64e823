"""A problem as a line of text: structure, options and a seed, from which its arrays are made.

Hypothesis draws and shrinks recipes, which are small; the arrays come from the seed and from a
named distribution, so that shrinking is fast and a report can print the whole problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from npattn.problem import Array, Problem, Window, finfo

__all__ = ["BIASES", "DISTRIBUTIONS", "MASKS", "SCORE_MODS", "VIEWS", "Cotangents", "Recipe"]

Draw = Callable[[np.random.Generator, "Recipe"], tuple[Array, Array, Array]]


class Cotangents(NamedTuple):
    """Of out and, where the implementation returns it, of lse."""

    dout: Array
    dlse: Array | None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Structure, options and a seed; ``Recipe(...).problem()`` makes the arrays.

    Parameters
    ----------
    lead : tuple of int, or None
        Leading axes; None makes q, k, v of rank 2 (then H = K = 1).
    H, K, T, S, D, E : int
        The sizes.
    dtype : str
        Of q, k, v, bias, sinks and dout, which are drawn in it.
    seed : int
        Everything random comes from it.
    distribution : str
        One of `DISTRIBUTIONS`: what q, k, v look like.
    broadcast : bool
        k and v have leading axes of size 1.
    mask, bias : str, optional
        One of `MASKS`, `BIASES`.
    causal : bool
    window : (left, right), optional
    scale, softcap : float, optional
    score_mod : str, optional
        One of `SCORE_MODS`.
    sinks : bool
    dropout : float, optional
        A rate; 0.0 drops without rescaling, None does not drop.
    view : str
        One of `VIEWS`: how the arrays lie in memory when the implementation gets them.
    """

    lead: tuple[int, ...] | None = (2,)
    H: int = 1
    K: int = 1
    T: int = 2
    S: int = 3
    D: int = 5
    E: int = 7
    dtype: str = "float32"
    seed: int = 0
    distribution: str = "normal"
    broadcast: bool = False
    mask: str | None = None
    causal: bool = False
    window: Window | None = None
    bias: str | None = None
    scale: float | None = None
    softcap: float | None = None
    score_mod: str | None = None
    sinks: bool = False
    dropout: float | None = None
    view: str = "contiguous"

    def __repr__(self) -> str:
        words = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name in ("lead", "H", "K", "T", "S", "D", "E", "dtype", "seed")
            or getattr(self, f.name) != f.default
        ]
        return f"Recipe({', '.join(words)})"

    def problem(self, alignment: str = "bottom_right", mask_true: str = "attend") -> Problem:
        """The problem, in the terms of conventions with this alignment and this meaning of True."""
        rng = np.random.default_rng([self.seed, 1])
        q, k, v = DISTRIBUTIONS[self.distribution](rng, self)
        mask = None if self.mask is None else MASKS[self.mask](self._stream(2), self)
        if mask is not None and mask_true == "hide":
            mask = ~mask
        bias = None if self.bias is None else self._cast(BIASES[self.bias](self._stream(3), self))
        sinks = self._cast(2 * self._stream(4).standard_normal(self.H)) if self.sinks else None
        keep = None
        if self.dropout is not None:
            keep = self._stream(5).random(self.whole) >= max(self.dropout, 0.2)
        return Problem(
            self._cast(q),
            self._cast(k),
            self._cast(v),
            mask,
            causal=self.causal,
            window=self.window,
            bias=bias,
            scale=self.scale,
            softcap=self.softcap,
            score_mod=None if self.score_mod is None else SCORE_MODS[self.score_mod],
            sinks=sinks,
            dropout_mask=keep,
            dropout_rate=self.dropout or 0.0,
            alignment=alignment,  # type: ignore[arg-type]  # checked by Problem
        )

    def cotangents(self, problem: Problem, lse: bool = True) -> Cotangents:
        """Random cotangents: dout in the dtype tested, dlse in that of an lse (0 on empty rows
        is the caller's to see to)."""
        rng = self._stream(6)
        lead = () if self.lead is None else (*problem.lead, problem.H)
        dout = self._cast(rng.standard_normal((*lead, problem.T, problem.E)))
        if not lse:
            return Cotangents(dout, None)
        wide = np.float64 if self.dtype == "float64" else np.float32
        return Cotangents(dout, rng.standard_normal((*lead, problem.T)).astype(wide))

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the scores, as options broadcast against it."""
        return (*(self.lead or ()), self.H, self.T, self.S)[-2 if self.lead is None else 0 :]

    def shape(self, heads: int, length: int, size: int, shared: bool = False) -> tuple[int, ...]:
        """The shape of q, or of k and v (shared)."""
        if self.lead is None:
            return (length, size)
        lead = (1,) * len(self.lead) if shared and self.broadcast else self.lead
        return (*lead, heads, length, size)

    def normal(self, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """Standard normal q, k, v."""
        q = rng.standard_normal(self.shape(self.H, self.T, self.D))
        k = rng.standard_normal(self.shape(self.K, self.S, self.D, shared=True))
        v = rng.standard_normal(self.shape(self.K, self.S, self.E, shared=True))
        return q, k, v

    def steepness(self, logit: float) -> float:
        """What to multiply a standard normal q with for scores of about `logit`.

        Limited so that scores stay within the range of the dtype even before they are scaled.
        """
        scale = 1 / math.sqrt(max(self.D, 1)) if self.scale is None else abs(self.scale)
        raw = float(finfo(self.dtype).max) / 8 / max(self.D, 1) ** 0.5 / 4
        size = logit / max(scale, 0.01) / math.sqrt(max(self.D, 1))
        return float(min(size, raw))

    def _stream(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, purpose])

    def _cast(self, x: Array) -> Array:
        return np.asarray(x).astype(self.dtype)


# --- what q, k, v look like ---


def _normal(rng: np.random.Generator, recipe: Recipe) -> tuple[Array, Array, Array]:
    return recipe.normal(rng)


def _steep(logit: float) -> Draw:
    def draw(rng: np.random.Generator, recipe: Recipe) -> tuple[Array, Array, Array]:
        q, k, v = recipe.normal(rng)
        return q * recipe.steepness(logit), k, v

    return draw


def _low(rng: np.random.Generator, recipe: Recipe) -> tuple[Array, Array, Array]:
    """All scores far below zero: what a finite running maximum, or none at all, gets wrong."""
    q, k, v = recipe.normal(rng)
    sign = -1 if recipe.scale is None or recipe.scale >= 0 else 1
    return sign * (abs(q) + 1) * recipe.steepness(150), abs(k) + 0.5, v


def _offset(rng: np.random.Generator, recipe: Recipe) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    return q, k, v + 100


def _flat(rng: np.random.Generator, recipe: Recipe) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    return 0 * q, k, v


def _integers(rng: np.random.Generator, recipe: Recipe) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    return np.round(q), np.round(k), np.round(2 * v)


def _outliers(rng: np.random.Generator, recipe: Recipe) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    if recipe.D and recipe.E:
        k[..., 0] *= 8
        v[..., -1] *= 64
    return q, k, v


def _duplicates(rng: np.random.Generator, recipe: Recipe) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    return q, np.repeat(k[..., ::2, :], 2, axis=-2)[..., : recipe.S, :], v


def _tiny(rng: np.random.Generator, recipe: Recipe) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    return q, k, v * 2.0**-10


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": _normal,
    "large logits": _steep(20),
    "one-hot": _steep(300),
    "huge logits": _steep(1e4),
    "low": _low,
    "value offset": _offset,
    "flat": _flat,
    "integers": _integers,
    "outliers": _outliers,
    "duplicate keys": _duplicates,
    "tiny values": _tiny,
}
"""What q, k, v look like, by name."""

# --- masks and biases: (rng, recipe) → array ---

Make = Callable[[np.random.Generator, Recipe], Array]


def _tail(recipe: Recipe, rank: int) -> tuple[int, ...]:
    return recipe.whole[-rank:]


def _random(rank: int) -> Make:
    def make(rng: np.random.Generator, recipe: Recipe) -> Array:
        return rng.random(_tail(recipe, rank)) < 0.7

    return make


def _padding(rng: np.random.Generator, recipe: Recipe) -> Array:
    """(B, 1, 1, S): a length for each sample, as padding masks have it; at least one key."""
    lead = recipe.lead or ()
    heads = (1,) if recipe.lead is not None else ()
    lengths = rng.integers(1, max(recipe.S, 1) + 1, size=(*lead, *heads, 1, 1))
    return np.arange(recipe.S) < lengths


def _left_padding(rng: np.random.Generator, recipe: Recipe) -> Array:
    return np.ascontiguousarray(_padding(rng, recipe)[..., ::-1])


def _empty_rows(rng: np.random.Generator, recipe: Recipe) -> Array:
    """Some queries see nothing."""
    mask = rng.random(recipe.whole) < 0.7
    mask[..., rng.integers(0, max(recipe.T, 1)) :: 3, :] = False
    return mask


def _empty_head(rng: np.random.Generator, recipe: Recipe) -> Array:
    """(..., T, S) in which every query of one batch element and head sees nothing."""
    mask = rng.random(recipe.whole) < 0.7
    if mask.size:
        mask[(0,) * (mask.ndim - 2)] = False
    return mask


def _first_tile(rng: np.random.Generator, recipe: Recipe) -> Array:
    """Nobody sees the first half of the keys: whole tiles of an online softmax are empty."""
    mask = rng.random(recipe.whole) < 0.8
    mask[..., : recipe.S // 2] = False
    return mask


MASKS: dict[str, Make] = {
    "matrix": _random(2),
    "full": _random(5),
    "heads": _random(3),
    "padding": _padding,
    "left padding": _left_padding,
    "empty rows": _empty_rows,
    "empty head": _empty_head,
    "first tile": _first_tile,
}
"""Boolean masks, by name (True = may attend)."""


def _normal_bias(rank: int, *singletons: int) -> Make:
    def make(rng: np.random.Generator, recipe: Recipe) -> Array:
        shape = list(_tail(recipe, rank))
        for axis in singletons:
            if len(shape) >= -axis:
                shape[axis] = 1
        return 2 * rng.standard_normal(shape)

    return make


def _alibi(rng: np.random.Generator, recipe: Recipe) -> Array:
    t, s = np.ogrid[: recipe.T, : recipe.S]
    distance = -abs(t + recipe.S - recipe.T - s).astype(float)
    if recipe.lead is None:
        return distance / 2
    slopes = 2.0 ** (-8 * np.arange(1, recipe.H + 1) / max(recipe.H, 1))
    return np.asarray(slopes[:, None, None] * distance)


def _minus_inf(rng: np.random.Generator, recipe: Recipe) -> Array:
    """A decoder's padding mask in additive form: −inf, and 0 elsewhere; a key remains."""
    return np.where(_padding(rng, recipe), 0, -np.inf)


def _large_negative(rng: np.random.Generator, recipe: Recipe) -> Array:
    """An additive padding mask with a large finite number, as frameworks write it."""
    least = float(finfo(recipe.dtype).min)
    return np.where(_padding(rng, recipe), 0, max(-1e9, least / 4))


BIASES: dict[str, Make] = {
    "matrix": _normal_bias(2),
    "full": _normal_bias(5),
    "heads": _normal_bias(3),
    "keys": _normal_bias(5, -2),
    "one for all heads": _normal_bias(5, -3),
    "one for all samples": _normal_bias(5, -4),
    "one a row": _normal_bias(5, -1),
    "alibi": _alibi,
    "-inf padding": _minus_inf,
    "large negative padding": _large_negative,
}
"""Biases, by name."""


def _distance_mod(s: Any, b: Any, h: Any, t: Any, s_index: Any) -> Any:
    return s - 0.125 * (h + 1) * (t - s_index)


def _squash_mod(s: Any, b: Any, h: Any, t: Any, s_index: Any) -> Any:
    return s / (1 + 0.0625 * s * s)


SCORE_MODS: dict[str, Callable[..., Any]] = {"distance": _distance_mod, "squash": _squash_mod}
"""Score modifications, by name: plain arithmetic, so that they take tensors of any framework."""

VIEWS = ("contiguous", "transposed", "stepped", "expanded", "reversed")
"""How arrays lie in memory: as made; (B, T, H, D) storage seen as (B, H, T, D); every second
element of a larger buffer; k, v and dout repeated by a stride of 0; negative strides."""
