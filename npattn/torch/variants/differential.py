"""Differential attention on torch tensors, differentiable by autograd.

Meanings are those of `npattn.variants.differential`.
"""

import torch

from npattn.torch.twins import Tensors
from npattn.variants import differential
from npattn.variants.differential import DifferentialForward

_on_tensors = Tensors(__name__).bind
forward = _on_tensors(differential.forward, DifferentialForward)
attention = _on_tensors(
    differential.attention,
    torch.Tensor,
    """
    >>> import torch, npattn.torch
    >>> x, lam = torch.ones(1, 3, 2), torch.tensor(0.25, requires_grad=True)
    >>> npattn.torch.variants.differential.attention(x, x, x, x, x, lam=lam).sum().backward()
    >>> lam.grad
    tensor(-6.)
    """,
)
reparametrise = _on_tensors(differential.reparametrise, torch.Tensor)
