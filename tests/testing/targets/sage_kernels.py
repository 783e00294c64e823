"""SageAttention's Triton kernel of int8 q and k, as it is called behind ``sageattn``; interpreted.

It is imported by a worker alone: the interpreter is chosen before Triton is loaded.
"""

from __future__ import annotations

import math
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from sageattention.attn_qk_int8_per_block import forward

from npattn.testing import Implementation

ROWS = {"q": 128, "k": 64}
"""Rows of a block, as in its `forward`."""
MEANT = {f"{x}_scales": f"descale of blocks of {x}" for x in "qk"}


def attn_qk_int8_per_block(q, k, v, scale=None, q_scales=None, k_scales=None):
    """Call the kernel, whose caller puts scale and log₂e into the factors of q.

    v is float16. Keys beyond a whole block are not hidden: lengths are multiples of 64.
    """
    if k.shape[2] % ROWS["k"] or not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError("S must be a multiple of 64, and B that of all")
    if q.shape[3] not in (64, 128) or v.shape[3] != q.shape[3]:
        raise ValueError("head_dim must be 64 or 128")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError("the last axis of q, k and v must be contiguous")
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    of_q = (q_scales * (scale * math.log2(math.e)))[..., None].contiguous()
    return forward(q, k, v, of_q, k_scales[..., None].contiguous(), output_dtype=torch.float16)


def next_block(q, k, v, scale=None, q_scales=None, k_scales=None):
    """The same, with the factor of the block of keys behind."""
    return attn_qk_int8_per_block(q, k, v, scale, q_scales, k_scales.roll(-1, -1))


def _wrap(f):
    return Implementation(f, framework="torch", quantized="int8", rows=ROWS, rename=MEANT)


right, wrong = _wrap(attn_qk_int8_per_block), _wrap(next_block)
