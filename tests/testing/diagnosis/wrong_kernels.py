"""Mechanisms of public bug reports in a few lines each, with what must be read of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn.testing.cases.recipe import Recipe
from tests.testing.diagnosis.failures import RECIPES, attention_with


@dataclass(frozen=True)
class Kernel:
    """A wrong function, a recipe on which it fails, and what the first cause says."""

    recipe: str
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    features: tuple[str, ...]
    step: str
    where: str
    amount: str
    finer: str = ""  # another place that is as right


KERNELS: dict[str, Kernel] = {}
SIZES = {"lead": (1,), "D": 5, "E": 7}


def kernel(name, sizes, features, cause, *, backward=False, **steps):
    f = attention_with(**steps)
    RECIPES[name] = Recipe(**SIZES | sizes)
    KERNELS[name] = Kernel(name, f.forward, f.backward if backward else None, features, *cause)


def rounded_up(n, multiple):
    return -(-n // multiple) * multiple


def overlapping_splits(up, s, c, live):
    """Without causal, each of at most four splits runs to the last key: later keys count again."""
    split = np.minimum(np.arange(s.shape[-1]) // 32, 3)
    return up(s if c.causal else s + np.log(1 + split), c, live)


kernel(
    "split_overlap",
    {"H": 2, "K": 2, "T": 3, "S": 37},
    ("causal", "return_lse"),
    ("p", "s ≥ 32 and no causal", "counted 2, 3, 4 times"),
    softmax=overlapping_splits,
)


def delta_of_the_grid(up, p, dp):
    """The grid has ⌈T / 128⌉ programs of 64 rows."""
    delta = up(p, dp)
    T = delta.shape[-2]
    return np.where(np.arange(T)[:, None] < 64 * -(-T // 128), delta, 0)


kernel(
    "delta_grid",
    {"T": 67, "S": 3},
    ("causal",),
    ("delta", "t ≥ 64 · ⌈T / 128⌉", "δ is 0"),
    backward=True,
    delta=delta_of_the_grid,
)


def rows_of_another_length(up, c, *cotangents):
    """dq is stored in rows of D rounded up to 16, and read in rows of D rounded up to 32."""
    dq, *others = up(c, *cotangents)
    T, D = dq.shape[-2:]
    stored, read = (rounded_up(max(D, 64), n) for n in (16, 32))
    rows = np.zeros((*dq.shape[:-1], stored))
    rows[..., :D] = dq
    whole = np.zeros((*dq.shape[:-2], T * read))
    whole[..., : T * stored] = rows.reshape(*dq.shape[:-2], -1)
    return whole.reshape(*dq.shape[:-1], read)[..., :D], *others


kernel(
    "dq_rows",
    {"T": 5, "S": 3, "D": 72},
    ("causal",),
    (
        "dq",
        "t ≥ 1 and D > 64",
        "values of another place: rows of 80 are read as rows of 96",
        "t ≥ 1 and D > 64 and D % 32 ≠ 0",
    ),
    backward=True,
    gradients=rows_of_another_length,
)


def padded_with_zeros(up, q, k, v, mask=None, *, bias=None, **options):
    """A mask or a bias is padded with what hides nothing, to tiles of 16 keys of zeros."""
    if mask is None and bias is None:
        return up(q, k, v, **options)

    def pad(x, axis, value):
        width = [(0, 0)] * x.ndim
        width[axis] = (0, -k.shape[-2] % 16)
        return np.pad(x, width, constant_values=value)

    more = {}
    for name, x, value in (("mask", mask, True), ("bias", bias, 0)):
        if x is not None:
            more[name] = pad(np.broadcast_to(x, (*x.shape[:-1], k.shape[-2])), -1, value)
    return up(q, pad(k, -2, 0), pad(v, -2, 0), **more, **options)


kernel(
    "mask_zero_pad",
    {"H": 2, "K": 2, "T": 3, "S": 11, "mask": "full"},
    ("mask", "bias"),
    ("p", "S % 16 ≠ 0 and mask or bias", "rows sum to"),
    inputs=padded_with_zeros,
)


def lse_of_an_idle_split(up, c):
    """The last of the splits of 64 keys to write lse is one that sees nothing."""
    o, lse, p = up(c)
    T, S = p.shape[-2:]
    left = None if c.window is None else c.window[0]
    idle = T == 1 and left is not None and (S - 1 - left) // 64 >= 1
    return o, np.full_like(lse, -np.inf) if idle else lse, p


kernel(
    "lse_inactive",
    {"H": 2, "K": 2, "T": 1, "S": 67, "window": (2, None)},
    ("causal", "window", "return_lse"),
    ("lse", "rows whose first visible key is s ≥ 64 and T = 1", "−∞"),
    results=lse_of_an_idle_split,
)


def mask_of_an_earlier_tile(up, c):
    """With more than two heads a counter starts late: each tile has the mask of the one before."""
    visible = up(c)
    if not c.causal or c.q.shape[-3] <= 2:
        return visible
    T, S = c.q.shape[-2], c.k.shape[-2]
    t = np.arange(T)
    return np.broadcast_to(visible, (*visible.shape[:-2], T, S))[
        ..., np.where(t < 32, t, t - 32), :
    ]


kernel(
    "head_counter",
    {"H": 3, "K": 3, "T": 37, "S": 41, "causal": True},
    ("causal",),
    ("visible", "causal and H > 2 and T > 32", "the mask is of query t − 32"),
    visible=mask_of_an_earlier_tile,
)


def head_of_the_tile(up, x, H):
    """A tile of at most 4 query heads reads the keys of its first."""
    group = H // x.shape[-3]
    tile = min(group, 4)
    return x[..., np.arange(H) // tile * tile // group, :, :]


kernel(
    "head_tile",
    {"H": 28, "K": 4, "T": 2, "S": 5},
    ("mask",),
    ("s", "H > 8", "query head h takes keys of key head "),
    share=head_of_the_tile,
)


def online(q, k, v, mask=None):
    """exp(−∞ − −∞) in a tile of 16 keys that is hidden, before any key was seen."""
    m = np.full((*q.shape[:-1], 1), -np.inf, q.dtype)
    total, o = np.zeros_like(m), np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    for n in range(0, k.shape[-2], 16):
        s = q @ k[..., n : n + 16, :].swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
        seen = np.broadcast_to(True if mask is None else mask, (*q.shape[:-1], k.shape[-2]))
        s = np.where(seen[..., n : n + 16], s, -np.inf)
        new = np.maximum(m, s.max(-1, keepdims=True))
        with np.errstate(invalid="ignore"):
            p, carried = np.exp(s - new), np.exp(m - new)
        total, o, m = total * carried + p.sum(-1, keepdims=True), o * carried, new
        o = o + p @ v[..., n : n + 16, :]
    with np.errstate(invalid="ignore"):
        return o / total


RECIPES["hidden_tile"] = Recipe(**SIZES, H=2, K=2, T=3, S=37, mask="first tile", seed=2)
KERNELS["hidden_tile"] = Kernel(
    "hidden_tile", online, None, ("mask",), "nan", "rows whose first visible key is s ≥ 16",
    "o is NaN or infinite",
)  # fmt: skip
