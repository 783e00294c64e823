"""Products in float32 as IEEE 754 says, whatever the global flags are, which stay as they are.

Two kinds of flags make a product of float32 matrices something else: those that let it use tf32 or
bfloat16, of the process, and autocast, of the thread. Nothing of either touches float64.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["exact"]


BACKENDS: Any = torch.backends
CUDA = (BACKENDS.cuda.matmul, BACKENDS.cudnn)
MKLDNN = (getattr(BACKENDS.mkldnn, "matmul", None), BACKENDS.mkldnn)
BY_LEAF = hasattr(BACKENDS.cuda.matmul, "fp32_precision")  # torch ≥ 2.9
NARROW = ("tf32", "bf16")
NOTHING = nullcontext()


def exact(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Where products are computed in `dtype` and nothing narrower."""
    if dtype == torch.float64:
        return NOTHING
    leaf, whole = CUDA if device.type == "cuda" else MKLDNN
    if BY_LEAF:
        # As leaf.fp32_precision, without the error that is raised inside where that is looked for
        # before __getattr__ is asked: it takes as long as a product of small matrices.
        read = getattr(type(leaf), "__getattr__", getattr)
        narrow = read(leaf, "fp32_precision") in NARROW or id(leaf) in HELD
    else:
        narrow = torch.get_float32_matmul_precision() != "highest"
    autocast = torch.is_autocast_enabled(device.type)
    if not narrow and not autocast:
        return NOTHING
    needed: list[AbstractContextManager[Any]] = []
    if narrow:
        needed.append(_ieee(leaf, whole) if BY_LEAF else _highest())
    if autocast:
        needed.append(torch.autocast(device.type, enabled=False))
    return _all(needed)


@contextmanager
def _all(contexts: list[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield


@contextmanager
def _highest() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _ieee(leaf: Any, whole: Any) -> Iterator[None]:
    """The flag is of all threads: the first sets it, the last puts back what was there."""
    with LOCK:
        count, before = HELD.get(id(leaf), (0, None))
        if not count:
            before = "none" if _inherits(leaf, whole) else leaf.fp32_precision
            leaf.fp32_precision = "ieee"
        HELD[id(leaf)] = count + 1, before
    try:
        yield
    finally:
        with LOCK:
            count, before = HELD.pop(id(leaf))
            if count > 1:
                HELD[id(leaf)] = count - 1, before
            else:
                leaf.fp32_precision = before


LOCK = threading.Lock()
HELD: dict[int, tuple[int, Any]] = {}


def _inherits(leaf: Any, whole: Any) -> bool:
    """Whether a flag is not set itself, but read from those above it: then it must stay unset."""
    now = leaf.fp32_precision
    if whole.fp32_precision != now:
        return False
    every: Any = torch.backends
    top = every.fp32_precision
    every.fp32_precision = "ieee"
    try:
        inherited = whole.fp32_precision != now
        whole.fp32_precision = "ieee"
        try:
            return bool(leaf.fp32_precision != now)
        finally:
            whole.fp32_precision = "none" if inherited else now
    finally:
        every.fp32_precision = top
