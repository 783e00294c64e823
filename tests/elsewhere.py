"""A device for tests: tensors that claim to be elsewhere, and are computed on the CPU.

npattn.torch runs on it as on an accelerator, numbers and all; mixing tensors of the two devices, or
making one on the wrong device, raises as on a GPU. Only dtypes, speed and the accelerator's own
kernels are not tested.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

__all__ = ["DEVICE", "Generator"]

if torch.cuda.is_available():
    # From torch 2.8 on, autograd on CUDA fails in a process with a PrivateUse1 backend:
    # pytorch/pytorch#161129.
    raise ImportError("registering this device would break autograd on CUDA in this process")

aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)


class Elsewhere(torch.Tensor):
    """A tensor of the device, beside its tensor on the CPU."""

    here: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> Elsewhere:
        tensor: Any = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(),
            dtype=here.dtype, layout=here.layout, device=DEVICE,
        )  # fmt: skip
        tensor.here = here
        return tensor

    def tolist(self) -> Any:
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})

        def unwrap(x: Any) -> Any:
            if isinstance(x, Elsewhere):
                return x.here
            if isinstance(x, torch.Tensor) and x.ndim and func not in COPIES:
                raise RuntimeError(f"{func} has a tensor of the CPU among tensors elsewhere")
            return x

        device = kwargs.get("device")
        leaves = device is not None and torch.device(device).type != DEVICE.type
        if device is not None:
            kwargs["device"] = "cpu"
        result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
        if leaves or func is aten._local_scalar_dense.default:
            return result
        if func._schema.name.endswith("_"):  # in place
            return args[0]
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, result)


def _factory(name: str) -> Any:
    """Return a function that makes tensors on the device."""
    packet, _, overload = name.partition(".")
    func = getattr(getattr(aten, packet), overload or "default")

    def make(*args: Any, **kwargs: Any) -> Elsewhere:
        return Elsewhere(func(*args, **{**kwargs, "device": "cpu", "pin_memory": False}))

    return make


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class Generator(torch.Generator):
    """torch.Generator that samples the same numbers on the device as on the CPU."""

    device: Any = property(lambda self: DEVICE)

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type == DEVICE.type:
            return super().__new__(cls)
        return GENERATOR(device)


GENERATOR = torch.Generator
_setup_privateuseone_for_python_backend("elsewhere", _Module())
DEVICE = torch.device("elsewhere:0")
_library = torch.library.Library("aten", "IMPL")
for _name in ("empty.memory_format", "empty_strided", "arange", "arange.start",
              "arange.start_step"):  # fmt: skip
    _library.impl(_name, _factory(_name), "PrivateUse1")


def _copy(x: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy a tensor, the last step of torch.tensor(numbers, device=...)."""
    one, other = (getattr(t, "here", t) for t in (x, to))
    other.copy_(one)
    return to


_library.impl("_copy_from", _copy, "PrivateUse1")
