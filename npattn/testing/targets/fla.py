"""Softmax attention of Flash Linear Attention: Triton kernels, interpreted where there is no GPU.

fla.ops.attn.parallel_attn is causal self-attention with a backward, attn_decoding_one_step one
query for each sequence. Their arrays are (B, T, H, D), and those of decoding (1, B · T, H, D).
"""

from __future__ import annotations

import os
from typing import Any

from npattn.errors import optional_import

with optional_import("the targets fla need", "fla-core", "fla"):
    import torch
    from fla.ops.attn.decoding import attn_decoding_one_step, naive_attn_decoding_kernel
    from fla.ops.attn.parallel import parallel_attn


Window = tuple[int | None, int | None]


def _without_tuning(kernel: Any) -> None:
    """Leave a kernel its first configuration: to choose by time takes a driver of a GPU."""
    while kernel is not None:
        if hasattr(kernel, "configs"):
            kernel.configs = kernel.configs[:1]
        kernel = getattr(kernel, "fn", None)


if os.environ.get("TRITON_INTERPRET") == "1":
    _without_tuning(naive_attn_decoding_kernel)


def _window_size(window: Window | None, T: int) -> int | None:
    """Return the number of keys of a window that ends at the query, its own included."""
    left_keys = None if window is None else window[0]
    return None if left_keys is None else min(left_keys, T) + 1


def parallel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call ``parallel_attn``, which is always causal."""
    if not causal:
        raise ValueError("parallel_attn is always causal")
    if q.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError("q, k and v must have 4 axes, with one B and one T")
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    size = _window_size(window, q.shape[1])
    o: torch.Tensor = parallel_attn(q, k, v, scale=scale, window_size=size, sink_bias=sinks)
    return o.transpose(1, 2)


def decoding(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: Window | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call ``attn_decoding_one_step`` with the samples of a batch as its sequences."""
    if q.ndim != 4 or q.shape[2] != 1 or q.shape[0] != k.shape[0]:
        raise ValueError("q, k and v must have 4 axes, with one B and one query")
    B, S = k.shape[0], k.shape[2]
    bounds = torch.arange(B + 1, dtype=torch.int64, device=q.device) * S
    one = q[:, :, 0][None].contiguous()  # (1, B, H, D)
    k, v = (x.transpose(1, 2).flatten(0, 1)[None].contiguous() for x in (k, v))
    o: torch.Tensor = attn_decoding_one_step(
        *(one, k, v),
        scale=scale,
        cu_seqlens=bounds,
        window_size=_window_size(window, S),
        sink_bias=sinks,
    )
    return o[0][:, :, None]
