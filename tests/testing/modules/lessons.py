"""Modules as lessons write them, each with what is particular to it."""

import math

import torch
from torch import nn
from torch.nn import functional


class Notebook(nn.Module):
    """query, key, value and mask in, (output, weights) out; 0 in the mask is filled with −1e9."""

    mistakes = ("width", "merge", "queries", "after", "key", "dropout")

    def __init__(self, width=15, num_heads=3, dropout=0.1, mistake=""):
        super().__init__()
        self.num_heads, self.head_size, self.mistake = num_heads, width // num_heads, mistake
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, self.head_size)).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        keys = self.W_q(key) if self.mistake == "key" else self.W_k(key)
        q, k, v = self.split(self.W_q(query)), self.split(keys), self.split(self.W_v(value))
        size = self.W_q.out_features if self.mistake == "width" else self.head_size
        scores = q @ k.mT / math.sqrt(size)
        if mask is not None and self.mistake != "after":
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = scores.softmax(-2 if self.mistake == "queries" else -1)
        if mask is not None and self.mistake == "after":
            weights = weights * (mask != 0)
        left = self.dropout(weights)
        if self.mistake == "dropout":
            left = functional.dropout(weights, 0.1)
        out = left @ v
        if self.mistake != "merge":
            out = out.transpose(1, 2)
        return self.W_o(out.reshape(*query.shape[:2], -1)), weights


class DropsReturned(Notebook):
    """Lesson A: the weights are returned after dropout; the mask may be floats (1, 1, T, T)."""

    def forward(self, query, key, value, mask=None):
        q, k, v = (
            self.split(self.W_q(query)),
            self.split(self.W_k(key)),
            self.split(self.W_v(value)),
        )
        scores = q @ k.mT / math.sqrt(self.head_size)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = self.dropout(scores.softmax(-1))
        return self.W_o((weights @ v).transpose(1, 2).flatten(2)), weights


class HeadPerNumber(nn.Module):
    """Lesson B: no biases, one head for each number of a token of size 2."""

    def __init__(self, mode=2, num_heads=2):
        super().__init__()
        self.num_heads = num_heads
        self.Wq, self.Wk, self.Wv, self.Wo = (nn.Linear(mode, mode, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                   for w in (self.Wq, self.Wk, self.Wv))  # fmt: skip
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.Wo((weights @ v).transpose(1, 2).flatten(2)), weights


class WholeWidth(nn.Module):
    """Lesson C: one layer for all three, in chunks; scores divided by √ of the whole width."""

    def __init__(self, emd_dim=14, num_heads=2):
        super().__init__()
        self.n_heads, self.width = num_heads, emd_dim
        self.qkv, self.fc_out = nn.Linear(emd_dim, 3 * emd_dim), nn.Linear(emd_dim, emd_dim)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
                   for y in self.qkv(x).chunk(3, -1))  # fmt: skip
        weights = (q @ k.mT / math.sqrt(self.width)).softmax(-1)
        return self.fc_out((weights @ v).transpose(1, 2).flatten(2))


class PerHead(nn.Module):
    """Lesson D: features per head [q, k, v], −inf above the diagonal, heads not moved back."""

    def __init__(self, input_dim=10, d_model=14, num_heads=2, is_decoder=True, moves=False):
        super().__init__()
        self.num_heads, self.head_dim, self.is_decoder = num_heads, d_model // num_heads, is_decoder
        self.moves = moves
        self.qkv_layer = nn.Linear(input_dim, 3 * d_model)
        self.linear_layer = nn.Linear(d_model, d_model)

    def compute_attention(self, x):
        B, T, _ = x.shape
        qkv = self.qkv_layer(x).reshape(B, T, self.num_heads, 3 * self.head_dim).transpose(1, 2)
        self.query, self.key, self.value = qkv.chunk(3, -1)
        scores = self.query @ self.key.mT / math.sqrt(self.head_dim)
        if self.is_decoder:
            scores = scores + torch.full((T, T), -torch.inf, dtype=x.dtype).triu(1)
        values = scores.softmax(-1) @ self.value
        if self.moves:
            values = values.transpose(1, 2)
        return self.linear_layer(values.reshape(B, T, -1))


class SingleHead(nn.Module):
    """Lesson E, one head: T of the key is taken from the query."""

    def __init__(self, input_dim=6, output_dim=5):
        super().__init__()
        self.W_q, self.W_k, self.W_v = (nn.Linear(input_dim, output_dim) for _ in range(3))

    def forward(self, query, key, value, mask=None):
        scores = self.W_q(query) @ self.W_k(key).mT / math.sqrt(self.W_q.out_features)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -torch.inf)
        weights = scores.softmax(-1)
        return weights @ self.W_v(value), weights


class SmallHeads(nn.Module):
    """Lesson E: H · head_dim need not be input_dim; T of the key is taken from the query."""

    def __init__(self, input_dim=11, head_dim=2, num_heads=3, dropout=0.2):
        super().__init__()
        self.num_heads, self.head_dim, self.rate = num_heads, head_dim, dropout
        width = num_heads * head_dim
        self.W_q, self.W_k, self.W_v = (nn.Linear(input_dim, width) for _ in range(3))
        self.W_o = nn.Linear(width, input_dim)

    def forward(self, query, key, value, mask=None):
        B, T = query.shape[:2]
        pairs = ((self.W_q, query), (self.W_k, key), (self.W_v, value))
        q, k, v = (w(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2) for w, x in pairs)
        scores = q @ k.mT / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = functional.dropout(scores.softmax(-1), self.rate, self.training)
        return self.W_o((weights @ v).transpose(1, 2).reshape(B, T, -1)), weights


class RawWeights(nn.Module):
    """Parameters without layers: x @ W, biases b_q, b_k, b_v, and True hides in its mask."""

    def __init__(self, width=9, heads=3):
        super().__init__()
        self.heads = heads
        for name in "qkvo":
            self.register_parameter(f"w_{name}", nn.Parameter(torch.randn(width, width) / 3))
        for name in "qkv":
            self.register_parameter(f"b_{name}", nn.Parameter(torch.randn(width)))

    def forward(self, x, context=None, attention_mask=None):
        context = x if context is None else context
        pairs = (
            (x, self.w_q, self.b_q),
            (context, self.w_k, self.b_k),
            (context, self.w_v, self.b_v),
        )
        q, k, v = (self.split(y @ w + b) for y, w, b in pairs)
        hides = None if attention_mask is None else ~attention_mask
        out = functional.scaled_dot_product_attention(q, k, v, hides)
        return out.transpose(1, 2).flatten(2) @ self.w_o

    def split(self, y):
        return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class OddNames(nn.Module):
    """Layers whose names tell nothing, grouped keys, (T, B, C) and a mask that is added."""

    def __init__(self, width=12, heads=6, kv=2):
        super().__init__()
        self.count, self.kv, self.batch_first = heads, kv, False
        self.alpha, self.delta = nn.Linear(width, width), nn.Linear(width, width)
        self.beta, self.gamma = (nn.Linear(width, width * kv // heads) for _ in range(2))

    def forward(self, x, mask=None):
        x = x.transpose(0, 1)
        D = x.shape[-1] // self.count
        q, k, v = (f(x).unflatten(-1, (-1, D)).transpose(1, 2)
                   for f in (self.alpha, self.beta, self.gamma))  # fmt: skip
        k, v = (y.repeat_interleave(self.count // self.kv, 1) for y in (k, v))
        scores = q @ k.mT / D**0.5
        if mask is not None:
            scores = scores + mask
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.delta(out).transpose(0, 1)
