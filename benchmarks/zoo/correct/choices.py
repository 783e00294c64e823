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
    """

    # the arrays that are stored, and their formats
    rounding: Rounding = Rounding.upcast()  # noqa: RUF009  it is frozen
    # order of sums; "last" begins with the last key, and with the last tile: "blas", "first",
    # "last", "pairwise", "kahan"
    order: Order = "blas"
    tile: int | None = None  # keys per step of an online softmax
    # parts of the keys, each with an online softmax, merged by their lse; needs a tile
    splits: int = 1
    # operand of the scale; both: each is multiplied by its root: "scores", "queries", "keys",
    # "both"
    scaled: Literal["scores", "queries", "keys", "both"] = "scores"
    # exp2 of scores times log₂e, folded into the scale if no option comes between
    binary: bool = False
    log_softmax: bool = False  # weights are exp(s − m − log Σ), not exp(s − m) / Σ; whole rows only
    # the sink starts the softmax, joins it at the end (with a tile), or is a key with value 0:
    # "first", "last", "key"
    sink: Literal["first", "last", "key"] = "first"
    # hidden scores are replaced by −inf, or it is added to them: "select", "bias"
    hides: Literal["select", "bias"] = "select"
    # the bias enters the product as T more channels of q and k, if there is no softcap; the scale
    # must then be on q or k
    channels: bool = False
    flushes: bool = False  # results below the least normal number become 0
    apart: bool = False  # gradients through lse and through out are stored separately, then added
    forgets_delta: bool = False  # wrong: dS = P dP, without the rank-1 term
    # supported are `hidden_fill`, `empty_row` ("zero", "mean"), `lse_base`, `lse_empty`
    conventions: Conventions = Conventions()  # noqa: RUF009  it is frozen
