"""Attention of other forms than softmax(scale · q kᵀ) v of q, k and v as they are given.

    latent          keys and values of all heads from one compressed vector a key (MLA)
    gathered        each query has a list of keys, as the largest scores choose them
    differential    the difference of two softmaxes
    linear          sums over keys without a softmax, and their states

Each has `attention`, `forward` and `backward`. Those with a softmax are built on `npattn.forward`
and `npattn.backward`, so that its rules hold.
"""

from npattn.variants import differential, gathered, latent, linear

__all__ = ["differential", "gathered", "latent", "linear"]
__dir__ = __all__.copy
