"""Kernels of latent attention and of lists of keys, right and wrong, in their signatures."""

from __future__ import annotations

import math

import numpy as np
import torch


class Latent:
    """FlashInfer's and FlashMLA's decoding: queries in two parts, one head of compressed keys."""

    cause = ""

    def __call__(
        self, q_nope, q_pe, ckv, kpe, causal=False, sm_scale=None, attn_mask=None, return_lse=False
    ):
        C, R = q_nope.shape[-1], q_pe.shape[-1]
        scale = self.scale(C, R) if sm_scale is None else sm_scale
        q = torch.cat([q_nope, self.rotary(q_pe)], -1)
        k = torch.cat([ckv, kpe], -1)[..., None, :, :]
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
        o = p @ values
        return (o, lse) if return_lse else o

    def scale(self, C, R):
        return 1 / math.sqrt(C + R)

    def rotary(self, q_pe):
        return q_pe

    def scores(self, q, k):
        return q @ k.transpose(-1, -2)

    def values(self, ckv):
        return ckv


class ScaleOfContent(Latent):
    cause = "scale"

    def scale(self, C, R):
        return 1 / math.sqrt(C)


class NoRotary(Latent):
    cause = "rotary"

    def rotary(self, q_pe):
        return 0 * q_pe


class NoValueGradient(Latent):
    cause = "values"

    def values(self, ckv):
        return ckv.detach()
