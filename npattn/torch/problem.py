"""One attention problem on tensors, checked by `npattn.Problem`.

`npattn.Problem` reads shapes, dtypes and options, never numbers. So it checks stand-ins, arrays of
the same shapes and dtypes without memory of their own, and every error has the same message. This
module adds the checks that NumPy has no counterpart for: tensors and devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from npattn import problem as numpy_problem
from npattn.errors import DtypeError, OptionError
from npattn.problem import checks
from npattn.problem.arrays import BiasLike, MaskLike
from npattn.problem.options import OPTIONS
from npattn.torch import score_mod
from npattn.torch.tensors import cast, has_float64, numpy_dtype, stand_in, to_tensor

Tensor = torch.Tensor


class Namespace:
    """Functions with NumPy's names and arguments, on tensors of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __getattr__(self, name: str) -> Any:
        """Return a function that torch and NumPy call alike."""
        return getattr(torch, name)

    def arange(self, n: int) -> Tensor:
        return torch.arange(n, device=self.device)

    def zeros(self, shape: Sequence[int], dtype: Any = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def concatenate(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        return torch.cat(list(tensors), dim=axis)

    def minimum(self, x: Tensor, most: int) -> Tensor:
        return torch.clamp(x, max=most)

    def isfinite(self, x: Tensor) -> Tensor:
        return torch.isfinite(x.float() if x.element_size() == 1 else x)


@lru_cache
def namespace(device: torch.device) -> Namespace:
    return Namespace(device)


ENGINES = ("auto", "dense", "tiled", "fused")
ARRAYS = ("q", "k", "v", *(name for name, option in OPTIONS.items() if option.kind == "array"))
SETTINGS = tuple(name for name in OPTIONS if name not in ARRAYS)
COMPUTE = {np.dtype("f4"): torch.float32, np.dtype("f8"): torch.float64}
STORAGE = {np.dtype("bfloat16"): torch.bfloat16, np.dtype("f2"): torch.float16}


class Problem(numpy_problem.Problem):
    """Tensors and options of one attention call, checked and normalised once, when made.

    The counterpart of `npattn.Problem`, with the same parameters, attributes and errors. q, k, v
    are tensors on one device, of any real floating dtype; mask, bias, sinks, dropout_mask and gate
    are tensors on that device, NumPy arrays, which are copied there, or objects of `npattn.masks`
    and `npattn.biases`. Tensors are neither changed nor copied.

    Attributes
    ----------
    device : torch.device
        Where q, k, v are.
    dtype : torch.dtype
        Computed in: float64 by default, float32 if the device has no float64.
    storage : torch.dtype or None
        The 16-bit dtype that mixed precision stores in; then `dtype` is torch.float32.

    Raises
    ------
    ShapeError
        If shapes do not fit together, as in `npattn.Problem`.
    DtypeError
        As in `npattn.Problem`; also if q, k or v is no tensor, or a tensor is complex.
    OptionError
        As in `npattn.Problem`; also if tensors are on different devices.
    """

    q: Any
    k: Any
    v: Any
    mask: Any
    bias: Any
    sinks: Any
    dropout_mask: Any
    gate: Any
    storage: Any
    device: torch.device
    straight: bool  # q, k, v have four axes and broadcast nothing
    ready: bool  # straight, and in the dtype computed in

    def __init__(self, q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> None:
        kinds = [x if type(x) in PLAIN else _kind(x) for x in (q, k, v, mask)]
        for name, x in options.items():
            kinds.append(x if type(x) in PLAIN else _kind(x, name in ARRAYS))
        if OTHER in kinds:
            super().__init__(q, k, v, mask, **options)
            return
        fields = self.__dict__
        fields.update(_like(tuple(options), *kinds))
        fields["q"], fields["k"], fields["v"], fields["mask"] = q, k, v, mask
        for name in ARRAYS[4:]:
            if name in options:
                fields[name] = options[name]
        fields["_plans"] = {}

    def __post_init__(self) -> None:
        fields = self.__dict__
        arguments = (self.causal, self.scale, self.dtype, self.alignment)
        for name in ("q", "k", "v"):
            if not isinstance(fields[name], Tensor):
                raise DtypeError(
                    f"{name} is a {type(fields[name]).__qualname__}, must be a torch tensor: pass "
                    f"torch.as_tensor({name}), or pass arrays to npattn.attention"
                )
        device = fields["device"] = self.q.device
        if device.type == "meta":
            raise OptionError(
                "q is on meta, must be on a device that stores values: create it on device='cpu'"
            )
        for name in SETTINGS:
            if isinstance(fields[name], Tensor) and OPTIONS[name].kind != "callable":
                raise OptionError(
                    f"{name} is the tensor {fields[name]}, must be a plain Python value (it gets "
                    f"no gradient): pass {name}.item()"
                )
        for name in ARRAYS[3:]:
            if fields[name] is not None and not isinstance(fields[name], Tensor):
                fields[name] = _read(name, fields[name], device)
        checks.check_choice("engine", self.engine, ENGINES)
        arrays = {n: _check_device_of(n, fields[n], device) for n in ARRAYS}
        fields.update(
            _fields(arrays, {n: fields[n] for n in (*SETTINGS, "dtype", "alignment")}, device)
        )
        fields["_given"] = arguments
        heads = ((self.q, self.H), (self.k, self.K), (self.v, self.K))
        fields["straight"] = len(self.lead) == 1 and all(
            x.shape[:-2] == (*self.lead, n) for x, n in heads
        )
        rounded = self.storage is not None or any(x.dtype != self.dtype for x, _ in heads)
        fields["ready"] = self.straight and not rounded
        fields["_plans"] = {}  # of the engine, for forward and backward
        fields["_shared"] = {}  # the same without tensors, for all problems of this kind

    def __repr__(self) -> str:
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name) if field.init else None
            if isinstance(value, Tensor):
                parts.append(f"{field.name}={value.dtype} {tuple(value.shape)}")
            elif field.init and field.name != "_" and value != field.default:
                parts.append(f"{field.name}={value!r}")
        return f"Problem({', '.join(parts)})"

    @property
    def xp(self) -> Namespace:
        """Functions with NumPy's names for tensors on the device."""
        return namespace(self.device)

    @property
    def textbook(self) -> Any:
        """Functions for `npattn.conventions` in the place of those of `npattn.engines.dense`."""
        return score_mod

    @property
    def lowest(self) -> float:
        """Smallest finite number of the dtype of q, or of mixed precision, in range of `dtype`."""
        storage = self.q.dtype if self.storage is None else self.storage
        return max(torch.finfo(storage).min, torch.finfo(self.dtype).min)

    def to_compute_dtype(self, x: Any) -> Any:
        """Return x in the dtype computed in."""
        return x.to(self.dtype)

    def to_operand(self, x: Any) -> Any:
        """Return an input in the dtype computed in, rounded once in mixed precision [15]."""
        return x.to(self.dtype) if self.storage is None else cast(x, self.storage).to(self.dtype)

    def to_output_dtype(self, x: Any) -> Any:
        """Return x in the dtype of results [15]."""
        return x if self.storage is None else cast(x, self.storage)

    def with_tensors(self, **tensors: Any) -> Problem:
        """Return this problem with other tensors of the same shapes and dtypes, unchecked."""
        other = object.__new__(Problem)
        fields = other.__dict__
        fields.update(self.__dict__)
        fields.update(tensors)
        for name in ("visible", "mask_array", "bias_array"):
            fields.pop(name, None)
        return other

    def as_array(self, value: Any) -> Any:
        """Return a mask or a bias of this problem's sizes as a tensor; None is None."""
        if value is None or isinstance(value, Tensor):
            return value
        array = value.to_array(self.T, self.S, lead=self.lead, H=self.H)
        return to_tensor(array, self.device)


def _read(name: str, value: Any, device: torch.device) -> Any:
    """Read an option that is no tensor: a mask or bias as it is, an array as a tensor."""
    if name in ("mask", "bias") and isinstance(value, (MaskLike, BiasLike)):
        return value
    array = READ[name](value)  # first: torch may lack a wrong dtype
    assert isinstance(array, np.ndarray)
    if array.dtype.kind == "c":
        raise _complex_error(name, array.dtype)
    if np.dtype(array.dtype).name in ("longdouble", "float128", "float96"):
        array = array.astype(np.float64)
    return to_tensor(array, device)


READ: dict[str, Any] = {
    "mask": checks.read_mask,
    "bias": checks.read_bias,
    "sinks": partial(checks.read_floating, "sinks"),
    "dropout_mask": partial(checks.read_boolean, "dropout_mask"),
    "gate": checks.read_gate,
}


def _check_device_of(name: str, x: Any, device: torch.device) -> Any:
    """Return the stand-in of x for `npattn.Problem`, after checking the device of a tensor."""
    if not isinstance(x, Tensor):
        return x
    if x.device != device:
        raise OptionError(
            f"{name} is on {x.device}, must be on {device} as q: pass {name}.to({str(device)!r})"
        )
    return stand_in(name, x)


# --- problems checked before ----------------------------------------------------------------------

PLAIN = frozenset({type(None), bool, int, float, str, type, torch.dtype})
OTHER = object()
STRIDED = torch.strided


def _kind(x: Any, may_be_tensor: bool = True) -> Any:
    """Return what is checked of an argument that is not plain; OTHER if that cannot be kept."""
    if type(x) is tuple and len(x) == 2 and all(type(n) in (int, type(None)) for n in x):
        return x  # a window
    if not may_be_tensor:
        return OTHER
    if isinstance(x, Tensor) and x.layout is STRIDED and not (x.is_nested or x.is_quantized):
        return x.shape, x.dtype, x.device
    return OTHER


def _one_number(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of that shape without its memory."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


@lru_cache(maxsize=1024, typed=True)  # typed: 1 is not True
def _like(names: tuple[str, ...], *kinds: Any) -> dict[str, Any]:
    """Fields of a `Problem` of such arguments, tensors excepted."""
    args: list[Any] = [
        _one_number(*x) if isinstance(x, tuple) and len(x) == 3 else x for x in kinds
    ]
    problem: Any = object.__new__(Problem)
    numpy_problem.Problem.__init__(problem, *args[:4], **dict(zip(names, args[4:], strict=True)))
    return {n: x for n, x in problem.__dict__.items() if not isinstance(x, Tensor)}


# --- checks of npattn -----------------------------------------------------------------------------


def _fields(
    arrays: dict[str, Any], options: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Fields of a `npattn.Problem` of stand-ins, arrays excepted."""
    for name, array in arrays.items():
        if isinstance(array, np.ndarray) and array.dtype.kind == "c":
            raise _complex_error(name, array.dtype)
    dtype, wide = options["dtype"], has_float64(device.type)
    if isinstance(dtype, torch.dtype):
        options = options | {"dtype": numpy_dtype("dtype", dtype)}
    if dtype is None and not wide:
        options = options | {"dtype": np.float32}
    problem = numpy_problem.Problem(**arrays, **options)
    if problem.dtype not in COMPUTE:
        raise DtypeError(
            f"dtype is {problem.dtype}, must be float32, float64, bfloat16 or float16 for tensors: "
            "npattn.attention computes in longdouble and complex"
        )
    if problem.dtype == np.float64 and not wide:
        raise DtypeError(f"dtype is float64, must be float32: {device.type} has no float64")
    fields = {n: x for n, x in problem.__dict__.items() if n not in (*ARRAYS, "_given", "engine")}
    fields["dtype"] = COMPUTE[problem.dtype]
    fields["storage"] = None if problem.storage is None else STORAGE[problem.storage]
    return fields


def _complex_error(name: str, dtype: Any) -> DtypeError:
    return DtypeError(
        f"{name} is {dtype}, must be real on tensors: npattn.attention takes complex arrays"
    )
