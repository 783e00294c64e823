"""Parts of a heat map: cells, crosses, numbers, labels, the colour bar and the key.

    H heads   T queries (rows, downwards)   S keys (columns)

Sizes are inches, of fonts points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from npattn.arrays import Array
from npattn.errors import MissingExtraError

try:
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import Colormap, ListedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.image import AxesImage
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.patheffects import withStroke
except ImportError as err:
    raise MissingExtraError(
        "npattn.plot needs matplotlib; npattn itself does not: pip install 'npattn[plot]'"
    ) from err

__all__ = [
    "CROSS",
    "DPI",
    "FLAG",
    "LABEL",
    "PLAIN",
    "TITLE",
    "HeatMap",
    "Labels",
    "Look",
    "Ruler",
    "Ticks",
    "draw_bar",
    "draw_key",
    "draw_panel",
    "error_look",
    "format_number",
    "label_columns",
    "label_rows",
    "mask_look",
    "weight_look",
    "write_numbers",
]

DPI = 150
LABEL, TITLE = 8.0, 9.0  # points
NUMBERS = (5.5, 9.0)  # points, from and to
CROSS = 5.0  # points, the smallest
LINES = 0.11  # cells from here on have lines between them

FLAG = "#d55e00"  # vermillion, of Okabe and Ito's colours: in no part of viridis
VISIBLE = "#3b528b"
# A token may hold a $ or an underscore.
PLAIN: dict[str, Any] = {"parse_math": False, "usetex": False}


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


def weight_look(weights: Array) -> Look:
    """Colours from 0 to the largest weight; from the smallest if a wrong one is negative."""
    finite = weights[np.isfinite(weights)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    return Look(
        colours=colormaps["viridis"],
        norm=Normalize(min(low, 0.0), high if high > min(low, 0.0) else 1.0),
        zero="0: hidden",
        flagged="NaN or inf",
        scale="weight",
    )


def mask_look() -> Look:
    """One colour for visible keys."""
    return Look(
        colours=ListedColormap([VISIBLE]),
        norm=Normalize(0, 1),
        zero="hidden",
        flagged="",
        full="may attend",
    )


def error_look() -> Look:
    """Colours from 0 to 1, and another one beyond."""
    return Look(
        colours=colormaps["viridis"].with_extremes(over=FLAG),
        norm=Normalize(0, 1),
        zero="exactly 0",
        flagged="beyond 1: wrong",
        scale="error / tolerance",
        beyond=True,
    )


class Labels(NamedTuple):
    """Labels of one axis, one for each row or column."""

    word: str  # beside the axis
    texts: list[str]
    positions: bool  # numbers, of which some may be left out


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Values (H, T, S) with their labels, and the elements that get a cross."""

    values: Array
    flagged: Array
    rows: Labels
    columns: Labels
    title: str | None


class Ruler:
    """Measures texts in inches, as the figure will draw them."""

    def __init__(self, canvas: FigureCanvasAgg) -> None:
        self.renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]  # matplotlib's

    def width(self, text: str, points: float) -> float:
        font = FontProperties(size=points)
        lines = text.split("\n")
        pixels = (
            self.renderer.get_text_width_height_descent(line, font, False)[0] for line in lines
        )
        return float(max(pixels)) / DPI

    @staticmethod
    def height(points: float, lines: int = 1) -> float:
        """Distance from one line to the next."""
        return 1.25 * points * lines / 72


@dataclass(frozen=True)
class Ticks:
    """The labels of one axis that fit, and the space that they take."""

    at: list[int]
    texts: list[str]
    upright: bool
    space: float


# --- drawing --------------------------------------------------------------------------------------


def draw_panel(
    axes: Axes, values: Array, flagged: Array, look: Look, cell: tuple[float, float]
) -> AxesImage:
    """Draw the cells of one head; those with an exact 0 stay empty and show the hatched ground."""
    T, S = values.shape
    axes.grid(visible=False)  # also if the style sheet has one
    axes.patch.set(facecolor="white", edgecolor="0.75", hatch="////", linewidth=0)
    coloured = np.ma.masked_where(flagged | (values == 0), values)
    image = axes.imshow(
        coloured,
        cmap=look.colours,
        norm=look.norm,
        aspect="auto",
        interpolation="nearest",
        origin="upper",
    )
    if flagged.any():
        axes.imshow(
            np.ma.masked_where(~flagged, np.ones_like(values)),
            cmap=ListedColormap([FLAG]),
            aspect="auto",
            interpolation="nearest",
            origin="upper",
        )
        _draw_crosses(axes, flagged, cell)
    if min(cell) >= LINES:
        axes.set_xticks(np.arange(1, S) - 0.5, minor=True)
        axes.set_yticks(np.arange(1, T) - 0.5, minor=True)
        axes.grid(which="minor", color="0.85", linewidth=0.6)
        axes.tick_params(which="minor", length=0)
    axes.set(xlim=(-0.5, S - 0.5), ylim=(T - 0.5, -0.5))
    return image


def _draw_crosses(axes: Axes, flagged: Array, cell: tuple[float, float]) -> None:
    """Draw a cross on flagged cells; where cells are smaller than a cross, at most one a place."""
    size = max(0.75 * 72 * min(cell), CROSS)
    places = np.argwhere(flagged)
    many = [max(1, math.ceil(CROSS / 72 / side)) for side in reversed(cell)]
    _, first = np.unique(places // many, axis=0, return_index=True)
    rows, columns = places[first].T
    axes.scatter(
        columns,
        rows,
        s=size**2,
        marker="x",
        color="black",
        linewidths=1.0,
        clip_on=False,
        zorder=3,
        path_effects=[withStroke(linewidth=2.2, foreground="white")],
    )


def label_rows(axes: Axes, ticks: Ticks | None, word: str) -> None:
    if ticks is None:
        axes.set_yticks([])
        return
    axes.set_yticks(ticks.at, ticks.texts, fontsize=LABEL, **PLAIN)
    axes.set_ylabel(word, fontsize=TITLE, **PLAIN)


def label_columns(axes: Axes, ticks: Ticks | None, word: str) -> None:
    if ticks is None:
        axes.set_xticks([])
        return
    rotation = 90 if ticks.upright else 0
    axes.set_xticks(ticks.at, ticks.texts, fontsize=LABEL, rotation=rotation, **PLAIN)
    axes.set_xlabel(word, fontsize=TITLE, **PLAIN)


def draw_bar(axes: Axes, image: AxesImage, words: str, beyond: bool) -> None:
    extend = "max" if beyond else "neither"
    bar = axes.figure.colorbar(image, cax=axes, extend=extend, format="%.3g")
    bar.ax.set_label("<colorbar>")  # the label of matplotlib's own
    bar.ax.grid(visible=False)
    bar.ax.locator_params(nbins=5)
    bar.ax.tick_params(labelsize=LABEL)
    bar.set_label(words, fontsize=TITLE)


def draw_key(figure: Figure, heat: HeatMap, look: Look) -> Any:
    """Draw the key of cells without a colour of the scale; None if there are none."""
    entries: list[tuple[Any, str]] = []
    zero = (heat.values == 0) & ~heat.flagged
    if look.full and not zero.all():
        entries.append((Patch(facecolor=VISIBLE), look.full))
    if zero.any():
        entries.append((Patch(facecolor="white", edgecolor="0.6", hatch="////"), look.zero))
    if heat.flagged.any():
        cross = Line2D([], [], linestyle="", marker="x", color="black", markersize=6)
        entries.append(((Patch(facecolor=FLAG), cross), look.flagged))
    if not entries:
        return None
    handles, words = zip(*entries, strict=True)
    return figure.legend(
        handles,
        words,
        loc="lower center",
        ncols=len(words),
        fontsize=LABEL,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
    )


def write_numbers(
    figure: Figure, heat: HeatMap, look: Look, cell: tuple[float, float], ruler: Ruler
) -> None:
    """Write numbers in all cells, if there is a size of font in which all fit."""
    if look.scale is None or min(cell) < ruler.height(NUMBERS[0]):
        return
    texts = np.vectorize(format_number, otypes=[object])(heat.values)
    widest = max(ruler.width(text, 100.0) / 100 for text in set(texts.flat))
    points = min(0.85 * cell[0] / widest, 0.8 * cell[1] / ruler.height(1), NUMBERS[1])
    if points < NUMBERS[0]:
        return
    for axes, panel, values, flagged in zip(
        figure.axes, texts, heat.values, heat.flagged, strict=False
    ):
        colours = look.colours(look.norm(np.where(flagged, 0, values)))
        for (t, s), text in np.ndenumerate(panel):
            ink = "0.35" if values[t, s] == 0 else _text_colour(colours[t, s])
            number = axes.text(s, t, text, ha="center", va="center", fontsize=points, zorder=4)
            number.set(color="black" if flagged[t, s] else ink, **PLAIN)
            if flagged[t, s]:  # before the middle of its cross
                number.set_bbox({"facecolor": FLAG, "edgecolor": "none", "pad": 0.6})
                number.set_text(">1" if text == "1.00" else text)


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


def _text_colour(colour: Any) -> str:
    """Return black or white, by the contrast with the colour (relative luminance of sRGB)."""
    rgb = np.asarray(colour[:3])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    luminance = linear @ (0.2126, 0.7152, 0.0722)
    return "black" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "white"
