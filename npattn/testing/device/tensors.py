"""Tensors that NumPy's functions compute with, on their device; and errors in torch operations.

The oracle and its bounds are written in NumPy. A `DeviceArray` takes part in them by NumPy's own
protocols (NEP 13 and 18): each function runs as torch's function of the same meaning. An operation
that has none raises TypeError, and so does one that would copy the numbers to the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from npattn import problem as numpy_problem
from npattn.problem.arrays import Array
from npattn.testing.comparison import Comparison
from npattn.torch.problem import ARRAYS, Problem
from npattn.torch.tensors import numpy_dtype, to_tensor

Tensor = torch.Tensor
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAMES = {"equal": "eq", "invert": "bitwise_not", "power": "pow"}
"""Functions of NumPy → of torch, where the names differ, or mean something else."""
WIDE = {"f": torch.float64, "c": torch.complex128}


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A tensor as NumPy's functions take it; `tensor` is on any device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    # --- NumPy's protocols ------------------------------------------------------------------------

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"an array on {self.tensor.device} is not copied to the host")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Return the result of torch's function for a ufunc; `out` takes its tensor instead."""
        (out,) = kwargs.pop("out", (None,))
        if method != "__call__":
            result = METHODS[ufunc, method](self, *inputs[1:], **kwargs)
        elif kwargs:
            return NotImplemented
        else:
            operands = [self._operand(x) for x in inputs]
            if ufunc is np.matmul:
                common = torch.promote_types(operands[0].dtype, operands[1].dtype)
                operands = [x.to(common) for x in operands]
            name = ufunc.__name__
            result = DeviceArray(getattr(torch, NAMES.get(name, name))(*operands))
        if out is None:
            return result
        out.tensor = result.tensor
        return out

    def __array_function__(self, f: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return FUNCTIONS[f](self, *args, **kwargs) if f in FUNCTIONS else NotImplemented

    def _operand(self, x: Any) -> Tensor:
        """Return an operand as a tensor; numbers are of 64 bits, and no tensor is of 8."""
        if isinstance(x, DeviceArray):
            wide = x.tensor.element_size() > 1 or not x.tensor.is_floating_point()
            return x.tensor if wide else x.tensor.float()
        array = np.asarray(x)
        if array.ndim:
            return to_tensor(array, self.tensor.device)
        # Numbers stay on the host: torch passes them to the device with its operations.
        return torch.tensor(array.item(), dtype=WIDE.get(array.dtype.kind))

    # --- attributes and methods of arrays ---------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    @property
    def size(self) -> int:
        return self.tensor.numel()

    @property
    def dtype(self) -> np.dtype[Any]:
        return numpy_dtype("array", self.tensor.dtype)

    @property
    def real(self) -> DeviceArray:
        return DeviceArray(self.tensor.real)

    @property
    def imag(self) -> DeviceArray:
        return DeviceArray(self.tensor.imag)

    def __getitem__(self, at: Any) -> DeviceArray:
        places = at if isinstance(at, tuple) else (at,)
        places = tuple(
            self._operand(x) if isinstance(x, (DeviceArray, np.ndarray)) else x for x in places
        )
        return DeviceArray(self.tensor[places])

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __float__(self) -> float:
        return float(self.tensor)

    def __len__(self) -> int:
        return len(self.tensor)

    def astype(self, dtype: Any, copy: bool = True) -> DeviceArray:
        name = np.dtype(dtype).name
        return DeviceArray(self.tensor.to(getattr(torch, name)))

    def view(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self.tensor.view(torch.int64 if dtype is np.uint64 else torch.float64))

    def swapaxes(self, a: int, b: int) -> DeviceArray:
        return DeviceArray(self.tensor.transpose(a, b))

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(self.tensor.reshape(*shape))

    def copy(self) -> DeviceArray:
        return DeviceArray(self.tensor.clone())

    def sum(self, axis: Any = None, keepdims: bool = False) -> DeviceArray:
        if axis == ():
            return self
        return DeviceArray(self.tensor.sum(axis, keepdim=keepdims))

    def mean(self, axis: int, keepdims: bool = False) -> DeviceArray:
        return DeviceArray(self.tensor.mean(axis, keepdim=keepdims))

    def any(self, axis: int | None = None, keepdims: bool = False) -> DeviceArray:
        if axis is None:
            return DeviceArray(self.tensor.any())
        return DeviceArray(self.tensor.any(axis, keepdim=keepdims))

    def all(self, axis: int | None = None, keepdims: bool = False) -> DeviceArray:
        return DeviceArray(~DeviceArray(~self.tensor).any(axis, keepdims).tensor)

    def max(
        self, axis: Any = None, keepdims: bool = False, initial: Any = None, where: Any = None
    ) -> DeviceArray:
        """Return the maxima over axes, at least `initial`, of elements where `where` is True."""
        x = self.tensor
        if where is not None and where is not True:
            x = torch.where(self._operand(where), x, initial)
        axes = (
            tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        )
        if any(x.shape[i] == 0 for i in axes):
            top = torch.full_like(x.sum(axes, keepdim=keepdims), initial)
        else:
            top = x.amax(axes, keepdim=keepdims) if axes else x
        return DeviceArray(top if initial is None else top.clamp(min=initial))

    def min(self, axis: Any = None, keepdims: bool = False, initial: Any = None) -> DeviceArray:
        least = None if initial is None else -initial
        return DeviceArray(-DeviceArray(-self.tensor).max(axis, keepdims, least).tensor)


def _reduceat(x: DeviceArray, starts: Array, axis: int) -> DeviceArray:
    """Return the largest number of each part of the last axis."""
    parts = torch.tensor_split(x.tensor, [int(i) for i in starts[1:]], axis)
    return DeviceArray(torch.stack([part.amax(axis) for part in parts], axis))


METHODS: dict[Any, Callable[..., DeviceArray]] = {
    (np.add, "reduce"): DeviceArray.sum,
    (np.maximum, "accumulate"): lambda x, axis: DeviceArray(torch.cummax(x.tensor, axis).values),
    (np.maximum, "reduceat"): _reduceat,
}
"""Methods of NumPy's universal functions that bounds use."""


def _function(f: Callable[..., Tensor], *rest: int) -> Callable[..., DeviceArray]:
    """Return a function of NumPy made of one on tensors.

    The first argument is for the device; arguments in the places `rest` are no arrays.
    """

    def call(one: DeviceArray, *args: Any, **kwargs: Any) -> DeviceArray:
        operands = [x if i in rest else one._operand(x) for i, x in enumerate(args)]
        return DeviceArray(f(*operands, **kwargs))

    return call


def _join(f: Callable[..., Tensor]) -> Callable[..., DeviceArray]:
    def call(one: DeviceArray, arrays: Iterable[Any], axis: int = 0) -> DeviceArray:
        return DeviceArray(f([one._operand(x) for x in arrays], axis))

    return call


def _like(value: float) -> Callable[..., DeviceArray]:
    return _function(lambda x: torch.full_like(x, value))


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.where: _function(torch.where),
    np.broadcast_to: _function(torch.broadcast_to, 1),
    np.concatenate: _join(torch.cat),
    np.stack: _join(torch.stack),
    np.repeat: _function(lambda x, n, axis: x.repeat_interleave(n.to(x.device), axis)),
    np.sort: _function(lambda x, axis: torch.sort(x, axis).values, 1),
    np.diff: _function(lambda x, axis: torch.diff(x, dim=axis)),
    np.flip: _function(lambda x, axis: torch.flip(x, (axis,)), 1),
    np.clip: _function(torch.clamp),
    np.isneginf: _function(torch.isneginf),
    np.zeros_like: _like(0),
    np.full_like: _function(torch.full_like, 1),
    np.any: lambda one, x, axis=None, **kwargs: x.any(axis, **kwargs),
    np.max: lambda one, x, axis=None, **kwargs: x.max(axis, **kwargs),
}
"""Functions of NumPy that the oracle and its bounds call."""


def tensor_of(x: Any, device: Any) -> Tensor:
    """Return an array of NumPy, or of `DeviceArray`, as a tensor on a device."""
    return x.tensor.to(device) if isinstance(x, DeviceArray) else to_tensor(x, torch.device(device))


class DeviceProblem(numpy_problem.Problem):
    """A problem of tensors, as the oracle of NumPy takes it; computed in float64."""

    tensors: Problem  # it checks the arrays and options, of `replace` too

    def __init__(self, tensors: Problem) -> None:
        fields = self.__dict__
        fields.update(tensors.__dict__)
        names = (*ARRAYS, "visible", "mask_array", "bias_array")
        tensors_by_id = {
            id(x): DeviceArray(x) for n in names if (x := getattr(tensors, n)) is not None
        }
        fields.update({n: tensors_by_id.get(id(getattr(tensors, n))) for n in names})
        fields |= {"tensors": tensors, "dtype": np.dtype(float), "storage": None}

    def replace(self, **changes: Any) -> DeviceProblem:
        """Return the problem with other arrays or options, checked again."""
        plain = {n: x.tensor if isinstance(x, DeviceArray) else x for n, x in changes.items()}
        tensors: Any = self.tensors.replace(**plain)
        return DeviceProblem(tensors)


# --- errors ---------------------------------------------------------------------------------------


def ratios(result: Tensor, exact: Tensor, tolerance: Tensor) -> Tensor:
    """Return error / tolerance of each element, as in `compare_arrays`."""
    wide = result.to(exact.dtype)
    size, finite = wide.abs(), torch.isfinite(wide)
    # Neighbours of |result|: their bits, read as an integer, are one more and one less.
    bits = result.view(BITS[result.element_size()])
    bits = bits & torch.iinfo(bits.dtype).max
    above = (bits + 1).view(result.dtype).to(exact.dtype) - size
    below = size - (bits - 1).abs().view(result.dtype).to(exact.dtype)
    below = torch.where(size == 0, above, below)
    above = torch.where(torch.isfinite(above), above, below)
    over = torch.where(torch.signbit(wide), -exact, exact) - size
    gap = torch.maximum(over - above / 2, -over - below / 2).clamp(min=0)
    gap = torch.where(finite, gap, math.inf)
    gap = torch.where(torch.isfinite(exact), gap, torch.where(finite, math.inf, 0))
    overflows = torch.isinf(wide) & (torch.sign(wide) == torch.sign(exact))
    if result.dtype == torch.float8_e4m3fn:  # it overflows to NaN
        overflows = torch.isnan(wide)
    beyond = overflows & (exact.abs() + tolerance > torch.finfo(result.dtype).max)
    ratio = torch.where(gap == 0, 0, gap / tolerance)
    ratio = torch.where(beyond | torch.isposinf(tolerance), 0, ratio)
    return torch.where(torch.isnan(ratio), math.inf, ratio)  # NaN never passes


def real(result: Tensor) -> Tensor:
    """Return a result as a floating tensor, with complex numbers that are not real as NaN."""
    if result.is_complex():
        return torch.where(result.imag == 0, result.real, math.nan)
    return result if result.is_floating_point() else result.to(torch.float32)


def worst_ratios(
    results: Iterable[tuple[str, Tensor]],
    exact: Mapping[str, Tensor],
    tolerance: Mapping[str, Tensor],
) -> dict[str, float]:
    """Return the largest error / tolerance of each result, after one wait for the device.

    Results of one dtype are compared together: launches on a device take longer than its work.
    """
    groups: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    worst: dict[str, float] = {}
    for name, x in results:
        if x.shape != exact[name].shape:
            worst[name] = math.inf
        elif x.numel():
            groups.setdefault(real(x).dtype, []).append((name, real(x)))
    names: list[str] = []
    tops: list[Tensor] = []
    for group in groups.values():
        all_ratios = ratios(
            torch.cat([x.reshape(-1) for _, x in group]),
            torch.cat([exact[name].reshape(-1) for name, _ in group]),
            torch.cat([tolerance[name].reshape(-1) for name, _ in group]),
        )
        names += [name for name, _ in group]
        tops += [part.amax() for part in torch.split(all_ratios, [x.numel() for _, x in group])]
    if tops:
        for name, ratio in zip(names, torch.stack(tops).tolist(), strict=True):
            worst[name] = max(worst.get(name, 0.0), ratio)
    return worst


def compare_tensors(name: str, result: Tensor, exact: Tensor, tolerance: Tensor) -> Comparison:
    """Return the worst element of one result; a few numbers come to the host."""
    if result.shape != exact.shape:
        note = f"{name} has shape {tuple(result.shape)}, want {tuple(exact.shape)}"
        return Comparison(name, math.inf, (), 0.0, 0.0, 0.0, 1, 1, note)
    ratio = ratios(real(result), exact, tolerance)
    at = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
    worst, got, want, allowed = (float(x[at]) for x in (ratio, real(result), exact, tolerance))
    wrong = int((ratio > 1).sum())
    return Comparison(name, worst, at, got, want, allowed, wrong, ratio.numel())
