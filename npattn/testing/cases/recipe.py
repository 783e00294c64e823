"""A problem as a line of text: structure, options and a seed, from which its arrays are made.

Hypothesis draws and shrinks recipes, which are small; the arrays come from the seed and from a
named distribution, so that shrinking is fast and a report can print the whole problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from npattn.arrays import Array, finfo
from npattn.options import Window
from npattn.problem import Cotangents, Problem
from npattn.testing.cases.distributions import BIASES, DISTRIBUTIONS, MASKS, SCORE_MODS

__all__ = [
    "BIASES",
    "DISTRIBUTIONS",
    "MASKS",
    "SCORE_MODS",
    "VIEWS",
    "Recipe",
    "are_identical",
    "repeat_for_view",
]

VIEWS = ("contiguous", "transposed", "stepped", "expanded", "reversed")
"""How arrays lie in memory: as made; (B, T, H, D) storage seen as (B, H, T, D); every second
element of a larger buffer; k, v and dout repeated by a stride of 0; negative strides."""


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
        sinks = self._sinks() if self.sinks else None
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

    def cotangents(self, problem: Problem, lse: bool = True, weights: bool = False) -> Cotangents:
        """Random cotangents: dout in the dtype tested, dlse and dweights in that of an lse (0 on
        empty rows is the caller's to see to). None of them changes with what else is asked."""
        lead = () if self.lead is None else (*problem.lead, problem.H)
        wide = np.float64 if self.dtype == "float64" else np.float32
        rng = self._stream(6)
        dout = self._cast(rng.standard_normal((*lead, problem.T, problem.E)))
        dlse = rng.standard_normal((*lead, problem.T)).astype(wide)
        whole = (*lead, problem.T, problem.S)
        dweights = self._stream(13).standard_normal(whole).astype(wide) if weights else None
        return Cotangents(dout, dlse if lse else None, dweights)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the scores, as options broadcast against it."""
        return (*(self.lead or ()), self.H, self.T, self.S)[-2 if self.lead is None else 0 :]

    def shape(self, heads: int, length: int, size: int, shared: bool = False) -> tuple[int, ...]:
        """The shape of q, or of k and v (shared)."""
        if self.lead is None:
            return (length, size)
        return (*(self.shared_lead if shared else self.lead), heads, length, size)

    @property
    def shared_lead(self) -> tuple[int, ...]:
        """The leading axes of k and v."""
        lead = self.lead or ()
        if not self.broadcast:
            return lead
        # Of several axes, all are of size 1, or all but one.
        kept = self.seed % (len(lead) + 1) if len(lead) > 1 else 0
        return tuple(n if axis + 1 == kept else 1 for axis, n in enumerate(lead))

    def _sinks(self) -> Array:
        """One a head; now and then one is −inf, which is none."""
        sinks = 2 * self._stream(4).standard_normal(self.H)
        if self.H and self.seed % 4 == 1:
            sinks[self.seed // 4 % self.H] = -np.inf
        return self._cast(sinks)

    def arrays(self, draw: Callable[[tuple[int, ...]], Array]) -> tuple[Array, Array, Array]:
        """q, k, v, each drawn by its shape."""
        q = draw(self.shape(self.H, self.T, self.D))
        k = draw(self.shape(self.K, self.S, self.D, shared=True))
        v = draw(self.shape(self.K, self.S, self.E, shared=True))
        return q, k, v

    def normal(self, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """Standard normal q, k, v."""
        return self.arrays(rng.standard_normal)

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


def are_identical(a: Problem, b: Problem) -> bool:
    """Return True if two problems have the same options and, bit by bit, the same arrays."""
    arrays = ("q", "k", "v", "mask_array", "bias_array", "sinks", "dropout_mask")
    options = ("causal", "window", "scale", "softcap", "score_mod", "dropout_rate", "alignment")
    return all(getattr(a, name) == getattr(b, name) for name in options) and all(
        _same_bits(getattr(a, name), getattr(b, name)) for name in arrays
    )


def _same_bits(x: Array | None, y: Array | None) -> bool:
    if x is None or y is None:
        return x is y
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def repeat_for_view(
    recipe: Recipe, problem: Problem, cotangents: Cotangents
) -> tuple[Problem, Cotangents]:
    """Repeat the first sample of k, v and dout along their first axis if the view is "expanded".

    Only then can a stride of 0 hold them. Other views leave both as they are.
    """
    if recipe.view != "expanded" or problem.k.ndim < 3:
        return problem, cotangents
    k, v, dout = (np.repeat(x[:1], len(x), axis=0) for x in (problem.k, problem.v, cotangents.dout))
    return problem.replace(k=k, v=v), Cotangents(dout, cotangents.dlse)
