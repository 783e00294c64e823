"""Tensors of torch on a device as a framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np

from npattn.arrays import Array
from npattn.errors import OptionError, optional_import
from npattn.testing.adapters.base import ImplementationError, ResultError, refuse
from npattn.testing.adapters.numpy import READABLE

with optional_import("torch targets need", "torch", "torch"):
    import torch

__all__ = ["Torch"]

# Dtypes that NumPy has only through ml_dtypes are converted as integers of their size.
DISGUISES = {
    torch.bfloat16: (ml_dtypes.bfloat16, torch.int16, np.int16),
    torch.float8_e4m3fn: (ml_dtypes.float8_e4m3fn, torch.int8, np.int8),
    torch.float8_e5m2: (ml_dtypes.float8_e5m2, torch.int8, np.int8),
}
READ = {getattr(torch, dtype.name, None) for dtype in READABLE}
PLAIN = (torch.Tensor, torch.nn.Parameter)


class Torch:
    """Tensors of torch on a device; gradients by autograd."""

    name = "torch"
    differentiates = True
    compiles = immutable = False

    def __init__(self, device: str | None = None) -> None:
        self.device = device or "cpu"
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as err:
            reason = str(err).splitlines()[0]
            raise OptionError(
                f"device is {device!r}, which torch cannot use here: {reason}"
            ) from err

    def one_thread(self) -> AbstractContextManager[None]:
        return self._set_threads(1)

    @contextmanager
    def _set_threads(self, count: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def threads(self, count: int) -> AbstractContextManager[None] | None:
        return self._set_threads(count)

    def finish(self) -> None:
        if torch.device(self.device).type != "cpu":
            torch.accelerator.synchronize(self.device)

    def device_works(self) -> bool:
        try:
            return float(torch.ones(1, device=self.device).sum()) == 1
        except RuntimeError:  # after an access to a wrong address every call fails
            return False

    def allowing(self, dtype: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def give(self, array: Array) -> torch.Tensor:
        if any(stride < 0 for stride in array.strides):
            raise ImplementationError("torch tensors have no negative strides")
        if not array.flags.writeable:  # a view of stride 0: expanded on torch's side instead
            first = array[tuple(slice(None if n else 1) for n in array.strides)]
            return self.give(np.array(first)).expand(array.shape)
        for tensor_dtype, (dtype, bits, np_bits) in DISGUISES.items():
            if array.dtype == dtype:
                tensor = torch.from_numpy(array.view(np_bits)).to(self.device)
                assert tensor.dtype == bits
                return tensor.view(tensor_dtype)
        return torch.from_numpy(array).to(self.device)

    def take(self, value: Any) -> Array:
        if not isinstance(value, torch.Tensor):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise ResultError(f"returned {kind}, must be a torch tensor (or framework=)")
        if type(value) not in PLAIN:
            # One may compute when it is read, or hold other numbers than it shows.
            raise ResultError(
                f"returned {type(value).__module__}.{type(value).__qualname__}, a subclass of "
                "torch.Tensor, must be a plain tensor"
            )
        if value.is_nested or value.layout != torch.strided:
            kind = "a nested tensor" if value.is_nested else f"a tensor of {value.layout}"
            raise ResultError(f"returned {kind}, must be a dense one")
        if value.dtype not in READ:
            raise ResultError(f"returned a tensor of {value.dtype}")
        # An instance may have a detach of its own.
        value = torch.Tensor.detach(value).cpu().resolve_conj().resolve_neg()
        if value.dtype in DISGUISES:
            dtype, bits, _ = DISGUISES[value.dtype]
            return np.array(value.contiguous().view(bits).numpy().view(dtype))
        return np.array(value.numpy())

    def memory(self, value: torch.Tensor) -> Array | None:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return None
        value = torch.Tensor.detach(value)
        if value.dtype not in READ or value.layout != torch.strided:
            return None
        if value.is_conj() or value.is_neg():
            return None
        return (
            value.view(DISGUISES[value.dtype][1]) if value.dtype in DISGUISES else value
        ).numpy()

    def add_mask(self, mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros_like(mask, dtype=q.dtype)
        return zeros.masked_fill(~mask, torch.finfo(q.dtype).min)

    def hide(self, bias: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, bias, -torch.inf)

    def gradients(
        self,
        call: Callable[..., dict[str, Any]],
        inputs: Mapping[str, Any],
        cotangents: Mapping[str, Any],
        names: Iterable[str],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        names = tuple(names)
        leaves = {name: inputs[name].detach().requires_grad_() for name in names}
        results = call(**leaves)
        reached = [name for name in cotangents if results[name].requires_grad]
        if not reached and any(results[name].numel() for name in cotangents):
            raise ImplementationError("its result does not require grad: autograd cannot reach it")
        grads: Iterable[torch.Tensor | None] = [None] * len(names)
        if reached:
            outputs, dout = zip(*((results[n], cotangents[n]) for n in reached), strict=True)
            grads = torch.autograd.grad(outputs, list(leaves.values()), dout, allow_unused=True)
        pairs = zip(names, grads, strict=True)
        # Autograd returns None for zero.
        return results, {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in pairs}

    def gradients_twice(
        self,
        call: Callable[..., dict[str, Any]],
        inputs: Mapping[str, Any],
        cotangents: Mapping[str, Any],
        second: Mapping[str, Any],
    ) -> dict[str, Any]:
        leaves = {name: inputs[name].detach().requires_grad_() for name in second}
        given = {name: x.detach().requires_grad_() for name, x in cotangents.items()}
        results = call(**leaves)
        reached = {name: x for name, x in given.items() if results[name].requires_grad}
        if not reached:
            raise refuse("its result does not require grad: autograd cannot reach it")
        outputs, wanted = [results[name] for name in reached], list(leaves.values())
        douts = list(reached.values())
        first = torch.autograd.grad(outputs, wanted, douts, create_graph=True, allow_unused=True)
        pairs = zip(first, second.values(), strict=True)
        recorded = [(g, x) for g, x in pairs if g is not None and g.requires_grad]
        if not recorded:
            raise refuse("its gradients do not require grad: autograd cannot reach them")
        gradients, directions = zip(*recorded, strict=True)
        if _is_differentiable_once(gradients):
            raise refuse("its backward is marked once_differentiable")
        own = leaves | given
        twice = torch.autograd.grad(gradients, list(own.values()), directions, allow_unused=True)
        grads = zip(own, twice, strict=True)
        return {n: torch.zeros_like(own[n]) if g is None else g for n, g in grads}


def _is_differentiable_once(gradients: Iterable[torch.Tensor]) -> bool:
    """Return True if a backward among those of the gradients is marked once_differentiable.

    Autograd raises there in ``backward()``, but not if it is asked for certain inputs alone: no
    path leads to them.
    """
    nodes = [x.grad_fn for x in gradients]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if node.name() == "torch::autograd::Error":
            return True
        behind = {other for other, _ in node.next_functions} - seen
        seen |= behind
        nodes += behind
    return False
