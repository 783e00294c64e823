"""Pairs of plain operations: selections, kinks, fused functions, losses; right forms and gradients.

Each row is (reference, its inputs, other right forms). Of each a doubled gradient is the mistake.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

T = torch


def softmax(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def softmax_by_max(x):
    e = (x - x.max(-1, keepdim=True).values.detach()).exp()
    return e * (1 / e.sum(-1, keepdim=True))


def first(i):
    """Return indices along the last axis below its size."""
    return i[..., None]


def pool(x):
    n = x.shape[-1] // 2 * 2
    return x[..., :n].reshape(*x.shape[:-1], -1, 2).amax(-1)


def one_hot_loss(x, i):
    return -(F.one_hot(i, x.shape[-1]).to(x.dtype) * (x - x.logsumexp(-1, keepdim=True))).sum(-1)


def relu_mlp(x, w, u):
    return F.relu(x @ w) @ u


def relu_mlp_by_where(x, w, u):
    h = T.einsum("bc,ce->be", x, w)
    return T.where(h > 0, h, T.zeros_like(h)) @ u


def conv_by_unfold(x, w):
    return T.einsum("bcti,oci->bot", x.unfold(-1, w.shape[-1], 1), w)


def group_norm(x, w):
    c = x - x.mean((-1, -2), keepdim=True)
    return c / ((c * c).mean((-1, -2), keepdim=True) + 1e-5).sqrt() * w[:, None]


def huber(x, y):
    d = (x - y).abs()
    return T.where(d < 1, 0.5 * d * d, d - 0.5)


def eager(q, k, v):
    s = q @ k.mT / q.shape[-1] ** 0.5
    return s.softmax(-1, dtype=T.float32).to(q.dtype) @ v


def twice(f):
    """Return the right values with a doubled gradient."""
    return lambda *arrays: 2 * f(*arrays) - f(*arrays).detach()


def sinusoid(x):
    return T.atan2(x.sin(), x.cos() + 3)


X = {"x": "B C"}
XY = {"x": "B C", "y": "B C"}
PLAIN = {
    "softmax by amax": (softmax, X, [softmax_by_max, lambda x: T.softmax(x, -1)]),
    "softmax": (lambda x: T.softmax(x, -1), X, [softmax, lambda x: x.log_softmax(-1).exp()]),
    "softmax float32": (
        lambda x: T.softmax(x, -1, dtype=T.float32).to(x.dtype),
        X,
        [softmax, lambda x: T.softmax(x, -1)],
    ),
    "log softmax": (
        lambda x: F.log_softmax(x, -1),
        X,
        [lambda x: x - x.logsumexp(-1, keepdim=True)],
    ),
    "logsumexp": (
        lambda x: x.logsumexp(-1),
        X,
        [lambda x: x.amax(-1) + (x - x.amax(-1, keepdim=True)).exp().sum(-1).log()],
    ),
    "softmin": (lambda x: F.softmin(x, -1), X, [lambda x: softmax(-x)]),
    "largest": (
        lambda x: x / x.abs().amax(-1, keepdim=True),
        X,
        [lambda x: x * (1 / T.maximum(x, -x).max(-1, keepdim=True).values)],
    ),
    "max pool": (
        lambda x: F.max_pool1d(x[:, None], 2)[:, 0],
        {"x": "B 2C"},
        [pool, lambda x: T.maximum(x[..., ::2], x[..., 1::2])],
    ),
    "relu": (
        lambda x, w: F.relu(x @ w),
        {"x": "B C", "w": "C E"},
        [lambda x, w: (x @ w).clamp(min=0), lambda x, w: (x @ w) * (x @ w > 0)],
    ),
    "relu MLP": (relu_mlp, {"x": "B C", "w": "C E", "u": "E C"}, [relu_mlp_by_where]),
    "leaky": (
        lambda x: F.leaky_relu(x, 0.1),
        X,
        [lambda x: T.maximum(x, 0.1 * x), lambda x: x.clamp(min=0) + 0.1 * x.clamp(max=0)],
    ),
    "elu": (F.elu, X, [lambda x: x.clamp(min=0) + x.clamp(max=0).expm1()]),
    "hardswish": (F.hardswish, X, [lambda x: x * (x + 3).clamp(0, 6) / 6]),
    "clamp": (
        lambda x: x.clamp(-1, 0.5) * x,
        X,
        [lambda x: x * T.minimum(T.maximum(x, x.new_tensor(-1.0)), x.new_tensor(0.5))],
    ),
    "abs": (lambda x, y: (x * y).abs(), XY, [lambda x, y: x.abs() * y.abs()]),
    "sign": (lambda x, y: x.sign() * y, XY, [lambda x, y: T.where(x > 0, y, -y)]),
    "where": (
        lambda x, y: T.where(x > y, x * y, x - y),
        XY,
        [lambda x, y: (x > y) * (x * y) + (x <= y) * (x - y)],
    ),
    "median": (
        lambda x: x - x.median(-1, keepdim=True).values,
        X,
        [lambda x: x - x.sort(-1).values[..., (x.shape[-1] - 1) // 2, None]],
    ),
    "sort": (
        lambda x: x.sort(-1).values.cumsum(-1),
        X,
        [lambda x: T.cumsum(x.gather(-1, x.argsort(-1)), -1)],
    ),
    "top 1": (
        lambda x: x.topk(1, -1).values.exp(),
        X,
        [lambda x: x.amax(-1, keepdim=True).exp()],
    ),
    "gather": (
        lambda x, i: 3 * x.gather(-1, first(i)),
        {"x": "B V", "i": "B int V"},
        [lambda x, i: (3 * x * F.one_hot(i, x.shape[-1])).sum(-1, keepdim=True)],
    ),
    "embedding": (
        lambda e, i: F.embedding(i, e).mean(1),
        {"e": "V C", "i": "B T int V"},
        [lambda e, i: F.one_hot(i, len(e)).to(e.dtype).sum(1) @ e / i.shape[1]],
    ),
    "scatter": (
        lambda x, i: T.zeros_like(x).scatter_add(-1, i, x * x),
        {"x": "B C", "i": "B C int C"},
        [lambda x, i: ((x * x)[..., None] * F.one_hot(i, x.shape[-1])).sum(-2)],
    ),
    "cross entropy": (
        F.cross_entropy,
        {"x": "B V", "i": "B int V"},
        [
            lambda x, i: one_hot_loss(x, i).mean(),
            lambda x, i: F.nll_loss(x.log_softmax(-1), i),
        ],
    ),
    "smoothing": (
        lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1),
        {"x": "B V", "i": "B int V"},
        [lambda x, i: 0.9 * F.cross_entropy(x, i) - 0.1 * x.log_softmax(-1).mean()],
    ),
    "BCE": (
        F.binary_cross_entropy_with_logits,
        XY,
        [lambda x, y: (F.softplus(x) - x * y).mean()],
    ),
    "KL": (
        lambda x, y: F.kl_div(x.log_softmax(-1), y.log_softmax(-1), log_target=True),
        XY,
        [lambda x, y: (y.softmax(-1) * (y.log_softmax(-1) - x.log_softmax(-1))).mean()],
    ),
    "huber": (lambda x, y: F.huber_loss(x, y, reduction="none"), XY, [huber]),
    "L1": (F.l1_loss, XY, [lambda x, y: (x - y).abs().sum() / x.numel()]),
    "MSE": (F.mse_loss, XY, [lambda x, y: ((y - x) ** 2).sum() / x.numel()]),
    "cosine": (
        lambda x, y: F.cosine_similarity(x, y, -1),
        XY,
        [lambda x, y: (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)).clamp(min=1e-8)],
    ),
    "normalize": (
        lambda x: F.normalize(x, dim=-1),
        X,
        [lambda x: x * (x * x).sum(-1, keepdim=True).rsqrt()],
    ),
    "layer norm": (
        lambda x, w: F.layer_norm(x, x.shape[-1:], w),
        {"x": "B C", "w": "C"},
        [
            lambda x, w: (
                (x - x.mean(-1, keepdim=True))
                / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
                * w
            )
        ],
    ),
    "group norm": (
        lambda x, w: F.group_norm(x, 1, w), {"x": "B 2C T", "w": "2C"}, [group_norm]
    ),
    "variance": (
        lambda x: x / (1 + x.var(-1, keepdim=True, correction=0)),
        X,
        [lambda x: x / (1 + ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True))],
    ),
    "conv1d": (
        F.conv1d,
        {"x": "B C 7T", "w": "E C 3"},
        [conv_by_unfold],
    ),
    "sdpa": (
        eager,
        {"q": "B H T D", "k": "B H S D", "v": "B H S E"},
        [F.scaled_dot_product_attention],
    ),
    "gelu": (F.gelu, X, [lambda x: x * (1 + T.erf(x / 2**0.5)) / 2]),
    "silu": (F.silu, X, [lambda x: x / (1 + T.exp(-x))]),
    "tanh": (lambda x: T.tanh(x) * 3, X, [lambda x: 3 - 6 / (1 + T.exp(2 * x))]),
    "GLU": (F.glu, {"x": "B 2C"}, [lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1].sigmoid()]),
    "cumsum": (
        lambda x: x.cumsum(-1) * x,
        X,
        [lambda x: (T.tril(x.new_ones(*[x.shape[-1]] * 2)) @ x[..., None])[..., 0] * x],
    ),
    "atan": (sinusoid, X, [lambda x: T.atan(x.sin() / (x.cos() + 3))]),
}  # fmt: skip
