"""Heat maps of attention weights, masks and errors, as matplotlib figures.

    H heads   T queries (rows, downwards)   S keys (columns)

A weight of exactly 0 is hidden, which no colour of the scale says: its cell is empty and hatched.
NaN, inf, and errors beyond the tolerance have a cross and a colour outside the scale. So neither
can be missed in grey, by the colour-blind, or where a cell is smaller than a pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.plot import arguments
from npattn.plot.draw import HeatMap, draw, draw_within
from npattn.plot.looks import Look, error_look, mask_look, weight_look
from npattn.problem.arrays import Array, MaskLike


def head(
    weights: ArrayLike,
    *, queries: Sequence[str] | None = None, keys: Sequence[str] | None = None,
    title: str | None = None, cmap: str | Colormap = "viridis", fmt: str | None = None,
    figsize: tuple[float, float] | None = None, ax: Axes | None = None,
) -> Figure:  # fmt: skip
    """Draw the weights of one head.

    Parameters
    ----------
    weights : float array or tensor (T, S)
        Such as ``npattn.forward(q, k, v).weights[0, 0]``. 0 is drawn as hidden, NaN and inf with a
        cross.
    queries, keys : sequence of str, optional
        T and S labels, such as tokens; default: positions. If they do not all fit, every second
        one is shown, or every fifth, and so on.
    title : str, optional
    cmap : str or matplotlib.colors.Colormap, default "viridis"
        Colour map, or its name. Black or white numbers follow its colours.
    fmt : str, optional
        Format of the numbers in the cells, such as ".3f" or ".0%"; default: at most five
        characters, with "≈0" for a tiny weight. An exact 0 reads "0" in any of them.
    figsize : (float, float), optional
        Width and height of the figure in inches, which the cells fill; default: as large as the
        cells need.
    ax : matplotlib.axes.Axes, optional
        Axes to draw in, instead of a figure of its own. A colour bar takes its space from them,
        and the key stands above them. What fits is decided at their present size.

    Returns
    -------
    matplotlib.figure.Figure
        That of ax; or a new one, not registered with pyplot: show it as the last line of a
        notebook's cell, or write it with ``.savefig``. Numbers are in the cells if all of them
        fit.

    Raises
    ------
    ShapeError
        If weights is not (T, S), has a size of 0, or the number of labels is another.
    DtypeError
        If weights is not real and floating.
    OptionError
        If labels or title are no str, cmap or fmt is unknown, figsize is too small for the labels,
        both figsize and ax are given, or ax is no Axes.

    Examples
    --------
    >>> import numpy as np, npattn, npattn.plot
    >>> q, k, v = np.zeros((3, 2)), np.zeros((3, 2)), np.zeros((3, 2))
    >>> weights = npattn.forward(q, k, v, causal=True).weights
    >>> figure = npattn.plot.head(weights, queries=["a", "b", "c"], keys=["a", "b", "c"])
    >>> figure.savefig("head.png")  # doctest: +SKIP
    """
    return _draw_weights(2, weights, queries, keys, title, cmap, fmt, figsize, ax)


def heads(
    weights: ArrayLike,
    *, queries: Sequence[str] | None = None, keys: Sequence[str] | None = None,
    title: str | None = None, cmap: str | Colormap = "viridis", fmt: str | None = None,
    figsize: tuple[float, float] | None = None, ax: Sequence[Axes] | None = None,
) -> Figure:  # fmt: skip
    """Draw the weights of all heads side by side, with one colour scale.

    Parameters
    ----------
    weights : float array or tensor (H, T, S)
    queries, keys, title, cmap, fmt, figsize
        As in `head`.
    ax : sequence of matplotlib.axes.Axes, optional
        H axes of one figure, such as ``plt.subplots(1, H)[1]``; one colour bar is beside them all.

    Returns
    -------
    matplotlib.figure.Figure
        As from `head`.

    Raises
    ------
    ShapeError
        If weights is not (H, T, S), has a size of 0, or the number of labels or of axes is another.
    DtypeError
        If weights is not real and floating.
    OptionError
        As in `head`; and if title is given beside several axes.
    """
    return _draw_weights(3, weights, queries, keys, title, cmap, fmt, figsize, ax)


def mask(
    mask: ArrayLike | MaskLike,
    *, T: int | None = None, S: int | None = None, queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None, title: str | None = None, cmap: str | Colormap = "viridis",
    figsize: tuple[float, float] | None = None, ax: Axes | Sequence[Axes] | None = None,
) -> Figure:  # fmt: skip
    """Draw the visible keys of each query.

    Parameters
    ----------
    mask : bool array (T, S) or (H, T, S), or one of `npattn.masks`
        True = may attend, such as ``npattn.Problem(q, k, v, causal=True).visible``.
    T, S : int, optional
        Sizes of a mask that does not know its own; default: the number of its labels.
    queries, keys, title, figsize
        As in `head`. A mask has no numbers, and so no fmt.
    cmap : str or matplotlib.colors.Colormap, default "viridis"
        The darker one of its colours at a quarter and at three quarters is that of visible keys.
    ax : matplotlib.axes.Axes or sequence of them, optional
        As in `head`, or in `heads` for a mask (H, T, S).

    Returns
    -------
    matplotlib.figure.Figure
        As from `head`, without numbers.

    Raises
    ------
    ShapeError
        If mask is not (T, S) or (H, T, S), has a size of 0, or the number of labels or of axes is
        another.
    DtypeError
        If mask is not boolean.
    OptionError
        As in `heads`; and if mask does not know its sizes, and neither T, S nor labels say them.

    Examples
    --------
    >>> from npattn import masks, plot
    >>> words = ["one", "two", "three", "four"]
    >>> figure = plot.mask(masks.sliding(2, 1), queries=words, keys=words)
    """
    sizes = (queries if T is None else T, keys if S is None else S)
    visible = arguments.read_values("mask", mask, sizes)
    if visible.dtype != np.bool_:
        raise DtypeError(f"mask is {visible.dtype}, must be bool: True = may attend")
    visible = arguments.read_panels("mask", visible, (2, 3))
    for name, size, length in zip("TS", (T, S), visible.shape[1:], strict=True):
        if size not in (None, length):
            raise ShapeError(f"{name} is {size}, but mask has {name} = {length}")
    return _draw(
        "mask", visible.astype(float), np.zeros_like(visible), mask_look(cmap),
        rows=("queries", "query", queries), columns=("keys", "key", keys), title=title,
        figsize=figsize, ax=ax,
    )  # fmt: skip


def error(
    ratio: ArrayLike,
    *, rows: Sequence[str] | None = None, columns: Sequence[str] | None = None,
    axes: tuple[str, str] = ("row", "column"), title: str | None = None,
    cmap: str | Colormap = "viridis", fmt: str | None = None,
    figsize: tuple[float, float] | None = None, ax: Axes | Sequence[Axes] | None = None,
) -> Figure:  # fmt: skip
    """Draw the error of an implementation divided by the allowed error: beyond 1 it is wrong.

    Parameters
    ----------
    ratio : float array (rows, columns) or (H, rows, columns)
        Error / allowed error, ≥ 0. Elements beyond 1, and NaN, have a cross.
    rows, columns : sequence of str, optional
        Labels, as in `head`.
    axes : (str, str), default ("row", "column")
        Their names: ("query", "key") for weights, ("query", "value column") for the output.
    title, cmap, fmt, figsize
        As in `head`.
    ax : matplotlib.axes.Axes or sequence of them, optional
        As in `head`, or in `heads` for ratios of heads.

    Returns
    -------
    matplotlib.figure.Figure
        As from `head`.

    Raises
    ------
    ShapeError
        If ratio has another rank, a size of 0, or the number of labels or of axes is another.
    DtypeError
        If ratio is not real and floating.
    OptionError
        If ratio is negative somewhere, or axes is not two words; and as in `heads`.
    """
    values = arguments.read_reals("ratio", ratio, (2, 3), (rows, columns))
    if (values < 0).any():
        least = np.nanmin(values)
        raise OptionError(f"ratio has {least:.3g}, must be ≥ 0: |error| / allowed error")
    if not isinstance(axes, (tuple, list)) or len(axes) != 2:
        raise OptionError(f"axes is {axes!r}, must be two words, such as ('query', 'key')")
    return _draw(
        "ratio", values, ~(values <= 1), error_look(cmap, fmt),  # NaN is not ≤ 1
        rows=("rows", axes[0], rows), columns=("columns", axes[1], columns), title=title,
        figsize=figsize, ax=ax,
    )  # fmt: skip


def _draw_weights(
    rank: int, weights: ArrayLike, queries: Sequence[str] | None, keys: Sequence[str] | None,
    title: Any, cmap: Any, fmt: Any, figsize: Any, ax: Any,
) -> Figure:  # fmt: skip
    """Draw weights, (T, S) for rank 2 or (H, T, S) for rank 3, with crosses at NaN and inf."""
    values = arguments.read_reals("weights", weights, (rank,), (queries, keys))
    return _draw(
        "weights", values, ~np.isfinite(values), weight_look(values, cmap, fmt),
        rows=("queries", "query", queries), columns=("keys", "key", keys), title=title,
        figsize=figsize, ax=ax,
    )  # fmt: skip


def _draw(
    name: str, values: Array, flagged: Array, look: Look, *, rows: tuple[str, Any, Any],
    columns: tuple[str, Any, Any], title: Any, figsize: Any, ax: Any,
) -> Figure:  # fmt: skip
    """Draw values (H, T, S); rows and columns are (argument, word, labels)."""
    if title is not None and not isinstance(title, str):
        raise OptionError(f"title is {title!r}, must be a str or None")
    if figsize is not None and ax is not None:
        raise OptionError(
            "got figsize and ax: the size is that of the figure of ax, so leave out one of them"
        )
    H, T, S = values.shape
    where = f"{name} (..., {T}, {S})"
    heat = HeatMap(
        values=values, flagged=flagged, rows=arguments.read_labels(*rows, T, where),
        columns=arguments.read_labels(*columns, S, where), title=title,
    )  # fmt: skip
    if ax is not None:
        return draw_within(heat, look, arguments.read_axes(ax, H, title))
    return draw(heat, look, arguments.read_figsize(figsize))
