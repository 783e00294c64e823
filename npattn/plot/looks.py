"""Looks of heat maps: colours of values, format and ink of numbers, and words of the key."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Colormap, ListedColormap, Normalize

from npattn.errors import OptionError
from npattn.problem.arrays import Array

FLAG = "#d55e00"  # vermilion, of Okabe and Ito's colours: in no part of viridis


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
    """Return a function that formats numbers, but not 0, NaN and inf, as ``format(x, fmt)``."""
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


@dataclass(frozen=True, kw_only=True)
class Look:
    """Colours of values, and the words beside them."""

    colours: Colormap
    norm: Normalize
    zero: str  # an exact 0
    flagged: str  # a cross
    full: str | None = None  # every other cell, where there is no scale
    scale: str | None = None  # the colour bar; None: no bar, and no numbers
    beyond: bool = False  # the scale goes on above its end
    format: Callable[[float], str] = format_number
    percent: bool = False  # the numbers are percentages, those of the bar too


def weight_look(weights: Array, cmap: Any, fmt: Any) -> Look:
    """Colours of weights, of any shape, from 0 to the largest; from the smallest if negative."""
    finite = weights[np.isfinite(weights)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    return Look(
        colours=read_colours(cmap),
        norm=Normalize(min(low, 0.0), high if high > min(low, 0.0) else 1.0), zero="0: hidden",
        flagged="NaN or inf", scale="weight", format=read_format(fmt), percent=_is_percentage(fmt),
    )  # fmt: skip


def mask_look(cmap: Any) -> Look:
    """One colour for visible keys: the darker one of those at a quarter and three quarters."""
    ends = read_colours(cmap)([0.25, 0.75])
    return Look(
        colours=ListedColormap([min(ends, key=luminance)]), norm=Normalize(0, 1), zero="hidden",
        flagged="", full="may attend",
    )  # fmt: skip


def error_look(cmap: Any, fmt: Any) -> Look:
    """Colours from 0 to 1, and another one beyond."""
    return Look(
        colours=read_colours(cmap).with_extremes(over=FLAG), norm=Normalize(0, 1), zero="exactly 0",
        flagged="beyond 1: wrong", scale="error / tolerance", beyond=True, format=read_format(fmt),
        percent=_is_percentage(fmt),
    )  # fmt: skip


def read_colours(cmap: Any) -> Colormap:
    """Return a colour map, or that of a name. Raises OptionError with near names if unknown."""
    if isinstance(cmap, Colormap):
        return cmap
    if not isinstance(cmap, str):
        raise OptionError(
            f"cmap is {cmap!r}, must be the name of a colour map of matplotlib, or a Colormap"
        )
    if cmap in colormaps:
        return colormaps[cmap]
    names = {name.lower(): name for name in colormaps}
    near = [names[name] for name in get_close_matches(cmap.lower(), names, 3)]
    cure = f"did you mean {' or '.join(near)}?" if near else "try viridis, gray, Blues or magma"
    raise OptionError(f"cmap is {cmap!r}, no colour map of matplotlib: {cure}")


def _is_percentage(fmt: Any) -> bool:
    return isinstance(fmt, str) and fmt.endswith("%")
