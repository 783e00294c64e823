"""Names that engineers have for patterns of step, place and amount.

A name is added to what was read if its pattern holds, never the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from npattn.testing.diagnosis.explore import Point


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


NAMES: tuple[Name, ...] = ()


def name_of(
    step: str, where: str, amount: str, form: str, points: Sequence[Point]
) -> tuple[str, str]:
    """Return a short id, and the name of a pattern; "" if it has none."""
    for name in NAMES:
        if (
            re.fullmatch(name.step, step)
            and re.search(name.where, where)
            and re.search(name.amount, amount)
        ):
            return name.id, name.text
    return " ".join(filter(None, (step or "unknown", where and f"where {where}"))), ""
