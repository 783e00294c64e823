"""A problem as one call of ``scaled_dot_product_attention``."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from npattn.torch.kernels.operands import differentiates, flatten, with_positive_scale

Tensor = torch.Tensor
WITH_MASK = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def evaluate_sdpa(problem: Any) -> Tensor:
    """Return out (B, H, T, E) of a problem that has only options of theirs."""
    q, scale = with_positive_scale(problem)
    k, v = flatten(problem.k, problem), flatten(problem.v, problem)
    grouped = problem.H != problem.K
    if _is_triangle(problem):
        return scaled_dot_product_attention(
            q, k, v, None, 0.0, True, scale=scale, enable_gqa=grouped
        )
    mask = _attn_mask(problem)
    with correct_kernels(problem, mask):
        return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)


def _is_triangle(problem: Any) -> bool:
    """Check that their top-left causal mask hides all that is hidden, and nothing is added."""
    square = problem.T == problem.S or problem.alignment == "top_left"
    others = (problem.mask, problem.window, problem.bias)
    return bool(problem.causal) and square and all(x is None for x in others)


def _attn_mask(problem: Any) -> Tensor | None:
    """Return their one mask: bool, True = may attend, or floating, added to the scores."""
    visible = None if _sees_every_key(problem) else problem.visible
    visible = None if visible is None else flatten(visible, problem)
    if problem.bias is None:
        return visible if visible is None else _with_all_keys(visible, problem)
    bias = flatten(problem.bias_array, problem)
    mask = bias if visible is None else torch.where(visible, bias, float("-inf"))
    return _with_all_keys(mask, problem)


def _with_all_keys(mask: Tensor, problem: Any) -> Tensor:
    """Return the mask with a number for each key, in memory.

    Given a bias with a last axis of 1, EFFICIENT_ATTENTION on CUDA raises in float32 and accesses a
    wrong address in bfloat16 (torch 2.11).
    """
    if mask.shape[-1] == problem.S:
        return mask
    return mask.expand(*mask.shape[:-1], problem.S).contiguous()


def _sees_every_key(problem: Any) -> bool:
    """Check for one query at the end, as in decoding, which needs no mask."""
    last = problem.T == 1 and problem.alignment != "top_left"
    return last and problem.mask is None and problem.window is None


def correct_kernels(problem: Any, mask: Tensor | None) -> AbstractContextManager[Any]:
    """Context in which only kernels run that are correct with the mask."""
    if mask is None:
        return nullcontext()
    if mask.dtype != torch.bool and differentiates(problem):
        # Others rebuild the weights from a float32 lse: wrong gradients in a row of −1e9.
        return sdpa_kernel(SDPBackend.MATH)
    # cuDNN, the other one on CUDA: NaN in dq with a mask at some lengths.
    return nullcontext() if problem.device.type == "cpu" else sdpa_kernel(WITH_MASK)
