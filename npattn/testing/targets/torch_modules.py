"""Attention of torch that takes more than a call: fast paths, ragged batches, compiled code."""

from __future__ import annotations

import functools
from typing import Any

from npattn.errors import MissingExtraError

try:
    import torch
    from torch.nn.attention.flex_attention import flex_attention
    from torch.nn.functional import scaled_dot_product_attention
except ImportError as err:
    raise MissingExtraError(
        "torch targets need torch; npattn itself does not: pip install 'npattn[torch]'"
    ) from err

__all__ = ["flex_compiled", "mha_fast", "nested_sdpa"]

MOST_FEATURES = 4096  # its projections have three times the square of them


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
    module = torch.nn.MultiheadAttention(size, heads, batch_first=True, dtype=query.dtype).eval()
    same = torch.eye(size, dtype=query.dtype).view(heads, 4, D, heads, 4, D)
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
            *(x, x, x),
            attn_mask=attn_mask,
            need_weights=return_weights,
            average_attn_weights=False,
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
    """Return the visible keys of each sequence.

    Raises
    ------
    ValueError
        If they differ between heads or queries.
    """
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
