"""Parts of a heat map: cells, crosses, labels, numbers, the colour bar and the key.

    H heads   T queries (rows, downwards)   S keys (columns)

Sizes are inches, of fonts points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colorbar import Colorbar
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import PercentFormatter

from npattn.plot.looks import FLAG, Look, text_colour
from npattn.problem.arrays import Array

DPI = 150
LABEL, TITLE = 8.0, 9.0  # points
NUMBERS = (5.5, 9.0)  # points, from and to
CROSS = 5.0  # points, the smallest
TICK_DISTANCE = 0.16  # of the colour bar, at least
LINES = 0.11  # cells from here on have lines between them

# A token may hold a $ or an underscore.
PLAIN: dict[str, Any] = {"parse_math": False, "usetex": False}


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


def row_ticks(texts: list[str], cell: float, ruler: Ruler) -> Ticks:
    step = _round_up(ruler.height(LABEL) / cell)
    selected = texts[::step]
    space = max(ruler.width(text, LABEL) for text in selected)
    return Ticks(list(range(0, len(texts), step)), selected, False, space)


def column_ticks(labels: Labels, cell: float, ruler: Ruler) -> Ticks:
    """Flat labels if they fit side by side (positions may be thinned for that), else upright."""
    texts = labels.texts
    width = max(ruler.width(text, LABEL) for text in texts) + 0.5 * ruler.height(LABEL)
    upright = width > cell and not labels.positions
    step = _round_up((ruler.height(LABEL) if upright else width) / cell)
    selected = texts[::step]
    space = ruler.height(LABEL)
    if upright:
        space = max(ruler.width(text, LABEL) for text in selected)
    return Ticks(list(range(0, len(texts), step)), selected, upright, space)


def _round_up(least: float) -> int:
    """Smallest of 1, 2, 5, 10, 20, 50, ... that is not below `least`."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10


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


def finish_bar(bar: Colorbar, look: Look) -> None:
    """Format the colour bar and write its words."""
    bar.ax.set_label("<colorbar>")  # the label of matplotlib's own
    bar.ax.grid(visible=False)
    height = bar.ax.get_window_extent().height / bar.ax.figure.figure.dpi
    bar.ax.locator_params(nbins=max(1, min(5, int(height / TICK_DISTANCE))))
    bar.ax.tick_params(labelsize=LABEL)
    if look.percent:
        bar.formatter = PercentFormatter(1.0)
    bar.set_label(look.scale or "", fontsize=TITLE)


def draw_key(owner: Axes | Figure, heat: HeatMap, look: Look, **place: Any) -> Legend | None:
    """Draw the key of cells without a colour of the scale; None if there are none."""
    entries: list[tuple[Any, str]] = []
    zero = (heat.values == 0) & ~heat.flagged
    if look.full and not zero.all():
        entries.append((Patch(facecolor=look.colours(0.5)), look.full))
    if zero.any():
        entries.append((Patch(facecolor="white", edgecolor="0.6", hatch="////"), look.zero))
    if heat.flagged.any():
        cross = Line2D([], [], linestyle="", marker="x", color="black", markersize=6)
        entries.append(((Patch(facecolor=FLAG), cross), look.flagged))
    if not entries:
        return None
    handles, words = zip(*entries, strict=True)
    return owner.legend(
        handles, words, loc="lower center", ncols=len(words), fontsize=LABEL, frameon=False,
        borderpad=0, **place,
    )  # fmt: skip


def number_size(values: Array, look: Look, cell: tuple[float, float], ruler: Ruler) -> float | None:
    """Return the size of font in which all numbers fit into their cells, or None."""
    if look.scale is None or min(cell) < ruler.height(NUMBERS[0]):
        return None
    texts = {look.format(x) for x in np.unique(values).tolist()}
    widest = max(ruler.width(text, 100.0) / 100 for text in texts)
    points = min(0.85 * cell[0] / widest, 0.8 * cell[1] / ruler.height(1), NUMBERS[1])
    return points if points >= NUMBERS[0] else None


def write_numbers(axes: Axes, values: Array, flagged: Array, look: Look, points: float) -> None:
    """Write the numbers of one head into its cells."""
    colours = look.colours(look.norm(np.where(flagged, 0, values)))
    for (t, s), x in np.ndenumerate(values):
        text = look.format(x)
        ink = "0.35" if x == 0 else text_colour(colours[t, s])
        number = axes.text(s, t, text, ha="center", va="center", fontsize=points, zorder=4)
        number.set(color="black" if flagged[t, s] else ink, **PLAIN)
        if flagged[t, s]:  # before the middle of its cross
            number.set_bbox({"facecolor": FLAG, "edgecolor": "none", "pad": 0.6})
            number.set_text(">1" if text == look.format(1.0) else text)
