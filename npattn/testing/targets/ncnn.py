"""Layer SDPA of ncnn on the CPU, in a net of that layer alone."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from npattn.errors import optional_import
from npattn.problem.arrays import Array

with optional_import("the target ncnn needs", "ncnn"):
    import ncnn


@lru_cache(maxsize=64)
def _net(masked: bool, scale: float) -> Any:
    """Return a net of one layer, for arrays of every size."""
    net = ncnn.Net()
    net.opt.num_threads = 1
    for name in ("fp16", "bf16"):  # a processor that has them would compute in them
        for kind in ("packed", "storage"):
            setattr(net.opt, f"use_{name}_{kind}", False)
    net.opt.use_fp16_arithmetic = False
    names = ["q", "k", "v", *(["mask"] if masked else [])]
    lines = [
        "7767517",
        f"{len(names) + 1} {len(names) + 1}",
        *(f"Input {name} 0 1 {name}" for name in names),
        f"SDPA sdpa {len(names)} 1 {' '.join(names)} out 5={masked:d} 6={scale:.9e}",
    ]
    if net.load_param_mem("\n".join(lines) + "\n"):
        raise RuntimeError("ncnn could not read its param file")
    return net


def attention(
    q: Array, k: Array, v: Array, attn_mask: Array | None = None, scale: float | None = None
) -> Array:
    """Run the layer for every sample; a boolean mask becomes 0 and −inf, which is added.

    q is (B, H, T, D), k (B, K, S, D), v (B, K, S, E).
    """
    if not q.ndim == k.ndim == v.ndim == 4 or len({x.shape[0] for x in (q, k, v)}) > 1:
        raise ValueError("q, k and v must be (B, H, T, D), with one batch")
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise ValueError("no size may be 0 here")
    if q.dtype != np.float32:
        raise ValueError(f"q is {q.dtype}, must be float32: it is computed in that")
    if k.shape[:3] != v.shape[:3] or q.shape[1] % k.shape[1]:
        raise ValueError("k and v must have the same heads, whose number divides that of q")
    if scale == 0:
        raise ValueError("scale must not be 0: that stands for the default")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    net, inputs = _net(attn_mask is not None, scale), {"q": q, "k": k, "v": v}
    if attn_mask is not None:
        added = np.where(attn_mask, 0, -np.inf) if attn_mask.dtype == bool else attn_mask
        inputs["mask"] = np.broadcast_to(added, (*q.shape[:3], k.shape[2])).astype("f4")
    out = np.empty((*q.shape[:3], v.shape[-1]), np.float32)
    for b in range(len(q)):
        run = net.create_extractor()
        # A Mat borrows the memory of its array, which has to outlive it.
        arrays = {name: np.ascontiguousarray(x[b]) for name, x in inputs.items()}
        for name, x in arrays.items():
            run.input(name, ncnn.Mat(x).clone())
        status, result = run.extract("out")
        if status:
            raise RuntimeError(f"ncnn returned {status}")
        out[b] = np.array(result)
    return out
