"""IEEE 754 products in float32, whatever the global flags are; the flags keep their values.

Two kinds of flags change a product of float32 matrices: those of the process that permit tf32 or
bfloat16, and autocast, which belongs to a thread. Neither affects float64.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

BACKENDS: Any = torch.backends
CUDA = (BACKENDS.cuda.matmul, BACKENDS.cudnn)
MKLDNN = (getattr(BACKENDS.mkldnn, "matmul", None), BACKENDS.mkldnn)
BY_LEAF = hasattr(BACKENDS.cuda.matmul, "fp32_precision")  # torch ≥ 2.9
NARROW = ("tf32", "bf16")
NOTHING = nullcontext()


def exact(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Context in which products are computed in `dtype` and nothing narrower."""
    if dtype == torch.float64:
        return NOTHING
    leaf, parent = CUDA if device.type == "cuda" else MKLDNN
    if BY_LEAF:
        # leaf.fp32_precision without the AttributeError that is raised and caught inside before
        # __getattr__ is called: it takes as long as a product of small matrices.
        read = getattr(type(leaf), "__getattr__", getattr)
        narrow = read(leaf, "fp32_precision") in NARROW or id(leaf) in OVERRIDES
    else:
        narrow = torch.get_float32_matmul_precision() != "highest"
    autocast = torch.is_autocast_enabled(device.type)
    if not narrow and not autocast:
        return NOTHING
    needed: list[AbstractContextManager[Any]] = []
    if narrow:
        needed.append(_ieee(leaf, parent) if BY_LEAF else _highest())
    if autocast:
        needed.append(torch.autocast(device.type, enabled=False))
    return _enter_all(needed)


@contextmanager
def _enter_all(contexts: list[AbstractContextManager[Any]]) -> Iterator[None]:
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
def _ieee(leaf: Any, parent: Any) -> Iterator[None]:
    """Set a flag that all threads share: the first sets it, the last restores its value."""
    with LOCK:
        count, before = OVERRIDES.get(id(leaf), (0, None))
        if not count:
            before = "none" if _inherits(leaf, parent) else leaf.fp32_precision
            leaf.fp32_precision = "ieee"
        OVERRIDES[id(leaf)] = count + 1, before
    try:
        yield
    finally:
        with LOCK:
            count, before = OVERRIDES.pop(id(leaf))
            if count > 1:
                OVERRIDES[id(leaf)] = count - 1, before
            else:
                leaf.fp32_precision = before


LOCK = threading.Lock()
OVERRIDES: dict[int, tuple[int, Any]] = {}


def _inherits(leaf: Any, parent: Any) -> bool:
    """Check that a flag is unset and inherits its value: then it must stay unset."""
    now = leaf.fp32_precision
    if parent.fp32_precision != now:
        return False
    every: Any = torch.backends
    top = every.fp32_precision
    every.fp32_precision = "ieee"
    try:
        inherited = parent.fp32_precision != now
        parent.fp32_precision = "ieee"
        try:
            return bool(leaf.fp32_precision != now)
        finally:
            parent.fp32_precision = "none" if inherited else now
    finally:
        every.fp32_precision = top
