"""NumPy arrays as tensors and tensors as NumPy's stand-ins: devices and dtypes of both."""

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import torch

from npattn.errors import DtypeError, OptionError
from npattn.problem.arrays import Array

Tensor = torch.Tensor
ZERO = bytes(16)
"""Memory of one number of any dtype."""


def to_tensor(array: Array, device: torch.device) -> Tensor:
    """Return a NumPy array as a tensor on a device; read-only memory is copied, not shared."""
    if _is_of_ml_dtypes(array.dtype):
        bits = to_tensor(np.ascontiguousarray(array).view(f"i{array.itemsize}"), device)
        return bits.view(getattr(torch, array.dtype.name))
    if not array.flags.writeable or any(n < 0 for n in array.strides):
        array = array.copy()
    if array.dtype == np.float64 and not has_float64(device.type):
        array = array.astype(np.float32)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(array).to(device)


@lru_cache
def _is_of_ml_dtypes(dtype: np.dtype[Any]) -> bool:
    """True of dtypes of ml_dtypes, which torch reads by their bits alone."""
    return dtype.name.startswith(("bfloat16", "float8"))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert x to a dtype, rounded once, unlike torch: as `npattn.problem.arrays.cast`."""
    if x.dtype != torch.float64 or dtype.itemsize > 2 or not dtype.is_floating_point:
        return x.to(dtype)
    near, exact = x.to(torch.float32), x.detach()
    odd = near.detach()
    odd = torch.where(odd.abs() > exact.abs(), torch.nextafter(odd, torch.zeros_like(odd)), odd)
    last = ((odd != exact) & odd.isfinite()).to(torch.int32)
    odd = (odd.view(torch.int32) | last).view(torch.float32)
    # By a difference, which is exact, so that autograd sees the plain conversion.
    return (near + torch.where(near.isfinite(), odd - near, 0).detach()).to(dtype)


def to_host(tensor: Tensor) -> Array:
    """Return the numbers of a tensor that gets no gradient, as NumPy has them."""
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor.double()
    numbers: Array = tensor.numpy()
    return numbers


def refuse_batched(*tensors: Any) -> None:
    """Raise OptionError if one is batched by `torch.func.vmap`, under other transforms too."""
    for tensor in tensors:
        while isinstance(tensor, Tensor) and _wrapped(tensor):
            if _batched(tensor):
                raise OptionError(BATCHED)
            tensor = _unwrap(tensor)


BATCHED = (
    "tensors are batched by torch.func.vmap, which jacrev, jacfwd, hessian and is_grads_batched "
    "call: leading axes are batch axes already; for Jacobians and Hessians call "
    "torch.autograd.functional.jacobian and .hessian"
)
_functorch: Any = torch._C._functorch
_wrapped, _batched = _functorch.is_functorch_wrapped_tensor, _functorch.is_batchedtensor
_unwrap = _functorch.get_unwrapped


def stand_in(name: str, tensor: Tensor) -> Array:
    """Return an array of the shape and dtype of a tensor, without its memory."""
    if tensor.is_nested:
        raise DtypeError(f"{name} is nested, must be one tensor: pad it, and mask the padding")
    if tensor.is_quantized:
        raise DtypeError(f"{name} is quantized, must be plain: pass {name}.dequantize()")
    if tensor.layout != torch.strided:
        raise DtypeError(f"{name} is {tensor.layout}, must be strided: pass {name}.to_dense()")
    shape, dtype = tuple(tensor.shape), numpy_dtype(name, tensor.dtype)
    if torch.compiler.is_compiling():  # dynamo knows no arrays of bytes
        return np.broadcast_to(np.empty((), dtype), shape)
    # The same, in a twentieth of the time.
    return np.ndarray(shape, dtype, ZERO, strides=(0,) * tensor.ndim)


@lru_cache
def numpy_dtype(name: str, dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's dtype for one of torch. Raises DtypeError, naming `name`, without one."""
    word = short_name(dtype)
    same: Any = getattr(ml_dtypes, word, None) or getattr(np, word, None)
    if same is None or word.startswith("q"):
        if word == "bool":
            return np.dtype(np.bool_)
        raise DtypeError(f"{name} is {word}, must be floating: NumPy has no such dtype")
    return np.dtype(same)  # type: ignore[no-any-return]


def short_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


@lru_cache
def has_float64(device_type: str) -> bool:
    """Check that a kind of device computes in float64."""
    try:
        return bool(torch.ones(1, dtype=torch.float64, device=device_type).sum() == 1)
    except (TypeError, RuntimeError):
        return False
