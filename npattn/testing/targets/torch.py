"""Attention of torch as targets: its functions, fast paths, ragged batches, compiled code."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from npattn.errors import optional_import
from npattn.testing.targets.wrapping import rename

with optional_import("torch targets need", "torch", "torch"):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention


MOST_PROGRAMS = 4096  # of one compiled function: beyond 8 torch calls it without compiling
MOST_FEATURES = 4096  # the projections of mha_fast have three times the square of them


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


def _held_to(backend: SDPBackend, name: str) -> Any:
    """Return `sdpa` with one backend alone."""

    @functools.wraps(sdpa)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(*args, **kwargs)

    return rename(call, name)


sdpa_math = _held_to(SDPBackend.MATH, "sdpa_math")
sdpa_efficient = _held_to(SDPBackend.EFFICIENT_ATTENTION, "sdpa_efficient")
sdpa_cudnn = _held_to(SDPBackend.CUDNN_ATTENTION, "sdpa_cudnn")


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


def mha_fast(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    return_weights: bool = False,
) -> Any:
    """Call ``torch.nn.MultiheadAttention`` on its fast path, which is for inference.

    That takes one tensor for query, key and value, and an even number of heads. So the features of
    a head are (q, k, v, 0), four times D, of which the projections pick one: they hold zeros, ones,
    and twos for q, because the scale is half of 1/√D. All that is exact for numbers.
    """
    if query.ndim != 4 or not query.shape == key.shape == value.shape:
        raise ValueError("query, key and value must be (B, H, T, D), of one shape")
    B, H, T, D = query.shape
    heads = H + H % 2
    size = 4 * D * heads
    if attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[-3] != 1:
        raise ValueError("attn_mask must be one for all heads: NaN of a head goes to all here")
    if not 0 < size <= MOST_FEATURES:
        raise ValueError(f"H and D give {size} features, more than are asked of it here, or none")
    kind: Any = {"dtype": query.dtype, "device": query.device}
    module = torch.nn.MultiheadAttention(size, heads, batch_first=True, **kind).eval()
    same = torch.eye(size, **kind).view(heads, 4, D, heads, 4, D)
    with torch.no_grad():
        picks = [torch.zeros_like(same) for _ in range(3)]
        for i, (pick, factor) in enumerate(zip(picks, (2, 1, 1), strict=True)):
            pick[:, 0] = factor * same[:, i]  # its first D of 4 D features
        module.in_proj_weight.copy_(torch.stack(picks).view(3 * size, size))
        module.out_proj.weight.copy_(same.view(size, size))
        x = query.new_zeros(B, T, heads, 4, D)
        x[:, :, :H, :3] = torch.stack((query, key, value), 3).transpose(1, 2)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(B, heads, T, T).flatten(0, 1)
        x = x.flatten(2)
        o, p = module(
            *(x, x, x), attn_mask=attn_mask, need_weights=return_weights, average_attn_weights=False
        )
    o = o.view(B, T, heads, 4, D)[:, :, :H, 0].transpose(1, 2)
    return (o, p[:, :H]) if return_weights else o


def nested_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Call ``scaled_dot_product_attention`` on ragged batches of the keys that the mask leaves."""
    if query.ndim != 4:
        raise ValueError(f"query must have 4 axes here, got {query.ndim}")
    B, S = key.shape[0], key.shape[2]
    keys = [slice(None)] * B if mask is None else _visible_keys(mask, B, S)
    ragged = (_nest(query, [slice(None)] * B), _nest(key, keys), _nest(value, keys))
    o = scaled_dot_product_attention(*ragged, scale=scale)
    return torch.stack([one.transpose(0, 1) for one in o.transpose(1, 2).unbind()])


def _visible_keys(mask: torch.Tensor, B: int, S: int) -> list[Any]:
    """Return the visible keys of each sequence."""
    if mask.ndim != 4 or mask.shape[1:3] != (1, 1):
        raise ValueError("a ragged batch has the same keys for all heads and queries of a sequence")
    return [*mask.expand(B, 1, 1, S)[:, 0, 0]]


def _nest(x: torch.Tensor, positions: list[Any]) -> torch.Tensor:
    """Return some positions of each sequence of x (B, H, T, D) as a nested tensor."""
    sequences = [one[:, chosen].transpose(0, 1) for one, chosen in zip(x, positions, strict=True)]
    nested: torch.Tensor = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
    return nested.transpose(1, 2)


@functools.cache
def _compile() -> Any:
    from torch.nn.attention.flex_attention import flex_attention  # slow to load

    return torch.compile(flex_attention, dynamic=False)


def flex_compiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Call ``torch.compile(flex_attention)``, which compiles for every shape."""
    return _compile()(query, key, value, score_mod=score_mod, scale=scale, enable_gqa=enable_gqa)


def flex_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Call ``torch.compile(flex_attention)`` with a block mask and, for a softcap, a score_mod."""
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")  # slow to load
    if q.ndim != 4 or q.shape[0] != k.shape[0]:
        raise ValueError("q, k and v must have 4 axes, with one B")
    (B, H, T, _), S = q.shape, k.shape[2]
    left_keys, right_keys = (None, None) if window is None else window
    full_mask = None if mask is None else mask.expand(B, H, T, S)

    def visible(b: Any, h: Any, t: Any, s: Any) -> Any:
        gap = s - t - (S - T)
        shown = gap == gap if full_mask is None else full_mask[b, h, t, s]
        shown = shown if left_keys is None else shown & (gap >= -left_keys)
        shown = shown if right_keys is None else shown & (gap <= right_keys)
        return shown & (gap <= 0) if causal else shown

    kwargs: dict[str, Any] = {"scale": scale, "enable_gqa": k.shape[1] != H}
    kwargs |= {"return_aux": module.AuxRequest(lse=True)} if return_lse else {}
    if full_mask is not None or causal or window is not None:
        lead = (None, None) if full_mask is None else (B, H)
        kwargs["block_mask"] = module.create_block_mask(visible, *lead, T, S, device=q.device)
    if softcap is not None:
        kwargs["score_mod"] = lambda score, *_: softcap * torch.tanh(score / softcap)
    torch._dynamo.config.recompile_limit = MOST_PROGRAMS
    result = _compile()(q, k, v, **kwargs)
    return (result[0], result[1].lse) if return_lse else result


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

    options: dict[str, Any] = {"window": window, "bias": bias, "scale": scale, "softcap": softcap}
    options |= {"score_mod": score_mod, "sinks": sinks, "dropout_mask": dropout_mask}
    options |= {"causal": "bottom_right" if causal else False, "dropout_rate": dropout_rate}
    fwd = forward(q, k, v, mask, **options)
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

    options: dict[str, Any] = {"window": window, "bias": bias, "scale": scale, "engine": "fused"}
    return attention(q, k, v, mask, causal="bottom_right" if causal else False, **options)
