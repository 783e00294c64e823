"""Attention in Triton, forward and backward, in tiles [docs/how-to/triton-on-a-laptop.md].

    B batch   H query heads   K key/value heads (K divides H)   T queries   S keys
    D query/key size   E value size
    q (B, H, T, D)   k (B, K, S, D)   v (B, K, S, E)   o (B, H, T, E)   lse (B, H, T)
    mask: boolean, broadcasts against (B, H, T, S), True = may attend
    causal: query t sees keys s ≤ t + (S − T)

A query that sees no key gives 0, has an lse of −inf, and passes no gradient.
"""

import math

import torch
import triton
import triton.language as tl

TILE = tl.constexpr(16)  # queries, and keys, of a step; tl.dot takes no fewer


@triton.jit
def load_tile(x, rows, columns, R, C):
    """Load rows and columns of a matrix (R, C), 0 beyond its ends."""
    inside = (rows[:, None] < R) & (columns[None, :] < C)
    return tl.load(x + rows[:, None] * C + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(x, tile, rows, columns, R, C):
    inside = (rows[:, None] < R) & (columns[None, :] < C)
    tl.store(x + rows[:, None] * C + columns[None, :], tile, mask=inside)


@triton.jit
def scores(q, k, mask, t, s, T, S, scale, stride_t, stride_s, CAUSAL, MASKED):
    """Scores of a tile, −inf where a query may not look."""
    visible = (t[:, None] < T) & (s[None, :] < S)
    if CAUSAL:
        visible = visible & (s[None, :] <= t[:, None] + S - T)
    if MASKED:
        at = mask + t[:, None] * stride_t + s[None, :] * stride_s
        visible = visible & (tl.load(at, mask=visible, other=0) != 0)
    # "ieee": with the default a GPU may round float32 to TF32, ten bits, before it multiplies.
    x = scale * tl.dot(q, tl.trans(k), input_precision="ieee")
    return tl.where(visible, x, -float("inf"))


@triton.jit
def forward_kernel(
    q, k, v, mask, o, lse, scale, H, G, T, S, D, E,
    stride_b, stride_h, stride_t, stride_s,
    BD: tl.constexpr, BE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """o and lse of one tile of queries of one head, by an online softmax."""
    bh = tl.program_id(1)
    shared = bh // G  # b · K + h // G
    mask += (bh // H) * stride_b + (bh % H) * stride_h
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    q = load_tile(q + bh * T * D, t, d, T, D)

    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BE], tl.float32)
    for start in range(0, S, TILE):
        s = start + tl.arange(0, TILE)
        k_tile = load_tile(k + shared * S * D, s, d, S, D)
        v_tile = load_tile(v + shared * S * E, s, e, S, E)
        x = scores(q, k_tile, mask, t, s, T, S, scale, stride_t, stride_s, CAUSAL, MASKED)
        new = tl.maximum(top, tl.max(x, 1))
        pivot = tl.where(new == -float("inf"), 0.0, new)  # −inf − −inf would be NaN
        shrink = tl.exp(top - pivot)
        p = tl.exp(x - pivot[:, None])
        total = total * shrink + tl.sum(p, 1)
        product = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        acc = acc * shrink[:, None] + product
        top = new

    total = tl.where(total == 0, 1.0, total)  # a query that sees no key: 0 / 1, and −inf + log 1
    store_tile(o + bh * T * E, acc / total[:, None], t, e, T, E)
    tl.store(lse + bh * T + t, top + tl.log(total), mask=t < T)


@triton.jit
def weights_and_ds(x, do, v, lse, delta):
    """The weights of a tile, and the gradients of its scores."""
    pivot = tl.where(lse == -float("inf"), 0.0, lse)
    p = tl.exp(x - pivot[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    return p, p * (dp - delta[:, None])


@triton.jit
def dq_kernel(
    q, k, v, mask, do, lse, delta, dq, scale, H, G, T, S, D, E,
    stride_b, stride_h, stride_t, stride_s,
    BD: tl.constexpr, BE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries of one head."""
    bh = tl.program_id(1)
    shared = bh // G
    mask += (bh // H) * stride_b + (bh % H) * stride_h
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    q_tile = load_tile(q + bh * T * D, t, d, T, D)
    do_tile = load_tile(do + bh * T * E, t, e, T, E)
    lse_tile = tl.load(lse + bh * T + t, mask=t < T, other=0.0)
    delta_tile = tl.load(delta + bh * T + t, mask=t < T, other=0.0)

    acc = tl.zeros([TILE, BD], tl.float32)
    for start in range(0, S, TILE):
        s = start + tl.arange(0, TILE)
        k_tile = load_tile(k + shared * S * D, s, d, S, D)
        v_tile = load_tile(v + shared * S * E, s, e, S, E)
        x = scores(q_tile, k_tile, mask, t, s, T, S, scale, stride_t, stride_s, CAUSAL, MASKED)
        _, ds = weights_and_ds(x, do_tile, v_tile, lse_tile, delta_tile)
        acc += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision="ieee")
    store_tile(dq + bh * T * D, scale * acc, t, d, T, D)


@triton.jit
def dkv_kernel(
    q, k, v, mask, do, lse, delta, dk, dv, scale, H, G, T, S, D, E,
    stride_b, stride_h, stride_t, stride_s,
    BD: tl.constexpr, BE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Shares of one query head in dk and dv of one tile of keys."""
    bh = tl.program_id(1)
    shared = bh // G
    mask += (bh // H) * stride_b + (bh % H) * stride_h
    s = tl.program_id(0) * TILE + tl.arange(0, TILE)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    k_tile = load_tile(k + shared * S * D, s, d, S, D)
    v_tile = load_tile(v + shared * S * E, s, e, S, E)

    dk_tile = tl.zeros([TILE, BD], tl.float32)
    dv_tile = tl.zeros([TILE, BE], tl.float32)
    for start in range(0, T, TILE):
        t = start + tl.arange(0, TILE)
        q_tile = load_tile(q + bh * T * D, t, d, T, D)
        do_tile = load_tile(do + bh * T * E, t, e, T, E)
        lse_tile = tl.load(lse + bh * T + t, mask=t < T, other=0.0)
        delta_tile = tl.load(delta + bh * T + t, mask=t < T, other=0.0)
        x = scores(q_tile, k_tile, mask, t, s, T, S, scale, stride_t, stride_s, CAUSAL, MASKED)
        p, ds = weights_and_ds(x, do_tile, v_tile, lse_tile, delta_tile)
        dv_tile += tl.dot(tl.trans(p).to(do_tile.dtype), do_tile, input_precision="ieee")
        dk_tile += tl.dot(tl.trans(ds).to(q_tile.dtype), q_tile, input_precision="ieee")
    store_tile(dk + bh * S * D, scale * dk_tile, s, d, S, D)
    store_tile(dv + bh * S * E, dv_tile, s, e, S, E)


class Attention(torch.autograd.Function):
    """(o, lse) of contiguous arrays."""

    @staticmethod
    def forward(ctx, q, k, v, mask, causal, scale):
        (B, H, T, D), (S, E) = q.shape, v.shape[-2:]
        o = torch.empty(B, H, T, E, dtype=q.dtype, device=q.device)
        lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
        ctx.sizes = (scale, H, H // k.shape[1], T, S, D, E)
        ctx.mask = (0, 0, 0, 0) if mask is None else mask.expand(B, H, T, S).stride()
        ctx.flags = {
            "BD": max(16, triton.next_power_of_2(D)),
            "BE": max(16, triton.next_power_of_2(E)),
            "CAUSAL": causal,
            "MASKED": mask is not None,
        }
        grid = (triton.cdiv(T, TILE.value), B * H)
        where = q if mask is None else mask  # a pointer that is not read
        forward_kernel[grid](q, k, v, where, o, lse, *ctx.sizes, *ctx.mask, **ctx.flags)
        ctx.save_for_backward(q, k, v, where, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, where, o, lse = ctx.saved_tensors
        (B, H), (K, S) = q.shape[:2], k.shape[1:3]
        do, T = do.contiguous(), q.shape[2]
        # A fully masked row has an lse of −inf whatever its inputs are: its weights are 0.
        delta = (do.float() * o.float()).sum(-1) - dlse
        dq = torch.empty_like(q)
        dk, dv = (torch.empty(B, H, S, x.shape[3], device=q.device) for x in (k, v))
        ends = (*ctx.sizes, *ctx.mask)
        inputs = (q, k, v, where, do, lse, delta)
        dq_kernel[triton.cdiv(T, TILE.value), B * H](*inputs, dq, *ends, **ctx.flags)
        dkv_kernel[triton.cdiv(S, TILE.value), B * H](*inputs, dk, dv, *ends, **ctx.flags)
        dk, dv = (x.unflatten(1, (K, H // K)).sum(2).to(q.dtype) for x in (dk, dv))
        return dq, dk, dv, None, None, None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
):
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or 0 in q.shape + v.shape:
        raise ValueError("q, k, v must have four axes, one B and no size of 0")
    if q.dtype == torch.float64:
        raise TypeError("sums are in float32: q must not be float64")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    q, k, v = (x.contiguous() for x in (q, k, v))
    o, lse = Attention.apply(q, k, v, mask, causal, scale)
    return (o, lse) if return_lse else o
