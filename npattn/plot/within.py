"""Heat maps in axes of the user: cells, labels, numbers, the colour bar and the key.

The axes keep their place, less what the colour bar takes; what fits is measured there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from npattn.errors import OptionError, ShapeError
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

MUST = "must be matplotlib Axes, such as figure.add_subplot() or plt.subplots()[1]"


def read_axes(ax: Any, count: int, title: str | None) -> list[Axes]:
    """Return the axes to draw in, one for each head.

    Raises
    ------
    OptionError
        If one of them is no rectilinear Axes, they are of several figures, or one title is given
        for several.
    ShapeError
        If their number is not that of the heads.
    """
    if isinstance(ax, Axes):
        every: list[Any] = [ax]
    elif isinstance(ax, (list, tuple, np.ndarray)):
        every = [
            one for part in ax for one in (part.flat if isinstance(part, np.ndarray) else [part])
        ]
    else:
        raise OptionError(f"ax is a {type(ax).__name__}, {MUST}")
    for one in every:
        if not isinstance(one, Axes) or one.name != "rectilinear":
            kind = f"{one.name} axes" if isinstance(one, Axes) else f"a {type(one).__name__}"
            raise OptionError(f"ax has {kind}, {MUST}")
    if len(every) != count:
        heads = "1 head" if count == 1 else f"{count} heads"
        raise ShapeError(f"ax has {len(every)} axes, must have {count}, one each [{heads}]")
    if len({id(_figure_of(one)) for one in every}) > 1:
        raise OptionError("ax has axes of several figures, must have those of one")
    if title is not None and count > 1:
        raise OptionError(
            f"title is {title!r}, which belongs to a figure, and ax is part of yours: leave it "
            "out, and call figure.suptitle"
        )
    return every


def draw_within(heat: HeatMap, look: Look, every: Sequence[Axes]) -> Figure:
    """Draw a heat map in axes of a figure, and return that figure."""
    figure = _figure_of(every[0])
    ruler = Ruler(FigureCanvasAgg(Figure(dpi=DPI)))
    H, T, S = heat.values.shape
    key = draw_key(every[0], heat, look, bbox_to_anchor=(0.5, 1.0), borderaxespad=0.3)
    level = every[0].get_position().y1  # of the key, and of those beside it
    for h, axes in enumerate(every):
        cell = _cell(axes, T, S)
        image = draw_panel(axes, heat.values[h], heat.flagged[h], look, cell)
        title = heat.title if H == 1 else f"head {h}"
        if title:
            above_key = key and np.isclose(axes.get_position().y1, level)
            pad = 6.0 + (2 * LABEL if above_key else 0)  # points
            axes.set_title(title, fontsize=TITLE, pad=pad, **PLAIN)
        label_rows(axes, row_ticks(heat.rows.texts, cell[1], ruler), heat.rows.word)
        label_columns(axes, column_ticks(heat.columns, cell[0], ruler), heat.columns.word)
    if look.scale is not None:
        extend = "max" if look.beyond else "neither"
        beside = every[0] if H == 1 else list(every)  # tight layouts take no list
        bar = figure.colorbar(image, ax=beside, extend=extend, format="%.3g")
        finish_bar(bar, look)
    # The bar and the layout engine of the figure have moved the axes: labels and numbers that fit
    # are those of their present place.
    _lay_out(figure)
    for axes in every:
        cell = _cell(axes, T, S)
        label_rows(axes, row_ticks(heat.rows.texts, cell[1], ruler), heat.rows.word)
        label_columns(axes, column_ticks(heat.columns, cell[0], ruler), heat.columns.word)
    _lay_out(figure)
    for h, axes in enumerate(every):
        points = number_size(heat.values, look, _cell(axes, T, S), ruler)
        if points is not None:
            write_numbers(axes, heat.values[h], heat.flagged[h], look, points)
    return figure


def _figure_of(axes: Axes) -> Figure:
    """Return the figure of axes, also of those in a part of one."""
    return axes.figure.figure


def _lay_out(figure: Figure) -> None:
    """Let the layout engine of a figure place its axes, if it has one."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()


def _cell(axes: Axes, T: int, S: int) -> tuple[float, float]:
    """Width and height of a cell in inches."""
    box, dpi = axes.get_window_extent(), _figure_of(axes).dpi
    return box.width / dpi / S, box.height / dpi / T
