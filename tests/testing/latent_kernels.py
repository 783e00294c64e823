"""Kernels of latent attention and of lists of keys, right and wrong, in their signatures."""

from __future__ import annotations

import math

import numpy as np
import torch

from tests.make import make_changed


class Latent:
    """FlashInfer's and FlashMLA's decoding: queries in two parts, one head of compressed keys."""

    cause = ""

    def __call__(
        self, q_nope, q_pe, ckv, kpe, causal=False, sm_scale=None, attn_mask=None, return_lse=False
    ):
        C, R = q_nope.shape[-1], q_pe.shape[-1]
        scale = self.scale(C, R) if sm_scale is None else sm_scale
        dtype, wide = q_nope.dtype, torch.promote_types(q_nope.dtype, torch.float32)
        q = torch.cat([q_nope, self.rotary(q_pe)], -1).to(wide)
        k = torch.cat([ckv, kpe], -1)[..., None, :, :].to(wide)
        s = scale * self.scores(q, k)
        visible = torch.ones(s.shape[-2:], dtype=torch.bool)
        if causal:
            visible = visible.tril(s.shape[-1] - s.shape[-2])
        if attn_mask is not None:
            visible = visible & attn_mask if attn_mask.dtype == torch.bool else visible
            s = s if attn_mask.dtype == torch.bool else s + attn_mask
        s = s.masked_fill(~visible, -torch.inf)
        lse = s.logsumexp(-1)
        p = torch.exp(s - torch.where(lse.isneginf(), 0, lse)[..., None])
        used = visible.expand(*s.shape[:-2], *visible.shape[-2:]).flatten(0, -3).any(0).any(0)
        values = self.values(ckv)[..., None, :, :].masked_fill(~used[:, None], 0)
        o = (p @ values.to(wide)).to(dtype)
        return (o, lse) if return_lse else o

    def scale(self, C, R):
        return 1 / math.sqrt(C + R)

    def rotary(self, q_pe):
        return q_pe

    def scores(self, q, k):
        return q @ k.transpose(-1, -2)

    def values(self, ckv):
        return ckv


ScaleOfContent = make_changed(
    Latent, "ScaleOfContent", "scale", scale=lambda self, C, R: 1 / math.sqrt(C)
)
NoRotary = make_changed(Latent, "NoRotary", "rotary", rotary=lambda self, q_pe: 0 * q_pe)
NoValueGradient = make_changed(
    Latent, "NoValueGradient", "values", values=lambda self, ckv: ckv.detach()
)


class NoKeyGradient(Latent):
    cause = "keys"

    def __call__(
        self, q_nope, q_pe, ckv, kpe, causal=False, sm_scale=None, attn_mask=None, return_lse=False
    ):
        self.ckv = ckv
        return super().__call__(
            q_nope, q_pe, ckv.detach(), kpe, causal, sm_scale, attn_mask, return_lse
        )

    def values(self, ckv):
        return self.ckv


def with_qv(q, k, v, qv, causal=False, softmax_scale=None):
    """FlashAttention's qv: scores of q kᵀ and of qv vᵀ, one scale."""
    assert q.ndim == 4, "(B, H, T, D)"
    assert len(q) == len(k), "one batch"
    dtype = q.dtype
    q, k, v, qv = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v, qv))
    G = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(G, 1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1] + qv.shape[-1]) if softmax_scale is None else softmax_scale
    s = scale * (q @ k.transpose(-1, -2) + qv @ v.transpose(-1, -2))
    visible = torch.ones(s.shape[-2:], dtype=torch.bool)
    visible = visible.tril(s.shape[-1] - s.shape[-2]) if causal else visible
    s = s.masked_fill(~visible, -torch.inf)
    lse = s.logsumexp(-1, keepdim=True)
    p = torch.exp(s - torch.where(lse.isneginf(), 0, lse))
    return (p @ v.masked_fill(~visible.any(0)[:, None], 0)).to(dtype)


def with_scale_of_q(q, k, v, qv, causal=False, softmax_scale=None):
    """A mistake: the default scale of q alone."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return with_qv(q, k, v, qv, causal, scale)


class NumPyLatent:
    """The same with a hand-written backward, which returns a gradient for each part."""

    def __call__(self, q_nope, q_pe, ckv, kpe, sm_scale=None):
        return self.weights(q_nope, q_pe, ckv, kpe, sm_scale) @ ckv[:, None]

    def weights(self, q_nope, q_pe, ckv, kpe, sm_scale):
        assert q_nope.ndim == 4, "(B, H, T, C)"
        assert len(ckv) == len(q_nope), "one batch"
        assert ckv.size, "at least one key"
        q, k = np.concatenate([q_nope, q_pe], -1), np.concatenate([ckv, kpe], -1)[:, None]
        s = self.scale(q, sm_scale) * (q @ k.swapaxes(-1, -2))
        e = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
        return e / e.sum(-1, keepdims=True)

    def scale(self, q, sm_scale):
        return q.dtype.type(1 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale)

    def backward(self, dout, q_nope, q_pe, ckv, kpe, *, sm_scale=None):
        p = self.weights(q_nope, q_pe, ckv, kpe, sm_scale)
        q, k = np.concatenate([q_nope, q_pe], -1), np.concatenate([ckv, kpe], -1)[:, None]
        dp = dout @ ckv[:, None].swapaxes(-1, -2)
        ds = self.scale(q, sm_scale) * p * (dp - (p * dp).sum(-1, keepdims=True))
        dq, dk, C = ds @ k, self.sum_heads(ds.swapaxes(-1, -2) @ q), q_nope.shape[-1]
        dv = (p.swapaxes(-1, -2) @ dout).sum(1)
        return dq[..., :C], dq[..., C:], dk[..., :C] + dv, dk[..., C:]

    def sum_heads(self, dk):
        return dk.sum(1)


# The gradient of the keys is that through the first head.
FirstHeadAlone = make_changed(NumPyLatent, "FirstHeadAlone", sum_heads=lambda self, dk: dk[:, 0])


class Gathered:
    """FlashAttention-4's gather_kv_indices: lists (B, T, n) that heads share."""

    cause = ""

    def __call__(self, q, k, v, gather_kv_indices=None, causal=False, return_lse=False):
        B, H, T, D = q.shape
        assert len(k) == B, "one batch"
        assert 0 not in (H, k.shape[2]), "at least one head and key"
        S, G, dtype = k.shape[2], H // k.shape[1], q.dtype
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
        k, v = (x.repeat_interleave(G, 1) for x in (k, v))
        if gather_kv_indices is None:
            read, used = Gathered.read(self, torch.arange(S).expand(B, T, S), S)
        else:
            read, used = self.read(gather_kv_indices.long(), S)
        keys, values = (self.rows(x, read) for x in (k, v))  # (B, H, T, n, D)
        if causal:
            used = used & (read <= torch.arange(T)[:, None] + S - T)
        keys, values = (x.masked_fill(~used[:, None, :, :, None], 0) for x in (keys, values))
        s = torch.einsum("bhtd,bhtnd->bhtn", q, keys) / math.sqrt(max(D, 1))
        s = s.masked_fill(~used[:, None], -torch.inf)
        lse = s.logsumexp(-1)
        p = torch.exp(s - torch.where(lse.isneginf(), 0, lse)[..., None])
        o = torch.einsum("bhtn,bhtne->bhte", p, values).to(dtype)
        return (o, lse) if return_lse else o

    def read(self, lists, S):
        self.unused = torch.zeros_like(lists, dtype=torch.bool)
        return lists.clamp(min=0), lists >= 0

    def rows(self, x, read):
        (B, H, _, m), (T, n) = x.shape, read.shape[1:]
        flat = read.reshape(B, 1, T * n, 1).expand(B, H, T * n, m)
        return self.gather(x, flat).reshape(B, H, T, n, m)

    def gather(self, x, flat):
        return torch.gather(x, 2, flat)


WrapsAround, OffByOne, LastEntryLost, FirstQuery = (
    make_changed(Gathered, name, cause, read=read)
    for name, cause, read in (
        ("WrapsAround", "−1 in a list is read as the last key",
         lambda self, lists, S: (lists % max(S, 1), torch.ones_like(lists, dtype=torch.bool))),
        ("OffByOne", "each entry of a list is read as the key after it",
         lambda self, lists, S: ((lists + 1).clamp(min=0) % max(S, 1), lists >= 0)),
        ("LastEntryLost", "",  # where T or S is small, other mistakes give the same
         lambda self, lists, S: Gathered.read(self, lists[..., :-1], S)),
        ("FirstQuery", "the list of the first query is taken for all",
         lambda self, lists, S: Gathered.read(self, lists[:, :1].expand_as(lists), S)),
    )
)  # fmt: skip


class UnusedTakeWeight(Gathered):
    cause = "unused entries of lists take weight, as keys of zeros with values of zeros"

    def read(self, lists, S):
        self.unused = lists < 0
        return lists.clamp(min=0), torch.ones_like(lists, dtype=torch.bool)

    def rows(self, x, read):
        return super().rows(x, read).masked_fill(self.unused[:, None, :, :, None], 0)


class Assign(torch.autograd.Function):
    """Rows of x, with a backward that keeps one of the gradients of a row that is read twice."""

    @staticmethod
    def forward(ctx, x, flat):
        ctx.save_for_backward(flat)
        ctx.shape = x.shape
        return torch.gather(x, 2, flat)

    @staticmethod
    def backward(ctx, dy):
        (flat,) = ctx.saved_tensors
        return dy.new_zeros(ctx.shape).scatter(2, flat, dy), None


AssignsGradients = make_changed(
    Gathered, "AssignsGradients", gather=lambda self, x, flat: Assign.apply(x, flat)
)

WRONG_LATENT = (ScaleOfContent, NoRotary, NoValueGradient, NoKeyGradient)
WRONG_LISTS = (WrapsAround, OffByOne, LastEntryLost, FirstQuery, UnusedTakeWeight)


class NoContent(Latent):
    def __call__(
        self, q_nope, q_pe, ckv, kpe, causal=False, sm_scale=None, attn_mask=None, return_lse=False
    ):
        return super().__call__(0 * q_nope, q_pe, ckv, kpe, causal, sm_scale, attn_mask, return_lse)
