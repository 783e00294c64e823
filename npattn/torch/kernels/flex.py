"""A problem as one call of FlexAttention, with mask, bias and softcap as functions of indices."""

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from npattn.masks.bands import Band
from npattn.masks.mask import And
from npattn.masks.sequences import Documents
from npattn.problem.arrays import Array, diagonal
from npattn.torch.kernels.operands import differentiates, flatten, with_positive_scale
from npattn.torch.tensors import to_tensor

Tensor = torch.Tensor
Index = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # f(b, h, t, s)

ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters


def compile_flex(problem: Any) -> Any:
    """Return FlexAttention, compiled for a kind of call."""
    from torch.nn.attention.flex_attention import flex_attention

    return _compile(flex_attention, _kind(problem))


@lru_cache(maxsize=256)
def _compile(function: Any, kind: tuple[Any, ...]) -> Any:
    """Compile a function for calls of a kind.

    The ninth compilation of one function falls back to eager mode without a warning, and
    FlexAttention then holds T × S numbers. So each kind has a count of its own.
    """
    kwargs: Any = {"isolate_recompiles": True} if ISOLATES else {}
    return torch.compile(function, dynamic=False, **kwargs)  # dynamic has been a source of NaN


def _kind(problem: Any) -> tuple[Any, ...]:
    """Return all that is compiled into a kernel."""
    tensors = (problem.q, problem.k, problem.v)
    options = (problem.scale, problem.softcap, problem.causal, problem.window)
    return *((x.shape, x.dtype, x.device) for x in tensors), *options, differentiates(problem)


def evaluate_flex(problem: Any, function: Any) -> tuple[Tensor, Tensor]:
    """Return out (B, H, T, E) and lse (B, H, T) by FlexAttention, compiled or not."""
    from torch.nn.attention.flex_attention import AuxRequest

    q, scale = with_positive_scale(problem)
    out, aux = function(
        q.contiguous(), flatten(problem.k, problem).contiguous(),
        flatten(problem.v, problem).contiguous(), score_mod=_score_mod(problem),
        block_mask=_block_mask(problem), scale=scale, enable_gqa=problem.H != problem.K,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, aux.lse


def _score_mod(problem: Any) -> Any:
    """Return softcap, score_mod and bias, in that order, as one function; None without any."""
    cap, user_mod = problem.softcap, problem.score_mod
    bias = None if problem.bias is None else _lookup(problem.bias_array, problem)
    if cap is None and user_mod is None and bias is None:
        return None

    def score_mod(s: Tensor, b: Tensor, h: Tensor, t: Tensor, s_index: Tensor) -> Tensor:
        s = s if cap is None else cap * torch.tanh(s / cap)
        s = s if user_mod is None else user_mod(s, b, h, t, s_index)
        return s if bias is None else s + bias(b, h, t, s_index)

    return score_mod


def _block_mask(problem: Any) -> Any:
    """Return mask, causal and window as their block mask; None if nothing is hidden."""
    left_keys, right_keys = problem.window or (None, None)
    if problem.causal:
        right_keys = 0 if right_keys is None else min(right_keys, 0)
    T, S, mask = problem.T, problem.S, problem.mask
    band = _band(diagonal(T, S, problem.alignment), left_keys, right_keys, T + S)
    if mask is None:
        return _band_blocks(band, T, S, problem.device)
    of_mask = _mask_mod(mask, problem)
    both = of_mask if band is None else _and(of_mask, band)
    # Samples and heads with the same blocks share one copy.
    lead, H, sizes = problem.lead, problem.H, (T, S)
    shape = mask.shape if isinstance(mask, Tensor) else mask.shape(lead, H, *sizes)
    B = math.prod(lead) if math.prod(shape[:-3]) != 1 else None
    H = H if len(shape) > 2 and shape[-3] != 1 else None
    return _blocks(both, B, H, T, S, problem.device)


@lru_cache(maxsize=16)
def _band_blocks(band: Index | None, T: int, S: int, device: torch.device) -> Any:
    return None if band is None else _blocks(band, None, None, T, S, device)


def _blocks(
    mask_mod: Index, B: int | None, H: int | None, T: int, S: int, device: torch.device
) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mask_mod, B, H, T, S, device=device)


def _mask_mod(mask: Any, problem: Any) -> Index:
    """Return a mask as a function of indices, which holds T × S numbers only if the mask does."""
    T, S = problem.T, problem.S
    if isinstance(mask, And):
        return _and(_mask_mod(mask.one, problem), _mask_mod(mask.other, problem))
    if isinstance(mask, Band):
        band = _band(diagonal(T, S, mask.alignment), mask.left, mask.right, T + S)
        if band is not None:
            return band
    if isinstance(mask, Documents):
        queries, keys = (_per_sample(x, problem) for x in (mask.queries, mask.keys))
        return lambda b, h, t, s: queries[b, t] == keys[b, s]
    return _lookup(mask if isinstance(mask, Tensor) else problem.as_array(mask), problem)


@lru_cache(maxsize=16)  # the same numbers give the same function, which is not compiled again
def _band(diagonal: int, left_keys: int | None, right_keys: int | None, most: int) -> Index | None:
    """Return the keys beside the diagonal; beyond `most` keys a band counts as unlimited."""
    if left_keys is None and right_keys is None:
        return None
    far = diagonal + (most if right_keys is None else min(right_keys, most))
    near = diagonal - (most if left_keys is None else min(left_keys, most))

    def inside(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s - t <= far) & (s - t >= near)

    return inside


def _and(one: Index, other: Index) -> Index:
    def both(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return one(b, h, t, s) & other(b, h, t, s)

    return both


def _per_sample(documents: Array, problem: Any) -> Tensor:
    """Expand documents (..., n) to those of each sample (B, n)."""
    tensor = to_tensor(documents, problem.device)
    n = tensor.shape[-1]
    return tensor.expand(*problem.lead, n).reshape(-1, n).contiguous()


def _lookup(x: Tensor, problem: Any) -> Index:
    """Return x, which broadcasts against the scores, as a function of indices."""
    x = flatten(x, problem).contiguous()
    steps = [int(n != 1) for n in x.shape]  # an axis of 1 has one entry for all

    def at(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return x[b * steps[0], h * steps[1], t * steps[2], s * steps[3]]

    return at
