"""torch.nn.functional.scaled_dot_product_attention by two of its backends, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.speed.cases import Task
from benchmarks.speed.contestants import Calls
from npattn.problem.arrays import Array
from npattn.testing.targets.torch import sdpa


def fused_sdpa(task: Task, threads: int) -> Calls:
    return _calls(task, threads, SDPBackend.FLASH_ATTENTION)


def math_sdpa(task: Task, threads: int) -> Calls:
    return _calls(task, threads, SDPBackend.MATH)


def _calls(task: Task, threads: int, backend: SDPBackend) -> Calls:
    torch.set_num_threads(threads)
    q, k, v, dout = map(torch.from_numpy, (task.q, task.k, task.v, task.dout))
    mask, bias = _tensor(task.arrays.mask), _tensor(task.arrays.bias)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, mask, causal=task.case.causal, bias=bias)

    def forward() -> Any:
        with torch.no_grad():
            return (attend(q, k, v),)

    def both() -> Any:
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, dout)

    size = sum(x.nbytes for x in (mask, bias) if x is not None)
    return Calls(forward, both, _read, task.bytes + size)


def _tensor(array: Array | None) -> torch.Tensor | None:
    # As users make a mask: a separate array, whose memory torch shares.
    convert: Callable[[Array], torch.Tensor] = torch.from_numpy
    return None if array is None else convert(array if array.flags.writeable else array.copy())


def _read(results: Any) -> tuple[Array, ...]:
    return tuple(x.detach().numpy() for x in results)
