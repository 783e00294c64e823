"""Linear attention on torch tensors, differentiable by autograd, to any order.

    S_t = exp(g_t) S_{t−1} + φ(k_t)ᵀ v_t        o_t = scale · φ(q_t) S_t, divided by that of v = 1

Forms and meanings are those of `npattn.variants.linear`.
"""

from typing import Any, NamedTuple

import torch

from npattn.errors import OptionError
from npattn.torch.twins import Tensors
from npattn.variants import linear

Tensor = torch.Tensor


class LinearResults(NamedTuple):
    """Output (..., H, T, E), last state (..., K, D, E), and normaliser (..., K, D) or None."""

    out: Tensor
    state: Tensor
    normaliser: Tensor | None


def _features(kind: Any, x: Tensor) -> Tensor:
    """Return the features of x by the name of a map, or by a function on tensors."""
    if kind == "identity":
        return x
    if kind == "elu":
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    if kind == "relu":
        return x.relu()
    if kind == "softmax":
        return x.softmax(-1)
    y = kind(x)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        found = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise OptionError(f"feature_map returned {found}, must return a tensor {tuple(x.shape)}")
    return y


def _by_chunks(x: Any, size: int) -> tuple[Tensor, Tensor]:
    """Return y and the last state, chunk by chunk of keys."""
    state, length = x.state, x.k.shape[-2]
    y = x.q @ state[..., None, :, :] if not x.causal else None
    rows = []
    for start in range(0, length, size):
        at = slice(start, start + size)
        k, v = x.k[..., at, :], x.v[..., at, :]
        if y is not None:
            y = y + (x.q @ k[..., None, :, :].mT) @ v[..., None, :, :]
            state = state + k.mT @ v
            continue
        q, g = x.q[..., at, :], x.g[..., at, :]
        G, C = g.cumsum(-2), g.shape[-2]
        seen = torch.ones((C, C), dtype=torch.bool, device=g.device).tril()
        # G_t − G_s as a sum of its own: a difference loses all digits beyond a reset of −1e15.
        gap = torch.where(seen.tril(-1)[..., None], g[..., :, None, :], 0).cumsum(-3)
        within = gap.exp() * seen[..., None]
        out_of, last = within[..., -1, :, :], G[..., -1, :, None].exp()
        within = within[..., None, :, :, :]
        pairs = ((q[..., :, None, :] * k[..., None, None, :, :]) * within).sum(-1)
        before = (q * G.exp()[..., None, :, :]) @ state[..., None, :, :]
        if x.beta is not None:  # (1 + L) u = β (v − (k exp(G)) S)
            beta = x.beta[..., at, :]
            L = beta * ((k[..., :, None, :] * k[..., None, :, :]) * within[..., 0, :, :, :]).sum(-1)
            v = torch.linalg.solve_triangular(
                L.tril(-1), beta * (v - (k * G.exp()) @ state), upper=False, unitriangular=True
            )
        rows.append(before + pairs @ v[..., None, :, :])
        state = last * state + (k * out_of).mT @ v
    if y is None:
        empty = x.q.new_zeros(*x.q.shape[:-1], x.v.shape[-1])
        y = torch.cat(rows, -2) if rows else empty
    return y, state


class _Linear(Tensors):
    """Tensors with the features and chunks of linear attention, differentiable to any order."""

    by_chunks = staticmethod(_by_chunks)

    def read_features(self, feature_map: Any) -> Any:
        if isinstance(feature_map, tuple):
            raise OptionError(
                "feature_map is a FeatureMap of arrays; pass a callable f(x) on tensors"
            )
        return feature_map

    def features(self, problem: Any, x: Any) -> Any:
        return _features(problem.feature_map, x)


_on_tensors = _Linear(__name__).bind
forward = _on_tensors(linear.forward, LinearResults)
attention = _on_tensors(
    linear.attention,
    Tensor,
    """
    >>> import torch, npattn.torch
    >>> x = torch.ones(1, 3, 2, requires_grad=True)
    >>> npattn.torch.variants.linear.attention(x, x, x, causal=True).shape
    torch.Size([1, 3, 2])
    """,
)
