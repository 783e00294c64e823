"""What an implementation rounds, as its author declares it, and in numbers for one dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from npattn.errors import OptionError
from npattn.problem import finfo

__all__ = ["Rounding", "Units", "unit_roundoff"]

Storage = Literal["accumulator", "input"]


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Which intermediates an implementation rounds to the dtype of its inputs, and its exp.

    Sums, the row maximum, the row sum and lse are kept in the accumulator: float32, or float64 for
    float64 inputs. "input" rounds to the dtype of q, k, v.

    Parameters
    ----------
    name : str
        How reports call it.
    queries, scores, weights, dweights, dscores : {"accumulator", "input"}
        How q · scale (where q is scaled before the product), S, P, dP and dS are stored.
    delta_from : {"out", "weights", "either"}
        D = Σ do·out with the rounded out, or Σ P·dP.
    exp_error : float, optional
        Relative error of exp and tanh. Default: four units of the accumulator.
    gradient_block : int, optional
        Rows after which dq, dk, dv are rounded to the input dtype and added to; None: never.
    gradient_roundings : int, default 1
        How often a finished dq, dk, dv is rounded.
    """

    name: str
    queries: Storage = "accumulator"
    scores: Storage = "accumulator"
    weights: Storage = "accumulator"
    dweights: Storage = "accumulator"
    dscores: Storage = "accumulator"
    delta_from: Literal["out", "weights", "either"] = "either"
    exp_error: float | None = None
    gradient_block: int | None = None
    gradient_roundings: int = 1

    @classmethod
    def upcast(cls) -> Rounding:
        """Everything in the accumulator, rounded once at the end."""
        return cls(name="upcast")

    @classmethod
    def fused(cls) -> Rounding:
        """P and dS are rounded for the matrix products, D comes from the rounded out."""
        return cls(name="fused", weights="input", dscores="input", delta_from="out")

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


@dataclass(frozen=True)
class Units:
    """A `Rounding` in numbers, for one dtype."""

    u: float  # accumulator
    tiny: float  # what flushing subnormals, or a product of them, loses
    low: float  # input dtype
    eta: float  # half the least subnormal of the input dtype
    q: float  # stored q · scale, and so on: `low` or 0
    s: float
    p: float
    dp: float
    ds: float
    exp: float

    def eta_of(self, stored: float) -> float:
        """What storage loses at the bottom of its range: nothing, where it is not stored."""
        return self.eta if stored else 0.0

    @classmethod
    def of(cls, rounding: Rounding, dtype: Any) -> Units:
        low = unit_roundoff(dtype)
        wide = np.float32 if low >= unit_roundoff(np.float32) else np.float64
        u = unit_roundoff(wide)

        def stored(where: Storage) -> float:
            return low if where == "input" else 0.0

        return cls(
            u=u,
            tiny=float(np.finfo(wide).tiny),
            low=low,
            eta=float(finfo(dtype).smallest_subnormal) / 2,
            q=stored(rounding.queries),
            s=stored(rounding.scores),
            p=stored(rounding.weights),
            dp=stored(rounding.dweights),
            ds=stored(rounding.dscores),
            exp=4 * u if rounding.exp_error is None else rounding.exp_error,
        )
