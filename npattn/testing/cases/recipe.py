"""Recipe of a problem: structure, options and a seed, which fit in a line of text.

Hypothesis samples and shrinks recipes, which are small; the arrays come from the seed and a named
distribution, so that shrinking is fast and a report can print the whole problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from npattn.errors import OptionError
from npattn.problem import Cotangents as Cotangents  # it belongs to the names of npattn.testing
from npattn.problem import Problem
from npattn.problem.arrays import Array, finfo
from npattn.problem.options import OPTIONS, Window
from npattn.testing.cases.distributions import DISTRIBUTIONS, UNUSUAL
from npattn.testing.cases.options import BIASES, GATES, MASKS, SCORE_MODS

VIEWS = ("contiguous", "transposed", "stepped", "expanded", "reversed")
"""Memory layouts: C order; (B, T, H, D) storage viewed as (B, H, T, D); every second element of a
larger buffer; k, v and dout repeated by a stride of 0; negative strides."""
OPTION_FIELDS = tuple(
    dict.fromkeys(n.replace("dropout_mask", "dropout") for n in OPTIONS if n != "dropout_rate")
)
"""Fields of a recipe that are options; `dropout` stands for a mask and its rate."""
ARRAYS = tuple(name for name, option in OPTIONS.items() if option.kind == "array")
PLAIN = tuple(
    name
    for name, option in OPTIONS.items()
    if option.kind in ("flag", "pair", "number") and name != "dropout_rate"
)
"""Options that a recipe has as a problem has them."""


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
        Dtype of q, k, v, bias, sinks, gate and dout, which are sampled in it.
    seed : int
        Seed of everything random.
    distribution : str
        Distribution of q, k, v, one of `DISTRIBUTIONS` or `UNUSUAL`.
    broadcast : bool
        Give k and v leading axes of size 1.
    mask, bias : str, optional
        One of `MASKS`, `BIASES`.
    causal : bool
    window : (left, right), optional
    scale, softcap : float, optional
    score_mod : str, optional
        One of `SCORE_MODS`.
    sinks : bool
    dropout : float, optional
        Dropout rate; 0.0 drops without rescaling, None does not drop.
    gate : str, optional
        One of `GATES`.
    view : str
        Memory layout of the arrays that the implementation gets, one of `VIEWS`.
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
    gate: str | None = None
    view: str = "contiguous"

    def __repr__(self) -> str:
        kwargs = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name in ("lead", "H", "K", "T", "S", "D", "E", "dtype", "seed")
            or getattr(self, f.name) != f.default
        ]
        return f"Recipe({', '.join(kwargs)})"

    @property
    def has_plain_scores(self) -> bool:
        """True if its numbers are normal, and its scale is at most the default of 1/√D."""
        least = self.scale is None or 0 < self.scale**2 * self.D <= 1
        return self.distribution == "normal" and least

    def problem(self, alignment: str = "bottom_right", mask_true: str = "attend") -> Problem:
        """Make the problem, for conventions with this alignment and this meaning of True."""
        tables: dict[str, Any] = {"distribution": DISTRIBUTIONS | UNUSUAL, "mask": MASKS}
        tables |= {"bias": BIASES, "score_mod": SCORE_MODS, "gate": GATES}
        for name, table in tables.items():
            if (value := getattr(self, name)) is not None and value not in table:
                raise OptionError(f"{name} is {value!r}, must be one of {', '.join(table)}")
        rng = np.random.default_rng([self.seed, 1])
        q, k, v = (DISTRIBUTIONS | UNUSUAL)[self.distribution](rng, self)
        mask = None if self.mask is None else MASKS[self.mask](self._stream(2), self)
        if mask is not None and mask_true == "hide":
            mask = ~mask
        bias = None if self.bias is None else self._cast(BIASES[self.bias](self._stream(3), self))
        sinks = self._sinks() if self.sinks else None
        keep = None
        if self.dropout is not None:
            keep = self._stream(5).random(self.whole) >= max(self.dropout, 0.2)
        gate = None if self.gate is None else self._cast(GATES[self.gate](self._stream(16), self))
        return Problem(
            self._cast(q),
            self._cast(k),
            self._cast(v),
            mask,
            bias=bias,
            score_mod=None if self.score_mod is None else SCORE_MODS[self.score_mod],
            sinks=sinks,
            dropout_mask=keep,
            dropout_rate=self.dropout or 0.0,
            gate=gate,
            alignment=alignment,  # type: ignore[arg-type]  # checked by Problem
            **{name: getattr(self, name) for name in PLAIN},
        )

    def cotangents(self, problem: Problem, lse: bool = True, weights: bool = False) -> Cotangents:
        """Sample cotangents: dout in the dtype tested, dlse and dweights in that of an lse.

        None of them depends on which others are sampled. The caller sets dlse to 0 in fully masked
        rows.
        """
        lead = () if self.lead is None else (*problem.lead, problem.H)
        wide = np.float64 if self.dtype == "float64" else np.float32
        rng = self._stream(6)
        dout = self._cast(rng.standard_normal((*lead, problem.T, problem.E)))
        dlse = rng.standard_normal((*lead, problem.T)).astype(wide)
        weights_shape = (*lead, problem.T, problem.S)
        dweights = self._stream(13).standard_normal(weights_shape).astype(wide) if weights else None
        return Cotangents(dout, dlse if lse else None, dweights)

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the scores, against which options broadcast."""
        return (*(self.lead or ()), self.H, self.T, self.S)[-2 if self.lead is None else 0 :]

    def shape(self, heads: int, length: int, size: int, shared: bool = False) -> tuple[int, ...]:
        """Return the shape of q, or of k and v if `shared`."""
        if self.lead is None:
            return (length, size)
        return (*(self.shared_lead if shared else self.lead), heads, length, size)

    @property
    def shared_lead(self) -> tuple[int, ...]:
        """Leading axes of k and v."""
        lead = self.lead or ()
        if not self.broadcast:
            return lead
        # Of several axes, all are of size 1, or all but one.
        kept = self.seed % (len(lead) + 1) if len(lead) > 1 else 0
        return tuple(n if axis + 1 == kept else 1 for axis, n in enumerate(lead))

    def _sinks(self) -> Array:
        return self._cast(2 * self._stream(4).standard_normal(self.H))

    def arrays(self, sample: Callable[[tuple[int, ...]], Array]) -> tuple[Array, Array, Array]:
        """Sample q, k, v, each by its shape."""
        q = sample(self.shape(self.H, self.T, self.D))
        k = sample(self.shape(self.K, self.S, self.D, shared=True))
        v = sample(self.shape(self.K, self.S, self.E, shared=True))
        return q, k, v

    def normal(self, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """Sample standard normal q, k, v."""
        return self.arrays(rng.standard_normal)

    def steepness(self, logit: float) -> float:
        """Return the factor of a standard normal q that makes scores about `logit`.

        It is limited so that scores stay within the range of the dtype even before the scale.
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
    a, b = a.materialise(), b.materialise()
    options = ("alignment", *(name for name in OPTIONS if name not in ARRAYS))
    return all(getattr(a, name) == getattr(b, name) for name in options) and all(
        same_bits(getattr(a, name), getattr(b, name)) for name in ("q", "k", "v", *ARRAYS)
    )


def same_bits(x: Array | None, y: Array | None) -> bool:
    """Return True if two arrays have the same shape, dtype and bits, or both are None."""
    if x is None or y is None:
        return x is y
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def resize(recipe: Recipe, problem: Problem) -> Recipe:
    """Return the recipe with the sizes of a problem that was made of it."""
    sizes = {letter: getattr(problem, letter) for letter in "HKTSDE"}
    return replace(recipe, lead=None if problem.headless else problem.lead, **sizes)


def describe_changed(recipe: Recipe, problem: Problem) -> Recipe:
    """Return the recipe with the sizes and options of a problem that was made of it and changed."""
    kinds = {"mask": "matrix", "bias": "full", "score_mod": "distance", "gate": "full"}
    if problem.bias_array is not None and np.isneginf(problem.bias_array).any():
        kinds["bias"] = "-inf padding"
    own: dict[str, Any] = {name: getattr(problem, name) for name in PLAIN}
    for name, kind in kinds.items():
        is_on = getattr(problem, name) is not None
        own[name] = (getattr(recipe, name) or kind) if is_on else None
    own["scale"] = None if problem.has_default_scale else problem.scale
    own["dropout"] = None if problem.dropout_mask is None else problem.dropout_rate
    return replace(resize(recipe, problem), sinks=problem.sinks is not None, **own)


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
