"""How often a check by a reference is wrong: alarms of right pairs, and wrong pairs it misses.

    python -m benchmarks.power.reference                  # the table of docs/reference.md
    python -m benchmarks.power.reference --alarms 25      # right pairs × dtypes × 25 seeds

A row is a function in its plainest form, other right forms of it, and mistakes that people make.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.power.selections import PLAIN, twice
from npattn.testing import check

T = torch
F = torch.nn.functional
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Row:
    """A reference, and functions that are right or wrong by it."""

    reference: Callable[..., Any]
    inputs: dict[str, str] | None
    right: dict[str, Callable[..., Any]]
    wrong: dict[str, Callable[..., Any]]
    options: dict[str, tuple[Any, ...]] | None = None
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)


# --- normalisations -------------------------------------------------------------------------------


def layer_norm(x, w, b, eps=1e-5, ddof=0):
    c = x - x.mean(-1, keepdim=True)
    n = max(x.shape[-1] - ddof, 1)
    return c / ((c * c).sum(-1, keepdim=True) / n + eps).sqrt() * w + b


def wide(x):
    return T.float64 if x.dtype == T.float64 else T.float32


def layer_norm_float32(x, w, b):
    x32, w32, b32 = (y.to(wide(x)) for y in (x, w, b))
    return F.layer_norm(x32, x.shape[-1:], w32, b32).to(x.dtype)


def rms_norm(x, w, eps=1e-6):
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * w


def softmax_numpy(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softmax_division_last(x):
    z = x - x.max(-1, keepdims=True)
    return np.exp(z - np.log(np.exp(z).sum(-1, keepdims=True)))


# --- layers ---------------------------------------------------------------------------------------


def linear(x, w, b):
    return x @ w + b


def linear_in_blocks(x, w, b):
    n = x.shape[-1] // 2
    return x[..., :n] @ w[:n] + x[..., n:] @ w[n:] + b


def linear_tail(x, w, b):
    n = max(x.shape[-1] // 8 * 8, 1)
    return x[..., :n] @ w[:n] + b


def gelu(x):
    return 0.5 * x * (1 + T.erf(x / 2**0.5))


def swiglu(x, w, u, d):
    a = x @ w
    return (a * T.sigmoid(a) * (x @ u)) @ d


def swiglu_with(activation=F.silu, gate="w", drop=0):
    def f(x, w, u, d):
        a, g = (x @ w, x @ u) if gate == "w" else (x @ u, x @ w)
        y = activation(a) * g
        return y[..., : y.shape[-1] - drop] @ d[: y.shape[-1] - drop]

    return f


# --- attention within a block ---------------------------------------------------------------------


def rotate(x, base=1e4, first=0, layout="half"):
    n, D = x.shape[-2:]
    angle = base ** (-T.arange(D // 2, dtype=T.float64) / (D // 2))
    at = T.arange(first, first + n, dtype=T.float64)[:, None] * angle
    c, s = at.cos().to(x.dtype), at.sin().to(x.dtype)
    if layout == "pairs":
        a, b = x[..., ::2], x[..., 1::2]
        return T.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return T.cat([a * c - b * s, b * c + a * s], -1)


def rope_attention(q, k, v, causal=False, turn=rotate, turn_k=None, scale=None, soft=-1):
    turn_k = turn if turn_k is None else turn_k
    s = turn(q) @ turn_k(k).transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if causal:
        s = s.masked_fill(~T.ones(s.shape[-2:], dtype=T.bool).tril(), -T.inf)
    return T.softmax(s, soft) @ v


def rope_sdpa(q, k, v, causal=False):
    return F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=causal)


def rope_chunked(q, k, v, causal=False):
    q, k = rotate(q), rotate(k)
    rows = []
    for t in range(0, q.shape[-2], 16):
        s = q[..., t : t + 16, :] @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if causal:
            n = T.arange(t, t + s.shape[-2])[:, None]
            s = s.masked_fill(n < T.arange(k.shape[-2]), -T.inf)
        e = (s - s.amax(-1, keepdim=True)).exp()
        rows.append(e @ v / e.sum(-1, keepdim=True))
    return T.cat(rows, -2)


def late_base(k):
    return T.cat([rotate(k)[..., :64, :], rotate(k[..., 64:, :], 1.01e4, 64)], -2)


def block(x, w, o, mask):
    B, n, _C = x.shape
    q, k, v = (y.reshape(B, n, 2, -1).transpose(1, 2) for y in (x @ w).chunk(3, -1))
    s = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    p = T.softmax(s.masked_fill(~mask, -T.inf), -1)
    return x + (p @ v).transpose(1, 2).reshape(B, n, -1) @ o


def block_sdpa(x, w, o, mask):
    B, n, _C = x.shape
    q, k, v = (y.reshape(B, n, 2, -1).transpose(1, 2) for y in (x @ w).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return x + y.transpose(1, 2).reshape(B, n, -1) @ o


def block_with(order="qkv", merge=True, residual=1.0, power=0.5, hide=True, fill=-T.inf):
    def f(x, w, o, mask):
        B, n, _C = x.shape
        parts = dict(zip(order, (x @ w).chunk(3, -1), strict=True))
        q, k, v = (parts[i].reshape(B, n, 2, -1).transpose(1, 2) for i in "qkv")
        s = (q @ k.transpose(-1, -2)) / q.shape[-1] ** power
        p = T.softmax(s.masked_fill(~mask, fill) if hide else s, -1)
        y = p @ v
        y = (y.transpose(1, 2) if merge else y).reshape(B, n, -1)
        return residual * x + y @ o

    return f


# --- recurrences and losses -----------------------------------------------------------------------


def decay(x, a):
    h, rows = T.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = T.sigmoid(a) * h + x[:, t]
        rows.append(h)
    return T.stack(rows, 1)


def decay_matrix(x, a):
    n = T.arange(x.shape[1])
    steps = (n[:, None] - n).clamp(min=0)
    powers = T.sigmoid(a) ** steps[..., None].to(x.dtype)
    return T.einsum("tsc,bsc->btc", powers * (n[:, None] >= n)[..., None], x)


def decay_with(start=0, late=False):
    def f(x, a):
        h, rows = T.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = h if t < start else T.sigmoid(a) * h
            h = h + x[:, t] * (0.5 if late and t == 32 else 1)
            rows.append(h)
        return T.stack(rows, 1)

    return f


def cross_entropy(x, ids):
    rows = T.log_softmax(x, -1)
    return -rows.gather(-1, ids[..., None]).mean()


def cross_entropy_lse(x, ids):
    return (x.logsumexp(-1) - x.gather(-1, ids[..., None])[..., 0]).mean()


def conv(x, w):
    padded = F.pad(x, (2, 0))
    return sum(padded[..., i : i + x.shape[-1]] * w[:, i, None] for i in range(3))


def conv_library(x, w):
    return F.conv1d(F.pad(x, (2, 0)), w[:, None], groups=x.shape[-2])


def conv_with(pad=(2, 0), flip=False):
    def f(x, w):
        return conv_of(F.pad(x, pad), w.flip(-1) if flip else w, x.shape[-1])

    return f


def conv_of(padded, w, n):
    return sum(padded[..., i : i + n] * w[:, i, None] for i in range(3))


EVEN = {"D": (2, 8, 16, 64), "H": (1, 2)}
# fmt: off
TABLE = {
    "layer norm": Row(layer_norm, {"x": "B T C", "w": "C", "b": "C"}, {
        "torch": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        "in float32": layer_norm_float32,
        "var in float32": lambda x, w, b: (
            (x - x.to(wide(x)).mean(-1, keepdim=True))
            * (x.to(wide(x)).var(-1, keepdim=True, correction=0) + 1e-5).rsqrt()
            * w
            + b
        ).to(x.dtype),
        "by mean of squares": lambda x, w, b: (
            F.rms_norm(x - x.mean(-1, keepdim=True), x.shape[-1:], w, 1e-5) + b
        ),
    }, {
        "eps 1e-4": lambda x, w, b: layer_norm(x, w, b, 1e-4),
        "n - 1": lambda x, w, b: layer_norm(x, w, b, ddof=1),
        "eps after the root": lambda x, w, b: (
            (x - x.mean(-1, keepdim=True))
            / (x.var(-1, keepdim=True, correction=0).sqrt() + 1e-5)
            * w
            + b
        ),
        "no mean": lambda x, w, b: rms_norm(x, w) + b,
        "mean has no gradient": lambda x, w, b: (
            layer_norm(x, w, b)
            + (x.mean(-1, keepdim=True) - x.mean(-1, keepdim=True).detach()) * w
        ),
    }),
    "RMS norm": Row(rms_norm, {"x": "B T C", "w": "C"}, {
        "torch": lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6),
        "rsqrt in float32": lambda x, w: (
            x * T.rsqrt(x.to(wide(x)).pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * w
        ),
        "weight first": lambda x, w: (x * w) / (x.square().mean(-1, True) + 1e-6).sqrt(),
    }, {
        "eps 1e-5": lambda x, w: rms_norm(x, w, 1e-5),
        "1 + w": lambda x, w: rms_norm(x, 1 + w),
        "sum for mean": lambda x, w: x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt() * w,
        "root has no gradient": lambda x, w: (
            x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt().detach() * w
        ),
    }),
    "softmax (NumPy)": Row(softmax_numpy, {"x": "B S"}, {
        "by logarithm": softmax_division_last,
        "reciprocal": lambda x: (
            np.exp(x - x.max(-1, keepdims=True))
            * (1 / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
        ),
    }, {
        "other axis": lambda x: softmax_numpy(x.T).T,
        "base 2": lambda x: softmax_numpy(x * x.dtype.type(0.6931)),
        "last block left out": lambda x: (
            softmax_numpy(x)
            if x.shape[-1] < 65
            else (
                np.exp(x - x.max(-1, keepdims=True))
                / np.exp(x[:, :64] - x.max(-1, keepdims=True)).sum(-1, keepdims=True)
            )
        ),
    }),
    "linear": Row(linear, {"x": "B T C", "w": "C 3C", "b": "3C"}, {
        "addmm": lambda x, w, b: F.linear(x, w.T, b),
        "in blocks": linear_in_blocks,
        "einsum": lambda x, w, b: T.einsum("btc,cd->btd", x, w) + b,
        "products summed": lambda x, w, b: (x[..., None] * w).sum(-2) + b,
    }, {
        "tail of 8 left out": linear_tail,
        "bias twice": lambda x, w, b: linear(x, w, 2 * b),
        "last column": lambda x, w, b: T.cat([linear(x, w, b)[..., :-1], x @ w[:, -1:]], -1),
        "bias has no gradient": lambda x, w, b: linear(x, w, b.detach()),
    }),
    "GELU": Row(gelu, {"x": "T C"}, {
        "torch": F.gelu,
        "erfc": lambda x: 0.5 * x * T.erfc(-x / 2**0.5),
        "half later": lambda x: x * (0.5 + 0.5 * T.erf(x * 0.5**0.5)),
    }, {
        "tanh": lambda x: F.gelu(x, approximate="tanh"),
        "sigmoid": lambda x: x * T.sigmoid(1.702 * x),
    }),
    "SwiGLU": Row(swiglu, {"x": "T C", "w": "C 2C", "u": "C 2C", "d": "2C C"}, {
        "silu": swiglu_with(),
        "packed": lambda x, w, u, d: (lambda y: (F.silu(y[0]) * y[1]) @ d)(
            (x @ T.cat([w, u], -1)).chunk(2, -1)
        ),
        "1 - sigmoid(-x)": swiglu_with(lambda a: a * (1 - T.sigmoid(-a))),
    }, {
        "GELU": swiglu_with(F.gelu),
        "gate and value exchanged": swiglu_with(gate="u"),
        "last left out": swiglu_with(drop=1),
    }),
    "rotary attention": Row(rope_attention, {"q": "B H T D", "k": "B H T D", "v": "B H T D"}, {
        "scaled_dot_product_attention": rope_sdpa,
        "in chunks": rope_chunked,
        "scale first": lambda q, k, v, causal=False: rope_attention(
            q * q.shape[-1] ** -0.25, k * q.shape[-1] ** -0.25, v, causal, scale=1.0
        ),
    }, {
        "base from key 64 on": lambda q, k, v, causal=False: rope_attention(
            q, k, v, causal, turn_k=late_base
        ),
        "base 10001": lambda q, k, v, causal=False: rope_attention(
            q, k, v, causal, lambda x: rotate(x, 1.0001e4)
        ),
        "pairs": lambda q, k, v, causal=False: rope_attention(
            q, k, v, causal, lambda x: rotate(x, layout="pairs")
        ),
        "keys one later": lambda q, k, v, causal=False: rope_attention(
            q, k, v, causal, turn_k=lambda x: rotate(x, first=1)
        ),
        "√D twice": lambda q, k, v, causal=False: rope_attention(
            q, k, v, causal, scale=1 / q.shape[-1]
        ),
        "causal ignored": lambda q, k, v, causal=False: rope_attention(q, k, v),
        "softmax over queries": lambda q, k, v, causal=False: rope_attention(
            q, k, v, causal, soft=-2
        ),
        "causal with -1e4": lambda q, k, v, causal=False: (
            rope_attention(q, k, v, causal) + (1e-3 if causal and q.shape[-2] > 32 else 0)
        ),
    }, {"causal": (False, True)}, EVEN),
    "block": Row(block, {"x": "B T 4C", "w": "4C 12C", "o": "4C 4C", "mask": "T T bool"}, {
        "scaled_dot_product_attention": block_sdpa,
        "the least number": block_with(fill=-1e4),
        "same, other order": block_with(),
    }, {
        "order kqv": block_with("kqv"),
        "heads not moved back": block_with(merge=False),
        "no residual": block_with(residual=0.0),
        "whole width": block_with(power=0.25),
        "mask ignored": block_with(hide=False),
        "mask of -1": block_with(fill=-1.0),
        "residual 0.999": block_with(residual=0.999),
    }, sizes={"T": (3, 2, 5, 8, 17, 33, 65), "C": (2, 1, 3, 4, 8)}),
    "decay": Row(
        decay,
        {"x": "B T C", "a": "C"},
        {"matrix": decay_matrix, "scan": decay_with()},
        {"first step": decay_with(start=2), "step 32": decay_with(late=True)},
        sizes={"T": (3, 2, 5, 7, 17, 33, 40)},
    ),
    "cross entropy": Row(
        cross_entropy,
        {"x": "B V", "ids": "B int V"},
        {"torch": F.cross_entropy, "logsumexp": cross_entropy_lse},
        {
        "sum": lambda x, ids: cross_entropy(x, ids) * len(x),
        "next class": lambda x, ids: cross_entropy(x, (ids + 1) % x.shape[-1]),
        "smoothing": lambda x, ids: F.cross_entropy(x, ids, label_smoothing=0.01),
    }),
    "causal convolution": Row(
        conv,
        {"x": "B C T", "w": "C 3"},
        {"torch": conv_library, "same": conv_with()},
        {"centred": conv_with(pad=(1, 1)), "flipped": conv_with(flip=True)},
    ),
}
# fmt: on


TABLE |= {
    f"plain {name}": Row(
        g,
        inputs,
        {f"form {i}": f for i, f in enumerate(right)},
        {"doubled gradient": twice(g), "doubled gradient of another form": twice(right[0])},
    )
    for name, (g, inputs, right) in PLAIN.items()
}


def run(row: Row, f: Callable[..., Any], dtype: str, seed: int, examples: int) -> Any:
    """Check one function by the reference of its row."""
    framework = "numpy" if row.reference is softmax_numpy else "torch"
    return check(
        f, reference=row.reference, inputs=row.inputs, options=row.options, sizes=row.sizes or None,
        dtypes=(dtype,), framework=framework, seed=seed, examples=examples, shrink=False,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alarms", type=int, default=1, help="seeds of each right function")
    parser.add_argument("--examples", type=int, default=40)
    parser.add_argument("--dtypes", nargs="*", default=DTYPES)
    parser.add_argument("--missed", nargs="*", default=("float32",), help="dtypes of wrong ones")
    parser.add_argument("--only", default="")
    words = parser.parse_args()
    T.set_num_threads(1)
    alarms = reports = found = wrong = 0
    worst = 0.0
    print("| function | right | alarms | worst | wrong | missed |\n|---|---|---|---|---|---|")
    for name, row in TABLE.items():
        if words.only not in name:
            continue
        own, top = [], 0.0
        for label, f in row.right.items():
            for dtype in words.dtypes:
                for seed in range(words.alarms):
                    report = run(row, f, dtype, seed, words.examples)
                    reports += 1
                    top = max([top, *(o.worst for o in report.outcomes)])
                    if report.verdict == "failed":
                        own.append(f"{label}[{dtype}] seed {seed}")
        missed = []
        for dtype in words.missed:
            for label, f in row.wrong.items():
                wrong += 1
                if run(row, f, dtype, 0, words.examples).passed:
                    missed.append(f"{label}[{dtype}]")
        alarms, found = alarms + len(own), found + len(row.wrong) * len(words.missed) - len(missed)
        worst = max(worst, top)
        print(
            f"| {name} | {len(row.right)} | {', '.join(own) or 0} | {top:.2g} | {len(row.wrong)} | "
            f"{', '.join(missed) or 0} |",
            flush=True,
        )
    print(f"{alarms} alarms in {reports} reports, worst {worst:.2g}; {found} of {wrong} found")


if __name__ == "__main__":
    main()
