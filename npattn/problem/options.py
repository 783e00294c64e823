"""The options of attention, each once: name, kind, default, documentation, examples.

`Problem`, the engines' refusals, the signature reader and the judge read this table.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any, Literal

import numpy as np

_Array = np.ndarray[Any, Any]
Alignment = Literal["bottom_right", "top_left"]
Precision = Literal["extended"]
Window = tuple[int | None, int | None]
ScoreMod = Callable[[_Array, _Array, _Array, _Array, _Array], _Array]
ALIGNMENTS = ("bottom_right", "top_left")
ENGINES = ("auto", "dense", "tiled")


@lru_cache(None)
def default_scale(D: int) -> tuple[float, float]:
    """Return 1/√D as the nearest float64 and the float64 nearest to the rest; 1 where D is 0."""
    context = Context(prec=60)
    exact = context.divide(Decimal(1), context.sqrt(Decimal(max(D, 1))))
    nearest = float(exact)
    return nearest, float(context.subtract(exact, Decimal(nearest)))


@dataclass(frozen=True)
class Option:
    """One option of attention: a parameter that changes the result."""

    name: str  # the keyword of `npattn.attention`
    kind: Literal["array", "flag", "pair", "number", "callable"]
    default: Any  # the value that leaves the result unchanged; for `scale`, None stands for 1/√D
    doc: str  # one line for the documentation and for help
    examples: tuple[Any, ...] = ()  # values of a pair or a number to judge with, the simplest first
    legal: str = "a finite number"  # legal values of a number in words, for errors
    accepts: Callable[[float], bool] = math.isfinite  # True for a legal number


OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("mask", "array", None, "boolean, True = may attend"),
        Option("causal", "flag", False, "visible: s ≤ t + (S − T), or s ≤ t"),
        Option(
            "window",
            "pair",
            None,
            "keys (left, right) beside the diagonal",
            examples=(
                *((0, 0), (1, 0), (0, 1), (2, 3), (3, None)),
                *((None, 1), (7, 0), (16, 5), (0, 2**31 - 1)),
            ),
        ),
        Option("bias", "array", None, "added to the scores after scale and softcap"),
        Option(
            "scale", "number", None, "multiplies q·k", examples=(0.5, 1.0, -0.75, 0.0, 1.7),
            legal="a finite number or None (1/√D)",
        ),
        Option(
            "softcap", "number", None, "c > 0: scores become c·tanh(s/c)",
            examples=(2.0, 0.5, 1.0, 30.0), legal="a finite number > 0 or None (no cap)",
            accepts=lambda c: 0 < c < math.inf,
        ),
        Option("score_mod", "callable", None, "f(s, b, h, t, s_index) of the scores"),
        Option("sinks", "array", None, "one more logit per head, without a value"),
        Option("dropout_mask", "array", None, "boolean, True = keep the weight"),
        Option(
            "dropout_rate", "number", 0.0, "kept weights are divided by 1 − rate",
            examples=(0.5, 0.0, 0.3), legal="a number in [0, 1)",
            accepts=lambda rate: 0 <= rate < 1,
        ),
        Option("gate", "array", None, "multiplies o elementwise"),
    )
}  # fmt: skip
"""Every option, in the order of attention's signature."""

FEATURES = tuple(OPTIONS)
"""Names of the options that an implementation under test may have."""

RESULTS = ("return_lse", "return_weights", "return_max_score")
"""Flags that make an implementation return more than o."""
