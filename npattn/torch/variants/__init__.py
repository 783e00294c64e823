"""Variants of attention on torch tensors, differentiable by autograd.

The meanings are those of `npattn.variants`.
"""

from npattn.torch.variants import differential, linear
from npattn.torch.variants.gathered import (
    GatheredResults,
    drop_repeats,
    gathered_attention,
    gathered_forward,
    index_mask,
    top_k,
)
from npattn.torch.variants.latent import LatentResults, latent_attention, latent_forward

__all__ = [
    "GatheredResults",
    "LatentResults",
    "differential",
    "drop_repeats",
    "gathered_attention",
    "gathered_forward",
    "index_mask",
    "latent_attention",
    "latent_forward",
    "linear",
    "top_k",
]
