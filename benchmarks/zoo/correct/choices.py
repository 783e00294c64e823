"""Choices that leave a kernel correct: roundings, orders of sums, equivalent formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.zoo.correct.arithmetic import Order
from npattn.conventions import Conventions
from npattn.testing.bounds.rounding import Rounding


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices of a kernel: what it rounds, and the order in which it computes.

    With a `tile` the softmax is online, the weights are rounded before they are normalised, and
    backward rebuilds them from lse; without, rows are whole and normalised weights are stored.

    Parameters
    ----------
    rounding : Rounding
        The arrays that are stored, and their formats.
    order : {"blas", "first", "last", "pairwise", "kahan"}
        Order of sums; "last" begins with the last key, and with the last tile.
    tile : int, optional
        Keys per step of an online softmax.
    splits : int
        Parts of the keys, each with an online softmax, merged by their lse; needs a tile.
    scaled : {"scores", "queries", "keys", "both"}
        Operand of the scale; both: each is multiplied by its root.
    binary : bool
        exp2 of scores times log₂e, folded into the scale if no option comes between.
    log_softmax : bool
        Weights are exp(s − m − log Σ), not exp(s − m) / Σ; whole rows only.
    sink : {"first", "last", "key"}
        The sink starts the softmax, joins it at the end (with a tile), or is a key with value 0.
    hides : {"select", "bias"}
        Hidden scores are replaced by −inf, or it is added to them.
    channels : bool
        The bias enters the product as T more channels of q and k, if there is no softcap; the
        scale must then be on q or k.
    flushes : bool
        Results below the least normal number become 0.
    apart : bool
        Gradients through lse and through out are stored separately, then added.
    forgets_delta : bool
        Wrong: dS = P dP, without the rank-1 term.
    conventions : Conventions
        Supported are `hidden_fill`, `empty_row` ("zero", "mean"), `lse_base`, `lse_empty`.
    """

    rounding: Rounding = Rounding.upcast()  # noqa: RUF009  it is frozen
    order: Order = "blas"
    tile: int | None = None
    splits: int = 1
    scaled: Literal["scores", "queries", "keys", "both"] = "scores"
    binary: bool = False
    log_softmax: bool = False
    sink: Literal["first", "last", "key"] = "first"
    hides: Literal["select", "bias"] = "select"
    channels: bool = False
    flushes: bool = False
    apart: bool = False
    forgets_delta: bool = False
    conventions: Conventions = Conventions()  # noqa: RUF009  it is frozen
