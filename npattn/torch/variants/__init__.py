"""Variants of attention on torch tensors, differentiable by autograd.

The meanings are those of `npattn.variants`.
"""

from npattn.torch.variants import differential, gathered, latent, linear

__all__ = ["differential", "gathered", "latent", "linear"]
