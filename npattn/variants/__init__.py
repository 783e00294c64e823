"""Attention of other forms than softmax(scale · q kᵀ) v of q, k and v as they are given.

    latent_attention    latent_forward    latent_backward      keys and values compressed (MLA)
    gathered_attention  gathered_forward  gathered_backward    each query has a list of keys
    top_k  index_mask  drop_repeats                            such lists

Each is built on `npattn.forward` and `npattn.backward`, so that its rules hold.
"""

from npattn.variants import differential, linear
from npattn.variants.gathered import (
    GatheredForward,
    gathered_attention,
    gathered_backward,
    gathered_forward,
)
from npattn.variants.indices import drop_repeats, index_mask, top_k
from npattn.variants.latent import (
    LatentForward,
    LatentGradients,
    latent_attention,
    latent_backward,
    latent_forward,
)

__all__ = [
    "GatheredForward",
    "LatentForward",
    "LatentGradients",
    "differential",
    "drop_repeats",
    "gathered_attention",
    "gathered_backward",
    "gathered_forward",
    "index_mask",
    "latent_attention",
    "latent_backward",
    "latent_forward",
    "linear",
    "top_k",
]
