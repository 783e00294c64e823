"""Attention of Hugging Face's models that takes more than a call: sinks, ALiBi, modules."""

from __future__ import annotations

import importlib
import math
from typing import Any

from npattn.errors import optional_import

with optional_import("transformers targets need", "transformers and torch", "transformers"):
    import torch
    from transformers import BloomConfig, DynamicCache, FalconConfig
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.bloom.modeling_bloom import BloomAttention
    from transformers.models.falcon.modeling_falcon import FalconAttention
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward


def gpt_oss(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    scaling: float | None = None,
) -> Any:
    """Call the eager attention of gpt_oss, which reads the sinks of its module.

    Without sinks they are −inf, which takes no weight.
    """
    module.sinks = query.new_full((query.shape[1],), -math.inf) if sinks is None else sinks
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return eager_attention_forward(module, query, key, value, attention_mask, scaling=scale)


def sdpa(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool = False,
) -> Any:
    """Call the attention that models take for ``attn_implementation="sdpa"``.

    Beside a mask, and for one query, which is decoding, it takes no notice of ``is_causal``: there
    the triangle is a part of the mask, as models give it.
    """
    T, S = query.shape[2], key.shape[2]
    if attention_mask is not None and attention_mask.ndim != 4:
        raise ValueError(f"attention_mask must have 4 axes, got {attention_mask.ndim}")
    if is_causal and (T == 1 or attention_mask is not None):
        triangle = query.new_ones(1, 1, T, S, dtype=torch.bool).tril()
        if attention_mask is None or attention_mask.dtype == torch.bool:
            attention_mask = triangle if attention_mask is None else attention_mask & triangle
        else:
            attention_mask = attention_mask.masked_fill(~triangle, -math.inf)
        is_causal = False
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal
    )


def flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Call the attention of ``attn_implementation="flex_attention"``; its mask has no heads."""
    module: Any = importlib.import_module("transformers.integrations.flex_attention")
    B, T, S = q.shape[0], q.shape[-2], k.shape[-2]
    if q.ndim != 4 or k.shape[0] != B:
        raise ValueError("q, k and v must have 4 axes, with one B")
    if bias is not None and bias.ndim > 2 and bias.shape[-3] != 1:
        raise ValueError("attention_mask is one for all heads")
    added = None if bias is None else bias.expand(B, 1, T, S)
    layer, kwargs = torch.nn.Module().eval(), {"scaling": scale, "softcap": softcap}
    o: torch.Tensor = module.flex_attention_forward(layer, q, k, v, added, **kwargs)[0]
    return o.transpose(1, 2)


def bloom(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    alibi: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    *,
    return_weights: bool = False,
) -> Any:
    """Call BloomAttention on q, k and v as its fused projection gives them, earlier keys cached."""
    B, H, T, S, D = _sizes(query, key, value)
    if key.shape[1] != H:
        raise ValueError("key and value must have the heads of query")
    module = BloomAttention(BloomConfig(hidden_size=H * D, n_head=H), layer_idx=0).eval()
    _leave_out(module)
    cache, new = _cache(key, value, T)
    fused = torch.stack((query, *new), 3).transpose(1, 2).reshape(B, T, 3 * H * D)
    added = _over_keys(query, alibi, S).reshape(B * H, 1, S)
    residual = fused.new_zeros(B, T, H * D)
    o, weights = module(fused, residual, added, attention_mask, layer_past=cache)
    o = o.view(B, T, H, D).transpose(1, 2)
    return (o, weights) if return_weights else o


def falcon(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    alibi: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    *,
    return_weights: bool = False,
) -> Any:
    """Call FalconAttention with ALiBi: its eager way, earlier keys cached."""
    B, H, T, S, D = _sizes(query, key, value)
    K = key.shape[1]
    config = FalconConfig(alibi=True, new_decoder_architecture=True, attn_implementation="eager")
    # Given at once they must suit a rotation of pairs, which ALiBi has none of.
    config.hidden_size, config.num_attention_heads, config.num_kv_heads = H * D, H, K
    module = FalconAttention(config, layer_idx=0).eval()
    _leave_out(module)
    repeated_key, repeated_value = (x.repeat_interleave(H // K, 1) for x in (key, value))
    cache, _ = _cache(repeated_key, repeated_value, T)  # as the module keeps them
    grouped = (x.reshape(B, K, -1, T, D) for x in (query, *_last(key, value, T)))
    fused = torch.cat([*grouped], 2).flatten(1, 2).transpose(1, 2).flatten(2)
    added = _over_keys(query, alibi, S).reshape(B * H, 1, S)
    hides = fused.new_zeros(1, 1, 1, 1) if attention_mask is None else attention_mask
    o, weights = module(fused, added, hides, layer_past=cache)
    o = o.view(B, T, H, D).transpose(1, 2)
    return (o, weights) if return_weights else o


def _sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Return B, H, T, S, D of self-attention with a cache."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError("q, k, v must be (B, H, T, D), k and v of one shape, q with their D")
    B, H, T, D = q.shape
    S = k.shape[2]
    if S < T or k.shape[0] != B or 0 in (H, D, k.shape[1]) or H % k.shape[1]:
        raise ValueError("it attends to a sequence of its own: its queries are the last keys")
    return B, H, T, S, D


def _leave_out(module: torch.nn.Module) -> None:
    """Put the identity in the place of a module's projections."""
    module.query_key_value, module.dense = torch.nn.Identity(), torch.nn.Identity()


def _last(k: torch.Tensor, v: torch.Tensor, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of the last T positions."""
    earlier = k.shape[2] - T
    return k[:, :, earlier:], v[:, :, earlier:]


def _cache(
    k: torch.Tensor, v: torch.Tensor, T: int
) -> tuple[DynamicCache | None, tuple[torch.Tensor, torch.Tensor]]:
    """Return a cache of all keys and values but the last T, and those."""
    earlier = k.shape[2] - T
    if not earlier:
        return None, (k, v)
    cache = DynamicCache()
    cache.update(k[:, :, :earlier], v[:, :, :earlier], 0)
    return cache, _last(k, v, T)


def _over_keys(q: torch.Tensor, alibi: torch.Tensor | None, S: int) -> torch.Tensor:
    """Return a bias that is the same for all queries as (B, H, 1, S), zeros if there is none."""
    B, H = q.shape[:2]
    if alibi is None:
        return q.new_zeros(B, H, 1, S)
    if alibi.shape[-2] != 1:
        raise ValueError("alibi is (B H, 1, S): one number for each key, the same for all queries")
    return alibi.expand(B, H, 1, S)
