"""Summary of a module: its steps and parameters, and the behaviour of its heads on an input."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn.oracle import api
from npattn.problem.arrays import Array

NEARLY = 0.01
"""A head counts as even, saturated or constant from this distance on."""
NEGLIGIBLE = 1e-6
"""A head passes no gradient if its own is less than this share of the largest."""


@dataclass(frozen=True)
class SummaryStep:
    """One step of a module: what it computes, the shape of that, and its parameters."""

    name: str
    shape: str
    parameters: int


@dataclass(frozen=True)
class Head:
    """Behaviour of one head in a forward pass.

    Attributes
    ----------
    number : int
    evenness : float
        Mean of entropy / log(visible keys) over the queries with two visible keys or more: 1 if
        all keys weigh the same, 0 if one has all weight; NaN without such a query.
    largest : float
        Mean over the queries of the largest weight.
    change : float
        Largest distance of the weights of a query from the mean over the queries, half the sum of
        absolute differences: 0 if the weights do not depend on the query.
    gradient : float or None
        Norm of the gradients of its q, k and v, as a share of the largest of all heads; None
        without dout.
    """

    number: int
    evenness: float
    largest: float
    change: float
    gradient: float | None

    @property
    def faults(self) -> tuple[str, ...]:
        """Among "uniform", "constant", "saturated" and "no gradient"."""
        conditions = {
            "uniform": self.evenness >= 1 - NEARLY,
            "constant": self.change <= NEARLY,
            "saturated": self.largest >= 1 - NEARLY,
            "no gradient": self.gradient is not None and self.gradient < NEGLIGIBLE,
        }
        return tuple(name for name, holds in conditions.items() if holds)


@dataclass(frozen=True)
class Description:
    """Result of `MultiHeadAttention.describe`; its `str` is a table.

    Attributes
    ----------
    steps : tuple of Step
    heads : tuple of Head
        Empty without inputs.
    num_parameters : int
    """

    steps: tuple[SummaryStep, ...]
    heads: tuple[Head, ...]
    num_parameters: int

    def __str__(self) -> str:
        """Return a table of the steps, and one of the heads if a forward was described."""
        rows = [("step", "shape", "parameters")]
        rows += [(s.name, s.shape, f"{s.parameters:,}") for s in self.steps]
        text = [*_table(rows), f"{self.num_parameters:,} parameters"]
        if self.heads:
            rows2 = [("head", "evenness", "largest weight", "change", "gradient", "")]
            rows2 += [
                (
                    str(h.number), f"{h.evenness:.2f}", f"{h.largest:.2f}", f"{h.change:.2f}",
                    "" if h.gradient is None else f"{h.gradient:.2g}", ", ".join(h.faults),
                )
                for h in self.heads
            ]  # fmt: skip
            text += ["", *_table(rows2)]
        return "\n".join(text)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(word.ljust(n) for word, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def describe(module: Any, fwd: Any = None, dout: Array | None = None) -> Description:
    """Summarise the steps of a `MultiHeadAttention`, and its heads in a forward pass."""
    heads = () if fwd is None else tuple(_heads(module, fwd, dout))
    return Description(tuple(_steps(module, fwd)), heads, module.num_parameters)


def _steps(module: Any, fwd: Any) -> list[SummaryStep]:
    """Return the steps in order; sizes that only a forward knows are letters without one."""
    H, K, D, E = module.num_heads, module.num_kv_heads, module.head_size, module.value_size
    p = {name: array.size for name, array in module.parameters.items()}
    lead, T, S = "...", "T", "S"
    appended = module._appended_keys
    if fwd is not None:
        problem = fwd.attention.problem
        lead, T, S = ", ".join(map(str, problem.lead)), str(problem.T), str(problem.S - appended)

    def shape(*sizes: Any) -> str:
        return f"({', '.join(str(n) for n in (lead, *sizes) if n != '')})"

    def count(*names: str) -> int:
        return sum(p.get(name, 0) for name in names)

    steps = [
        SummaryStep("q = query Wq + bq", shape(H, T, D), count("wq", "bq")),
        SummaryStep("k = key Wk + bk", shape(K, S, D), count("wk", "bk")),
        SummaryStep("v = value Wv + bv", shape(K, S, E), count("wv", "bv")),
    ]
    if module.qk_norm is not None:
        norms = count("norm_q", "norm_k", "norm_q_bias", "norm_k_bias")
        steps.append(SummaryStep(f"{module.qk_norm} norm of q and k", shape(H, T, D), norms))
    if fwd is not None and fwd.inputs.rope is not None:
        steps.append(SummaryStep("rotary positions of q and k", shape(H, T, D), 0))
    keys = S
    if appended:
        keys = f"{S} + {appended}" if fwd is None else str(int(S) + appended)
        steps.append(SummaryStep("appended keys", shape(K, appended, D), count("bias_k", "bias_v")))
    gates = []
    if module.wg is not None:
        gates.append(SummaryStep("o · sigmoid(query Wg + bg)", shape(H, T, E), count("wg", "bg")))
    steps += [
        SummaryStep("weights = softmax(scale q kᵀ)", shape(H, T, keys), 0),
        SummaryStep("o = weights v", shape(H, T, E), 0),
        *gates,
        SummaryStep(f"merge by {module.merge}", shape(T, H * E), 0),
    ]
    if module.wo is not None:
        out = shape(T, module.wo.shape[1])
        steps.append(SummaryStep("out = o Wo + bo", out, count("wo", "bo")))
    return steps


def _heads(module: Any, fwd: Any, dout: Array | None) -> list[Head]:
    """Return what is known of each head, its part of the gradient too with dout (..., T, out)."""
    H = module.num_heads
    *lead, _, T, S = fwd.weights.shape
    p = np.moveaxis(abs(fwd.weights), -3, 0).reshape(H, math.prod(lead), T, S)
    p = p.astype(np.float64)  # (H, problems, T, S)
    sizes: list[float | None] = [None] * H
    if dout is not None:
        steps = fwd.steps
        grads = api.backward(steps.attention, module._backward_from_out(steps, dout)[1])
        group = H // module.num_kv_heads
        gradients = [(grads.q, 1), (grads.k, group), (grads.v, group)]
        squares = [sum(_squared_norm(g, h // n) for g, n in gradients) for h in range(H)]
        largest = max(squares)
        sizes = [math.sqrt(x / largest) if largest > 0 else 0.0 for x in squares]
    return [_head(h, p[h], sizes[h]) for h in range(H)]


def _squared_norm(gradient: Array, head: int) -> float:
    return float((abs(gradient[..., head, :, :].astype(np.float64)) ** 2).sum())


def _head(number: int, p: Array, gradient: float | None) -> Head:
    """Describe one head by its weights, (problems, T, S)."""
    visible, live = (p > 0).sum(-1), p.sum(-1) > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(p > 0, p * np.log(p), 0).sum(-1)
        evenness = np.where(visible > 1, entropy / np.log(visible), np.nan)
    mean = p.sum(-2, keepdims=True) / max(p.shape[-2], 1)
    change = abs(p - mean).sum(-1).max(initial=0) / 2
    return Head(
        number, float(np.nanmean(evenness)) if (visible > 1).any() else math.nan,
        float(p.max(-1, initial=0)[live].mean()) if live.any() else 0.0, float(change), gradient,
    )  # fmt: skip
