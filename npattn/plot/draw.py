"""Drawing of heat maps: cells, crosses, labels, numbers, the colour bar and the key.

    H heads   T queries (rows, downwards)   S keys (columns)

matplotlib's constrained layout has a place for everything in a figure of a given size. Here the
figure is made as large as its cells need, and labels and numbers that do not fit are left out.
Sizes are inches, of fonts points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.textpath import text_to_path
from matplotlib.ticker import PercentFormatter

from npattn.errors import OptionError
from npattn.plot.looks import FLAG, Look, text_colour
from npattn.problem.arrays import Array

DPI = 150
LABEL, TITLE = 8.0, 9.0  # points
LINE = 1.25 / 72  # from one line to the next, for each point
NUMBERS = (5.5, 9.0)  # points, from and to
CROSS = 5.0  # points, the smallest
LINES = 0.11  # cells from here on have lines between them
CELL, SHORTEST, LEAST = 0.5, 0.8, 0.4  # a cell at most; a side of a panel, and in a given figsize
WIDTH, AMONG = 12.0, (2.0, 4.5)  # of many heads side by side; the longer side of one among them
SIDE, LONGEST = 6.0, 20.0  # of a head alone; more where a cell would have no pixel, up to
PAD = 0.08  # around each panel
BAR, TICK_DISTANCE = 0.16, 0.18  # width of the colour bar, and from number to number at least
LONGEST_LABELS = 5.0  # more than labels, titles and the key take

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


class _Figure(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


# --- a figure of its own, and axes of the user ----------------------------------------------------


def draw(heat: HeatMap, look: Look, figsize: tuple[float, float] | None = None) -> Figure:
    """Draw a heat map on a figure of its own, of a given size or as large as its cells need."""
    H, T, S = heat.values.shape
    rows = 1 if H <= 3 else math.ceil(H / math.ceil(math.sqrt(H)))
    columns = math.ceil(H / rows)
    figure = _Figure(dpi=DPI)
    engine = ConstrainedLayoutEngine(w_pad=PAD, h_pad=PAD, wspace=0, hspace=0)
    figure.set_layout_engine(engine)
    grid = figure.subplots(rows, columns, squeeze=False)
    panels: list[Axes] = list(grid.flat[:H])
    for spare in grid.flat[H:]:
        spare.remove()
    images = [_draw_cells(axes, heat, look, h) for h, axes in enumerate(panels)]
    if H > 1:
        for h, axes in enumerate(panels):
            axes.set_title(f"head {h}", fontsize=TITLE, pad=3, **PLAIN)
    key = _draw_key(figure, heat, look, loc="outside lower center")
    if heat.title:
        figure.suptitle(heat.title, fontsize=1.2 * TITLE, **PLAIN)
    panel = _panel(H, T, S, columns)
    # The smallest size that works must not depend on the one that was asked for.
    aspect = (max(figsize[1], LONGEST_LABELS) if figsize else panel[1] * rows) / BAR
    bar = _draw_bar(figure, images[-1], look, panels, aspect)
    least = max(
        key.get_window_extent().width / DPI if key else 0.0,
        max(_width(line, 1.2 * TITLE) for line in (heat.title or "").split("\n")),
    )

    def label(panel: Array) -> None:
        for h, axes in enumerate(panels):
            cell = panel[0] / S, panel[1] / T
            _label(axes, heat, cell, rows=h % columns == 0, columns=h + columns >= H)
            # Labels above an empty place of the grid hang into it.
            axes.xaxis.set_in_layout(h + columns >= rows * columns)

    def fit(panel: Array) -> Array:
        """Return the size of the figure in which panels have a size."""
        label(panel)
        size = panel * (columns, rows) + LONGEST_LABELS
        figure.set_size_inches(*size)
        engine.execute(figure)
        actual = np.asarray(panels[0].get_position().size * size)
        wider = bar.get_position().height * size[1] / aspect - BAR if bar else 0.0
        return np.asarray(size + (panel - actual) * (columns, rows) - (wider, 0.0))

    if figsize is None:
        needed = fit(panel)
        size = np.maximum(needed, (least + 4 * PAD, 0))
        edge = float(1 - needed[0] / size[0]) / 2
        engine.set(rect=(edge, 0, 1 - 2 * edge, 1))
    else:
        needed = size = np.array(figsize)
        smallest = np.maximum(fit(np.array([LEAST, LEAST])), (least + 4 * PAD, 0))
        if (size < smallest).any():
            width, height = np.ceil(10 * smallest) / 10
            raise OptionError(
                f"figsize is {figsize}, too small for the labels and the cells: it must be at "
                f"least ({width:.1f}, {height:.1f}) inches here"
            )
        panel = (size - smallest) / (columns, rows) + LEAST
    figure.set_size_inches(*size)
    for _ in range(1 if figsize is None else 2):  # of a given size: until the labels fit
        label(panel)
        engine.execute(figure)
        panel = np.asarray(panels[0].get_position().size * size)
    figure.set_layout_engine("none")  # everything has its place
    if bar:
        bar.apply_aspect()
        _thin_numbers(bar, panel[1] * rows)
    _write_numbers(panels, heat, look)
    return figure


def draw_within(heat: HeatMap, look: Look, panels: Sequence[Axes]) -> Figure:
    """Draw a heat map in axes of a figure, and return that figure."""
    figure, H = panels[0].figure.figure, len(panels)
    key = _draw_key(
        panels[0], heat, look, loc="lower center", bbox_to_anchor=(0.5, 1.0), borderaxespad=0.3
    )
    level = panels[0].get_position().y1  # of the key, and of those beside it
    for h, axes in enumerate(panels):
        image = _draw_cells(axes, heat, look, h)
        title = heat.title if H == 1 else f"head {h}"
        if title:
            above_key = key and np.isclose(axes.get_position().y1, level)
            pad = 6.0 + (2 * LABEL if above_key else 0)  # points
            axes.set_title(title, fontsize=TITLE, pad=pad, **PLAIN)
        _label(axes, heat, _cell(axes, heat))
    _draw_bar(figure, image, look, panels[0] if H == 1 else list(panels))
    # The bar and the layout engine of the figure move the axes: what fits is decided there.
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
    for axes in panels:
        _label(axes, heat, _cell(axes, heat))
    _write_numbers(panels, heat, look)
    return figure


def _panel(H: int, T: int, S: int, columns: int) -> Array:
    """Width and height of a panel whose cells are square and large enough."""
    longest = max(T, S)
    side = min(max(SIDE, longest / DPI), LONGEST)
    if H > 1:
        side = min(max(WIDTH / columns, AMONG[0]), AMONG[1])
    cell = min(CELL, side / longest)
    return np.maximum((S * cell, T * cell), SHORTEST)


def _cell(axes: Axes, heat: HeatMap) -> tuple[float, float]:
    """Width and height of a cell."""
    box, dpi = axes.get_window_extent(), axes.figure.figure.dpi
    return box.width / dpi / heat.values.shape[2], box.height / dpi / heat.values.shape[1]


# --- parts ----------------------------------------------------------------------------------------


def _draw_cells(axes: Axes, heat: HeatMap, look: Look, h: int) -> AxesImage:
    """Draw the cells of one head; those with an exact 0 stay empty and show the hatched ground."""
    values, flagged = heat.values[h], heat.flagged[h]
    axes.grid(visible=False)  # also if the style sheet has one
    axes.patch.set(facecolor="white", edgecolor="0.75", hatch="////", linewidth=0)
    place: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "origin": "upper"}
    coloured = np.ma.masked_where(flagged | (values == 0), values)
    image = axes.imshow(coloured, cmap=look.colours, norm=look.norm, **place)
    if flagged.any():
        crossed = np.ma.masked_where(~flagged, np.ones_like(values))
        axes.imshow(crossed, cmap=ListedColormap([FLAG]), **place)
    return image


def _finish_cells(axes: Axes, heat: HeatMap, flagged: Array) -> None:
    """Draw what depends on the size of a cell: the lines, and crosses where flagged, (T, S).

    Where cells are smaller than a cross, there is at most one cross a place.
    """
    _, T, S = heat.values.shape
    cell = _cell(axes, heat)
    if min(cell) >= LINES:
        style: dict[str, Any] = {"color": "0.85", "linewidth": 0.6, "antialiased": False}
        for n, m, swap in ((S, T, False), (T, S, True)):
            x = np.repeat(np.arange(1, n) - 0.5, 3)  # one line with gaps: ticks would be slow
            y = np.tile([-0.5, m - 0.5, np.nan], n - 1)
            axes.add_line(Line2D(*((y, x) if swap else (x, y)), **style))
    places = np.argwhere(flagged)
    many = [max(1, math.ceil(CROSS / 72 / side)) for side in reversed(cell)]
    _, first = np.unique(places // many, axis=0, return_index=True)
    if len(first):
        size = max(0.75 * 72 * min(cell), CROSS)
        axes.scatter(
            places[first, 1], places[first, 0], s=size**2, marker="x", color="black",
            linewidths=1.0, clip_on=False, zorder=3,
            path_effects=[withStroke(linewidth=2.2, foreground="white")],
        )  # fmt: skip
    axes.set(xlim=(-0.5, S - 0.5), ylim=(T - 0.5, -0.5))


def _label(
    axes: Axes, heat: HeatMap, cell: tuple[float, float], rows: bool = True, columns: bool = True
) -> None:
    """Label the rows and columns with what fits: flat, else upright, else every n-th."""
    line, texts = LABEL * LINE, heat.columns.texts
    width = max(_width(text, LABEL) for text in texts) + line / 2
    upright = width > cell[0] and not heat.columns.positions
    _set_ticks(axes.yaxis, heat.rows, line / cell[1], rows)
    least = (line if upright else width) / cell[0]
    _set_ticks(axes.xaxis, heat.columns, least, columns, rotation=90 if upright else 0)


def _set_ticks(axis: Axis, labels: Labels, least: float, shown: bool, rotation: int = 0) -> None:
    """Label every n-th row or column, n the smallest of 1, 2, 5, 10, 20, … from `least` on."""
    steps = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    step = next(n for n in steps if n >= least)
    at = list(range(0, len(labels.texts), step)) if shown else []
    axis.set_ticks(at, labels.texts[::step] if shown else [], fontsize=LABEL, **PLAIN)
    axis.set_tick_params(rotation=rotation)
    axis.set_label_text(labels.word if shown else "", fontsize=TITLE, **PLAIN)


def _width(text: str, points: float) -> float:
    font = FontProperties(size=points)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, False)
    return float(width) / 72


def _draw_bar(
    figure: Figure, image: AxesImage, look: Look, panels: Any, aspect: float = 20
) -> Axes | None:
    """Draw the colour bar; None for a look without a scale."""
    if look.scale is None:
        return None
    extend = "max" if look.beyond else "neither"
    bar = figure.colorbar(image, ax=panels, extend=extend, aspect=aspect, format="%.3g")
    bar.ax.set_label("<colorbar>")  # the label of matplotlib's own
    bar.ax.grid(visible=False)
    _thin_numbers(bar.ax, bar.ax.get_window_extent().height / figure.dpi)
    bar.ax.tick_params(labelsize=LABEL)
    if look.percent:
        bar.formatter = PercentFormatter(1.0)
    bar.set_label(look.scale, fontsize=TITLE)
    return bar.ax


def _thin_numbers(bar: Axes, height: float) -> None:
    bar.locator_params(nbins=max(1, min(5, int(height / TICK_DISTANCE))))


def _draw_key(owner: Axes | Figure, heat: HeatMap, look: Look, **place: Any) -> Legend | None:
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
    style: dict[str, Any] = {"ncols": len(words), "fontsize": LABEL, "frameon": False}
    return owner.legend(handles, words, borderpad=0, **style, **place)


def _write_numbers(panels: Sequence[Axes], heat: HeatMap, look: Look) -> None:
    """Finish the cells, and write the numbers into them where all of a panel fit."""
    widest: float | None = None
    for axes, values, flagged in zip(panels, heat.values, heat.flagged, strict=True):
        _finish_cells(axes, heat, flagged)
        cell = _cell(axes, heat)
        if look.scale is None or min(cell) < NUMBERS[0] * LINE:
            continue
        if widest is None:
            texts = {look.format(x) for x in np.unique(heat.values).tolist()}
            widest = max(_width(text, 1) for text in texts)
        points = min(0.85 * cell[0] / widest, 0.8 * cell[1] / LINE, NUMBERS[1])
        if points < NUMBERS[0]:
            continue
        colours = look.colours(look.norm(np.where(flagged, 0, values)))
        for (t, s), x in np.ndenumerate(values):
            text = look.format(x)
            ink = "0.35" if x == 0 else text_colour(colours[t, s])
            number = axes.text(s, t, text, ha="center", va="center", fontsize=points, zorder=4)
            number.set(color="black" if flagged[t, s] else ink, **PLAIN)
            if flagged[t, s]:  # before the middle of its cross
                number.set_bbox({"facecolor": FLAG, "edgecolor": "none", "pad": 0.6})
                number.set_text(">1" if text == look.format(1.0) else text)
