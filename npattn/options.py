"""The options of attention, each once: name, kind, default, documentation, examples.

`Problem`, the engines' refusals, the signature reader and the judge read this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

__all__ = [
    "ALIGNMENTS",
    "ENGINES",
    "FEATURES",
    "OPTIONS",
    "Alignment",
    "Option",
    "ScoreMod",
    "Window",
]

_Array = np.ndarray[Any, Any]
Alignment = Literal["bottom_right", "top_left"]
Window = tuple[int | None, int | None]
ScoreMod = Callable[[_Array, _Array, _Array, _Array, _Array], _Array]

ALIGNMENTS = ("bottom_right", "top_left")
ENGINES = ("auto", "dense", "tiled")


@dataclass(frozen=True)
class Option:
    """One option of attention: a parameter that changes the result.

    Parameters
    ----------
    name : str
        The keyword of `npattn.attention`.
    kind : {"array", "flag", "pair", "number", "callable"}
    default : object
        The value that leaves the result unchanged; the one of `scale` is computed from D.
    doc : str
        One line for the documentation and for help.
    refusable : tuple of str
        The fast paths that may refuse it: "sdpa" (PyTorch's scaled_dot_product_attention), "flex"
        (its FlexAttention), "row_norms" (the judge's cheap bounds).
    examples : tuple
        Values of a pair or a number to judge with, the simplest first.
    """

    name: str
    kind: Literal["array", "flag", "pair", "number", "callable"]
    default: Any
    doc: str
    refusable: tuple[str, ...] = ()
    examples: tuple[Any, ...] = ()


_WINDOWS = ((0, 0), (1, 0), (0, 1), (2, 3), (3, None), (None, 1), (7, 0), (16, 5), (0, 2**31 - 1))

OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("mask", "array", None, "boolean, True = may attend"),
        Option("causal", "flag", False, "query t sees keys s ≤ t + (S − T), or s ≤ t"),
        Option("window", "pair", None, "keys (left, right) beside the diagonal", (), _WINDOWS),
        Option("bias", "array", None, "added to the scores after scale and softcap"),
        Option("scale", "number", None, "multiplies q·k", (), (0.5, 1.0, -0.75, 0.0, 1.7)),
        Option(
            "softcap",
            "number",
            None,
            "c > 0: scores become c·tanh(s/c)",
            ("sdpa", "row_norms"),
            (2.0, 0.5, 1.0, 30.0),
        ),
        Option(
            "score_mod",
            "callable",
            None,
            "f(s, b, h, t, s_index) of the scores",
            ("sdpa", "row_norms"),
        ),
        Option(
            "sinks",
            "array",
            None,
            "one more logit per head, without a value",
            ("sdpa", "flex", "row_norms"),
        ),
        Option(
            "dropout_mask",
            "array",
            None,
            "boolean, True = keep the weight",
            ("sdpa", "flex", "row_norms"),
        ),
        Option(
            "dropout_rate",
            "number",
            0.0,
            "kept weights are divided by 1 − rate",
            ("sdpa", "flex", "row_norms"),
            (0.5, 0.0, 0.3),
        ),
    )
}
"""Every option, in the order of attention's signature."""

FEATURES = tuple(OPTIONS)
"""Their names: what an implementation under test may have."""
