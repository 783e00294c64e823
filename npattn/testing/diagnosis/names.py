"""Names that engineers have for patterns of step, place and amount.

A name is added to what was read if its pattern holds, never the other way round.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Name(NamedTuple):
    """A pattern, and the name that it has.

    Attributes
    ----------
    id : str
    step : str
        Pattern of the whole step.
    where, amount : str
        Patterns that are found in the place and in the amount.
    text : str
        The name, and advice.
    """

    id: str
    step: str
    where: str
    amount: str
    text: str


ANY = ""
NAMES = (
    Name("keys-counted-again", "p", ANY, "^counted", "tiles or splits overlap"),
    Name("rows-not-empty", "p", "no key", "mean of all", "a row of −∞ is not a uniform one"),
    Name("dropout-scaled-twice", "p", "dropout", r"1/\(1 − rate\)", "1/(1 − rate) is taken twice"),
    Name("dropout-not-scaled", "p", "dropout", "× 1 − rate", "1/(1 − rate) is left out"),
    Name("scale-left-out", "s", ANY, "q·k × 1/scale$", "the scale is left out"),
    Name("scale-twice", "s", ANY, "q·k × the scale$", "the scale is applied twice"),
    Name("scale-of-default", "s", ANY, "default scale", "the scale that is given is not used"),
    Name("columns-of-padded-size", "s", ANY, "D padded", "the scale is that of the padded D"),
    Name("base-2", "lse", ANY, "log₂ e|ln 2", "logarithms of base 2 and e are mixed"),
    Name("delta-without-dlse", "delta", "dlse", ANY, "δ is Σ do·o − dlse"),
    Name("stride-of-rows", "o|d[qkv]", ANY, "rows of .* are read as",
         "what is stored and what is read have different row strides"),
    Name("unscaled-gradient", "d[qk]", ANY, "× 1/scale$", "the scale is missing in it"),
    Name("division-by-nothing", "nan", "no key", "NaN", "0/0, or exp(−∞ − −∞), of no key"),
    Name("overflow", "nan", "contents", "NaN or infinite",
         "exp without the maximum of the row, or a product beyond the range of the dtype"),
    Name("hidden-times-zero", "nan", "hidden keys", "NaN or infinite",
         "0 · NaN is NaN: hidden keys are to be selected away, not multiplied by 0"),
    Name("dropout-in-backward", "dp", "dropout", ANY,
         "dP is masked and scaled by 1/(1 − rate), as P is"),
    Name("gradient-scaled-twice", "d[qk]", ANY, "× the scale$", "the scale is applied twice in it"),
)  # fmt: skip
"""Patterns, the most special first."""


def name_of(step: str, where: str, amount: str) -> tuple[str, str]:
    """Return a short id, and the name of a pattern; "" if it has none."""
    for name in NAMES:
        if (
            re.fullmatch(name.step, step)
            and re.search(name.where, where)
            and re.search(name.amount, amount)
        ):
            return name.id, name.text
    return " ".join(filter(None, (step or "unknown", where and f"where {where}"))), ""
