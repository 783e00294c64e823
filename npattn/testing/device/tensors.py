"""Bounds and errors in torch operations, on the device of the tensors.

The bounds are derived in npattn.testing.bounds.row_norms, with `DeviceTensors` as its array
operations; errors are those of npattn.testing.comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from npattn.engines.dense import Residuals
from npattn.problem import Problem
from npattn.testing.bounds.array_ops import ArrayOps
from npattn.testing.comparison import Comparison
from npattn.torch.score_mod import operands

Tensor = torch.Tensor
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeviceTensors(ArrayOps):
    """Array operations of torch, on the device of a problem and in its compute dtype.

    `out` and `lse` are the oracle's.
    """

    expm1: Any = staticmethod(torch.expm1)
    isfinite: Any = staticmethod(torch.isfinite)
    log1p: Any = staticmethod(torch.log1p)
    sqrt: Any = staticmethod(torch.sqrt)
    where: Any = staticmethod(torch.where)

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse
        self.eps = float(torch.finfo(out.dtype).eps)

    def evaluate(self, problem: Any) -> tuple[Any, Any, Any]:
        head = (None,) if problem.headless else (...,)
        out, lse = self.out[head], self.lse[head]
        q, k, v = operands(problem)
        s = problem.scale * (q @ k.mT)
        if problem.bias_array is not None:
            s = s + self.wide(problem.bias_array)
        if problem.visible is not None:
            s = s.masked_fill(~problem.visible, -math.inf)
        p = torch.exp(s - lse[..., None])
        if self.shows_all(problem, None):
            live = torch.ones((), dtype=torch.bool, device=s.device).expand(s.shape)
        else:
            live = s != -math.inf
            p = torch.where(live, p, 0)  # of a fully masked row, −inf − −inf is NaN
        tensors: Any = (q, k, v, None, None, live, p, None, None, None)
        return out, lse, Residuals(*tensors)

    def wide(self, x: Tensor) -> Tensor:
        return x.to(self.out.dtype)

    def shows_all(self, problem: Problem, live: Any) -> bool:
        # Decided without waiting for the device.
        return problem.visible is None and problem.bias is None

    def all_finite(self, *arrays: Tensor) -> bool:
        return bool(torch.stack([torch.isfinite(x).all() for x in arrays]).all())

    def count(self, live: Tensor, axis: int) -> Tensor:
        return live.sum(axis, keepdim=True, dtype=self.out.dtype)

    def top(self, x: Tensor, axis: int, least: float = 0) -> Tensor:
        top = x.amax(axis, keepdim=True)
        return top if least == -math.inf else top.clamp(min=least)

    def farthest(self, x: Tensor) -> Tensor:
        low, top = torch.aminmax(x, dim=-1, keepdim=True)
        return torch.maximum(top, -low).clamp(min=0)

    def along(self, *arrays: Tensor) -> Tensor:
        first, *others = arrays
        for x in others:
            first = first * x
        return first.sum(-1, keepdim=True)

    def mean(self, x: Tensor) -> Tensor:
        return x.mean(-2, keepdim=True)

    def square(self, x: Tensor) -> Tensor:
        return x.square_()

    def minimum(self, x: Tensor, y: Any) -> Tensor:
        return torch.minimum(x, y) if isinstance(y, Tensor) else x.clamp(max=y)

    def maximum(self, x: Tensor, y: Any) -> Tensor:
        return torch.maximum(x, y) if isinstance(y, Tensor) else x.clamp(min=y)

    def sum_live(self, w: Tensor, x: Tensor, live: Tensor) -> Tensor:
        finite = torch.isfinite(x)
        touched = live.to(w.dtype) @ (~finite).to(w.dtype) > 0
        return torch.where(touched, math.nan, w @ torch.where(finite, x, 0))


# --- errors ---------------------------------------------------------------------------------------


def ratios(result: Tensor, exact: Tensor, tolerance: Tensor) -> Tensor:
    """Return error / tolerance of each element, as in `compare_arrays`."""
    wide = result.to(exact.dtype)
    size, finite = wide.abs(), torch.isfinite(wide)
    # Neighbours of |result|: their bits, read as an integer, are one more and one less.
    bits = result.view(BITS[result.element_size()])
    bits = bits & torch.iinfo(bits.dtype).max
    above = (bits + 1).view(result.dtype).to(exact.dtype) - size
    below = size - (bits - 1).abs().view(result.dtype).to(exact.dtype)
    below = torch.where(size == 0, above, below)
    above = torch.where(torch.isfinite(above), above, below)
    over = torch.where(torch.signbit(wide), -exact, exact) - size
    gap = torch.maximum(over - above / 2, -over - below / 2).clamp(min=0)
    gap = torch.where(finite, gap, math.inf)
    gap = torch.where(torch.isfinite(exact), gap, torch.where(finite, math.inf, 0))
    overflows = torch.isinf(wide) & (torch.sign(wide) == torch.sign(exact))
    if result.dtype == torch.float8_e4m3fn:  # it overflows to NaN
        overflows = torch.isnan(wide)
    beyond = overflows & (exact.abs() + tolerance > torch.finfo(result.dtype).max)
    ratio = torch.where(gap == 0, 0, gap / tolerance)
    ratio = torch.where(beyond | torch.isposinf(tolerance), 0, ratio)
    return torch.where(torch.isnan(ratio), math.inf, ratio)  # NaN never passes


def real(result: Tensor) -> Tensor:
    """Return a result as a floating tensor, with complex numbers that are not real as NaN."""
    if result.is_complex():
        return torch.where(result.imag == 0, result.real, math.nan)
    return result if result.is_floating_point() else result.to(torch.float32)


def worst_ratios(
    results: Iterable[tuple[str, Tensor]],
    exact: Mapping[str, Tensor],
    tolerance: Mapping[str, Tensor],
) -> dict[str, float]:
    """Return the largest error / tolerance of each result, after one wait for the device.

    Results of one dtype are compared together: launches on a device take longer than its work.
    """
    groups: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    worst: dict[str, float] = {}
    for name, x in results:
        if x.shape != exact[name].shape:
            worst[name] = math.inf
        elif x.numel():
            groups.setdefault(real(x).dtype, []).append((name, real(x)))
    names: list[str] = []
    tops: list[Tensor] = []
    for group in groups.values():
        whole = ratios(
            torch.cat([x.reshape(-1) for _, x in group]),
            torch.cat([exact[name].reshape(-1) for name, _ in group]),
            torch.cat([tolerance[name].reshape(-1) for name, _ in group]),
        )
        names += [name for name, _ in group]
        tops += [part.amax() for part in torch.split(whole, [x.numel() for _, x in group])]
    if tops:
        for name, ratio in zip(names, torch.stack(tops).tolist(), strict=True):
            worst[name] = max(worst.get(name, 0.0), ratio)
    return worst


def compare_tensors(name: str, result: Tensor, exact: Tensor, tolerance: Tensor) -> Comparison:
    """Return the worst element of one result; a few numbers come to the host."""
    if result.shape != exact.shape:
        note = f"{name} has shape {tuple(result.shape)}, want {tuple(exact.shape)}"
        return Comparison(name, math.inf, (), 0.0, 0.0, 0.0, 1, 1, note)
    ratio = ratios(real(result), exact, tolerance)
    at = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
    worst, got, want, allowed = (float(x[at]) for x in (ratio, real(result), exact, tolerance))
    wrong = int((ratio > 1).sum())
    return Comparison(name, worst, at, got, want, allowed, wrong, ratio.numel())
