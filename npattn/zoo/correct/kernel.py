"""A correct implementation that rounds what it is told to, in an order of choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from npattn.arrays import Array
from npattn.conventions import Conventions
from npattn.options import ScoreMod, Window
from npattn.problem import Problem
from npattn.testing.bounds.rounding import Rounding
from npattn.zoo.correct.arithmetic import Order
from npattn.zoo.correct.run import Run

__all__ = ["Kernel"]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A correct implementation: what it rounds, and in which order it does what.

    With a `tile` the softmax is online, the weights are rounded before they are normalised, and
    backward rebuilds them from lse; without, rows are whole and normalised weights are stored.

    Parameters
    ----------
    rounding : Rounding
        What is stored, and in what.
    order : {"blas", "first", "last", "pairwise", "kahan"}
        Of sums; "last" begins with the last key, and with the last tile.
    tile : int, optional
        Keys a step of an online softmax.
    splits : int
        Parts of the keys with an online softmax each, merged by their lse; needs a tile.
    scaled : {"scores", "queries", "keys", "both"}
        What is multiplied by the scale; both: by its root.
    binary : bool
        exp2 of scores times log₂e, which is folded into the scale where nothing comes between.
    log_softmax : bool
        Weights are exp(s − m − log Σ), not exp(s − m) / Σ; whole rows only.
    sink : {"first", "last", "key"}
        It starts the softmax, joins it at the end (with a tile), or is a key with value 0.
    hides : {"select", "bias"}
        Hidden scores are replaced by −inf, or it is added to them.
    channels : bool
        The bias enters the product as T more channels of q and k, where no softcap comes between;
        the scale must then be on q or k.
    flushes : bool
        Results below the least normal number become 0.
    apart : bool
        Gradients through lse and through out are stored apart, then added.
    forgets_delta : bool
        Wrong: dS = P dP, without the rank-1 term.
    conventions : Conventions
        Of them `hidden_fill`, `empty_row` ("zero", "mean"), `lse_base`, `lse_empty`.
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

    def __call__(
        self,
        problem: Problem,
        dout: Array | None = None,
        dlse: Array | None = None,
        dweights: Array | None = None,
    ) -> dict[str, Array]:
        """o, lse, weights and, with dout, the gradients, by name."""
        return Run(self, problem).results(dout, dlse, dweights)

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Array | None = None,
        *,
        causal: bool = False,
        window: Window | None = None,
        bias: Array | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        score_mod: ScoreMod | None = None,
        sinks: Array | None = None,
        dropout_mask: Array | None = None,
        dropout_rate: float = 0.0,
        return_lse: bool = False,
        return_weights: bool = False,
    ) -> Any:
        """As an implementation under test: out, or with lse and weights where they are asked."""
        problem = Problem(
            q, k, v, mask, causal=causal, alignment="bottom_right", window=window, bias=bias,
            scale=scale, softcap=softcap, score_mod=score_mod, sinks=sinks,
            dropout_mask=dropout_mask, dropout_rate=dropout_rate,
        )  # fmt: skip
        found = self(problem)
        asked = [found["o"]]
        asked += [found["lse"]] if return_lse else []
        asked += [found["weights"]] if return_weights else []
        return asked[0] if len(asked) == 1 else tuple(asked)

    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        *,
        dlse: Array | None = None,
        dweights: Array | None = None,
        **options: Any,
    ) -> dict[str, Array]:
        """Its gradients by name of the input; out and lse are made again, to the last bit."""
        problem = Problem(q, k, v, alignment="bottom_right", **options)
        found = self(problem, dout, dlse, dweights)
        return {n[1:]: found[n] for n in ("dq", "dk", "dv", "dbias", "dsinks") if n in found}
