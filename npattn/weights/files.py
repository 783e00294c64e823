"""Files: safetensors, of modules with their options and of other systems, to the bit."""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from npattn.errors import NpattnError, OptionError, ShapeError
from npattn.multihead import MultiHeadAttention
from npattn.multihead.build import PARAMETERS
from npattn.problem.arrays import Array
from npattn.weights.exchange import DTYPES, check_names, join_names, needed_by

KIND, VERSION = "npattn.MultiHeadAttention", "1"
OPTIONS = ("num_heads", "num_kv_heads", "add_zero_attn", "merge", "qk_norm", "norm_eps")
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def save(mha: MultiHeadAttention, path: str | os.PathLike[str]) -> None:
    """Write a module to a safetensors file: arrays to the bit, options in the metadata.

    The file is written beside `path` under another name first, so that an existing file is either
    replaced by a complete one or stays as it is.

    Parameters
    ----------
    mha : MultiHeadAttention
        With arrays in float64, float32, float16 or bfloat16.
    path : str or path

    Raises
    ------
    OptionError
        If an array has another dtype.
    OSError
        If the file cannot be written.
    MissingExtraError
        If safetensors is not installed.

    Notes
    -----
    The metadata hold ``kind``, ``version`` ("1"), ``options`` and ``shapes`` (both JSON), and
    ``sha256`` of all of it, by which `load` detects any change.

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
            raise OptionError(
                f"{name} is {array.dtype}, must be one of {join_names(DTYPES.values())}"
            )
        arrays[name] = np.array(array, plain, order="C")
    options = {name: _plain(value) for name, value in mha.options.items()}
    metadata = {
        "kind": KIND, "version": VERSION, "options": json.dumps(options),
        "shapes": json.dumps({name: array.shape for name, array in arrays.items()}),
        "sha256": _digest(options, arrays),
    }  # fmt: skip
    write_whole(Path(path).resolve(), tensors.save(arrays, metadata))


def load(path: str | os.PathLike[str]) -> MultiHeadAttention:
    """Read a module from a file of `save`, to the bit.

    Parameters
    ----------
    path : str or path

    Returns
    -------
    MultiHeadAttention

    Raises
    ------
    OptionError
        If the file is no safetensors file, truncated, changed, or not one of `save`'s.
    ShapeError
        If the shape of an array is not that of the metadata.
    OSError
        If the file cannot be read; FileNotFoundError if it does not exist.
    MissingExtraError
        If safetensors is not installed.

    Examples
    --------
    As in `save`.
    """
    _safetensors("load")
    from safetensors import SafetensorError, deserialize

    data = Path(path).read_bytes()
    must = "must be a file of npattn.weights.save"
    try:
        tensors = dict(deserialize(data))  # type: ignore[no-untyped-call, unused-ignore]
    except SafetensorError as err:
        raise OptionError(f"{path} is no whole safetensors file ({err}), {must}") from err
    # deserialize has checked the header, but does not return its metadata.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__") or {}
    if metadata.get("kind") != KIND:
        raise OptionError(
            f"{path} is a safetensors file of {join_names(tensors) or 'nothing'}, {must}"
        )
    try:
        return _build(metadata, tensors)
    except NpattnError as err:
        raise type(err)(f"{path} cannot be loaded: {err}") from err


# --- checkpoints of other systems -----------------------------------------------------------------


def list_arrays(path: Path, function: str) -> dict[str, Path]:
    """Return the file of each array of a safetensors file, or of a folder of one or several.

    Raises OptionError if there is none, a file is damaged, or the weights are in a pickle, and
    FileNotFoundError if path or a file of the index does not exist.
    """
    _safetensors(function)
    if not path.is_dir():
        if path.suffix in PICKLES:
            raise _pickle_error(path)
        return dict.fromkeys(_read_header(path)[1], path)
    if (path / WHOLE).exists():
        return list_arrays(path / WHOLE, function)
    if not (path / INDEX).exists():
        pickles = [p for p in sorted(path.iterdir()) if p.suffix in PICKLES]
        if pickles:
            raise _pickle_error(pickles[0])
        raise OptionError(f"{path} has neither {WHOLE} nor {INDEX}; pass the file itself")
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or any(
        not isinstance(name, str) or Path(name).name != name for name in weight_map.values()
    ):
        raise OptionError(f"{path / INDEX} has no weight_map from arrays to files beside it")
    return {name: path / file for name, file in weight_map.items()}


def read_arrays(files: Mapping[str, Path], names: Iterable[str]) -> dict[str, Array]:
    """Read these arrays, and no others, in the dtype of the file."""
    arrays = {}
    for name in names:
        start, header = _read_header(files[name])
        if name not in header:
            raise OptionError(f"{files[name]} has no {name}, though {INDEX} says so")
        entry = header[name]
        if entry["dtype"] not in DTYPES:
            raise OptionError(
                f"{name} is {entry['dtype']} in {files[name]}, must be one of "
                f"{join_names(DTYPES)}: dequantise weights first"
            )
        first, last = entry["data_offsets"]
        with open(files[name], "rb") as file:
            file.seek(start + first)
            data = file.read(last - first)
        arrays[name] = np.array(np.frombuffer(data, DTYPES[entry["dtype"]])).reshape(entry["shape"])
    return arrays


def read_json(path: Path) -> dict[str, Any]:
    return _json_object(str(path), path.read_text(encoding="utf-8"))


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the arrays of a file begin, and the dtype, shape and place of each."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):  # type: ignore[no-untyped-call, unused-ignore]
            pass  # it has checked the header against the size of the file
    except SafetensorError as err:
        raise OptionError(f"{path} is no whole safetensors file ({err})") from err
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return 8 + size, header


def _pickle_error(path: Path) -> OptionError:
    return OptionError(
        f"{path} is a pickle, which runs code when it is read; convert it to safetensors: "
        "model.save_pretrained(folder) of transformers"
    )


# --- files of save --------------------------------------------------------------------------------


def _build(metadata: Mapping[str, str], tensors: Mapping[str, Any]) -> MultiHeadAttention:
    """Build a module from the parts of a file, after checking them against each other."""
    names = {"kind", "version", "options", "shapes", "sha256"}
    if metadata.get("version") != VERSION:
        raise OptionError(f"version is {metadata.get('version')!r}, must be {VERSION!r}")
    check_names("metadata", metadata, names, names)
    options, shapes = (_json_object(name, metadata[name]) for name in ("options", "shapes"))
    check_names("options", options, set(OPTIONS), set(OPTIONS))
    check_names("the file", tensors, set(shapes), set(shapes))
    check_names("the file", tensors, {"wq", "wk", "wv"}, set(PARAMETERS))
    arrays = {}
    for name, tensor in tensors.items():
        if list(tensor["shape"]) != shapes[name]:
            raise ShapeError(
                f"{name} has shape {tuple(tensor['shape'])}, must have that of the metadata, "
                f"{shapes[name]}"
            )
        if tensor["dtype"] not in DTYPES:
            raise OptionError(f"{name} is {tensor['dtype']}, must be one of {join_names(DTYPES)}")
        dtype = DTYPES[tensor["dtype"]]
        arrays[name] = np.array(np.frombuffer(tensor["data"], dtype)).reshape(tensor["shape"])
    digest = _digest(options, arrays)
    if metadata["sha256"] != digest:
        raise OptionError(
            f"sha256 is {metadata['sha256']}, must be {digest}: the file was changed afterwards"
        )
    arguments: dict[str, Any] = {**arrays, **options}
    return MultiHeadAttention(**arguments)


def _digest(options: Mapping[str, Any], arrays: Mapping[str, Array]) -> str:
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Write data to path, whole or not at all; an existing file stays until then."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # still there if writing or renaming failed


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


def _safetensors(function: str) -> Any:
    with needed_by(function, "safetensors", "weights"):
        import safetensors.numpy
    return safetensors.numpy
