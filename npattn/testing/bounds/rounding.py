"""What an implementation rounds, as its author declares it, and in numbers for one dtype."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from npattn.arrays import finfo
from npattn.errors import OptionError

__all__ = ["Rounding", "Stored", "Units", "unit_roundoff"]

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
)
NARROW = ("float32", "tf32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Which intermediates an implementation rounds, and to what.

    A storage is "accumulator" (not rounded), "input" (the dtype of q, k, v) or the name of a
    format: "float32", "tf32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2".

    Parameters
    ----------
    name : str
        How reports call it.
    accumulator : {None, "float32", "float64", "truncated"}
        Of sums, products and the softmax. None: float64 for float64 inputs, else float32.
        "truncated" is a float32 that is cut off and not rounded to nearest.
    operands : storage
        What enters a matrix product: "tf32" for float32 matrices on tensor cores.
    queries, scores, weights, dweights, dscores : storage
        q · scale (where q is scaled before the product), S, P, dP and dS.
    row_sum : storage
        In which the weights of a row are summed.
    lse : storage
        As it is saved for the backward, and delivered.
    shared : storage
        dk and dv of each query head, before those that share a key head are summed.
    delta_from : {"out", "weights", "either"}
        D = Σ do·out with the delivered out, or Σ P·dP.
    exp_error : float, optional
        Relative error of exp and tanh. Default: four units of the accumulator.
    sum_block : int, optional
        Length of the blocks in which long sums are taken; None: any order.
    gradient_block : int, optional
        Rows after which dq, dk, dv are rounded to the input dtype and added to; None: never.
    out_roundings, gradient_roundings : int, default 1
        How often a finished out, and a finished dq, dk, dv, is rounded.
    fuses : bool
        P and dS are stored once, as they enter a product, and dS is made of the P that is not
        stored. Otherwise each is an array of its own: P is stored again after dropout, dS after the
        scale, and dS is made of the stored P.
    """

    name: str
    accumulator: Literal["float32", "float64", "truncated"] | None = None
    operands: str = "accumulator"
    queries: str = "accumulator"
    scores: str = "accumulator"
    weights: str = "accumulator"
    row_sum: str = "accumulator"
    lse: str = "accumulator"
    dweights: str = "accumulator"
    dscores: str = "accumulator"
    shared: str = "accumulator"
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
        for name in ("sum_block", "gradient_block", "out_roundings", "gradient_roundings"):
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or count < 1):
                raise OptionError(f"{name} is {count!r}, must be an integer ≥ 1")
        if self.exp_error is not None and not 0 <= self.exp_error < 1:
            raise OptionError(f"exp_error is {self.exp_error!r}, must be in [0, 1)")

    def __repr__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Rounding({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    @classmethod
    def upcast(cls) -> Rounding:
        """Everything in the accumulator, rounded once at the end."""
        return cls(name="upcast")

    @classmethod
    def fused(cls) -> Rounding:
        """P and dS are rounded for the matrix products, D comes from the rounded out."""
        return cls(name="fused", weights="input", dscores="input", delta_from="out", fuses=True)

    @classmethod
    def eager(cls) -> Rounding:
        """q · scale, S, P, dP, dS are all stored in the input dtype: separate array operations
        around a softmax that sums in the accumulator."""
        return cls(
            name="eager",
            queries="input",
            scores="input",
            weights="input",
            dweights="input",
            dscores="input",
            shared="input",
            gradient_roundings=2,
        )

    @classmethod
    def undeclared(cls, dtype: Any) -> Rounding:
        """What is allowed to whoever declares nothing: the loosest that the dtype explains."""
        if unit_roundoff(dtype) < 2.0**-24:
            return cls.eager()
        if unit_roundoff(dtype) == 2.0**-24:
            # The least accurate exp measured in a shipped float32 kernel: torch 2.13 on the CPU.
            return replace(cls.eager(), exp_error=2.0**-20)
        return replace(cls.eager(), exp_error=2.0**-11, gradient_block=32)

    @classmethod
    def named(cls, name: str) -> Rounding:
        """The preset of that name."""
        presets = {"upcast": cls.upcast, "fused": cls.fused, "eager": cls.eager}
        if name not in presets:
            raise OptionError(f"rounding is {name!r}, must be one of {', '.join(presets)}")
        return presets[name]()


def unit_roundoff(dtype: Any) -> float:
    """Half the distance from 1 to the next number: 2⁻²⁴ for float32, 2⁻⁸ for bfloat16."""
    return float(finfo(dtype).eps) / 2


class Stored(NamedTuple):
    """What storing a number x costs: |x| · u + eta."""

    u: float
    eta: float  # half the least subnormal

    def times(self, n: int) -> float:
        """The relative error of n of them in a row, to all orders."""
        return float((1 + self.u) ** n - 1)


EXACT = Stored(0.0, 0.0)
TF32 = Stored(2.0**-11, 2.0**-137)  # the exponents of float32, 10 bits of its fraction


@dataclass(frozen=True)
class Units:
    """A `Rounding` in numbers, for one dtype."""

    u: float  # accumulator
    tiny: float  # what flushing subnormals, or a product of them, loses
    low: Stored  # input dtype
    operands: Stored
    q: Stored  # stored q · scale, and so on
    s: Stored
    p: Stored
    row_sum: Stored
    lse: Stored
    dp: Stored
    ds: Stored
    shared: Stored
    exp: float

    @classmethod
    def of(cls, rounding: Rounding, dtype: Any) -> Units:
        low = _storage(dtype)
        narrow = low.u >= 2.0**-24
        wide = rounding.accumulator or ("float32" if narrow else "float64")
        u = {"float32": 2.0**-24, "truncated": 2.0**-23, "float64": 2.0**-53}[wide]

        def stored(where: str) -> Stored:
            if where == "accumulator":
                return EXACT
            return low if where == "input" else _storage(where)

        return cls(
            u=u,
            tiny=float(np.finfo(np.float64 if wide == "float64" else np.float32).tiny),
            low=low,
            operands=stored(rounding.operands),
            q=stored(rounding.queries),
            s=stored(rounding.scores),
            p=stored(rounding.weights),
            row_sum=stored(rounding.row_sum),
            lse=stored(rounding.lse),
            dp=stored(rounding.dweights),
            ds=stored(rounding.dscores),
            shared=stored(rounding.shared),
            exp=4 * u if rounding.exp_error is None else rounding.exp_error,
        )


def _storage(dtype: Any) -> Stored:
    if isinstance(dtype, str) and dtype == "tf32":
        return TF32
    return Stored(unit_roundoff(dtype), float(finfo(dtype).smallest_subnormal) / 2)
