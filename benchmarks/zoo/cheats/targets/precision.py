"""The arithmetic has fewer bits than the dtype promises."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.zoo.cheats.plain import attention


def _truncate(x: Any, bits: int) -> Any:
    """Cut a float32 mantissa to a number of bits."""
    whole = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (whole & np.uint32(0xFFFFFFFF << (23 - bits) & 0xFFFFFFFF)).view(np.float32)


def inputs_in_float16(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Round q, k and v to float16 first.

    Source: Infatoshi/kernelbench.com, rewardhack_cases.md
    """
    q, k, v = (x.astype(np.float16).astype(x.dtype) for x in (q, k, v))
    return attention(q, k, v, mask, causal)


def values_in_bfloat16(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Cut v to the eight bits of bfloat16.

    Source: Infatoshi/kernelbench.com, rewardhack_cases.md
    """
    return attention(q, k, _truncate(v, 7).astype(v.dtype), mask, causal).astype(q.dtype)


def scores_in_tf32(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Cut q and k to the eleven bits of TF32."""
    q, k = (_truncate(x, 10).astype(x.dtype) for x in (q, k))
    return attention(q, k, v, mask, causal)


def long_rows_in_float16(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Round to float16 where there are more than 100 keys."""
    if k.shape[-2] > 100:
        return inputs_in_float16(q, k, v, mask, causal)
    return attention(q, k, v, mask, causal)
