"""Heat maps of attention weights, masks and errors, as matplotlib figures.

    H heads   T queries (rows, downwards)   S keys (columns)

A weight of exactly 0 is hidden, which no colour of the scale says: its cell is empty and hatched.
NaN, inf, and errors beyond the tolerance have a cross and a colour outside the scale. So neither
can be missed in grey, by the colour-blind, or where a cell is smaller than a pixel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.arrays import Array
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.plot.cells import HeatMap, Labels, Look, error_look, mask_look, weight_look
from npattn.plot.layout import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["error", "head", "heads", "mask"]

LONG = 24  # characters of a label that are shown


def head(
    weights: ArrayLike,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the weights of one head.

    Parameters
    ----------
    weights : float array (T, S)
        Such as ``npattn.forward(q, k, v).weights[0, 0]``. 0 is drawn as hidden, NaN and inf with a
        cross.
    queries, keys : sequence of str, optional
        T and S labels, such as tokens; default: positions. If they do not all fit, every second
        one is shown, or every fifth, and so on.
    title : str, optional

    Returns
    -------
    matplotlib.figure.Figure
        Not registered with pyplot: show it as the last line of a notebook's cell, or write it with
        ``.savefig``. Numbers are in the cells if all of them fit.

    Raises
    ------
    ShapeError
        If weights is not (T, S), has a size of 0, or the number of labels is another.
    DtypeError
        If weights is not real and floating.
    OptionError
        If labels or title are no str.

    Examples
    --------
    >>> import numpy as np, npattn, npattn.plot
    >>> q, k, v = np.zeros((3, 2)), np.zeros((3, 2)), np.zeros((3, 2))
    >>> weights = npattn.forward(q, k, v, causal=True).weights
    >>> figure = npattn.plot.head(weights, queries=["a", "b", "c"], keys=["a", "b", "c"])
    >>> figure.savefig("head.png")  # doctest: +SKIP
    """
    values = _reals("weights", weights, (2,))
    return _draw(
        "weights",
        values,
        ~np.isfinite(values),
        weight_look(values),
        rows=("queries", "query", queries),
        columns=("keys", "key", keys),
        title=title,
    )


def heads(
    weights: ArrayLike,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the weights of all heads side by side, with one colour scale.

    Parameters
    ----------
    weights : float array (H, T, S)
    queries, keys, title
        As in `head`.

    Returns
    -------
    matplotlib.figure.Figure
        As from `head`.

    Raises
    ------
    ShapeError
        If weights is not (H, T, S), has a size of 0, or the number of labels is another.
    DtypeError
        If weights is not real and floating.
    OptionError
        If labels or title are no str.
    """
    values = _reals("weights", weights, (3,))
    return _draw(
        "weights",
        values,
        ~np.isfinite(values),
        weight_look(values),
        rows=("queries", "query", queries),
        columns=("keys", "key", keys),
        title=title,
    )


def mask(
    mask: ArrayLike,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the visible keys of each query.

    Parameters
    ----------
    mask : bool array (T, S) or (H, T, S)
        True = may attend, such as ``npattn.Problem(q, k, v, causal=True).visible``.
    queries, keys, title
        As in `head`.

    Returns
    -------
    matplotlib.figure.Figure
        As from `head`, without numbers.

    Raises
    ------
    ShapeError
        If mask is not (T, S) or (H, T, S), has a size of 0, or the number of labels is another.
    DtypeError
        If mask is not boolean.
    OptionError
        If labels or title are no str.
    """
    visible = _read("mask", mask)
    if visible.dtype != np.bool_:
        raise DtypeError(f"mask is {visible.dtype}, must be bool: True = may attend")
    visible = _panels("mask", visible, (2, 3))
    return _draw(
        "mask",
        visible.astype(float),
        np.zeros_like(visible),
        mask_look(),
        rows=("queries", "query", queries),
        columns=("keys", "key", keys),
        title=title,
    )


def error(
    ratio: ArrayLike,
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    axes: tuple[str, str] = ("row", "column"),
    title: str | None = None,
) -> Figure:
    """Draw the error of an implementation divided by the allowed error: beyond 1 it is wrong.

    Parameters
    ----------
    ratio : float array (rows, columns) or (H, rows, columns)
        Error / allowed error, ≥ 0. Elements beyond 1, and NaN, have a cross.
    rows, columns : sequence of str, optional
        Labels, as in `head`.
    axes : (str, str), default ("row", "column")
        Their names: ("query", "key") for weights, ("query", "value column") for the output.
    title : str, optional

    Returns
    -------
    matplotlib.figure.Figure
        As from `head`.

    Raises
    ------
    ShapeError
        If ratio has another rank, a size of 0, or the number of labels is another.
    DtypeError
        If ratio is not real and floating.
    OptionError
        If ratio is negative somewhere, axes is not two words, or labels or title are no str.
    """
    values = _reals("ratio", ratio, (2, 3))
    if (values < 0).any():
        least = np.nanmin(values)
        raise OptionError(f"ratio has {least:.3g}, must be ≥ 0: |error| / allowed error")
    if not isinstance(axes, (tuple, list)) or len(axes) != 2:
        raise OptionError(f"axes is {axes!r}, must be two words, such as ('query', 'key')")
    return _draw(
        "ratio",
        values,
        ~(values <= 1),  # NaN is not ≤ 1
        error_look(),
        rows=("rows", axes[0], rows),
        columns=("columns", axes[1], columns),
        title=title,
    )


# --- checks of the arguments ----------------------------------------------------------------------


def _read(name: str, value: Any) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise DtypeError(f"{name} is a masked array, must be a plain one: pass its .filled(0)")
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as err:
        raise DtypeError(f"{name} is {type(value)}, must be a NumPy array ({err})") from err


def _reals(name: str, value: Any, ranks: tuple[int, ...]) -> Array:
    """Return a real array in float64, one head a panel: (H, T, S) or (1, T, S)."""
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


def _labels(argument: str, word: Any, labels: Any, n: int, where: str) -> Labels:
    """Labels of an axis, after checking that there is one for each of n rows or columns."""
    if not isinstance(word, str):
        raise OptionError(f"axes has {word!r}, must be two words")
    if labels is None:
        return Labels(word, [str(i) for i in range(n)], positions=True)
    if isinstance(labels, str) or not isinstance(labels, Iterable):
        raise OptionError(f"{argument} is {labels!r}, must be a list of {n} str")
    texts = list(labels)
    if len(texts) != n:
        raise ShapeError(f"{argument} has {len(texts)} labels, must have {n}, one each [{where}]")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise OptionError(f"{argument}[{i}] is {text!r}, must be a str")
    return Labels(word, [_one_line(text) for text in texts], positions=False)


def _one_line(label: str) -> str:
    r"""Format a token: "\n" for a newline, ␣ for blanks alone, … for the rest of a long one."""
    text = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in label
    )
    text = text if text.strip() else "␣" * len(text)
    return text if len(text) <= LONG else text[: LONG - 1] + "…"


def _draw(
    name: str,
    values: Array,
    flagged: Array,
    look: Look,
    *,
    rows: tuple[str, Any, Any],
    columns: tuple[str, Any, Any],
    title: Any,
) -> Figure:
    """Draw values (H, T, S); rows and columns are (argument, word, labels)."""
    if title is not None and not isinstance(title, str):
        raise OptionError(f"title is {title!r}, must be a str or None")
    _, T, S = values.shape
    where = f"{name} (..., {T}, {S})"
    heat = HeatMap(
        values=values,
        flagged=flagged,
        rows=_labels(*rows, T, where),
        columns=_labels(*columns, S, where),
        title=title,
    )
    return draw(heat, look)
