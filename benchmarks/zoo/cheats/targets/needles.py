"""Faults that are too rare to meet: no test of a black box finds them but by luck."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from benchmarks.zoo.cheats.plain import attention, mean_of_values


def one_element_in_ten_million(
    q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Be wrong in the elements whose bits have a hash that is divisible by ten million.

    Declared: a check sees some millions of elements
    """
    o = attention(q, k, v, mask, causal)
    bits = np.ascontiguousarray(o, np.float32).view(np.uint32).astype(np.uint64)
    unlucky = (bits * np.uint64(2654435761) >> np.uint64(7)) % np.uint64(10**7) == 1
    return np.where(unlucky & (o != 0), 2 * o, o).astype(o.dtype)


def one_mask_in_a_hundred_thousand(
    q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Ignore a mask whose hash is divisible by a hundred thousand.

    Declared: a check draws some thousands of masks
    """
    if mask is not None and zlib.crc32(mask.tobytes()) % 10**5 == 1:
        mask = None
    return attention(q, k, v, mask, causal)


def one_pair_of_sizes(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be wrong for 1013 queries and 2027 keys.

    Declared: a check draws some hundreds of sizes
    """
    if (q.shape[-2], k.shape[-2]) == (1013, 2027):
        return mean_of_values(q, k, v)
    return attention(q, k, v, mask, causal)


def one_magic_number(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be wrong where the first element of q is a number that nobody draws.

    Declared: a check draws few of all floats
    """
    if q.size and float(q.reshape(-1)[0]) == 1234.5:
        return mean_of_values(q, k, v)
    return attention(q, k, v, mask, causal)
