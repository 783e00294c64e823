"""Attention functions of torch as targets."""

from __future__ import annotations

from typing import Any

from npattn.errors import MissingExtraError

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
except ImportError as err:
    raise MissingExtraError(
        "torch targets need torch; npattn itself does not: pip install 'npattn[torch]'"
    ) from err

__all__ = ["mha", "mha_sdpa", "npattn_fused", "npattn_torch", "sdpa", "sdpa_flash", "sdpa_math"]


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Call ``torch.nn.functional.scaled_dot_product_attention`` as a user does.

    It has one argument for mask and bias, and refuses ``is_causal`` beside it. With several of
    them, the bias is −inf where the mask or the (top-left) causal mask hides a key.
    """
    visible = mask
    if causal and (mask is not None or bias is not None):
        triangle = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        visible, causal = triangle if mask is None else mask & triangle, False
    attn_mask = visible
    if bias is not None:
        attn_mask = bias if visible is None else bias.masked_fill(~visible, float("-inf"))
    grouped = q.ndim > 2 and q.shape[-3] != k.shape[-3]
    return scaled_dot_product_attention(
        q, k, v, attn_mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def sdpa_math(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Call `sdpa` with the MATH backend."""
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, mask, causal=causal, bias=bias, scale=scale)


def sdpa_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Call `sdpa` with the FLASH_ATTENTION backend, which refuses what it does not compute.

    It has no gradient of a bias, and refuses one that wants it: so none is given.
    """
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(q, k, v, mask, causal=causal, scale=scale)


def mha(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    return_weights: bool = False,
) -> Any:
    """Call what ``torch.nn.MultiheadAttention`` calls by default, its projections the identity.

    Arrays are (B, H, T, D). A product with the identity is exact for numbers; a NaN in one feature
    goes to all, as behind any projection.
    """
    return _multihead(query, key, value, attn_mask, True, return_weights)


def mha_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
) -> Any:
    """Call what ``torch.nn.MultiheadAttention`` calls with ``need_weights=False``."""
    return _multihead(query, key, value, attn_mask, False, False)


def _multihead(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    need_weights: bool,
    return_weights: bool,
) -> Any:
    """Call ``multi_head_attention_forward`` with the identity as its projections."""
    if query.ndim != 4:
        raise ValueError(f"query must have 4 axes here, got {query.ndim}")
    if value.shape != key.shape or key.shape[1] != query.shape[1]:
        raise ValueError("key and value must have one shape, and the heads of query")
    B, H, T, D = query.shape
    q, k, v = (x.permute(2, 0, 1, 3).flatten(2) for x in (query, key, value))  # (T, B, H D)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(B, H, T, key.shape[2]).flatten(0, 1)
    same = torch.eye(H * D, dtype=query.dtype, device=query.device)
    attend: Any = multi_head_attention_forward
    o, p = attend(
        *(q, k, v, H * D, H, None, None, None, None, False, 0.0, same, None),
        need_weights=need_weights,
        attn_mask=attn_mask,
        use_separate_proj_weight=True,
        average_attn_weights=False,
        **{f"{name}_proj_weight": same for name in "qkv"},
    )
    o = o.view(T, B, H, D).permute(1, 2, 0, 3)
    return (o, p) if return_weights else o


def npattn_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: Any = None,
    sinks: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    dropout_rate: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """Call `npattn.torch.forward` and round out to the dtype of q."""
    from npattn.torch import forward

    fwd = forward(
        q,
        k,
        v,
        mask,
        causal="bottom_right" if causal else False,
        window=window,
        bias=bias,
        scale=scale,
        softcap=softcap,
        score_mod=score_mod,
        sinks=sinks,
        dropout_mask=dropout_mask,
        dropout_rate=dropout_rate,
    )
    out: Any = fwd.out
    return (out.to(q.dtype), fwd.lse) if return_lse else out.to(q.dtype)


def npattn_fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Call ``npattn.torch.attention(engine="fused")`` with the options that every device has."""
    from npattn.torch import attention

    return attention(
        q,
        k,
        v,
        mask,
        causal="bottom_right" if causal else False,
        window=window,
        bias=bias,
        scale=scale,
        engine="fused",
    )
