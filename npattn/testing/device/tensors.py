"""The judge's arithmetic on torch tensors, where they are: bounds, errors, and nothing moved.

The bounds are derived in npattn.testing.bounds.row_norms, with `Tensors` as its arithmetic;
errors are those of npattn.testing.compare, in torch operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from npattn.dense import Residuals
from npattn.problem import Problem
from npattn.testing.bounds.array_ops import ArrayOps
from npattn.testing.compare import Comparison
from npattn.torch.score_mod import operands

__all__ = ["Tensors", "compared", "computes_in", "worst_ratios"]

Tensor = torch.Tensor
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def computes_in(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device has nothing wider."""
    try:
        torch.ones(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


class Tensors(ArrayOps):
    """torch, on the device of the problem, in the dtype that it computes in.

    `out` and `lse` are those of the problem, as the oracle gave them.
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
            p = torch.where(live, p, 0)  # where nothing is seen, −inf less −inf is NaN
        tensors: Any = (q, k, v, None, None, live, p, None, None)
        return out, lse, Residuals(*tensors)

    def wide(self, x: Tensor) -> Tensor:
        return x.to(self.out.dtype)

    def shows_all(self, problem: Problem, live: Any) -> bool:
        # Known without waiting for the device.
        return problem.visible is None and problem.bias is None

    def all_finite(self, *arrays: Tensor) -> bool:
        return bool(torch.stack([torch.isfinite(x).all() for x in arrays]).all())

    def count(self, live: Tensor, axis: int) -> Tensor:
        return live.sum(axis, keepdim=True, dtype=self.out.dtype)

    def top(self, x: Tensor, axis: int, least: float = 0) -> Tensor:
        found = x.amax(axis, keepdim=True)
        return found if least == -math.inf else found.clamp(min=least)

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


def ratios(got: Tensor, want: Tensor, allowed: Tensor) -> Tensor:
    """Error / allowed error of each element, as `compare_arrays` has it."""
    wide = got.to(want.dtype)
    size, finite = wide.abs(), torch.isfinite(wide)
    # The numbers beside |got|: those whose bits, read as an integer, are one more and one less.
    bits = got.view(BITS[got.element_size()])
    bits = bits & torch.iinfo(bits.dtype).max
    above = (bits + 1).view(got.dtype).to(want.dtype) - size
    below = size - (bits - 1).abs().view(got.dtype).to(want.dtype)
    below = torch.where(size == 0, above, below)
    above = torch.where(torch.isfinite(above), above, below)
    over = torch.where(torch.signbit(wide), -want, want) - size
    gap = torch.maximum(over - above / 2, -over - below / 2).clamp(min=0)
    gap = torch.where(finite, gap, math.inf)
    gap = torch.where(torch.isfinite(want), gap, torch.where(finite, math.inf, 0))
    overflows = torch.isinf(wide) & (torch.sign(wide) == torch.sign(want))
    if got.dtype == torch.float8_e4m3fn:  # it overflows to NaN
        overflows = torch.isnan(wide)
    beyond = overflows & (want.abs() + allowed > torch.finfo(got.dtype).max)
    found = torch.where(gap == 0, 0, gap / allowed)
    found = torch.where(beyond | torch.isposinf(allowed), 0, found)
    return torch.where(torch.isnan(found), math.inf, found)  # NaN never passes


def real(got: Tensor) -> Tensor:
    """What was delivered as a floating tensor; a number that is not real is NaN."""
    if got.is_complex():
        return torch.where(got.imag == 0, got.real, math.nan)
    return got if got.is_floating_point() else got.to(torch.float32)


def worst_ratios(
    got: Iterable[tuple[str, Tensor]], want: Mapping[str, Tensor], allowed: Mapping[str, Tensor]
) -> dict[str, float]:
    """The largest error / allowed error of each result, in one wait for the device.

    Results of one dtype are looked at together: a device is slow to begin, not to compute.
    """
    groups: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    found: dict[str, float] = {}
    for name, x in got:
        if x.shape != want[name].shape:
            found[name] = math.inf
        elif x.numel():
            groups.setdefault(real(x).dtype, []).append((name, real(x)))
    names: list[str] = []
    tops: list[Tensor] = []
    for group in groups.values():
        whole = ratios(
            torch.cat([x.reshape(-1) for _, x in group]),
            torch.cat([want[name].reshape(-1) for name, _ in group]),
            torch.cat([allowed[name].reshape(-1) for name, _ in group]),
        )
        names += [name for name, _ in group]
        tops += [part.amax() for part in torch.split(whole, [x.numel() for _, x in group])]
    if tops:
        for name, ratio in zip(names, torch.stack(tops).tolist(), strict=True):
            found[name] = max(found.get(name, 0.0), ratio)
    return found


def compared(name: str, got: Tensor, want: Tensor, allowed: Tensor) -> Comparison:
    """The worst element of one result, of which a few numbers come to the host."""
    if got.shape != want.shape:
        told = f"{name} has shape {tuple(got.shape)}, want {tuple(want.shape)}"
        return Comparison(name, math.inf, (), 0.0, 0.0, 0.0, 1, 1, told)
    found = ratios(real(got), want, allowed)
    at = tuple(int(i) for i in torch.unravel_index(found.argmax(), found.shape))
    ratio, number, exact, room = (float(x[at]) for x in (found, real(got), want, allowed))
    wrong = int((found > 1).sum())
    return Comparison(name, ratio, at, number, exact, room, wrong, found.numel())
