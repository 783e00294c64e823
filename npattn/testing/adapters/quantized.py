"""Queries, keys, values and outputs of 8 bits, with factors (descales) of their own.

A problem keeps q, k and v as numbers of the tested dtype, and each of them is exactly a number of 8
bits times a factor, so that the bound has nothing to cover but what the implementation rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn.errors import OptionError
from npattn.problem import Problem
from npattn.problem.arrays import Array, cast, finfo
from npattn.problem.descales import spread
from npattn.problem.meanings import DESCALES
from npattn.quantization import FORMATS, largest
from npattn.testing.adapters.base import NotAsked, ResultError, inexpressible
from npattn.testing.adapters.child import STARRED, parameters
from npattn.testing.adapters.forms import Form
from npattn.testing.adapters.signature import Signature

HEADROOM = 64.0
"""Largest number of fp8 by that of an array, so that a rule may replace some by larger ones."""
LEAST = -100
"""Least power of two of a factor: float32 holds it, its reciprocal and its products."""
MEANING = {per: name[:-1] for name, per in DESCALES.items() if name.startswith("descale")}
BEYOND, WITHIN = -2, 1
"""Powers of two by which a factor is off that just holds the largest value: then o is saturated in
rows of few keys, or else it never is."""
MOST = 100
"""Largest power of two of a factor: float32 holds it and its reciprocal."""
WORDS: dict[str, str] = {
    "fp8": "float8_e4m3fn",
    "float8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    **{name: name for name in FORMATS},
}
"""Names of formats → dtypes."""


@dataclass(frozen=True)
class QuantizedOutput:
    """o of 8 bits, and the parts that have a factor of their own."""

    dtype: str  # one of `npattn.quantization.FORMATS`
    # "tensor", "head", "block" or "token": with "head", a factor for each sample and query head
    per: str
    meaning: str  # that of the parameter for the factors, among `npattn.problem.meanings.DESCALES`
    rows: int | None = None  # number of rows in a block

    @property
    def multiplies(self) -> bool:
        """True if o is multiplied by the factor, as by cuDNN's ``scale_o``, and not divided."""
        return self.meaning.startswith("scale")

    def factors(self, problem: Problem) -> Array:
        """Return the factors of a call, float32, as the parameter takes them.

        They follow the largest value of each head, which o does not exceed; no two beside each
        other are alike, and every other one has o saturated.
        """
        values = np.where(np.isfinite(problem.v), abs(problem.v.astype(np.float64)), 0)
        shape = self._shape(problem)
        size = np.asarray(values.max(initial=0))
        if self.per != "tensor":
            heads = np.repeat(values.max((-2, -1), initial=0), problem.H // max(problem.K, 1), 1)
            size = np.broadcast_to(heads, shape[:2]) if heads.size else np.zeros(shape[:2])
            size = np.broadcast_to(size.reshape(*shape[:2], *(1,) * (len(shape) - 2)), shape)
        # By the values alone, so that parts of a problem have the factors of the whole.
        number = np.arange(size.size).reshape(shape) + (16 * np.frexp(size)[0]).astype(int)
        least = np.where(size > 0, size, 1.0) / largest(self.dtype)
        power = np.ceil(np.log2(least)) + np.where(number % 2, BEYOND, WITHIN)
        descale = (1 + number % 7 / 8) * np.exp2(np.clip(power, -MOST, MOST))
        return np.asarray(1 / descale if self.multiplies else descale, np.float32)

    def _shape(self, problem: Problem) -> tuple[int, ...]:
        if self.per == "tensor":
            return ()
        lead = (problem.lead[0], problem.H)
        if self.per == "head":
            return lead
        return (*lead, -(-problem.T // (self.rows or 1)))

    def descales(self, problem: Problem) -> Array:
        """Return what o of 8 bits is multiplied by, float64; it broadcasts against o."""
        factors = self.factors(problem).astype(np.float64)
        shape = (*problem.lead, *(() if problem.headless else (problem.H,)), problem.T, problem.E)
        return spread(1 / factors if self.multiplies else factors, shape, self.rows)

    def restore(self, o: Array, problem: Problem) -> Array:
        """Return o as it is meant, float64."""
        if o.dtype != np.dtype(self.dtype):
            raise ResultError(
                f"o has dtype {o.dtype}, must be {self.dtype}, since it has a factor for o: wrap "
                "it without that parameter to have o in another"
            )
        wide, descales = o.astype(np.float64), self.descales(problem)
        fits = wide.ndim >= descales.ndim and all(
            n in (1, m) for n, m in zip(descales.shape[::-1], wide.shape[::-1], strict=False)
        )
        return wide * descales if fits else wide  # another shape is the business of shape-dtype


@dataclass(frozen=True)
class QuantizedInputs(Form):
    """Inputs that are numbers of 8 bits, and the parts that have a factor of their own."""

    dtype: str  # one of `npattn.quantization.FORMATS`
    # "q", "k" or "v" → "tensor", "head" (a factor for each sample and key head), "block" or "token"
    per: Mapping[str, str]
    rows: Mapping[str, int]  # number of rows in a block of "q", "k", "v" or "o", for those
    output: QuantizedOutput | None = None  # how o is returned, if it is in 8 bits too

    @property
    def words(self) -> str:
        """The storage in words."""
        factor_words = {
            "tensor": "factor",
            "head": "factors (B, K)",
            "block": "factors of blocks of rows",
            "token": "factors of tokens",
        }
        parts = [
            f"{name} in {self.dtype} with {factor_words[per]}" for name, per in self.per.items()
        ]
        if self.output is not None:
            ways = factor_words | {"head": "factors (B, H)"}
            how = " that it is multiplied by" if self.output.multiplies else ""
            parts.append(f"o in {self.dtype} with {ways[self.output.per]}{how}")
        return ", ".join(parts)

    @property
    def meanings(self) -> dict[str, str]:
        """Meanings of the parameters for the factors, by input."""
        return {name: MEANING[per] + name for name, per in self.per.items()}

    def by_input(self, factors: Mapping[str, Array]) -> dict[str, Array]:
        """Return factors by "q", "k" and "v"."""
        return {name: factors[meaning] for name, meaning in self.meanings.items()}

    def _rows(self, name: str) -> int | None:
        """Return the number of rows that share a factor; None if all of a head do."""
        return 1 if self.per[name] == "token" else self.rows.get(name)

    def alike(self, name: str, other: str) -> bool:
        """Return True if two inputs of the same contents are the same numbers and factors."""
        first, second = ((self.per.get(x), self.rows.get(x)) for x in (name, other))
        return first == second

    @property
    def weights(self) -> str:
        """Storage of P where nobody declares one: tensor cores take two operands of a format."""
        return self.dtype if self.dtype != "int8" and {"q", "v"} <= {*self.per} else "input"

    def fit(self, problem: Problem, mask_true: str = "attend") -> Problem:
        """Return the problem with numbers that the format and a factor hold exactly.

        The problem itself if they are such already, or their rank has no parameter for factors.
        """
        if self._unfitting(problem) is not None:
            return problem
        with suppress(NotAsked):
            self.split(problem)
            return problem
        changed = {}
        for name in self.per:
            array = getattr(problem, name)
            factors = spread(self._draw_factors(name, problem), array.shape, self._rows(name))
            rounded = self._cast(array.astype(np.float64) / factors).astype(np.float64)
            changed[name] = (rounded * factors).astype(array.dtype)
        return problem.replace(**changed)

    def store(
        self, problem: Problem, arrays: Mapping[str, Array], mask_true: str
    ) -> tuple[Problem, Mapping[str, Array]]:
        """Return the problem without factors, and the arrays of a call with those of parts."""
        split_problem, factors = self.split(problem)
        inputs = {name: getattr(split_problem, name) for name in self.per}
        return split_problem, {**arrays, **inputs, **{n: x for n, x in factors.items() if x.ndim}}

    def numbers(self, problem: Problem, mask_true: str) -> dict[str, Any]:
        """Return the factors of whole arrays."""
        return {name: float(x) for name, x in self.split(problem)[1].items() if not x.ndim}

    def restore(self, name: str, array: Any, problem: Problem, mask_true: str) -> Mapping[str, Any]:
        """Return o as it is meant."""
        quantized = name == "o" and self.output is not None
        return {name: self.output.restore(array, problem) if quantized and self.output else array}

    def split(self, problem: Problem) -> tuple[Problem, dict[str, Array]]:
        """Return the problem without the factors, and these by their meanings, float32.

        Its numbers are of 8 bits, in the dtype of the problem.

        Raises ImplementationError, a refusal, if there is no parameter for factors of such inputs.
        Raises NotAsked if the inputs are no such numbers: a rule has replaced some by others.
        """
        unfitting = self._unfitting(problem)
        if unfitting is not None:
            raise inexpressible(unfitting)
        values, factors = {}, {}
        for name, meaning in self.meanings.items():
            values[name], factors[meaning] = self._split(name, problem)
        if self.output is not None:
            factors[self.output.meaning] = self.output.factors(problem)
        return problem.replace(**values), factors

    def check_backward(self, backward: Signature, forward: Signature) -> None:
        """Raise OptionError if a backward has no parameter for the factors of its inputs."""
        theirs = {meaning: name for name, meaning in forward.meanings.items()}
        for name, meaning in self.meanings.items():
            if meaning not in backward.meanings.values():
                raise OptionError(
                    f"backward has no {theirs[meaning]}, and gets {name} in {self.dtype}: give it "
                    "that parameter, or leave backward out, and no gradients are asked"
                )

    def narrow(self, name: str, array: Array) -> Array:
        """Return an array of a call as it is passed: q, k and v in 8 bits."""
        return self._cast(array.astype(np.float64)) if name in self.per else array

    def _unfitting(self, problem: Problem) -> str | None:
        ways = {*self.per.values(), *([self.output.per] if self.output else [])}
        if problem.q.ndim == 4 or ways == {"tensor"}:
            return None
        return f"factors of arrays of {problem.q.ndim} axes"

    def _draw_factors(self, name: str, problem: Problem) -> Array:
        """Return factors of different significands, so that each is seen if another is taken."""
        room = 1.0 if self.dtype == "int8" else HEADROOM
        size = self._sizes(name, problem) * room / largest(self.dtype)
        exponents = np.maximum(np.ceil(np.log2(np.where(size > 0, size, 1.0))), LEAST)
        odd = np.arange(size.size).reshape(size.shape) + "qkv".index(name) + 1
        significands = self._significands(getattr(problem, name).dtype)
        return np.asarray(significands[odd % len(significands)] * 2.0**exponents)

    def _split(self, name: str, problem: Problem) -> tuple[Array, Array]:
        """Return an input as exact numbers of 8 bits, in its own dtype, and its factors."""
        array = getattr(problem, name)
        size = self._sizes(name, problem)
        wide, rows, top = array.astype(np.float64), self._rows(name), largest(self.dtype)
        found, missing = np.ones_like(size), np.ones(size.shape, bool)
        for significand in self._significands(array.dtype):
            # The least factor that reaches the largest number: the others are held best by it.
            least = np.where(size > 0, size, 1.0) / (significand * top)
            factors = significand * 2.0 ** np.maximum(np.ceil(np.log2(least)), LEAST)
            scaled = wide / spread(factors, array.shape, rows)
            exact = self._cast(scaled).astype(np.float64)
            wrong = ~((exact == scaled) | (np.isnan(exact) & np.isnan(scaled)))
            fits = missing & (self._maxima(name, problem, wrong.astype(np.float64)) == 0)
            found[fits], missing[fits] = factors[fits], False
        if missing.any():
            raise NotAsked(f"{name} is no array of {self.dtype} and factors")
        values = wide / spread(found, array.shape, rows)
        return values.astype(array.dtype), found.astype(np.float32)

    def _cast(self, scaled: Array) -> Array:
        top = largest(self.dtype)
        if self.dtype == "int8":
            integers = np.clip(np.rint(np.where(np.isfinite(scaled), scaled, 0.0)), -top, top)
            return np.asarray(integers.astype(np.int8))
        # Casts overflow to NaN or inf; what is not finite itself stays so.
        bounded = np.where(np.isfinite(scaled), np.clip(scaled, -top, top), scaled)
        return np.asarray(cast(bounded, self.dtype))

    def _sizes(self, name: str, problem: Problem) -> Array:
        """Return the largest finite absolute value of each part that has a factor."""
        array = abs(getattr(problem, name).astype(np.float64))
        return self._maxima(name, problem, np.where(np.isfinite(array), array, 0.0))

    def _maxima(self, name: str, problem: Problem, array: Array) -> Array:
        """Return the largest of the numbers (..., H, T, D) of each part that has a factor."""
        if self.per[name] == "tensor":
            return np.asarray(array.max(initial=0))
        if self.per[name] == "head":
            groups = max(array.shape[1] // max(problem.K, 1), 1)
            top = array.max((-2, -1), initial=0)
            shared = top.reshape(len(array), problem.K, groups)
            return np.asarray(shared.max(-1, initial=0))
        starts = np.arange(0, array.shape[-2], self._rows(name))
        top = array.max(-1, initial=0)
        return np.asarray(np.maximum.reduceat(top, starts, axis=-1) if len(starts) else top)

    def _significands(self, dtype: Any) -> Array:
        """Return the significands that a factor may have: the tested dtype holds the product."""
        bits = round(-math.log2(finfo(dtype).eps)) + 1
        digits = 7 if self.dtype == "int8" else round(-math.log2(finfo(self.dtype).eps)) + 1
        free = max(min(bits - digits, 4), 1)
        return np.asarray(np.arange(2 ** (free - 1), 2**free) / 2 ** (free - 1))


def read_quantized(
    f: Callable[..., Any],
    signature: Signature,
    name: str,
    told: str | None,
    rows: Mapping[str, int] | None,
) -> QuantizedInputs | None:
    """Return which arrays are of 8 bits, by the parameters of a callable; None if none is told."""
    if told is None:
        return None
    if told not in WORDS:
        zero = ": uint8 has a zero point, and formats here have none" if told == "uint8" else ""
        raise OptionError(f"quantized is {told!r}, must be fp8, {', '.join(FORMATS)}{zero}")
    _check_zero_points(f, name)
    per, meaning_of = {}, {}
    for meaning in signature.meanings.values():
        if meaning in DESCALES:
            per[meaning[-1]], meaning_of[meaning[-1]] = DESCALES[meaning], meaning
    if not per:
        raise OptionError(
            f"quantized is {told!r}, and {name} has no q_descale, k_descale, v_descale or "
            "o_descale: rename={theirs: 'descale of heads of k'} says what a parameter is"
        )
    rows = dict(rows or {})
    blocks = [x for x, kind in per.items() if kind == "block"]
    if sorted(rows) != sorted(blocks):
        raise OptionError(f"rows of blocks are {rows}, must be of {', '.join(blocks) or 'nothing'}")
    output = None
    if "o" in per:
        output = QuantizedOutput(WORDS[told], per["o"], meaning_of["o"], rows.get("o"))
    ordered = {x: per[x] for x in "qkv" if x in per}
    return QuantizedInputs(WORDS[told], ordered, rows, output)


ZERO_POINTS = ("_zp", "zero_point", "zero_points")
"""Endings of names of zero points, of asymmetric formats."""


def _check_zero_points(f: Callable[..., Any], name: str) -> None:
    """Refuse zero points that are not 0 by default: values · descale is all that is judged."""
    for theirs, parameter in parameters(f).items():
        if parameter.kind in STARRED or not theirs.endswith(ZERO_POINTS):
            continue
        if parameter.default not in (0, None):
            raise OptionError(
                f"{name} has {theirs}, a zero point, and formats here are symmetric: give it a "
                "default of 0, or wrap it with one"
            )
