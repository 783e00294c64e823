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
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from npattn.errors import OptionError
from npattn.plot.cells import (
    DPI,
    LABEL,
    PLAIN,
    TITLE,
    HeatMap,
    Ruler,
    column_ticks,
    draw_key,
    draw_panel,
    finish_bar,
    label_columns,
    label_rows,
    number_size,
    row_ticks,
    write_numbers,
)
from npattn.plot.looks import Look

WIDTH = 12.0  # of many heads side by side
AMONG = (2.0, 4.5)  # the longer side of one head among many, from and to
SIDE = 6.0  # of a head alone; more where a cell would have no pixel, up to
LONGEST = 20.0
SHORTEST = 0.8  # the shorter side of a panel
LEAST = 0.4  # a side of a panel in a figure of a given size
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
        """Width and height of a panel whose cells are square and large enough."""
        longest = max(self.T, self.S)
        if self.H == 1:
            side = min(max(SIDE, longest / DPI), LONGEST)
        else:
            side = min(max(WIDTH / self.columns, AMONG[0]), AMONG[1])
        cell = min(CELL, side / longest)
        return max(self.S * cell, SHORTEST), max(self.T * cell, SHORTEST)


class _Margins(NamedTuple):
    """Space around the panels, and what a figure needs beside."""

    left: float
    top: float
    name: float  # height of "head 3" above each panel
    right: float  # of the colour bar, beyond the gap that follows each panel
    key: float
    least: float  # width of the key or the title, whichever is wider


def _margins(heat: HeatMap, look: Look, rows: float, key: Legend | None, ruler: Ruler) -> _Margins:
    """Measure the margins; `rows` is the width of the labels of the rows."""
    line = ruler.height(TITLE)
    title_lines = heat.title.count("\n") + 1 if heat.title else 0
    title_width = ruler.width(heat.title, 1.2 * TITLE) if heat.title else 0.0
    box = key.get_window_extent(ruler.renderer) if key else None
    key_width, key_height = (box.width / DPI, box.height / DPI + GAP) if box else (0.0, 0.0)
    return _Margins(
        left=GAP + line + GAP / 2 + rows + TICK,
        top=GAP + ruler.height(1.2 * TITLE, title_lines) + (GAP / 2 if title_lines else 0),
        name=line if len(heat.values) > 1 else 0.0,
        right=BAR[0] + BAR_LABELS if look.scale else 0.0,
        key=key_height,
        least=max(key_width, title_width) + 2 * GAP,
    )


def _below(columns: float, margins: _Margins, ruler: Ruler) -> float:
    """Space below the panels; `columns` is the height of the labels of the columns."""
    return TICK + columns + GAP / 2 + ruler.height(TITLE) + GAP + margins.key


def _panel_within(
    figsize: tuple[float, float], heat: HeatMap, grid: _Grid, margins: _Margins, ruler: Ruler
) -> tuple[float, float]:
    """Return the width and height that a figure of a given size leaves for a panel.

    Raises
    ------
    OptionError
        If that is less than `LEAST`, or a title or the key does not fit.
    """
    across, down = figsize[0] - margins.left - margins.right, figsize[1] - margins.top
    width = across / grid.columns - GAP
    columns = column_ticks(heat.columns, max(width, LEAST) / grid.S, ruler).space
    below = _below(columns, margins, ruler) - GAP
    height = (down - below) / grid.rows - margins.name - GAP
    least = (
        max(figsize[0] + (LEAST - width) * grid.columns, margins.least),
        figsize[1] + (LEAST - height) * grid.rows,
    )
    if figsize[0] < least[0] or figsize[1] < least[1]:
        width, height = (math.ceil(10 * side) / 10 for side in least)
        raise OptionError(
            f"figsize is {figsize}, too small for the labels and the cells: it must be at least "
            f"({width:.1f}, {height:.1f}) inches here"
        )
    return width, height


def draw(heat: HeatMap, look: Look, figsize: tuple[float, float] | None = None) -> Figure:
    """Draw a heat map on a figure of its own, of a given size or as large as its cells need."""
    H, T, S = heat.values.shape
    grid = _Grid(H, T, S)
    figure = _Figure(figsize=(1, 1), dpi=DPI)
    figure.set_layout_engine("none")  # everything here has its place
    ruler = Ruler(FigureCanvasAgg(figure))
    key = draw_key(figure, heat, look, borderaxespad=0)
    if figsize is None:
        panel = grid.panel
        rows = row_ticks(heat.rows.texts, panel[1] / T, ruler)
        margins = _margins(heat, look, rows.space, key, ruler)
    else:
        # The widest label has space, whether it is shown or not: that depends on the height.
        every = row_ticks(heat.rows.texts, ruler.height(LABEL), ruler)
        margins = _margins(heat, look, every.space, key, ruler)
        panel = _panel_within(figsize, heat, grid, margins, ruler)
        rows = row_ticks(heat.rows.texts, panel[1] / T, ruler)
    cell = (panel[0] / S, panel[1] / T)
    columns = column_ticks(heat.columns, cell[0], ruler)
    dx, dy = panel[0] + GAP, panel[1] + margins.name + GAP
    right = margins.left + grid.columns * dx
    bottom = margins.top + grid.rows * dy - GAP
    width = max(right + margins.right, margins.least)
    height = bottom + _below(columns.space, margins, ruler)
    if figsize is not None:
        width, height = figsize
    shift = (width - right - margins.right) / 2
    figure.set_size_inches(width, height)
    if key:
        key.set_bbox_to_anchor((0.5, GAP / height))

    def add_axes(x: float, y: float, w: float, h: float) -> Axes:
        return figure.add_axes((x / width, 1 - (y + h) / height, w / width, h / height))

    top, points = margins.top + margins.name, number_size(heat.values, look, cell, ruler)
    for h in range(H):
        i, j = divmod(h, grid.columns)
        axes = add_axes(margins.left + shift + j * dx, top + i * dy, *panel)
        image = draw_panel(axes, heat.values[h], heat.flagged[h], look, cell)
        if H > 1:
            axes.set_title(f"head {h}", fontsize=TITLE, pad=3, **PLAIN)
        label_rows(axes, rows if j == 0 else None, heat.rows.word)
        # The lowest panel of each column has the labels of the keys.
        label_columns(axes, columns if h + grid.columns >= H else None, heat.columns.word)
        if points is not None:
            write_numbers(axes, heat.values[h], heat.flagged[h], look, points)
    if look.scale is not None:
        bar = add_axes(right + shift, top, BAR[0], min(bottom - top, BAR[1]))
        extend = "max" if look.beyond else "neither"
        finish_bar(figure.colorbar(image, cax=bar, extend=extend, format="%.3g"), look)
    if heat.title:
        figure.suptitle(heat.title, fontsize=1.2 * TITLE, y=1 - GAP / height, va="top", **PLAIN)
    return figure
