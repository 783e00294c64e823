"""Checks of what is passed to `npattn.plot`: values, labels, the size of the figure."""

import math
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.plot.draw import Labels
from npattn.problem.arrays import Array, describe_value, to_numpy
from npattn.problem.sizes import ANY, Sized

LONG = 24  # characters of a label that are shown
MUST = "must be matplotlib Axes, such as figure.add_subplot() or plt.subplots()[1]"


def read_values(name: str, value: Any, sizes: tuple[Any, Any]) -> Array:
    """Return an array; a mask or bias takes the T or S it lacks from `sizes`, or their labels."""
    if isinstance(value, np.ma.MaskedArray):
        raise DtypeError(f"{name} is a masked array, must be a plain one: pass its .filled(0)")
    if isinstance(value, Sized):
        return _expand(name, value, sizes)
    try:
        return to_numpy(value)
    except (TypeError, ValueError, RuntimeError) as err:
        raise DtypeError(f"{name} is {type(value)}, must be a NumPy array ({err})") from err


def _expand(name: str, value: Sized, sizes: tuple[Any, Any]) -> Array:
    """Return a mask or a bias as an array whose last axes have their full sizes."""
    fixed = value._known_sizes()
    T, S = (
        size if size not in (None, ANY) else _count(other)
        for size, other in zip((fixed.T, fixed.S), sizes, strict=True)
    )
    if T is None or S is None:
        missing = " and ".join(n for n, size in (("T", T), ("S", S)) if size is None)
        remedy = "T= and S=, " if name == "mask" else ""
        raise OptionError(
            f"{name} is {describe_value(value)}, which has no {missing} of its own: pass "
            f"{remedy}labels of both axes, or .to_array(T=..., S=...)"
        )
    array = value.to_array(T, S)
    return np.broadcast_to(array, (*array.shape[:-2], T, S))


def _count(size: Any) -> int | None:
    """Return a size that is a number, or the number of labels; None if it is neither."""
    if isinstance(size, Collection) and not isinstance(size, str):
        return len(size)
    return size if isinstance(size, int) else None


def read_reals(name: str, value: Any, ranks: tuple[int, ...], sizes: tuple[Any, Any]) -> Array:
    """Return a real array in float64, one head a panel: (H, T, S) or (1, T, S)."""
    array = read_values(name, value, sizes)
    if array.dtype == np.bool_:
        raise DtypeError(f"{name} is bool, must be floating: draw it with npattn.plot.mask")
    # The dtypes of ml_dtypes have kind "V" or "f" by version.
    if array.dtype.kind != "f" and not array.dtype.name.startswith(("bfloat16", "float")):
        raise DtypeError(f"{name} is {array.dtype}, must be real and floating")
    return read_panels(name, array, ranks).astype(np.float64)


def read_panels(name: str, array: Array, ranks: tuple[int, ...]) -> Array:
    """Return an array of one of these ranks, (T, S) or (H, T, S), as panels (H, T, S)."""
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


def read_labels(argument: str, word: Any, labels: Any, n: int, where: str) -> Labels:
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


def read_figsize(figsize: Any) -> tuple[float, float] | None:
    """Return the width and height of a figure in inches. Raises OptionError if they are none."""
    if figsize is None:
        return None
    try:
        width, height = (float(side) for side in figsize)
    except (TypeError, ValueError):
        width = height = math.nan
    if not (0 < width < math.inf and 0 < height < math.inf):
        raise OptionError(
            f"figsize is {figsize!r}, must be a width and a height in inches, such as (8, 6)"
        )
    return width, height


def read_axes(ax: Any, count: int, title: str | None) -> list[Axes]:
    """Return the axes to draw in, one for each head."""
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
    if len({id(one.figure.figure) for one in every}) > 1:
        raise OptionError("ax has axes of several figures, must have those of one")
    if title is not None and count > 1:
        raise OptionError(
            f"title is {title!r}, which belongs to a figure, and ax is part of yours: leave it "
            "out, and call figure.suptitle"
        )
    return every
