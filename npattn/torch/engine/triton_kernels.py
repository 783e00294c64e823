"""Two kernels in Triton of what torch computes in several passes over a tile.

    B samples   H query heads   T queries   S keys   D query/key size   E value size
    m rows and n columns of a tile

Loaded by `npattn.torch.engine.in_one_pass` alone. A number that a kernel is given as a Python float
is rounded to float32 on the way: every float here comes as a tensor.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# A kernel is no Python: its arguments have the types that a call gives them.

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from subprocess import SubprocessError
from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

Tensor = torch.Tensor
FAILURES = (triton.TritonError, RuntimeError, OSError, SubprocessError, ImportError)
"""Errors of Triton, of CUDA, and of the C compiler that makes the launchers and what it made."""
KEYS, STAGES = 32, 2
LEAST = 106_496
"""Bytes of shared memory for 32 queries, D = E = 128: GPUs with a fast float64 have more."""
MOST = 196_608
"""Bytes for 128 queries, the fastest number on an H200."""
COLUMNS = 1024


@triton.jit
def _sum_exp(
    q, k, v, out, total,
    H, G, T, S, first, left, right,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Sums of a block of queries of one head, over the keys of a band, or all."""
    blocks = tl.cdiv(T, QUERIES)
    plane = (tl.program_id(0) // blocks).to(tl.int64)
    # The last queries of a causal mask see the most keys, and begin first.
    t0 = (blocks - 1 - tl.program_id(0) % blocks) * QUERIES
    shared = plane // H * (H // G) + plane % H // G
    # Indices inside a plane have 32 bits, or there would be too few registers.
    q, out, total = q + plane * T * D, out + plane * T * E, total + plane * T
    k, v = k + shared * S * D, v + shared * S * E
    t, d, e = t0 + tl.arange(0, QUERIES), tl.arange(0, BD), tl.arange(0, BE)
    inside = t[:, None] < T
    x = tl.load(q + t[:, None] * D + d[None, :], mask=inside & (d[None, :] < D), other=0.0)
    beside = t0 + first
    # Keys lo ≤ s < hi are visible to some query of the block, and a ≤ s < b to all of them.
    lo = tl.maximum(beside - left, 0) // KEYS * KEYS
    hi = tl.minimum(beside + QUERIES + right, S)
    a = tl.cdiv(tl.maximum(beside + QUERIES - 1 - left, 0), KEYS) * KEYS
    a = tl.minimum(a, tl.maximum(hi, lo))
    b = tl.maximum(tl.minimum(beside + right + 1, S) // KEYS * KEYS, a)
    acc, sums = tl.zeros([QUERIES, BE], tl.float64), tl.zeros([QUERIES], tl.float64)
    for s0 in range(a, b, KEYS):
        acc, sums = _add_keys(
            acc, sums, x, k, v, t, s0, S, first, left, right, D, E, BD, BE, KEYS, False
        )
    before = tl.cdiv(a - lo, KEYS)
    for i in range(before + tl.cdiv(tl.maximum(hi - b, 0), KEYS)):
        s0 = tl.where(i < before, lo + i * KEYS, b + (i - before) * KEYS)
        acc, sums = _add_keys(
            acc, sums, x, k, v, t, s0, S, first, left, right, D, E, BD, BE, KEYS, True
        )
    tl.store(total + t, sums, mask=t < T)
    tl.store(out + t[:, None] * E + e[None, :], acc, mask=inside & (e[None, :] < E))


@triton.jit
def _add_keys(
    acc, sums, x, k, v, t, s0, S, first, left, right,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    KEYS: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add the keys from s0 on. Not partial: every query of the block sees all of them."""
    s, d, e = s0 + tl.arange(0, KEYS), tl.arange(0, BD), tl.arange(0, BE)
    k_at, v_at = k + s[None, :] * D + d[:, None], v + s[:, None] * E + e[None, :]
    if PARTIAL or D < BD:
        k_tile = tl.load(k_at, mask=(s[None, :] < S) & (d[:, None] < D), other=0.0)
    else:  # a comparison costs registers, which are scarce
        k_tile = tl.load(k_at)
    p = tl.exp(tl.dot(x, k_tile, out_dtype=tl.float64))
    if PARTIAL:
        after = s[None, :] - (t[:, None] + first)
        p = tl.where((after >= -left) & (after <= right) & (s[None, :] < S), p, 0.0)
    if PARTIAL or E < BE:
        v_tile = tl.load(v_at, mask=(s[:, None] < S) & (e[None, :] < E), other=0.0)
    else:
        v_tile = tl.load(v_at)
    return tl.dot(p, v_tile, acc, out_dtype=tl.float64), sums + tl.sum(p, 1)


@triton.jit
def _weights_and_gradients(s, dp, log, delta, n, COLUMNS: tl.constexpr):
    """exp(s − log) in the place of s, and (dp − delta) times that in the place of dp."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at, inside = row * n + column, column < n
    score = tl.load(s + at, mask=inside, other=0.0)
    p = tl.exp(score - tl.load(log + row))
    ds = (tl.load(dp + at, mask=inside, other=0.0) - tl.load(delta + row)) * p
    tl.store(s + at, p, mask=inside)
    tl.store(dp + at, tl.where(score == -float("inf"), 0.0, ds), mask=inside)


def sum_exp(
    q: Tensor, k: Tensor, v: Tensor, first: int, left: int | None, right: int | None
) -> tuple[Tensor, Tensor]:
    """Return Σ exp(q·k) v and Σ exp(q·k) of each query: (B, H, T, E), (B, H, T), all in float64.

    Parameters
    ----------
    q, k, v : Tensor
        (B, H, T, D), (B, K, S, D) and (B, K, S, E) in float64, scaled; K divides H.
    first : int
        Index of the key beside query 0.
    left, right : int or None
        How many keys before and after the one beside it a query sees; None for all.
    """
    (B, H, T, D), (S, E) = q.shape, v.shape[-2:]
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, total = q.new_empty(B, H, T, E), q.new_empty(B, H, T)
    unlimited = T + S + abs(first)
    left, right = (unlimited if n is None else min(n, unlimited) for n in (left, right))
    sizes = {"D": D, "E": E, "BD": _power(D), "BE": _power(E)}
    queries, warps = (128, 8) if shared_memory(q.device) >= MOST else (32, 4)
    with _current(q.device):
        _sum_exp[triton.cdiv(T, queries) * B * H,](
            q, k, v, out, total, H, H // k.shape[1], T, S, first, left, right, **sizes,
            QUERIES=queries, KEYS=KEYS, num_warps=warps, num_stages=STAGES,
        )  # fmt: skip
    return out, total


def weights_and_gradients(s: Tensor, dp: Tensor, log: Tensor, delta: Tensor) -> None:
    """Write the weights exp(s − log) over s, and the gradients of the scores over dp.

    Parameters
    ----------
    s, dp : Tensor
        (..., m, n) in float64, contiguous: scores, −inf where hidden, and gradients of the weights.
    log, delta : Tensor
        (..., m): the logarithm of each row's sum, and the mean that the softmax subtracts from dp.
    """
    n = s.shape[-1]
    log, delta = log.contiguous(), delta.contiguous()
    grid = (log.numel(), triton.cdiv(n, COLUMNS))
    with _current(s.device):
        _weights_and_gradients[grid](s, dp, log, delta, n, COLUMNS=COLUMNS)


def shared_memory(device: torch.device) -> int:
    """Return how many bytes a block may share; of Triton's interpreter, the least that suffice."""
    if device.type != "cuda":
        return LEAST
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))  # not in every torch


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the one that Triton launches on; its interpreter knows no device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _power(n: int) -> int:
    """Return the power of two that is not below n, and 16 at least: tl.dot takes no less."""
    return max(16, int(triton.next_power_of_2(n)))
