"""Kernels that need CUDA, as targets: FlashInfer, TransformerEngine, ThunderKittens, Triton's.

Each package is imported by the call, so that one does without the others. FlashAttention and
xFormers need nothing of this: their own functions are called by their profiles.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

from npattn.errors import optional_import

with optional_import("targets on CUDA need", "torch", "torch"):
    import torch


Window = tuple[int | None, int | None]


def _triangle(T: int, S: int, device: Any) -> torch.Tensor:
    """Return the causal mask that is aligned to the bottom right."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def flashinfer(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Call ``flashinfer.single_prefill_with_kv_cache`` for each sample."""
    prefill: Any = importlib.import_module("flashinfer").single_prefill_with_kv_cache
    if q.ndim != 4 or q.shape[0] != k.shape[0]:
        raise ValueError("q, k and v must have 4 axes, with one B")
    B, _, T, _ = q.shape
    if mask is not None and causal:
        raise ValueError("causal is ignored beside a mask")
    if window is not None and window[1] is not None and not causal:
        raise ValueError("a window has no end to the right")
    if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
        raise ValueError("a mask is one matrix for all heads")
    if mask is not None:
        mask = mask.reshape(-1, *mask.shape[-2:]).expand(B, T, k.shape[2])
    left_keys = None if window is None else window[0]
    results = [
        prefill(
            *(x[i].transpose(0, 1).contiguous() for x in (q, k, v)),  # (T, H, D)
            custom_mask=None if mask is None else mask[i].contiguous(),
            causal=causal,
            sm_scale=scale,
            window_left=-1 if left_keys is None else left_keys,
            logits_soft_cap=softcap,
            return_lse=return_lse,
        )
        for i in range(B)
    ]
    if not return_lse:
        return torch.stack(results).transpose(1, 2)
    o, lse = (torch.stack(x).transpose(1, 2) for x in zip(*results, strict=True))
    return o, lse


WORKSPACE = 128 * 1024 * 1024
"""Bytes of its work buffer, as its documentation has them."""


def flashinfer_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    *,
    custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Plan and run ``flashinfer.BatchPrefillWithPagedKVCacheWrapper``."""
    module: Any = importlib.import_module("flashinfer")
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout)
    slots, heads = k_cache.shape[1:3] if kv_layout == "NHD" else k_cache.shape[2:0:-1]
    wrapper.plan(
        *(qo_indptr, kv_indptr, kv_indices, last_page_len),
        *(q.shape[1], heads, q.shape[2], slots),
        head_dim_vo=v_cache.shape[3],
        custom_mask=custom_mask,
        causal=causal,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        q_data_type=q.dtype,
        kv_data_type=k_cache.dtype,
    )
    return wrapper.run(q, (k_cache, v_cache), return_lse=return_lse)


def transformer_engine(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Call ``transformer_engine.pytorch.DotProductAttention``, whose masks hide where True."""
    module: Any = importlib.import_module("transformer_engine.pytorch")
    if q.ndim != 4 or q.shape[0] != k.shape[0]:
        raise ValueError("q, k and v must have 4 axes, with one B")
    (B, H, T, D), (K, S), E = q.shape, k.shape[1:3], v.shape[3]
    if mask is not None and causal:
        mask, causal = mask & _triangle(T, S, q.device), False
    left, right = (None, None) if window is None else window
    kind = "arbitrary" if mask is not None else "causal_bottom_right" if causal else "no_mask"
    attend = module.DotProductAttention(
        num_attention_heads=H,
        kv_channels=(D, E),
        num_gqa_groups=K,
        qkv_format="bshd",
        attn_mask_type=kind,
        window_size=(-1 if left is None else left, 0 if causal else -1 if right is None else right),
        bottom_right_diagonal=True,
        softmax_scale=1 / math.sqrt(D) if scale is None else scale,
    )
    hidden = None
    if mask is not None:
        hidden = ~mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    flat = attend(
        *(x.transpose(1, 2).contiguous() for x in (q, k, v)),
        attention_mask=hidden,
        core_attention_bias_type="no_bias" if bias is None else "post_scale_bias",
        core_attention_bias=None if bias is None else bias.expand(B, H, T, S).contiguous(),
    )
    o: torch.Tensor = flat.reshape(B, T, H, E).transpose(1, 2)
    return o


class _ThunderKittens(torch.autograd.Function):
    """o of mha_forward, and the gradients of mha_backward."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
        o, norms = importlib.import_module("_C").mha_forward(q, k, v, causal)
        ctx.save_for_backward(q, k, v, o, norms)
        ctx.causal = causal
        return o

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        do = cotangents[0].contiguous()
        backward = importlib.import_module("_C").mha_backward
        grads = backward(*ctx.saved_tensors, do, ctx.causal)
        return (*(x.to(do.dtype) for x in grads), None)


def thunderkittens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """Call ``mha_forward`` and ``mha_backward`` of ThunderKittens, in bfloat16."""
    if q.ndim != 4 or q.shape[2:] != k.shape[2:] or k.shape != v.shape:
        raise ValueError("q, k and v must have 4 axes, with one T and one D")
    if q.dtype != torch.bfloat16 or q.shape[3] not in (64, 128) or q.shape[2] % 64:
        raise ValueError("it takes bfloat16, D of 64 and 128, and T in multiples of 64")
    attend: Any = _ThunderKittens.apply
    o: torch.Tensor = attend(*(x.contiguous() for x in (q, k, v)), causal)
    return o


def flash_attn_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Call ``flash_attn_triton.flash_attn_func``, without what it says that it does not support."""
    attend: Any = importlib.import_module("flash_attn_triton").flash_attn_func
    if q.ndim != 4 or q.shape[0] != k.shape[0] or k.shape != v.shape:
        raise ValueError("q, k and v must have 4 axes, with one B and one D")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o: torch.Tensor = attend(q, k, v, softmax_scale=scale, causal=causal)
    return o.transpose(1, 2)


def _with_one_mask(
    attend: Any,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Call a function whose ``attn_mask`` is boolean or added, and has every axis."""
    q, k, _ = qkv
    if q.ndim != 4 or q.shape[0] != k.shape[0]:
        raise ValueError("q, k and v must have 4 axes, with one B")
    if mask is not None and bias is not None:
        raise ValueError("attn_mask is boolean or added")
    added = bias if mask is None else mask
    full_mask = None if added is None else added.expand(*q.shape[:3], k.shape[2]).contiguous()
    o: torch.Tensor = attend(*qkv, attn_mask=full_mask, **kwargs)
    return o


def jvp_flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Call ``jvp_flash_attention.jvp_attention.attention``, for q, k and v of one shape."""
    attend = importlib.import_module("jvp_flash_attention.jvp_attention").attention
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    return _with_one_mask(attend, (q, k, v), mask, bias, causal=causal, sm_scale=scale)


def flag_gems(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Call ``scaled_dot_product_attention`` of FlagGems, which stands in for torch's."""
    attend = importlib.import_module("flag_gems.ops.attention").scaled_dot_product_attention
    kwargs = {"is_causal": causal, "scale": scale, "enable_gqa": q.shape[-3:-2] != k.shape[-3:-2]}
    return _with_one_mask(attend, (q, k, v), mask, bias, **kwargs)
