"""Files: safetensors with every array to the bit, and the options in the metadata."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from npattn.arrays import Array
from npattn.errors import NpattnError, OptionError, ShapeError
from npattn.multihead import MultiHeadAttention
from npattn.multihead_build import PARAMETERS
from npattn.weights.reading import check_names, listed, missing

__all__ = ["load", "save"]


KIND, VERSION = "npattn.MultiHeadAttention", "1"
OPTIONS = ("num_heads", "num_kv_heads", "add_zero_attn", "merge", "qk_norm", "norm_eps")
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def save(mha: MultiHeadAttention, path: str | os.PathLike[str]) -> None:
    """Write it to a safetensors file: every array to the bit, its options in the metadata.

    It is written beside `path` under another name first, so that a file that is there is replaced
    by a whole one or stays as it is.

    Parameters
    ----------
    mha : MultiHeadAttention
        In float64, float32, float16 or bfloat16.
    path : str or path

    Raises
    ------
    OptionError
        If an array has another dtype.
    OSError
        If it cannot be written.
    MissingExtraError
        If safetensors is not installed.

    Notes
    -----
    The metadata hold ``kind``, ``version`` ("1"), ``options`` and ``shapes`` (both JSON), and
    ``sha256`` of all of it: whatever changes a bit is found by `load`.

    Examples
    --------
    >>> import tempfile, npattn
    >>> mha = npattn.MultiHeadAttention.init(6, 2, seed=0)
    >>> path = tempfile.mkdtemp() + "/mha.safetensors"
    >>> save(mha, path)
    >>> (load(path).wq == mha.wq).all()
    np.True_
    """
    tensors = _safetensors("save")
    arrays = {}
    for name, array in mha.parameters.items():
        plain = array.dtype.newbyteorder("=")
        if plain not in DTYPES.values():
            raise OptionError(f"{name} is {array.dtype}, must be one of {listed(DTYPES.values())}")
        arrays[name] = np.array(array, plain, order="C")
    options = {name: _plain(value) for name, value in mha.options.items()}
    metadata = {
        "kind": KIND,
        "version": VERSION,
        "options": json.dumps(options),
        "shapes": json.dumps({name: array.shape for name, array in arrays.items()}),
        "sha256": _digest(options, arrays),
    }
    write_whole(Path(path).resolve(), tensors.save(arrays, metadata))


def load(path: str | os.PathLike[str]) -> MultiHeadAttention:
    """What `save` wrote, to the bit, or an error and nothing.

    Parameters
    ----------
    path : str or path

    Returns
    -------
    MultiHeadAttention

    Raises
    ------
    OptionError, ShapeError
        If the file is no safetensors file, cut short, changed, or not one of `save`'s.
    OSError
        If it cannot be read; FileNotFoundError if there is none.
    MissingExtraError
        If safetensors is not installed.

    Examples
    --------
    As in `save`.
    """
    _safetensors("load")
    from safetensors import SafetensorError, deserialize

    data = Path(path).read_bytes()
    must = "must be one that npattn.weights.save wrote"
    try:
        found = dict(deserialize(data))  # type: ignore[no-untyped-call, unused-ignore]
    except SafetensorError as err:
        raise OptionError(f"{path} is no whole safetensors file ({err}), {must}") from err
    # deserialize has held the header against the format, but does not give its metadata.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__") or {}
    if metadata.get("kind") != KIND:
        raise OptionError(f"{path} is a safetensors file of {listed(found) or 'nothing'}, {must}")
    try:
        return _rebuilt(metadata, found)
    except NpattnError as err:
        raise type(err)(f"{path} cannot be loaded: {err}") from err


def _rebuilt(metadata: Mapping[str, str], found: Mapping[str, Any]) -> MultiHeadAttention:
    """Of the parts of a file, after holding each against the others."""
    names = {"kind", "version", "options", "shapes", "sha256"}
    if metadata.get("version") != VERSION:
        raise OptionError(f"version is {metadata.get('version')!r}, must be {VERSION!r}")
    check_names("metadata", metadata, names, names)
    options, shapes = (_json_object(name, metadata[name]) for name in ("options", "shapes"))
    check_names("options", options, set(OPTIONS), set(OPTIONS))
    check_names("the file", found, set(shapes), set(shapes))
    check_names("the file", found, {"wq", "wk", "wv"}, set(PARAMETERS))
    arrays = {}
    for name, tensor in found.items():
        if list(tensor["shape"]) != shapes[name]:
            raise ShapeError(
                f"{name} has shape {tuple(tensor['shape'])}, must have that of the metadata, "
                f"{shapes[name]}"
            )
        if tensor["dtype"] not in DTYPES:
            raise OptionError(f"{name} is {tensor['dtype']}, must be one of {listed(DTYPES)}")
        dtype = DTYPES[tensor["dtype"]]
        arrays[name] = np.array(np.frombuffer(tensor["data"], dtype)).reshape(tensor["shape"])
    digest = _digest(options, arrays)
    if metadata["sha256"] != digest:
        raise OptionError(
            f"sha256 is {metadata['sha256']}, must be {digest}: something was changed afterwards"
        )
    given: dict[str, Any] = {**arrays, **options}
    return MultiHeadAttention(**given)


def _digest(options: Mapping[str, Any], arrays: Mapping[str, Array]) -> str:
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Write data to path, whole or not at all: what was there stays until then."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)  # it has its new name, or it is half written


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise OptionError(f"{name} is no JSON ({err})") from err
    if not isinstance(value, dict):
        raise OptionError(f"{name} is a {type(value).__name__}, must be an object")
    return value


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _safetensors(asked: str) -> Any:
    try:
        import safetensors.numpy
    except ImportError as err:
        raise missing(asked, "safetensors", "weights") from err
    return safetensors.numpy
