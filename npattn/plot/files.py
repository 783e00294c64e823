"""The .npz files that `npattn plot` draws. Messages name its flags."""

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from npattn.errors import OptionError, ShapeError
from npattn.oracle.api import forward
from npattn.plot import maps
from npattn.problem.arrays import Array
from npattn.problem.options import OPTIONS

CONTENTS = "weights, mask or error, or q, k and v (and options of npattn.attention)"
# A file cannot hold a callable.
LOADABLE = tuple(name for name, option in OPTIONS.items() if option.kind != "callable")

# Exceptions that a damaged .npz may raise.
UNREADABLE = (
    *(OSError, EOFError, ValueError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)


def check_picture(flag: str, path: str) -> Path:
    """Return the absolute path of a picture to write."""
    formats = FigureCanvasAgg.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in formats:
        raise OptionError(f"{flag} is {path!r}, must end in one of .{', .'.join(formats)}")
    picture = Path(path).absolute()
    if not picture.parent.is_dir():
        raise OptionError(f"the folder of {path} does not exist; create it first")
    return picture


def draw_file(
    path: str | Path, head: int | None = None, sample: int | None = None, **look: Any
) -> Figure:
    """Draw the heat map of an .npz file: of one head alone, of one element of the batch.

    It holds weights, mask or error, each (T, S) or (H, T, S); or q, k, v and options of
    `npattn.attention`, whose exact weights are drawn. It may hold labels, queries and keys. `look`
    has cmap, fmt and figsize of `npattn.plot.head`. Raises ShapeError or DtypeError if an array
    cannot be drawn as it is.
    """
    arrays = _read(path)
    labels = {name: arrays.pop(name).tolist() for name in ("queries", "keys") if name in arrays}
    name, array = _array_to_draw(arrays)
    array = _select(name, array, head, sample)
    options: dict[str, Any] = {"title": None if head is None else f"head {head}"}
    options |= {flag: value for flag, value in look.items() if value is not None}
    if name == "mask":
        if "fmt" in options:
            raise OptionError(
                f"--fmt is {options['fmt']!r}, but a mask has no numbers: leave it out"
            )
        return maps.mask(array, **options, **labels)
    if name == "error":
        queries, keys = labels.get("queries"), labels.get("keys")
        axes = ("query" if queries else "row", "key" if keys else "column")
        return maps.error(array, rows=queries, columns=keys, axes=axes, **options)
    draw = maps.heads if array.ndim == 3 else maps.head
    return draw(array, **options, **labels)


def _read(path: str | Path) -> dict[str, Array]:
    """Read the arrays of an .npz."""
    must = f"must be an .npz that holds {CONTENTS}"
    if not zipfile.is_zipfile(path):
        raise OptionError(f"{path} is no .npz, {must}")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: np.asarray(file[name]) for name in file.files}
    except UNREADABLE as err:
        raise OptionError(f"{path} cannot be read ({err}), {must}") from err


def _array_to_draw(arrays: dict[str, Array]) -> tuple[str, Array]:
    """Return the name of the array to draw, and the array."""
    names = ", ".join(arrays) or "nothing"
    if not {"q", "k", "v"} & set(arrays):
        if len(arrays) != 1 or names not in ("weights", "mask", "error"):
            raise OptionError(f"the file holds {names}, must hold {CONTENTS}")
        return names, arrays[names]
    missing = [name for name in "qkv" if name not in arrays]
    unknown = [name for name in arrays if name not in (*"qkv", *LOADABLE)]
    if missing or unknown:
        raise OptionError(
            f"the file holds {names}, must hold q, k, v, and may hold {', '.join(LOADABLE)}"
        )
    options = {n: _option(n, a) for n, a in arrays.items()}
    return "weights", forward(**options).weights


def _option(name: str, array: Array) -> Any:
    """Convert an option of npattn.attention from a file, where None is nan."""
    if name == "window" and array.shape == (2,) and array.dtype.kind in "iuf":
        sides = (None if np.isnan(n) else float(n) for n in array)  # nan makes both floats
        return tuple(int(n) if n is not None and n.is_integer() else n for n in sides)
    return array.item() if array.ndim == 0 else array


def _select(name: str, array: Array, head: int | None, sample: int | None) -> Array:
    """Select one element of the batch and one head, unless None, of an array (..., H, T, S)."""
    if sample is not None:
        if array.ndim < 4:
            raise ShapeError(f"{name} has shape {array.shape}, must have a batch for --sample")
        array = array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])
        if sample >= len(array):
            raise OptionError(f"--sample is {sample}, must be below {len(array)}")
        array = array[sample]
    elif array.ndim > 3:
        raise ShapeError(f"{name} has shape {array.shape}: pick one of the batch with --sample")
    if head is None:
        return array
    if array.ndim != 3:
        raise ShapeError(f"{name} has shape {array.shape}, must be (H, T, S) for --head")
    if head >= len(array):
        raise OptionError(f"--head is {head}, must be below {len(array)}, the number of heads")
    return np.asarray(array[head])
