"""One attention problem on tensors: `npattn.Problem` is the judge, the tensors stay beside it.

`npattn.Problem` looks at shapes, dtypes and options, never at numbers, so that it can judge
stand-ins: arrays of the same shapes and dtypes without memory of their own. Whatever is wrong is
therefore said in the same words. Here is only what NumPy has no word for: tensors and devices.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache, partial
from typing import Any

import ml_dtypes
import numpy as np
import torch

from npattn import problem as numpy_problem
from npattn.arrays import Array, BiasLike, MaskLike
from npattn.checks import read_bias, read_boolean, read_floating, read_mask
from npattn.errors import DtypeError, OptionError
from npattn.torch import score_mod
from npattn.torch.namespace import Namespace, namespace

__all__ = ["ENGINES", "Problem", "Tensor", "checked_device", "dtype_of", "moved", "stand_in"]

Tensor = torch.Tensor

ENGINES = ("auto", "dense", "tiled", "fused")
ARRAYS = ("q", "k", "v", "mask", "bias", "sinks", "dropout_mask")
COMPUTE = {np.dtype("f4"): torch.float32, np.dtype("f8"): torch.float64}
STORAGE = {np.dtype("bfloat16"): torch.bfloat16, np.dtype("f2"): torch.float16}


class Problem(numpy_problem.Problem):
    """Tensors and options of one attention call, checked and normalised when made.

    What `npattn.Problem` is for arrays: the same parameters, attributes and errors. q, k, v are
    tensors on one device, of any real floating dtype; mask, bias, sinks and dropout_mask are
    tensors on that device, NumPy arrays, which are moved there, or objects of `npattn.masks` and
    `npattn.biases`. No tensor that was given is changed or copied here.

    Attributes
    ----------
    device : torch.device
        Where q, k, v are.
    dtype : torch.dtype
        What is computed in: float64 unless said; float32 where the device has no float64.
    storage : torch.dtype or None
        The narrow dtype that mixed precision stores in; then `dtype` is torch.float32.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `npattn.Problem`; also if the tensors are on several devices, or complex.
    """

    q: Any
    k: Any
    v: Any
    mask: Any
    bias: Any
    sinks: Any
    dropout_mask: Any
    storage: Any
    device: torch.device
    straight: bool  # q, k, v have four axes, and broadcast nothing
    ready: bool  # and are in the dtype computed in

    def __init__(self, q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> None:
        kinds = [x if type(x) in PLAIN else _kind(x) for x in (q, k, v, mask)]
        for name, x in options.items():
            kinds.append(x if type(x) in PLAIN else _kind(x, name in ARRAYS))
        if OTHER in kinds:
            super().__init__(q, k, v, mask, **options)
            return
        own = self.__dict__
        own.update(_like(tuple(options), *kinds))
        own["q"], own["k"], own["v"], own["mask"] = q, k, v, mask
        for name in ("bias", "sinks", "dropout_mask"):
            if name in options:
                own[name] = options[name]
        own["_plans"] = {}

    def __post_init__(self) -> None:
        own = self.__dict__
        given = (self.causal, self.scale, self.dtype, self.alignment)
        for name in ("q", "k", "v"):
            if not isinstance(own[name], Tensor):
                raise DtypeError(
                    f"{name} is a {type(own[name]).__qualname__}, must be a torch tensor: pass "
                    f"torch.as_tensor({name}), or arrays to npattn.attention"
                )
        device = own["device"] = self.q.device
        if device.type == "meta":
            raise OptionError(
                "q is on meta, must be on a device that holds numbers: make it with device='cpu'"
            )
        for name in ("causal", "window", "scale", "softcap", "dropout_rate"):
            if isinstance(own[name], Tensor):
                raise OptionError(
                    f"{name} is the tensor {own[name]}, must be a plain Python value, for no "
                    f"gradient goes through it: pass {name}.item()"
                )
        for name in ARRAYS[3:]:
            if own[name] is not None and not isinstance(own[name], Tensor):
                own[name] = _read(name, own[name], device)
        if not isinstance(self.engine, str) or self.engine not in ENGINES:
            raise OptionError(f"engine is {self.engine!r}, must be one of {', '.join(ENGINES)}")
        arrays = {n: _judged(n, own[n], device) for n in ARRAYS}
        own.update(_verdict(arrays, {n: own[n] for n in OPTIONS}, device))
        own["_given"] = given
        heads = ((self.q, self.H), (self.k, self.K), (self.v, self.K))
        own["straight"] = len(self.lead) == 1 and all(
            x.shape[:-2] == (*self.lead, n) for x, n in heads
        )
        rounded = self.storage is not None or any(x.dtype != self.dtype for x, _ in heads)
        own["ready"] = self.straight and not rounded
        own["_plans"] = {}  # of the engine: what is seen, once for forward and backward
        own["_shared"] = {}  # the same, for all problems of this kind: plans without tensors

    def __repr__(self) -> str:
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name) if field.init else None
            if isinstance(value, Tensor):
                words.append(f"{field.name}={value.dtype} {tuple(value.shape)}")
            elif field.init and field.name != "_" and value != field.default:
                words.append(f"{field.name}={value!r}")
        return f"Problem({', '.join(words)})"

    @property
    def xp(self) -> Namespace:
        """NumPy's words for tensors on the device."""
        return namespace(self.device)

    @property
    def textbook(self) -> Any:
        """What conventions ask beside the engine."""
        return score_mod

    def to_compute_dtype(self, x: Any) -> Any:
        """x in the dtype computed in."""
        return x.to(self.dtype)

    def round_to_storage(self, x: Any) -> Any:
        """x as it is kept beside what computes: rounded, in mixed precision.  [15]"""
        return x if self.storage is None else x.to(self.storage).to(self.dtype)

    def to_output_dtype(self, x: Any) -> Any:
        """x in the dtype that is returned.  [15]"""
        return x if self.storage is None else x.to(self.storage)

    def holding(self, **tensors: Any) -> Problem:
        """The same problem with tensors of the same shapes and dtypes: nothing to check."""
        other = object.__new__(Problem)
        own = other.__dict__
        own.update(self.__dict__)
        own.update(tensors)
        for name in ("visible", "mask_array", "bias_array"):
            own.pop(name, None)
        return other

    def _as_array(self, value: Any) -> Any:
        if value is None or isinstance(value, Tensor):
            return value
        array = value.to_array(self.T, self.S, lead=self.lead, H=self.H)
        return moved(array, self.device)


def moved(array: Array, device: torch.device) -> Tensor:
    """A NumPy array as a tensor on a device, which shares no memory with what cannot be written."""
    if array.dtype == ml_dtypes.bfloat16 or array.dtype.name.startswith("float8"):
        bits = moved(np.ascontiguousarray(array).view(f"i{array.itemsize}"), device)
        return bits.view(getattr(torch, array.dtype.name))
    if not array.flags.writeable or any(n < 0 for n in array.strides):
        array = array.copy()
    if array.dtype == np.float64 and not _has_float64(device.type):
        array = array.astype(np.float32)
    native = array.dtype.newbyteorder("=")
    return torch.from_numpy(array.astype(native, copy=False)).to(device)


def checked_device(device: Any) -> torch.device:
    """A device that torch can use here; OptionError where it cannot."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as err:
        told = str(err).splitlines()[0]
        raise OptionError(
            f"device is {device!r}, must be one that torch can use here: {told}"
        ) from err
    return found


def stand_in(name: str, tensor: Tensor) -> Array:
    """An array of the shape and dtype of a tensor, without its memory."""
    if tensor.is_nested:
        raise DtypeError(f"{name} is nested, must be one tensor: pad it, and mask what is padding")
    if tensor.is_quantized:
        raise DtypeError(f"{name} is quantized, must be plain: pass {name}.dequantize()")
    if tensor.layout != torch.strided:
        raise DtypeError(f"{name} is {tensor.layout}, must be strided: pass {name}.to_dense()")
    return np.broadcast_to(np.empty((), _numpy_dtype(name, tensor.dtype)), tuple(tensor.shape))


def dtype_of(dtype: np.dtype[Any]) -> torch.dtype:
    """The dtype of torch for one that npattn computes in or stores in."""
    return (COMPUTE | STORAGE)[dtype]


# --- the parts ------------------------------------------------------------------------------------


def _read(name: str, value: Any, device: torch.device) -> Any:
    """What is no tensor: an object as it is, an array moved to the device."""
    if name in ("mask", "bias") and isinstance(value, (MaskLike, BiasLike)):
        return value
    array = READ[name](value)  # what has a wrong dtype need not be one of torch
    assert isinstance(array, np.ndarray)
    if array.dtype.kind == "c":
        raise _is_complex(name, array.dtype)
    if np.dtype(array.dtype).name in ("longdouble", "float128", "float96"):
        array = array.astype(np.float64)
    return moved(array, device)


READ: dict[str, Any] = {
    "mask": read_mask,
    "bias": read_bias,
    "sinks": partial(read_floating, "sinks"),
    "dropout_mask": partial(read_boolean, "dropout_mask"),
}


def _judged(name: str, x: Any, device: torch.device) -> Any:
    """What `npattn.Problem` judges in the place of x."""
    if not isinstance(x, Tensor):
        return x
    if x.device != device:
        raise OptionError(
            f"{name} is on {x.device}, must be on {device} as q: pass {name}.to({str(device)!r})"
        )
    return stand_in(name, x)


OPTIONS = ("causal", "window", "scale", "softcap", "score_mod", "dropout_rate", "dtype",
           "alignment")  # fmt: skip


# --- what was judged before -----------------------------------------------------------------------

PLAIN = frozenset({type(None), bool, int, float, str, type, torch.dtype})
OTHER = object()
STRIDED = torch.strided


def _kind(x: Any, may_be_tensor: bool = True) -> Any:
    """All that is judged of an argument that is not plain; OTHER where that is not kept."""
    if type(x) is tuple and len(x) == 2 and all(type(n) in (int, type(None)) for n in x):
        return x  # a window
    if not may_be_tensor:
        return OTHER
    if isinstance(x, Tensor) and x.layout is STRIDED and not (x.is_nested or x.is_quantized):
        return x.shape, x.dtype, x.device
    return OTHER


def _one_number(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of that shape without its memory."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


@lru_cache(maxsize=1024, typed=True)  # typed: 1 is not True
def _like(names: tuple[str, ...], *kinds: Any) -> dict[str, Any]:
    """The fields of a `Problem` of such arguments, but for the tensors."""
    given: list[Any] = [
        _one_number(*x) if isinstance(x, tuple) and len(x) == 3 else x for x in kinds
    ]
    made: Any = object.__new__(Problem)
    numpy_problem.Problem.__init__(made, *given[:4], **dict(zip(names, given[4:], strict=True)))
    return {n: x for n, x in made.__dict__.items() if not isinstance(x, Tensor)}


# --- judged by npattn -----------------------------------------------------------------------------


def _verdict(
    arrays: dict[str, Any], options: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """The fields of a `npattn.Problem` of stand-ins, but for the arrays themselves."""
    for name, array in arrays.items():
        if isinstance(array, np.ndarray) and array.dtype.kind == "c":
            raise _is_complex(name, array.dtype)
    asked, wide = options["dtype"], _has_float64(device.type)
    if isinstance(asked, torch.dtype):
        options = options | {"dtype": _numpy_dtype("dtype", asked)}
    if asked is None and not wide:
        options = options | {"dtype": np.float32}
    judge = numpy_problem.Problem(**arrays, **options)
    if judge.dtype not in COMPUTE:
        raise DtypeError(
            f"dtype is {judge.dtype}, must be float32, float64, bfloat16 or float16 for tensors: "
            "npattn.attention computes in longdouble and complex"
        )
    if judge.dtype == np.float64 and not wide:
        raise DtypeError(f"dtype is float64, must be float32: {device.type} has no float64")
    fields = {n: x for n, x in judge.__dict__.items() if n not in (*ARRAYS, "_given", "engine")}
    fields["dtype"] = COMPUTE[judge.dtype]
    fields["storage"] = None if judge.storage is None else STORAGE[judge.storage]
    return fields


def _is_complex(name: str, dtype: Any) -> DtypeError:
    return DtypeError(
        f"{name} is {dtype}, must be real on tensors: npattn.attention takes complex arrays"
    )


@lru_cache
def _numpy_dtype(name: str, dtype: torch.dtype) -> np.dtype[Any]:
    word = str(dtype).removeprefix("torch.")
    found: Any = getattr(ml_dtypes, word, None) or getattr(np, word, None)
    if found is None or word.startswith("q"):
        if word == "bool":
            return np.dtype(np.bool_)
        raise DtypeError(f"{name} is {word}, must be floating: NumPy has no such dtype")
    dtype_of_numpy: np.dtype[Any] = np.dtype(found)
    return dtype_of_numpy


@lru_cache
def _has_float64(device_type: str) -> bool:
    try:
        return bool(torch.ones(1, dtype=torch.float64, device=device_type).sum() == 1)
    except (TypeError, RuntimeError):
        return False
