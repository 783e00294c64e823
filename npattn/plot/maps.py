"""Heat maps of attention weights, masks and errors, as matplotlib figures.

    H heads   T queries (rows, downwards)   S keys (columns)

A weight of exactly 0 is hidden, which no colour of the scale says: its cell is empty and hatched.
What is no number, or is beyond what is allowed, has a cross and a colour outside the scale. So
neither can be missed in grey, by the colour-blind, or where a cell is smaller than a pixel.

Sizes are inches, of fonts points. Everything is placed from measured texts: cells first, then what
surrounds them, then the figure that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.errors import DtypeError, MissingExtraError, OptionError, ShapeError

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

__all__ = ["error", "head", "heads", "mask"]

DPI = 150
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
LABEL, TITLE = 8.0, 9.0  # points
NUMBERS = (5.5, 9.0)  # points, from and to
LONG = 24  # characters of a label that are shown
CROSS = 5.0  # points, the smallest
LINES = 0.11  # cells from here on have lines between them

FLAG = "#d55e00"  # vermillion, of Okabe and Ito's colours: in no part of viridis
VISIBLE = "#3b528b"
PLAIN: dict[str, Any] = {
    "parse_math": False,
    "usetex": False,
}  # a token may hold a $ or an underscore


class _Figure(Figure):
    """A figure that a notebook shows where pyplot was never imported too."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class _Look:
    """How values become colours, and what the words beside them say."""

    colours: Colormap
    norm: Normalize
    zero: str  # an exact 0
    flagged: str  # a cross
    full: str | None = None  # every other cell, where there is no scale
    scale: str | None = None  # the colour bar; None: no bar, and no numbers
    beyond: bool = False  # the scale goes on above its end


def head(
    weights: Any,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """The weights of one head.

    Parameters
    ----------
    weights : float array (T, S)
        Such as ``npattn.forward(q, k, v).weights[0, 0]``. 0 is drawn as hidden, NaN and inf with a
        cross.
    queries, keys : sequence of str, optional
        T and S labels, such as tokens; default: positions. Where there are too many for the room,
        every second one is shown, or every fifth, and so on.
    title : str, optional

    Returns
    -------
    matplotlib.figure.Figure
        Of its own, unknown to pyplot: show it as the last line of a notebook's cell, or write it
        with ``.savefig``. Numbers are in the cells where they fit.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        Before any work.

    Examples
    --------
    >>> import numpy as np, npattn, npattn.plot
    >>> q, k, v = np.zeros((3, 2)), np.zeros((3, 2)), np.zeros((3, 2))
    >>> weights = npattn.forward(q, k, v, causal=True).weights
    >>> figure = npattn.plot.head(weights, queries=["a", "b", "c"], keys=["a", "b", "c"])
    >>> figure.savefig("head.png")  # doctest: +SKIP
    """
    values = _reals("weights", weights, (2,))
    return _drawn(
        _Asked("weights", values, ~np.isfinite(values), title),
        _look_of_weights(values),
        _Axis("queries", "query", queries),
        _Axis("keys", "key", keys),
    )


def heads(
    weights: Any,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """The weights of all heads side by side, with one colour scale.

    Parameters
    ----------
    weights : float array (H, T, S)
    queries, keys, title
        As in `head`.

    Returns
    -------
    matplotlib.figure.Figure
        As of `head`.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        Before any work.
    """
    values = _reals("weights", weights, (3,))
    return _drawn(
        _Asked("weights", values, ~np.isfinite(values), title),
        _look_of_weights(values),
        _Axis("queries", "query", queries),
        _Axis("keys", "key", keys),
    )


def mask(
    mask: Any,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Which keys each query may attend to.

    Parameters
    ----------
    mask : bool array (T, S) or (H, T, S)
        True = may attend, such as ``npattn.Problem(q, k, v, causal=True).visible``.
    queries, keys, title
        As in `head`.

    Returns
    -------
    matplotlib.figure.Figure
        As of `head`, without numbers.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        Before any work.
    """
    visible = _read("mask", mask)
    if visible.dtype != np.bool_:
        raise DtypeError(f"mask is {visible.dtype}, must be bool: True = may attend")
    visible = _panels("mask", visible, (2, 3))
    look = _Look(
        colours=ListedColormap([VISIBLE]),
        norm=Normalize(0, 1),
        zero="hidden",
        flagged="",
        full="may attend",
    )
    return _drawn(
        _Asked("mask", visible.astype(float), np.zeros_like(visible), title),
        look,
        _Axis("queries", "query", queries),
        _Axis("keys", "key", keys),
    )


def error(
    ratio: Any,
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    axes: tuple[str, str] = ("row", "column"),
    title: str | None = None,
) -> Figure:
    """The error of an implementation in units of the allowed error: beyond 1 it is wrong.

    Parameters
    ----------
    ratio : float array (rows, columns) or (H, rows, columns)
        Error / allowed error, ≥ 0. What is not ≤ 1, NaN too, has a cross.
    rows, columns : sequence of str, optional
        Labels, as in `head`.
    axes : (str, str), default ("row", "column")
        What they are: ("query", "key") of weights, ("query", "value column") of the output.
    title : str, optional

    Returns
    -------
    matplotlib.figure.Figure
        As of `head`.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        Before any work.
    """
    values = _reals("ratio", ratio, (2, 3))
    if (values < 0).any():
        least = np.nanmin(values)
        raise OptionError(f"ratio has {least:.3g}, must be ≥ 0: |error| / allowed error")
    if not isinstance(axes, (tuple, list)) or len(axes) != 2:
        raise OptionError(f"axes is {axes!r}, must be two words, such as ('query', 'key')")
    look = _Look(
        colours=colormaps["viridis"].with_extremes(over=FLAG),
        norm=Normalize(0, 1),
        zero="exactly 0",
        flagged="beyond 1: wrong",
        scale="error / allowed error",
        beyond=True,
    )
    return _drawn(
        _Asked("ratio", values, ~(values <= 1), title),  # NaN is not ≤ 1
        look,
        _Axis("rows", axes[0], rows),
        _Axis("columns", axes[1], columns),
    )


def _look_of_weights(weights: Array) -> _Look:
    """Colours from 0 to the largest weight; from below 0 where a wrong one is negative."""
    finite = weights[np.isfinite(weights)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    return _Look(
        colours=colormaps["viridis"],
        norm=Normalize(min(low, 0.0), high if high > min(low, 0.0) else 1.0),
        zero="0: hidden",
        flagged="NaN or inf",
        scale="weight",
    )


# --- what the caller can get wrong ----------------------------------------------------------------


def _read(name: str, value: Any) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise DtypeError(f"{name} is a masked array, must be a plain one: pass its .filled(0)")
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as err:
        raise DtypeError(f"{name} is {type(value)}, must be a NumPy array ({err})") from err


def _reals(name: str, value: Any, ranks: tuple[int, ...]) -> Array:
    """The array in float64, one head a panel: (H, T, S) or (1, T, S)."""
    array = _read(name, value)
    if array.dtype == np.bool_:
        raise DtypeError(f"{name} is bool, must be floating: draw it with npattn.plot.mask")
    # The dtypes of ml_dtypes have kind "V" or "f" by version.
    if array.dtype.kind != "f" and not array.dtype.name.startswith(("bfloat16", "float")):
        raise DtypeError(f"{name} is {array.dtype}, must be real and floating")
    return _panels(name, array, ranks).astype(np.float64)


def _panels(name: str, array: Array, ranks: tuple[int, ...]) -> Array:
    shapes = " or ".join("(T, S)" if rank == 2 else "(H, T, S)" for rank in ranks)
    cure = ""
    if array.ndim > 3:
        first = ", ".join("0" * (array.ndim - max(ranks)))
        cure = f": pick one of the batch, such as {name}[{first}]"
    elif array.ndim == 3:
        cure = f": pick one head, such as {name}[0], or draw all with npattn.plot.heads"
    elif array.ndim == 2:
        cure = ": draw one head with npattn.plot.head"
    if array.ndim not in ranks:
        raise ShapeError(f"{name} has shape {array.shape}, must be {shapes}{cure}")
    if array.size == 0:
        raise ShapeError(f"{name} has shape {array.shape}, must have no size of 0 to be drawn")
    return array if array.ndim == 3 else array[None]


@dataclass(frozen=True)
class _Axis:
    """One axis of the map."""

    argument: str
    word: str
    labels: Any

    def __post_init__(self) -> None:
        if not isinstance(self.word, str):
            raise OptionError(f"axes has {self.word!r}, must be two words")

    def texts(self, n: int, where: str) -> list[str]:
        """A label for each of the n rows or columns."""
        if self.labels is None:
            return [str(i) for i in range(n)]
        if isinstance(self.labels, str) or not isinstance(self.labels, Iterable):
            raise OptionError(f"{self.argument} is {self.labels!r}, must be a list of {n} str")
        labels = list(self.labels)
        if len(labels) != n:
            raise ShapeError(
                f"{self.argument} has {len(labels)} labels, must have {n}, one each [{where}]"
            )
        for i, label in enumerate(labels):
            if not isinstance(label, str):
                raise OptionError(f"{self.argument}[{i}] is {label!r}, must be a str")
        return [_shown(label) for label in labels]


def _shown(label: str) -> str:
    """A token in one line: "\\n" for a newline, ␣ for blanks alone, … for what is too long."""
    text = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in label
    )
    text = text if text.strip() else "␣" * len(text)
    return text if len(text) <= LONG else text[: LONG - 1] + "…"


@dataclass(frozen=True)
class _Asked:
    """What is to be drawn: values (H, T, S), which of them get a cross, and the title."""

    name: str
    values: Array
    flagged: Array
    title: Any

    def __post_init__(self) -> None:
        if self.title is not None and not isinstance(self.title, str):
            raise OptionError(f"title is {self.title!r}, must be a str or None")


# --- where everything goes ------------------------------------------------------------------------


class _Ruler:
    """Sizes of texts in inches, as the figure will draw them."""

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
        """From one line to the next."""
        return 1.25 * points * lines / 72


@dataclass(frozen=True)
class _Ticks:
    """The labels of one axis that have room, and the room that they take."""

    at: list[int]
    texts: list[str]
    upright: bool
    room: float


def _ticks_of_rows(texts: list[str], cell: float, ruler: _Ruler) -> _Ticks:
    step = _round_step(ruler.height(LABEL) / cell)
    shown = texts[::step]
    room = max(ruler.width(text, LABEL) for text in shown)
    return _Ticks(list(range(0, len(texts), step)), shown, False, room)


def _ticks_of_columns(texts: list[str], positions: bool, cell: float, ruler: _Ruler) -> _Ticks:
    """Flat where they fit side by side (positions may be thinned for that), else upright."""
    wide = max(ruler.width(text, LABEL) for text in texts) + 0.5 * ruler.height(LABEL)
    upright = wide > cell and not positions
    step = _round_step((ruler.height(LABEL) if upright else wide) / cell)
    shown = texts[::step]
    room = ruler.height(LABEL)
    if upright:
        room = max(ruler.width(text, LABEL) for text in shown)
    return _Ticks(list(range(0, len(texts), step)), shown, upright, room)


def _round_step(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is not below `least`."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10


@dataclass(frozen=True)
class _Grid:
    """Panels in rows and columns: how many, and the size of each and of its cells."""

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
        """Width and height."""
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


def _drawn(asked: _Asked, look: _Look, y: _Axis, x: _Axis) -> Figure:
    H, T, S = asked.values.shape
    where = f"{asked.name} (..., {T}, {S})"
    rows, columns = y.texts(T, where), x.texts(S, where)
    grid = _Grid(H, T, S)
    figure = _Figure(figsize=(1, 1), dpi=DPI)
    figure.set_layout_engine("none")  # everything has its place already
    ruler = _Ruler(FigureCanvasAgg(figure))
    row_ticks = _ticks_of_rows(rows, grid.cell[1], ruler)
    column_ticks = _ticks_of_columns(columns, x.labels is None, grid.cell[0], ruler)

    # Inches, from the left and from the top.
    line = ruler.height(TITLE)
    names = line if H > 1 else 0.0  # "head 3", above its panel
    title_lines = asked.title.count("\n") + 1 if asked.title else 0
    key = _key(figure, asked, look)
    key_width, key_height = _size(key, ruler) if key else (0.0, 0.0)
    left = GAP + line + GAP / 2 + row_ticks.room + TICK
    top = GAP + ruler.height(1.2 * TITLE, title_lines) + (GAP / 2 if title_lines else 0)
    dx, dy = grid.panel[0] + GAP, grid.panel[1] + names + GAP
    right = left + grid.columns * dx
    bottom = top + grid.rows * dy - GAP
    width = right + (BAR[0] + BAR_LABELS if look.scale else 0)
    height = bottom + TICK + column_ticks.room + GAP / 2 + line + GAP
    height += key_height + GAP if key else 0
    title_width = ruler.width(asked.title, 1.2 * TITLE) if asked.title else 0.0
    whole = max(width, key_width + 2 * GAP, title_width + 2 * GAP)
    left, right = left + (whole - width) / 2, right + (whole - width) / 2
    figure.set_size_inches(whole, height)
    if key:
        key.set_bbox_to_anchor((0.5, GAP / height))

    def placed(x0: float, y0: float, w: float, h: float) -> Axes:
        return figure.add_axes((x0 / whole, 1 - (y0 + h) / height, w / whole, h / height))

    for h in range(H):
        i, j = divmod(h, grid.columns)
        axes = placed(left + j * dx, top + names + i * dy, *grid.panel)
        image = _panel(axes, asked.values[h], asked.flagged[h], look, grid.cell)
        if H > 1:
            axes.set_title(f"head {h}", fontsize=TITLE, pad=3, **PLAIN)
        _label_rows(axes, row_ticks if j == 0 else None, y.word)
        # The lowest panel of each column has the labels of the keys.
        _label_columns(axes, column_ticks if h + grid.columns >= H else None, x.word)
    if look.scale is not None:
        tall = min(bottom - top - names, BAR[1])
        _bar(placed(right, top + names, BAR[0], tall), image, look.scale, look.beyond)
    _number_all(figure, asked, look, grid.cell, ruler)
    if asked.title:
        figure.suptitle(asked.title, fontsize=1.2 * TITLE, y=1 - GAP / height, va="top", **PLAIN)
    return figure


# --- what is drawn there --------------------------------------------------------------------------


def _panel(
    axes: Axes, values: Array, flagged: Array, look: _Look, cell: tuple[float, float]
) -> AxesImage:
    """The cells of one head. Those with an exact 0 stay empty, and show the hatched ground."""
    T, S = values.shape
    axes.grid(visible=False)  # whatever the style sheet says
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
        _crosses(axes, flagged, cell)
    if min(cell) >= LINES:
        axes.set_xticks(np.arange(1, S) - 0.5, minor=True)
        axes.set_yticks(np.arange(1, T) - 0.5, minor=True)
        axes.grid(which="minor", color="0.85", linewidth=0.6)
        axes.tick_params(which="minor", length=0)
    axes.set(xlim=(-0.5, S - 0.5), ylim=(T - 0.5, -0.5))
    return image


def _crosses(axes: Axes, flagged: Array, cell: tuple[float, float]) -> None:
    """A cross a flagged cell; where cells are smaller than a cross, at most one a place."""
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


def _label_rows(axes: Axes, ticks: _Ticks | None, word: str) -> None:
    if ticks is None:
        axes.set_yticks([])
        return
    axes.set_yticks(ticks.at, ticks.texts, fontsize=LABEL, **PLAIN)
    axes.set_ylabel(word, fontsize=TITLE, **PLAIN)


def _label_columns(axes: Axes, ticks: _Ticks | None, word: str) -> None:
    if ticks is None:
        axes.set_xticks([])
        return
    rotation = 90 if ticks.upright else 0
    axes.set_xticks(ticks.at, ticks.texts, fontsize=LABEL, rotation=rotation, **PLAIN)
    axes.set_xlabel(word, fontsize=TITLE, **PLAIN)


def _bar(axes: Axes, image: AxesImage, words: str, beyond: bool) -> None:
    extend = "max" if beyond else "neither"
    bar = axes.figure.colorbar(image, cax=axes, extend=extend, format="%.3g")
    bar.ax.set_label("<colorbar>")  # as matplotlib names those that it makes
    bar.ax.grid(visible=False)
    bar.ax.locator_params(nbins=5)
    bar.ax.tick_params(labelsize=LABEL)
    bar.set_label(words, fontsize=TITLE)


def _key(figure: Figure, asked: _Asked, look: _Look) -> Any:
    """Below everything, what no colour of the scale says; None where nothing needs it."""
    entries: list[tuple[Any, str]] = []
    zero = (asked.values == 0) & ~asked.flagged
    if look.full and not zero.all():
        entries.append((Patch(facecolor=VISIBLE), look.full))
    if zero.any():
        entries.append((Patch(facecolor="white", edgecolor="0.6", hatch="////"), look.zero))
    if asked.flagged.any():
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


def _size(key: Any, ruler: _Ruler) -> tuple[float, float]:
    box = key.get_window_extent(ruler.renderer)
    return box.width / DPI, box.height / DPI


def _number_all(
    figure: Figure, asked: _Asked, look: _Look, cell: tuple[float, float], ruler: _Ruler
) -> None:
    """Numbers in all cells, if there is a size of font in which all fit."""
    if look.scale is None or min(cell) < ruler.height(NUMBERS[0]):
        return
    texts = np.vectorize(_number, otypes=[object])(asked.values)
    widest = max(ruler.width(text, 100.0) / 100 for text in set(texts.flat))
    points = min(0.85 * cell[0] / widest, 0.8 * cell[1] / ruler.height(1), NUMBERS[1])
    if points < NUMBERS[0]:
        return
    for axes, panel, values, flagged in zip(
        figure.axes, texts, asked.values, asked.flagged, strict=False
    ):
        colours = look.colours(look.norm(np.where(flagged, 0, values)))
        for (t, s), text in np.ndenumerate(panel):
            ink = "0.35" if values[t, s] == 0 else _ink(colours[t, s])
            written = axes.text(s, t, text, ha="center", va="center", fontsize=points, zorder=4)
            written.set(color="black" if flagged[t, s] else ink, **PLAIN)
            if flagged[t, s]:  # before the middle of its cross
                written.set_bbox({"facecolor": FLAG, "edgecolor": "none", "pad": 0.6})
                written.set_text(">1" if text == "1.00" else text)


def _number(x: float) -> str:
    """At most five characters. 0 is exact, ≈0 is not."""
    if not math.isfinite(x):
        return str(x).replace("nan", "NaN")
    if x == 0:
        return "0"
    if abs(x) >= 999.5:
        return f"{x:.0e}".replace("e+", "e").replace("e0", "e")
    if abs(x) >= 9.995:
        return f"{x:.0f}"
    return "≈0" if abs(x) < 0.005 else f"{x:.2f}"


def _ink(colour: Any) -> str:
    """Black or white, whichever contrasts more with the colour (relative luminance of sRGB)."""
    rgb = np.asarray(colour[:3])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    luminance = linear @ (0.2126, 0.7152, 0.0722)
    return "black" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "white"
