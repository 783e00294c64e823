"""Variants of attention on torch tensors, differentiable by autograd."""

from npattn.torch.variants import differential, linear

__all__ = ["differential", "linear"]
