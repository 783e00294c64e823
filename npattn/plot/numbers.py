"""Numbers in the cells of a heat map: their format, their size and their colour."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from npattn.errors import OptionError

__all__ = ["format_number", "luminance", "read_format", "text_colour"]

SAMPLE = 0.25
"""Number that a format is tried on."""


def format_number(x: float) -> str:
    """Format x in at most five characters. 0 is exact, ≈0 is not."""
    if not math.isfinite(x):
        return str(x).replace("nan", "NaN")
    if x == 0:
        return "0"
    if abs(x) >= 999.5:
        return f"{x:.0e}".replace("e+", "e").replace("e0", "e")
    if abs(x) >= 9.995:
        return f"{x:.0f}"
    return "≈0" if abs(x) < 0.005 else f"{x:.2f}"


def read_format(fmt: Any) -> Callable[[float], str]:
    """Return the function that formats numbers as ``format(x, fmt)`` does, or `format_number`.

    An exact 0, NaN and inf read as always.

    Raises
    ------
    OptionError
        If fmt is no format of a float; the message has the format that was meant, if it is another
        spelling of one.
    """
    if fmt is None:
        return format_number
    if not isinstance(fmt, str) or not _formats(fmt):
        spellings = (str(fmt).lstrip("%"), str(fmt).strip("{}").lstrip(":"))
        meant = [other for other in spellings if other and other != fmt and _formats(other)]
        cure = f": did you mean {meant[0]!r}?" if meant else ", such as '.3f', '.1e' or '.0%'"
        raise OptionError(f"fmt is {fmt!r}, must be a format of a float{cure}")

    def format_as_asked(x: float) -> str:
        return format(x, fmt) if x != 0 and math.isfinite(x) else format_number(x)

    return format_as_asked


def _formats(fmt: str) -> bool:
    try:
        format(SAMPLE, fmt)
    except ValueError:
        return False
    return True


def luminance(colour: Any) -> float:
    """Relative luminance of a colour of sRGB, from 0 (black) to 1 (white)."""
    rgb = np.asarray(colour[:3])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def text_colour(colour: Any) -> str:
    """Return black or white, whichever has the larger contrast with the colour."""
    return "black" if (luminance(colour) + 0.05) ** 2 > 0.05 * 1.05 else "white"
