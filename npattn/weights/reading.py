"""What the importers share: arrays to the bit, kernels with an axis of heads, and refusals."""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from npattn.arrays import Array
from npattn.checks import read_floating
from npattn.errors import DtypeError, MissingExtraError, OptionError, ShapeError
from npattn.multihead import MultiHeadAttention

__all__ = [
    "check_kind",
    "check_names",
    "drops",
    "listed",
    "loaded",
    "missing",
    "of_kernels",
    "optional",
    "read",
    "refuse",
    "torch_bits",
    "transposed",
]


def read(name: str, value: Any) -> Array:
    """A copy of a framework's array as one of NumPy, to the bit."""
    value = value.unbox() if hasattr(value, "unbox") else value  # flax's box of a sharding
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(torch, name, value)
    return np.array(read_floating(name, value), order="C")


def _of_tensor(torch: Any, name: str, tensor: Any) -> Array:
    kind = str(tensor.dtype).removeprefix("torch.")
    dtype = getattr(ml_dtypes, kind, getattr(np, kind, None))
    if dtype is None or not tensor.is_floating_point():
        raise DtypeError(f"{name} is {tensor.dtype}, must be a floating dtype that NumPy can hold")
    if tensor.is_meta:
        raise OptionError(f"{name} is on the meta device, must be on one that holds its numbers")
    plain = tensor.detach().cpu().contiguous()
    return np.array(plain.view(torch_bits(torch, plain.dtype.itemsize)).numpy()).view(dtype)


def torch_bits(torch: Any, itemsize: int) -> Any:
    """The integers as which bits go across: NumPy and torch share no bfloat16 and no float8."""
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]


def optional(name: str, value: Any) -> Array | None:
    return None if value is None else read(name, value)


def transposed(w: Array) -> Array:
    return np.ascontiguousarray(w.T)


def of_kernels(
    kernels: Mapping[str, Any], biases: Mapping[str, Any], **options: Any
) -> MultiHeadAttention:
    """Of query (in, H, D), key (in, K, D), value (in, K, E), out (H, E, out) and their biases."""
    k = {name: read(f"the kernel of {name}", kernel) for name, kernel in kernels.items()}
    shapes = {name: kernel.shape for name, kernel in k.items()}
    if any(kernel.ndim != 3 for kernel in k.values()):
        raise ShapeError(f"the kernels have shapes {shapes}, must have three axes, one of heads")
    H = k["query"].shape[1]
    K, E = k["value"].shape[1:]
    if k["key"].shape[1] != K or k["out"].shape[:2] != (H, E):
        raise ShapeError(f"the kernels have shapes {shapes}, must agree on their heads")
    given: dict[str, Any] = {}
    for name, kernel in k.items():
        cut = 2 if name == "out" else 1  # what is before goes in
        goes_in, comes_out = kernel.shape[:cut], kernel.shape[cut:]
        letter = "o" if name == "out" else name[0]
        given["w" + letter] = kernel.reshape(math.prod(goes_in), math.prod(comes_out))
        bias = optional(f"the bias of {name}", biases[name])
        if bias is not None and bias.shape != comes_out:
            raise ShapeError(f"the bias of {name} has shape {bias.shape}, must have {comes_out}")
        given["b" + letter] = None if bias is None else bias.reshape(-1)
    return MultiHeadAttention(**given, num_heads=H, num_kv_heads=K, **options)


def loaded(package: str, asked: str) -> Any:
    """A package whose object was handed in, and which is there for that reason; never loads it."""
    module = sys.modules.get(package)
    if module is not None:
        return module
    if importlib.util.find_spec(package) is None:
        raise missing(asked, package, package)
    raise OptionError(f"{package} is not imported, so that nothing can be of {package}: {asked}")


def missing(asked: str, package: str, extra: str) -> MissingExtraError:
    return MissingExtraError(
        f"npattn.weights.{asked} needs {package}; npattn itself does not: "
        f"pip install 'npattn[{extra}]'"
    )


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def check_kind(name: str, value: Any, kinds: Mapping[str, type], methods: tuple[str, ...]) -> None:
    """Raise unless value is one of these classes, or a subclass that computes as they do."""
    parents = [parent for parent in kinds.values() if isinstance(value, parent)]
    if not parents:
        raise OptionError(f"{name} is a {_kind(value)}, must be a {' or '.join(kinds)}")
    for method in methods:
        own = inspect.getattr_static(type(value), method, None)
        if all(own is not inspect.getattr_static(p, method, None) for p in parents):
            raise OptionError(
                f"{name} is a {_kind(value)} with a {method} of its own, must be a "
                f"{' or '.join(kinds)}: what it computes is not known"
            )


def check_names(name: str, found: Any, needed: set[str], allowed: set[str]) -> None:
    if not isinstance(found, Mapping):
        raise OptionError(f"{name} is a {_kind(found)}, must be a mapping of {listed(needed)}")
    if needed - set(found):
        missing = listed(needed - set(found))
        raise OptionError(f"{name} has no {missing}, must have {listed(needed)}")
    if set(found) - allowed:
        more = listed(set(found) - allowed)
        raise OptionError(f"{name} has {more}, must have no more than {listed(allowed)}")


def refuse(*options: tuple[str, Any, str]) -> None:
    """Raise at the first option that is set: nothing of a module is silently left out."""
    for name, value, why in options:
        if value is not None and value is not False:
            raise OptionError(f"{name} is {value!r}, which MultiHeadAttention does not hold: {why}")


def drops(name: str, rate: float, state: str, cure: str) -> OptionError:
    return OptionError(
        f"{name} has dropout {rate} and {state}, must drop nothing: {cure}, and give forward the "
        "dropout_mask and dropout_rate that it shall have"
    )


def listed(names: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, names)))
