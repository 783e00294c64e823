"""SageAttention 1: a Triton kernel whose queries and keys are int8, interpreted without a GPU.

Its asserts ask for tensors on a GPU, which the interpreter does not need: the module is compiled
without them, and what else they ask for is asked here.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npattn.errors import optional_import

if TYPE_CHECKING:
    import torch


_CORE = "sageattention.core"


def _load() -> ModuleType:
    """Load the module that has ``sageattn`` without its asserts."""
    spec = importlib.util.find_spec(_CORE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(_CORE)
    module = importlib.util.module_from_spec(spec)
    code = compile(Path(spec.origin).read_text("utf-8"), spec.origin, "exec", optimize=1)
    exec(code, vars(module))
    return module


with optional_import("the target sageattention needs", "sageattention"):
    _core: Any = _load()


def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """Call ``sageattn`` on tensors (B, H, T, D)."""
    if q.ndim != 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError("q, k and v must have 4 axes, with one B")
    if q.shape[-1] not in (64, 96, 128) or v.shape[-1] != q.shape[-1]:
        raise ValueError("head_dim must be 64, 96 or 128, that of v too")
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ValueError("is_causal is only applicable when qo_len == kv_len")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError("the last axis of q, k and v must be contiguous")
    o: torch.Tensor = _core.sageattn(q, k, v, is_causal=is_causal, sm_scale=sm_scale)
    return o
