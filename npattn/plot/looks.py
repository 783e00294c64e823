"""Looks of heat maps: the colours of values, the format of numbers, and the words of the key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Colormap, ListedColormap, Normalize

from npattn.arrays import Array
from npattn.errors import OptionError
from npattn.plot.numbers import format_number, luminance, read_format

__all__ = ["FLAG", "Look", "error_look", "mask_look", "read_colours", "weight_look"]

FLAG = "#d55e00"  # vermillion, of Okabe and Ito's colours: in no part of viridis


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
    """Colours from 0 to the largest weight; from the smallest if a wrong one is negative."""
    finite = weights[np.isfinite(weights)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    return Look(
        colours=read_colours(cmap),
        norm=Normalize(min(low, 0.0), high if high > min(low, 0.0) else 1.0),
        zero="0: hidden",
        flagged="NaN or inf",
        scale="weight",
        format=read_format(fmt),
        percent=_is_percentage(fmt),
    )


def mask_look(cmap: Any) -> Look:
    """One colour for visible keys: the darker one of those at a quarter and three quarters."""
    ends = read_colours(cmap)([0.25, 0.75])
    return Look(
        colours=ListedColormap([min(ends, key=luminance)]),
        norm=Normalize(0, 1),
        zero="hidden",
        flagged="",
        full="may attend",
    )


def error_look(cmap: Any, fmt: Any) -> Look:
    """Colours from 0 to 1, and another one beyond."""
    return Look(
        colours=read_colours(cmap).with_extremes(over=FLAG),
        norm=Normalize(0, 1),
        zero="exactly 0",
        flagged="beyond 1: wrong",
        scale="error / tolerance",
        beyond=True,
        format=read_format(fmt),
        percent=_is_percentage(fmt),
    )


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
