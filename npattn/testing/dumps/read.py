"""Read a dump: the arrays and options of one call of attention, with any of its results.

A dump is an .npz, a folder of .npy files, a .safetensors or a .pt file. Each entry has a name: q,
k, v and options of `npattn.attention`, results (o, lse, dq, …) and cotangents (dout, dlse).
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from npattn.errors import DtypeError, OptionError, optional_import
from npattn.problem.arrays import Array
from npattn.problem.foreign import FOREIGN
from npattn.problem.options import OPTIONS, Alignment

INPUTS = ("q", "k", "v")
RESULTS = ("o", "lse", "weights", "max_score", "dq", "dk", "dv", "dbias", "dsinks", "dgate")
COTANGENTS = ("dout", "dlse", "dweights")
LOADABLE = tuple(name for name, one in OPTIONS.items() if one.kind != "callable")
NAMES = (*INPUTS, *RESULTS, *COTANGENTS, *LOADABLE)
OTHER_NAMES = {
    "query": "q", "key": "k", "value": "v", "out": "o", "output": "o", "softmax_lse": "lse",
    "do": "dout", "dO": "dout", "grad_out": "dout", "grad_output": "dout",
    "dquery": "dq", "dkey": "dk", "dvalue": "dv",
}  # fmt: skip
"""Other names that mean one thing only."""
ROWS = (*INPUTS, "o", "dout", "dq", "dk", "dv", "gate", "dgate")
"""Entries whose axes follow the layout."""
# What a damaged file may raise.
UNREADABLE = (
    *(OSError, EOFError, ValueError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)


@dataclass(frozen=True, eq=False)
class Dump:
    """One call, with npattn's names and layout."""

    source: str  # the file or folder
    arrays: dict[str, Array]  # q (..., H, T, D), k (..., K, S, D) and v (..., K, S, E)
    options: dict[str, Any]  # options of `npattn.attention`
    results: dict[str, Array]  # o, lse, dq, …: what is judged
    # dout (..., H, T, E), dlse (..., H, T), dweights (..., H, T, S), as far as there are any
    cotangents: dict[str, Array]
    # "bottom_right" or "top_left": alignment that the systems with these names have in common, as
    # ``is_causal``
    alignment: Alignment | None = None


def read_dump(
    path: str | Path, *, rename: Mapping[str, str] | None = None, layout: str | None = None
) -> Dump:
    """Read the arrays and options of one call; DtypeError if an entry holds something but numbers.

    It lies in an .npz, a folder of .npy files (mapped into memory, not loaded), a .safetensors or a
    .pt file. uint16 arrays among q, k, v, results and cotangents are bfloat16 numbers, bit by bit.
    `rename` says what the name of an entry means: one of q, k, v, o, lse, dq, dk, dv, dout, …, an
    option, or "" to leave it out. `layout` is that of q, k, v, o, dout and their gradients.
    """
    stored = dict(_entries(Path(path)))
    alignments = {FOREIGN[name].causal for name in stored if name in FOREIGN} - {None}
    entries = _rename(stored, rename or {}, path)
    for name in INPUTS:
        if name not in entries:
            raise OptionError(
                f"{path} has {', '.join(entries) or 'nothing'}, but no {name}: "
                f"rename={{'their name': '{name}'}} says which it is"
            )
    for name in (*INPUTS, *RESULTS, *COTANGENTS):
        if name in entries:
            entries[name] = _read_floats(name, entries[name])
    if layout == "BTHD":
        entries |= {n: _move_heads(n, entries[n]) for n in ROWS if n in entries}
    results = {name: entries[name] for name in RESULTS if name in entries}
    if not results:
        raise OptionError(
            f"{path} has {', '.join(entries)}, but no result to judge: add one of "
            f"{', '.join(RESULTS)}, or pass rename= if it has another name"
        )
    return Dump(
        str(path),
        {name: entries[name] for name in INPUTS},
        {name: _read_option(name, entries[name]) for name in LOADABLE if name in entries},
        results,
        {name: entries[name] for name in COTANGENTS if name in entries},
        next(iter(alignments), None),
    )


# --- files ----------------------------------------------------------------------------------------


def _entries(path: Path) -> Iterator[tuple[str, Array]]:
    """Yield name and array of each entry."""
    must = "must be an .npz, a folder of .npy files, a .safetensors or a .pt file"
    if not path.exists():
        raise OptionError(f"{path} does not exist; a dump {must}")
    readers: dict[str, Callable[[Path], Iterator[tuple[str, Array]]]] = {
        ".npz": _read_npz,
        ".safetensors": _read_safetensors,
        ".pt": _read_torch,
        ".pth": _read_torch,
    }
    read = _read_folder if path.is_dir() else readers.get(path.suffix)
    if read is None:
        raise OptionError(f"{path} {must}")
    try:
        yield from read(path)
    except UNREADABLE as err:
        raise OptionError(f"{path} cannot be read ({err}), {must}") from err


def _read_npz(path: Path) -> Iterator[tuple[str, Array]]:
    with np.load(path, allow_pickle=False) as file:
        for name in file.files:
            yield name, np.asarray(file[name])


def _read_folder(path: Path) -> Iterator[tuple[str, Array]]:
    for file in sorted(path.glob("*.npy")):
        yield file.stem, np.load(file, mmap_mode="r", allow_pickle=False)


def _read_safetensors(path: Path) -> Iterator[tuple[str, Array]]:
    with optional_import("a .safetensors dump needs", "safetensors", "weights"):
        from safetensors.numpy import load_file
    yield from load_file(path).items()


def _read_torch(path: Path) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of a mapping; nothing in the file is run (weights_only)."""
    with optional_import("a .pt dump needs", "torch", "torch"):
        import torch
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise OptionError(f"{path} holds a {kind}, must hold a dict of tensors by name")
    for name, value in content.items():
        if not isinstance(value, torch.Tensor):
            yield str(name), np.asarray(np.nan if value is None else value)
            continue
        value = value.detach().contiguous()
        bits = value.dtype == torch.bfloat16
        array = value.view(torch.uint16).numpy() if bits else value.numpy()
        yield str(name), array.view(ml_dtypes.bfloat16) if bits else array


# --- names, dtypes, axes --------------------------------------------------------------------------


def _rename(
    entries: dict[str, Array], rename: Mapping[str, str], path: str | Path
) -> dict[str, Array]:
    """Return the entries by npattn's names."""
    for theirs, ours in rename.items():
        if theirs not in entries:
            raise OptionError(
                f"rename has {theirs!r}, which {path} does not have: it has {', '.join(entries)}"
            )
        if ours and ours not in NAMES:
            raise OptionError(f"rename reads {theirs!r} as {ours!r}, must be in {', '.join(NAMES)}")
    renamed: dict[str, Array] = {}
    for theirs, array in entries.items():
        meaning = _meaning(theirs, array)
        ours = rename.get(theirs, "" if meaning is None else meaning)
        if meaning is None and theirs not in rename:
            near = get_close_matches(theirs, NAMES, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise OptionError(
                f"{path} has {theirs!r}, which is no name of attention{hint}: pass "
                f"rename={{'{theirs}': NAME}} with one of {', '.join(NAMES)}, or '' to leave it out"
            )
        if ours in renamed:
            raise OptionError(f"{path} has {ours} twice, once as {theirs!r}: rename one to ''")
        if ours:
            renamed[ours] = array
    return renamed


def _meaning(name: str, array: Array) -> str | None:
    """Return what an entry means; None if its name says nothing."""
    if name in NAMES:
        return name
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    meaning = FOREIGN[name].meaning if name in FOREIGN else ""
    if meaning == "mask or bias":
        return "mask" if array.dtype == bool else "bias"
    if meaning == "window or −1":
        return "window"
    return meaning if meaning in NAMES else None


def _read_floats(name: str, array: Array) -> Array:
    """Return an array of floats; uint16, and what NumPy stored of bfloat16, are its bits."""
    if array.dtype == np.uint16 or (array.dtype.kind == "V" and array.dtype.itemsize == 2):
        return array.view(ml_dtypes.bfloat16)
    if array.dtype.kind not in "fV" or array.dtype.names:
        raise DtypeError(
            f"{name} has dtype {array.dtype}, must be floating; uint16 stands for bfloat16"
        )
    return array


def _move_heads(name: str, array: Array) -> Array:
    """Return (B, T, H, D) as (B, H, T, D)."""
    if array.ndim != 4:
        raise OptionError(f"{name} has rank {array.ndim}, must be 4 with layout BTHD")
    return array.swapaxes(1, 2)


def _read_option(name: str, array: Array) -> Any:
    """Return the value of an option, an array of any shape; NaN, or −1 in a window, is None."""
    kind = OPTIONS[name].kind
    if kind == "array":
        return array
    if kind == "pair":
        sides = array.astype(float).ravel().tolist()
        if len(sides) != 2:
            raise OptionError(f"window has {len(sides)} numbers, must have two: left and right")
        return tuple(None if math.isnan(n) or n == -1 else int(n) for n in sides)
    if array.size != 1:
        raise OptionError(f"{name} has shape {array.shape}, must be one value")
    value = array.reshape(())[()].item()
    if kind == "flag":
        return value if isinstance(value, str) else bool(value)
    return None if math.isnan(value) else float(value)
