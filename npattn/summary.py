"""What a module is made of, and what its heads do with given inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn import api
from npattn.arrays import Array

__all__ = ["Description", "Head", "Step", "described"]

ALIKE = 0.01
"""A head is even, saturated or constant where it is so but for a hundredth."""
FAINT = 1e-6
"""A head passes no gradient where its own is less than this share of the largest."""


@dataclass(frozen=True)
class Step:
    """One step of a module: what it computes, the shape of that, and its parameters."""

    name: str
    shape: str
    parameters: int


@dataclass(frozen=True)
class Head:
    """What one head did.

    Attributes
    ----------
    number : int
    evenness : float
        Mean over the queries of entropy / log(keys seen): 1 where all keys weigh the same, 0 where
        one has all weight. Of queries that see two keys or more; NaN without any.
    largest : float
        Mean over the queries of the largest weight.
    change : float
        Largest distance of the weights of a query from those of the mean query, half the sum of
        absolute differences: 0 where no query makes a difference.
    gradient : float or None
        Size of the gradients of its q, k and v beside that of the head with the largest; None
        where no dout was given.
    """

    number: int
    evenness: float
    largest: float
    change: float
    gradient: float | None

    @property
    def faults(self) -> tuple[str, ...]:
        """Among "uniform", "constant", "saturated" and "no gradient"."""
        found = {
            "uniform": self.evenness >= 1 - ALIKE,
            "constant": self.change <= ALIKE,
            "saturated": self.largest >= 1 - ALIKE,
            "no gradient": self.gradient is not None and self.gradient < FAINT,
        }
        return tuple(name for name, so in found.items() if so)


@dataclass(frozen=True)
class Description:
    """What `MultiHeadAttention.describe` found; its `str` is a table.

    Attributes
    ----------
    steps : tuple of Step
    heads : tuple of Head
        Empty where no inputs were given.
    num_parameters : int
    """

    steps: tuple[Step, ...]
    heads: tuple[Head, ...]
    num_parameters: int

    def __str__(self) -> str:
        rows = [("step", "shape", "parameters")]
        rows += [(s.name, s.shape, f"{s.parameters:,}") for s in self.steps]
        text = [*_table(rows), f"{self.num_parameters:,} parameters"]
        if self.heads:
            rows2 = [("head", "evenness", "largest weight", "change", "gradient", "")]
            rows2 += [
                (
                    str(h.number),
                    f"{h.evenness:.2f}",
                    f"{h.largest:.2f}",
                    f"{h.change:.2f}",
                    "" if h.gradient is None else f"{h.gradient:.2g}",
                    ", ".join(h.faults),
                )
                for h in self.heads
            ]
            text += ["", *_table(rows2)]
        return "\n".join(text)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(word.ljust(n) for word, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def described(module: Any, fwd: Any = None, dout: Array | None = None) -> Description:
    """The steps of a `MultiHeadAttention`, and its heads in a forward pass."""
    heads = () if fwd is None else tuple(_heads(module, fwd, dout))
    return Description(tuple(_steps(module, fwd)), heads, module.num_parameters)


def _steps(module: Any, fwd: Any) -> list[Step]:
    H, K, D, E = module.num_heads, module.num_kv_heads, module.head_size, module.value_size
    p = {name: array.size for name, array in module.parameters.items()}
    lead, T, S = "...", "T", "S"
    added = int(module.bias_k is not None) + int(module.add_zero_attn)
    if fwd is not None:
        problem = fwd.attention.problem
        lead, T, S = ", ".join(map(str, problem.lead)), str(problem.T), str(problem.S - added)

    def shape(*sizes: Any) -> str:
        return f"({', '.join(str(n) for n in (lead, *sizes) if n != '')})"

    def count(*names: str) -> int:
        return sum(p.get(name, 0) for name in names)

    found = [
        Step("q = query Wq + bq", shape(H, T, D), count("wq", "bq")),
        Step("k = key Wk + bk", shape(K, S, D), count("wk", "bk")),
        Step("v = value Wv + bv", shape(K, S, E), count("wv", "bv")),
    ]
    if module.qk_norm is not None:
        norms = count("norm_q", "norm_k", "norm_q_bias", "norm_k_bias")
        found.append(Step(f"{module.qk_norm} norm of q and k", shape(H, T, D), norms))
    seen = S
    if added:
        seen = f"{S} + {added}" if fwd is None else str(int(S) + added)
        found.append(Step("keys that are added", shape(K, added, D), count("bias_k", "bias_v")))
    found += [
        Step("weights = softmax(scale q kᵀ)", shape(H, T, seen), 0),
        Step("o = weights v", shape(H, T, E), 0),
        Step(f"merge by {module.merge}", shape(T, H * E), 0),
    ]
    if module.wo is not None:
        out = shape(T, module.wo.shape[1])
        found.append(Step("out = o Wo + bo", out, count("wo", "bo")))
    return found


def _heads(module: Any, fwd: Any, dout: Array | None) -> list[Head]:
    H = module.num_heads
    *lead, _, T, S = fwd.weights.shape
    p = np.moveaxis(abs(fwd.weights), -3, 0).reshape(H, math.prod(lead), T, S)
    p = p.astype(np.float64)  # (H, problems, T, S)
    sizes: list[float | None] = [None] * H
    if dout is not None:
        steps = fwd.steps
        grads = api.backward(steps.attention, module._from_out(steps, dout)[1])
        group = H // module.num_kv_heads
        own = [_size(grads.q, h) + _size(grads.k, h // group) + _size(grads.v, h // group)
               for h in range(H)]  # fmt: skip
        sizes = [math.sqrt(x / max(own)) if max(own) > 0 else 0.0 for x in own]
    return [_head(h, p[h], sizes[h]) for h in range(H)]


def _size(gradient: Array, head: int) -> float:
    return float((abs(gradient[..., head, :, :].astype(np.float64)) ** 2).sum())


def _head(number: int, p: Array, gradient: float | None) -> Head:
    """Of the weights of one head, (problems, T, S)."""
    seen, rows = (p > 0).sum(-1), p.sum(-1) > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(p > 0, p * np.log(p), 0).sum(-1)
        evenness = np.where(seen > 1, entropy / np.log(seen), np.nan)
    mean = p.sum(-2, keepdims=True) / max(p.shape[-2], 1)
    change = abs(p - mean).sum(-1).max(initial=0) / 2
    return Head(
        number,
        float(np.nanmean(evenness)) if (seen > 1).any() else math.nan,
        float(p.max(-1, initial=0)[rows].mean()) if rows.any() else 0.0,
        float(change),
        gradient,
    )
