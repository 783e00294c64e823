"""Multi-head latent attention on torch tensors, as `npattn.variants.latent`."""

from typing import Any, NamedTuple

import torch

from npattn.problem import Forward
from npattn.torch.twins import Tensors
from npattn.variants import latent

Tensor = torch.Tensor


class LatentResults(NamedTuple):
    """Output, lse, and the attention inside, which has the weights."""

    out: Tensor
    lse: Tensor
    attention: Forward

    @property
    def weights(self) -> Tensor:
        """Weights (..., H, T, S), differentiable once."""
        weights: Any = self.attention.weights
        return weights  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """x w, in whose gradient a hidden row that is not finite counts nothing [10]."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = (dy @ w.swapaxes(-1, -2)).sum_to_size(x.shape)
        # 0 · NaN is NaN: a row without gradient counts nothing, whatever stands in the other one.
        x = torch.where(~x.isfinite() & (dy == 0).all(-1, keepdim=True), 0, x)
        dy = torch.where(~dy.isfinite() & (x == 0).all(-1, keepdim=True), 0, dy)
        return dx, (x.swapaxes(-1, -2) @ dy).sum_to_size(w.shape)


class _Latent(Tensors):
    """Tensors whose products with the projections are those of `_Product`."""

    matmul = staticmethod(_Product.apply)


_on_tensors = _Latent(__name__).bind
forward = _on_tensors(latent.forward, LatentResults)
attention = _on_tensors(latent.attention, Tensor)
