"""Layout of a heat map: the size and the place of everything.

    H heads   T queries (rows, downwards)   S keys (columns)

Sizes are inches, of fonts points. Everything is placed from measured texts: cells first, then their
surroundings, then the figure around both. matplotlib's constrained layout fits panels into a figure
of a given size; here the figure must fit cells of a given size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from npattn.plot.cells import (
    DPI,
    LABEL,
    PLAIN,
    TITLE,
    HeatMap,
    Labels,
    Look,
    Ruler,
    Ticks,
    draw_bar,
    draw_key,
    draw_panel,
    label_columns,
    label_rows,
    write_numbers,
)

__all__ = ["draw"]

WIDTH = 12.0  # of many heads side by side
AMONG = (2.0, 4.5)  # the longer side of one head among many, from and to
SIDE = 6.0  # of a head alone; more where a cell would have no pixel, up to
LONGEST = 20.0
SHORTEST = 0.8  # the shorter side of a panel
CELL = 0.5  # the largest cell
GAP = 0.2  # between panels, and around everything
TICK = 0.12  # from a panel to its labels
BAR = (0.16, SIDE)  # the colour bar: its width, and its height at most
BAR_LABELS = 0.75  # the numbers and the words beside it


class _Figure(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def _row_ticks(texts: list[str], cell: float, ruler: Ruler) -> Ticks:
    step = _round_up(ruler.height(LABEL) / cell)
    selected = texts[::step]
    space = max(ruler.width(text, LABEL) for text in selected)
    return Ticks(list(range(0, len(texts), step)), selected, False, space)


def _column_ticks(labels: Labels, cell: float, ruler: Ruler) -> Ticks:
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


@dataclass(frozen=True)
class _Grid:
    """Panels in rows and columns, and the sizes of a panel and of its cells."""

    H: int
    T: int
    S: int

    @property
    def columns(self) -> int:
        return self.H if self.H <= 3 else math.ceil(self.H / self.rows)

    @property
    def rows(self) -> int:
        return 1 if self.H <= 3 else math.ceil(self.H / math.ceil(math.sqrt(self.H)))

    @property
    def panel(self) -> tuple[float, float]:
        """Width and height of a panel."""
        longest = max(self.T, self.S)
        if self.H == 1:
            side = min(max(SIDE, longest / DPI), LONGEST)
        else:
            side = min(max(WIDTH / self.columns, AMONG[0]), AMONG[1])
        cell = min(CELL, side / longest)
        return max(self.S * cell, SHORTEST), max(self.T * cell, SHORTEST)

    @property
    def cell(self) -> tuple[float, float]:
        return self.panel[0] / self.S, self.panel[1] / self.T


def _key_size(key: Any, ruler: Ruler) -> tuple[float, float]:
    box = key.get_window_extent(ruler.renderer)
    return box.width / DPI, box.height / DPI


class _Places(NamedTuple):
    """Places in inches, from the left and from the top of the figure."""

    left: float  # of the first panel
    top: float  # of its name
    step: tuple[float, float]  # from panel to panel
    name: float  # height of "head 3" above its panel
    right: float  # of the colour bar
    bottom: float  # of the lowest panels
    size: tuple[float, float]  # of the figure


def _places(
    heat: HeatMap, look: Look, grid: _Grid, ticks: tuple[Ticks, Ticks], key: Any, ruler: Ruler
) -> _Places:
    line = ruler.height(TITLE)
    name = line if grid.H > 1 else 0.0
    title_lines = heat.title.count("\n") + 1 if heat.title else 0
    title_width = ruler.width(heat.title, 1.2 * TITLE) if heat.title else 0.0
    key_width, key_height = _key_size(key, ruler) if key else (0.0, 0.0)
    left = GAP + line + GAP / 2 + ticks[0].space + TICK
    top = GAP + ruler.height(1.2 * TITLE, title_lines) + (GAP / 2 if title_lines else 0)
    dx, dy = grid.panel[0] + GAP, grid.panel[1] + name + GAP
    right = left + grid.columns * dx
    bottom = top + grid.rows * dy - GAP
    width = right + (BAR[0] + BAR_LABELS if look.scale else 0)
    height = bottom + TICK + ticks[1].space + GAP / 2 + line + GAP
    height += key_height + GAP if key else 0
    whole = max(width, key_width + 2 * GAP, title_width + 2 * GAP)
    shift = (whole - width) / 2
    return _Places(left + shift, top, (dx, dy), name, right + shift, bottom, (whole, height))


def draw(heat: HeatMap, look: Look) -> Figure:
    """Draw a heat map on a figure of its own."""
    H, T, S = heat.values.shape
    grid = _Grid(H, T, S)
    figure = _Figure(figsize=(1, 1), dpi=DPI)
    figure.set_layout_engine("none")  # `_places` has a place for everything
    ruler = Ruler(FigureCanvasAgg(figure))
    rows = _row_ticks(heat.rows.texts, grid.cell[1], ruler)
    columns = _column_ticks(heat.columns, grid.cell[0], ruler)
    key = draw_key(figure, heat, look)
    places = _places(heat, look, grid, (rows, columns), key, ruler)
    width, height = places.size
    figure.set_size_inches(width, height)
    if key:
        key.set_bbox_to_anchor((0.5, GAP / height))

    def add_axes(x: float, y: float, w: float, h: float) -> Axes:
        return figure.add_axes((x / width, 1 - (y + h) / height, w / width, h / height))

    top = places.top + places.name
    for h in range(H):
        i, j = divmod(h, grid.columns)
        axes = add_axes(places.left + j * places.step[0], top + i * places.step[1], *grid.panel)
        image = draw_panel(axes, heat.values[h], heat.flagged[h], look, grid.cell)
        if H > 1:
            axes.set_title(f"head {h}", fontsize=TITLE, pad=3, **PLAIN)
        label_rows(axes, rows if j == 0 else None, heat.rows.word)
        # The lowest panel of each column has the labels of the keys.
        label_columns(axes, columns if h + grid.columns >= H else None, heat.columns.word)
    if look.scale is not None:
        bar = add_axes(places.right, top, BAR[0], min(places.bottom - top, BAR[1]))
        draw_bar(bar, image, look.scale, look.beyond)
    write_numbers(figure, heat, look, grid.cell, ruler)
    if heat.title:
        figure.suptitle(heat.title, fontsize=1.2 * TITLE, y=1 - GAP / height, va="top", **PLAIN)
    return figure
