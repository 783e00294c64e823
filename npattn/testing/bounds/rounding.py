"""Rounding models: what an implementation rounds, by name and in numbers for one dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

from npattn.errors import OptionError
from npattn.problem.arrays import finfo

STORAGE = (
    "queries",
    "operands",
    "scores",
    "weights",
    "row_sum",
    "lse",
    "dweights",
    "dscores",
    "shared",
    "partial",
)
NARROW = ("float32", "tf32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, kw_only=True)
class Integers:
    """Integers that q and k are rounded to for their product.

    Each block of rows of a head has a factor of its own: its largest absolute value by the largest
    integer.

    Parameters
    ----------
    largest : int, default 127
        127 for int8, 7 for int4.
    q_rows, k_rows : int, optional
        Number of rows in a block; None: all of a head.
    centred : bool, default False
        The mean of all keys of a head is subtracted from them first. That shifts the scores of a
        row alike: lse is then promised only if the shift is added again.

    Raises
    ------
    OptionError
        If a number is below 1.
    """

    largest: int = 127
    q_rows: int | None = None
    k_rows: int | None = None
    centred: bool = False

    def __post_init__(self) -> None:
        counts = {"q_rows": self.q_rows, "k_rows": self.k_rows}
        _check_counts(
            {"largest": self.largest} | {n: x for n, x in counts.items() if x is not None}
        )


def _check_counts(counts: dict[str, Any]) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise OptionError(f"{name} is {count!r}, must be an integer ≥ 1")


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Declaration of which intermediates an implementation rounds, and to what.

    A storage is "accumulator" (not rounded), "input" (the dtype of q, k, v) or the name of a
    format: "float32", "tf32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2".

    Parameters
    ----------
    name : str
        Name in reports.
    accumulator : {None, "float32", "float64", "truncated"}
        Arithmetic of sums, products and the softmax. None: float64 for float64 inputs, else
        float32. "truncated" is a float32 that is cut off, not rounded to nearest.
    operands : storage
        Inputs of a matrix product: "tf32" for float32 matrices on tensor cores.
    queries, scores, weights, dweights, dscores : storage
        q · scale (where q is scaled before the product), S, P, dP and dS.
    weights_factor : float, default 1
        What P is multiplied by before it is stored, so that less of it vanishes.
    row_sum : storage
        Sum of the weights of a row.
    lse : storage
        lse as it is saved for the backward, and returned.
    shared : storage
        dk and dv of each query head, before those that share a key head are summed.
    delta_from : {"out", "weights", "either"}
        D = Σ do·out with the delivered out, or Σ P·dP.
    partial : storage
        Sums of P·V over one block of `sum_block` keys, before they are added to those before.
    integers : Integers, optional
        q and k enter their product as integers; gradients are those of the given q and k.
    exp_error : float, optional
        Relative error of exp and tanh. Default: four units of the accumulator.
    sum_block : int, optional
        Length of the blocks of long sums; None: any order.
    gradient_block : int, optional
        Number of rows after which partial dq, dk, dv are rounded to the input dtype; None: never.
    out_roundings, gradient_roundings : int, default 1
        Number of roundings of a finished out, and of finished dq, dk, dv.
    fuses : bool
        P and dS are stored once, as they enter a product, and dS is computed from the unrounded P.
        Otherwise each is an array of its own: P is stored again after dropout, dS after the scale,
        and dS is computed from the stored P.
    """

    name: str
    accumulator: Literal["float32", "float64", "truncated"] | None = None
    operands: str = "accumulator"
    queries: str = "accumulator"
    scores: str = "accumulator"
    weights: str = "accumulator"
    weights_factor: float = 1.0
    row_sum: str = "accumulator"
    lse: str = "accumulator"
    dweights: str = "accumulator"
    dscores: str = "accumulator"
    shared: str = "accumulator"
    partial: str = "accumulator"
    integers: Integers | None = None
    delta_from: Literal["out", "weights", "either"] = "either"
    exp_error: float | None = None
    sum_block: int | None = None
    gradient_block: int | None = None
    out_roundings: int = 1
    gradient_roundings: int = 1
    fuses: bool = False

    def __post_init__(self) -> None:
        legal = ("accumulator", "input", *NARROW)
        for name in STORAGE:
            if getattr(self, name) not in legal:
                raise OptionError(f"{name} is {getattr(self, name)!r}, must be one of {legal}")
        choices: dict[str, tuple[Any, ...]] = {
            "accumulator": (None, "float32", "float64", "truncated"),
            "delta_from": ("out", "weights", "either"),
        }
        for name, values in choices.items():
            if getattr(self, name) not in values:
                raise OptionError(f"{name} is {getattr(self, name)!r}, must be one of {values}")
        names = ("sum_block", "gradient_block", "out_roundings", "gradient_roundings")
        _check_counts({n: x for n in names if (x := getattr(self, n)) is not None})
        if not (self.weights_factor >= 1 and math.isfinite(self.weights_factor)):
            raise OptionError(f"weights_factor is {self.weights_factor!r}, must be finite and ≥ 1")
        if self.exp_error is not None and not 0 <= self.exp_error < 1:
            raise OptionError(f"exp_error is {self.exp_error!r}, must be in [0, 1)")

    def __repr__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Rounding({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    @property
    def needs_whole_rows(self) -> bool:
        """True if a bound needs all keys of a row at hand."""
        return self.integers is not None or self.partial != "accumulator"

    @classmethod
    def upcast(cls) -> Rounding:
        """Return the model that computes in the accumulator and rounds once, at the end."""
        return cls(name="upcast")

    @classmethod
    def fused(cls) -> Rounding:
        """Return the model that rounds P and dS for products, and takes D from the rounded out."""
        return cls(name="fused", weights="input", dscores="input", delta_from="out", fuses=True)

    @classmethod
    def eager(cls) -> Rounding:
        """Return the model that stores q · scale, S, P, dP and dS in the input dtype.

        Separate array operations, around a softmax that sums in the accumulator.
        """
        stored = ("queries", "scores", "weights", "dweights", "dscores", "shared")
        inputs: dict[str, Any] = dict.fromkeys(stored, "input")
        return cls(name="eager", gradient_roundings=2, **inputs)

    @classmethod
    def int8(cls) -> Rounding:
        """Return the model of SageAttention: q and k in int8, P and V in float16.

        A factor for 128 queries and one for 64 keys, less their mean; P V is summed in float16 over
        64 keys, and in the accumulator over these sums.
        """
        return replace(
            cls.fused(),
            name="int8",
            integers=Integers(q_rows=128, k_rows=64, centred=True),
            operands="float16",
            weights="float16",
            partial="float16",
            sum_block=64,
        )

    @classmethod
    def fp8(cls) -> Rounding:
        """Return the model of FlashAttention 3's kernels for q, k and v in float8: P is too.

        P is relative to the largest of its row, times 2⁸; sums are in the accumulator.
        """
        return replace(cls.fused(), name="fp8", weights="float8_e4m3fn", weights_factor=256.0)

    @classmethod
    def undeclared(cls, dtype: Any, weights: str = "input") -> Rounding:
        """Return the model of an implementation that declares none: the loosest for its dtype.

        `weights` is the storage of P, where its inputs are quantized.
        """
        if weights != "input":
            return replace(cls.undeclared(dtype), weights=weights)
        if unit_roundoff(dtype) < 2.0**-24:
            return cls.eager()
        if unit_roundoff(dtype) == 2.0**-24:
            # The least accurate exp measured in a shipped float32 kernel: torch 2.13 on the CPU.
            return replace(cls.eager(), exp_error=2.0**-20)
        return replace(cls.eager(), exp_error=2.0**-11, gradient_block=32)

    @classmethod
    def choose(
        cls, declared: Rounding | str | None, dtype: Any, weights: str = "input"
    ) -> Rounding:
        """Return a declared model, or that with its name; `undeclared` if there is none."""
        if isinstance(declared, Rounding):
            return declared
        return cls.undeclared(dtype, weights) if declared is None else cls.from_name(declared)

    @classmethod
    def from_name(cls, name: str) -> Rounding:
        """Return the preset with this name: "upcast", "fused", "eager", "fp8" or "int8"."""
        presets = {"upcast": cls.upcast, "fused": cls.fused, "eager": cls.eager}
        presets |= {"fp8": cls.fp8, "int8": cls.int8}
        if name not in presets:
            raise OptionError(f"rounding is {name!r}, must be one of {', '.join(presets)}")
        return presets[name]()


def unit_roundoff(dtype: Any) -> float:
    """Return half the distance from 1 to the next number: 2⁻²⁴ for float32, 2⁻⁸ for bfloat16."""
    return float(finfo(dtype).eps) / 2


class StorageCost(NamedTuple):
    """Cost of storing a number x: |x| · u + eta."""

    u: float
    eta: float  # half the least subnormal

    def times(self, n: int) -> float:
        """Return the relative error of n roundings in a row, to all orders."""
        return float((1 + self.u) ** n - 1)


EXACT = StorageCost(0.0, 0.0)
TF32 = StorageCost(2.0**-11, 2.0**-137)  # the exponents of float32, 10 bits of its fraction


@dataclass(frozen=True)
class Units:
    """A `Rounding` in numbers, for one dtype."""

    u: float  # accumulator
    tiny: float  # loss by flushing subnormals, or a product of them
    low: StorageCost  # input dtype
    operands: StorageCost
    q: StorageCost  # q · scale as stored, and so on
    s: StorageCost
    p: StorageCost
    row_sum: StorageCost
    lse: StorageCost
    dp: StorageCost
    ds: StorageCost
    shared: StorageCost
    partial: StorageCost
    exp: float

    @classmethod
    @cache
    def of(cls, rounding: Rounding, dtype: Any) -> Units:
        """Return the numbers of a model for inputs of a dtype."""
        low = _format(dtype)
        narrow = low.u >= 2.0**-24
        wide = rounding.accumulator or ("float32" if narrow else "float64")
        u = {"float32": 2.0**-24, "truncated": 2.0**-23, "float64": 2.0**-53}[wide]

        def storage(where: str) -> StorageCost:
            if where == "accumulator":
                return EXACT
            return low if where == "input" else _format(where)

        short = {"queries": "q", "scores": "s", "weights": "p", "dweights": "dp", "dscores": "ds"}
        stored = {short.get(n, n): storage(getattr(rounding, n)) for n in STORAGE}
        stored["p"] = stored["p"]._replace(eta=stored["p"].eta / rounding.weights_factor)
        return cls(
            u=u,
            tiny=float(np.finfo(np.float64 if wide == "float64" else np.float32).tiny),
            low=low,
            exp=4 * u if rounding.exp_error is None else rounding.exp_error,
            **stored,
        )


def _format(dtype: Any) -> StorageCost:
    if isinstance(dtype, str) and dtype == "tf32":
        return TF32
    return StorageCost(unit_roundoff(dtype), float(finfo(dtype).smallest_subnormal) / 2)
