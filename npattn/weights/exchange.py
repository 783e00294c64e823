"""Shared by importers and exporters: arrays to the bit, an axis of heads, what has no place."""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import ml_dtypes
import numpy as np

from npattn.errors import DtypeError, OptionError, ShapeError, optional_import
from npattn.multihead import MultiHeadAttention
from npattn.problem.arrays import Array, cast
from npattn.problem.checks import read_floating

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
"""Dtypes that files and frameworks hold, by their name in safetensors."""
BIASES = ("bq", "bk", "bv", "bo")


def read(name: str, value: Any) -> Array:
    """Copy a framework's array to NumPy, to the bit."""
    value = value.unbox() if hasattr(value, "unbox") else value  # flax's box of a sharding
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _read_tensor(torch, name, value)
    return np.array(read_floating(name, value), order="C")


def _read_tensor(torch: Any, name: str, tensor: Any) -> Array:
    kind = str(tensor.dtype).removeprefix("torch.")
    dtype = getattr(ml_dtypes, kind, getattr(np, kind, None))
    if dtype is None or not tensor.is_floating_point():
        raise DtypeError(f"{name} is {tensor.dtype}, must be a floating dtype that NumPy can hold")
    if tensor.is_meta:
        raise OptionError(f"{name} is on the meta device, must be on one that holds its numbers")
    plain = tensor.detach().cpu().contiguous()
    return np.array(plain.view(torch_bits(torch, plain.dtype.itemsize)).numpy()).view(dtype)


def torch_bits(torch: Any, itemsize: int) -> Any:
    """Return the integer dtype to pass bits through: NumPy lacks torch's bfloat16 and float8."""
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]


def optional(name: str, value: Any) -> Array | None:
    """As `read`; None for None."""
    return None if value is None else read(name, value)


def transpose(w: Array) -> Array:
    """Return a contiguous copy of w.T."""
    return np.ascontiguousarray(w.T)


def from_kernels(
    kernels: Mapping[str, Any], biases: Mapping[str, Any], **options: Any
) -> MultiHeadAttention:
    """Build a module from query (in, H, D), key (in, K, D), value (in, K, E), out (H, E, out).

    And, where there is one, from gate (in, H, E).
    """
    k = {name: read(f"the kernel of {name}", kernel) for name, kernel in kernels.items()}
    shapes = {name: kernel.shape for name, kernel in k.items()}
    if any(kernel.ndim != 3 for kernel in k.values()):
        raise ShapeError(f"the kernels have shapes {shapes}, must have three axes, one of heads")
    H = k["query"].shape[1]
    K, E = k["value"].shape[1:]
    if k["key"].shape[1] != K or k["out"].shape[:2] != (H, E):
        raise ShapeError(f"the kernels have shapes {shapes}, must agree on their heads")
    arguments: dict[str, Any] = {}
    for name, kernel in k.items():
        inputs = 2 if name == "out" else 1  # number of axes that are summed over
        in_shape, out_shape = kernel.shape[:inputs], kernel.shape[inputs:]
        letter = "o" if name == "out" else name[0]
        arguments["w" + letter] = kernel.reshape(math.prod(in_shape), math.prod(out_shape))
        bias = optional(f"the bias of {name}", biases[name])
        if bias is not None and bias.shape != out_shape:
            raise ShapeError(f"the bias of {name} has shape {bias.shape}, must have {out_shape}")
        arguments["b" + letter] = None if bias is None else bias.reshape(-1)
    return MultiHeadAttention(**arguments, num_heads=H, num_kv_heads=K, **options)


def loaded_package(package: str, function: str) -> Any:
    """Return a package that is imported already, as it must be to hand in one of its objects."""
    module = sys.modules.get(package)
    if module is not None:
        return module
    with needed_by(function, package):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(package)
    raise OptionError(f"{function} takes an object of {package}, which is not imported")


def needed_by(function: str, package: str, extra: str = "") -> AbstractContextManager[None]:
    """Return the context in which a function of this package imports another one."""
    return optional_import(f"npattn.weights.{function} needs", package, extra or package)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def check_kind(name: str, value: Any, kinds: Mapping[str, type], methods: tuple[str, ...]) -> None:
    """Check that value is of one of these classes, or of a subclass with the same methods."""
    parents = [parent for parent in kinds.values() if isinstance(value, parent)]
    if not parents:
        raise OptionError(f"{name} is a {_kind(value)}, must be a {' or '.join(kinds)}")
    for method in methods:
        defined = inspect.getattr_static(type(value), method, None)
        if all(defined is not inspect.getattr_static(p, method, None) for p in parents):
            raise OptionError(
                f"{name} is a {_kind(value)} with its own {method}, must be a "
                f"{' or '.join(kinds)}: the computation of a subclass is not known"
            )


def check_names(name: str, mapping: Any, needed: set[str], allowed: set[str]) -> None:
    """Check that a mapping has all needed keys and no others than the allowed ones."""
    if not isinstance(mapping, Mapping):
        raise OptionError(
            f"{name} is a {_kind(mapping)}, must be a mapping of {join_names(needed)}"
        )
    if needed - set(mapping):
        missing = join_names(needed - set(mapping))
        raise OptionError(f"{name} has no {missing}, must have {join_names(needed)}")
    if set(mapping) - allowed:
        more = join_names(set(mapping) - allowed)
        raise OptionError(f"{name} has {more}, must have no more than {join_names(allowed)}")


def refuse(*options: tuple[str, Any, str]) -> None:
    """Raise at the first option that is set; nothing of a module is silently left out."""
    for name, value, why in options:
        if value is not None and value is not False:
            raise OptionError(f"{name} is {value!r}, which MultiHeadAttention does not have: {why}")


def dropout_error(name: str, rate: float, state: str, cure: str) -> OptionError:
    """Error of a module that would drop weights as it stands."""
    return OptionError(
        f"{name} has dropout {rate} and {state}; switch it off with {cure}, and pass dropout_mask "
        "and dropout_rate to forward instead"
    )


def join_names(names: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, names)))


# --- writing --------------------------------------------------------------------------------------


def check_fits(
    function: str, mha: MultiHeadAttention, *further: tuple[bool, str], shares_heads: bool = False,
    separate_biases: bool = False, value_size: bool = False, norms: bool = False,
    appends: bool = False,
) -> None:  # fmt: skip
    """Raise OptionError at the first part of `mha` that a framework has no place for.

    The keywords say what it has a place for; `further` are more conditions, with their messages.
    """
    H, K, D, E = mha.num_heads, mha.num_kv_heads, mha.head_size, mha.value_size
    some = len({getattr(mha, name) is None for name in BIASES}) > 1
    checks = (
        (mha.wo is None, "wo is None; the heads are always projected there"),
        (mha.bias_k is not None and not appends,
         "got bias_k and bias_v; no keys are appended there"),
        (bool(mha.add_zero_attn) and not appends,
         "add_zero_attn is True; no keys are appended there"),
        (mha.merge != "concat", f'merge is {mha.merge!r}, must be "concat"'),
        (mha.wg is not None, "got wg, must be None: no gate is written there"),
        (K != H and not shares_heads,
         f"num_kv_heads is {K}, must be {H} as num_heads: none are shared there (mha.unshared())"),
        (E != D and not value_size,
         f"heads of values have size {E}, must be {D} as those of queries"),
        (some and not separate_biases,
         "got some of bq, bk, bv, bo; all or none are there (a missing one can be zeros)"),
        (mha.qk_norm is not None and not norms,
         f"qk_norm is {mha.qk_norm!r}, must be None: heads are not normalised there"),
        (0 in (D, E), f"heads have sizes {D} and {E}, must be 1 or more"),
        *further,
    )  # fmt: skip
    for wrong, message in checks:
        if wrong:
            raise OptionError(f"{message} [{function} of {mha!r}]")


def read_parameters(function: str, mha: MultiHeadAttention, dtype: Any) -> dict[str, Array]:
    """Return copies of all parameters in one dtype: their own, or this one, rounded once."""
    names = sorted({x.dtype.name for x in mha.parameters.values()})
    if dtype is None and len(names) > 1:
        raise OptionError(f"parameters are {join_names(names)}, must be one: pass dtype=")
    try:
        wanted = np.dtype(names[0] if dtype is None else dtype)
    except TypeError as err:
        raise DtypeError(
            f"dtype is {dtype!r}, must be one of {join_names(DTYPES.values())}"
        ) from err
    if wanted not in DTYPES.values():
        raise DtypeError(f"dtype is {wanted}, must be one of {join_names(DTYPES.values())}")
    arrays = {}
    for name, x in mha.parameters.items():
        if x.dtype.kind == "c":
            raise DtypeError(f"{name} is {x.dtype}, must be real")
        with np.errstate(over="ignore", invalid="ignore"):  # NaN stays NaN
            arrays[name] = np.array(cast(x, wanted), order="C")
            overflow = (np.isinf(arrays[name]) & ~np.isinf(x)).any()
        if overflow:
            raise OptionError(f"{name} has numbers beyond the range of {wanted} [{function}]")
    return arrays


def heads_apart(mha: MultiHeadAttention, arrays: dict[str, Array]) -> dict[str, Array]:
    """Give heads an axis: query (in_q, H, D), its bias (H, D), ..., out (H, E, out)."""
    sizes = {"q": mha.head_size, "k": mha.head_size, "v": mha.value_size}
    split = {}
    for name, x in arrays.items():
        if name in ("wq", "wk", "wv", "bq", "bk", "bv"):
            x = x.reshape(*x.shape[:-1], -1, sizes[name[1]])
        split[name] = x.reshape(-1, mha.value_size, x.shape[-1]) if name == "wo" else x
    return split


def check_held(function: str, held: Any, array: Array) -> None:
    """Check that a framework holds an array in its dtype: JAX makes float64 float32."""
    actual = str(held.dtype).removeprefix("torch.")
    if actual != array.dtype.name:
        raise OptionError(
            f"a parameter is {array.dtype}, but {function} can only hold it as {actual}: pass "
            f"dtype={actual!r}, or call jax.config.update('jax_enable_x64', True)"
        )
