"""Biases on the device: the objects of `npattn.biases`, and tensors, for tiles of many heads.

Each class computes a tile of its bias from its parameter, in float64, and sums the gradient of the
scores of a tile to the gradient of its parameter. No operation here changes its order of summation
between two runs.
"""

import math
from typing import Any

import numpy as np
import torch

from npattn.biases.bias import ArrayBias
from npattn.biases.distances import Alibi, Relative
from npattn.problem.arrays import Tile, diagonal, sum_to
from npattn.torch.problem import Problem
from npattn.torch.tensors import to_tensor
from npattn.torch.tiles import Group, QueryRows, Strip, flatten, host_tile, tile_of

Tensor = torch.Tensor


class BiasTerm:
    """One term of a bias."""

    def tile(self, rows: QueryRows, strip: Strip) -> Tensor:
        """Bias of a tile in the dtype computed in; it broadcasts against the tile."""
        raise NotImplementedError

    def add(self, rows: QueryRows, strip: Strip, ds: Tensor) -> None:
        """Add the gradient of the scores of a tile, (b1 − b0, h1 − h0, t1 − t0, s1 − s0)."""
        raise NotImplementedError

    def gradient(self) -> Tensor:
        """Return the gradient, shaped as the parameter."""
        raise NotImplementedError


def bias_terms(problem: Problem, bias: Any) -> list[BiasTerm]:
    """Split a bias of a problem's sizes, its own or the change of it, into its terms."""
    if bias is None:
        return []
    if isinstance(bias, Tensor):
        return [_TensorTerm(problem, bias)]
    return [_term(problem, term) for term in getattr(bias, "parts", (bias,))]


def _term(problem: Problem, bias: Any) -> BiasTerm:
    if isinstance(bias, ArrayBias):
        return _TensorTerm(problem, to_tensor(_real(bias.array), problem.device))
    if isinstance(bias, Alibi):
        return _AlibiTerm(problem, bias)
    if isinstance(bias, Relative):
        return _RelativeTerm(problem, bias)
    return _HostTerm(problem, bias)


class _TensorTerm(BiasTerm):
    """A tensor."""

    def __init__(self, problem: Problem, bias: Tensor):
        self.problem, self.shape = problem, bias.shape
        self.flat = flatten(bias, problem.lead)
        self.total: Tensor | None = None

    def tile(self, rows: QueryRows, strip: Strip) -> Tensor:
        return self.problem.to_compute_dtype(tile_of(self.flat, rows, strip))  # type: ignore[no-any-return]

    def add(self, rows: QueryRows, strip: Strip, ds: Tensor) -> None:
        if self.total is None:
            self.total = torch.zeros(self.flat.shape, dtype=ds.dtype, device=ds.device)
        here = tile_of(self.total, rows, strip)
        here += _sum_to(ds, here.shape)

    def gradient(self) -> Tensor:
        problem, shape = self.problem, self.shape
        if self.total is None:
            return torch.zeros(shape, dtype=problem.dtype, device=problem.device)
        if self.total.numel() == math.prod(shape):
            return self.total.reshape(shape)
        return _sum_to(self.total.reshape(*problem.lead, *self.total.shape[1:]), shape)


class _AlibiTerm(BiasTerm):
    """−slope · distance."""

    def __init__(self, problem: Problem, bias: Alibi):
        self.dtype, self.shape = problem.dtype, bias.slopes.shape
        self.offset = diagonal(problem.T, problem.S, bias.alignment)
        self.slopes = _wide(problem, bias.slopes)  # (H,)
        self.total = torch.zeros(self.shape, dtype=problem.dtype, device=problem.device)

    def tile(self, rows: QueryRows, strip: Strip) -> Tensor:
        distance = self._distance(rows, strip).to(self.slopes.dtype)
        return (-self.slopes[_heads(rows, self.shape[0]), None, None] * distance).to(self.dtype)

    def add(self, rows: QueryRows, strip: Strip, ds: Tensor) -> None:
        each = (ds * self._distance(rows, strip)).sum((0, 2, 3))
        here = self.total[_heads(rows, self.shape[0])]
        here -= _sum_to(each, here.shape)

    def gradient(self) -> Tensor:
        return self.total

    def _distance(self, rows: QueryRows, strip: Strip) -> Tensor:
        device = self.slopes.device
        t = torch.arange(rows.t0, rows.t1, device=device)[:, None]
        return (t + self.offset - torch.arange(strip.s0, strip.s1, device=device)).abs()


class _RelativeTerm(BiasTerm):
    """One number per bucket of distances, looked up once for each diagonal of a tile."""

    def __init__(self, problem: Problem, bias: Relative):
        self.dtype, self.T = problem.dtype, problem.T
        self.table = _wide(problem, bias.table)  # (num_buckets, H)
        # (T + S − 1,) of the diagonals, starting with that of the last query and the first key.
        plane = Tile((), 1, problem.T, problem.S, (0,), 0, problem.T, 0, problem.S)
        self.buckets = torch.as_tensor(bias.diagonals(plane), device=problem.device)
        self.total = torch.zeros(self.table.shape, dtype=problem.dtype, device=problem.device)

    def tile(self, rows: QueryRows, strip: Strip) -> Tensor:
        of_head = self.table[:, _heads(rows, self.table.shape[1])].to(self.dtype)
        along = of_head[self._buckets(rows, strip)].T  # (H, m + n − 1)
        return along.unfold(-1, strip.s1 - strip.s0, 1).flip(-2)

    def add(self, rows: QueryRows, strip: Strip, ds: Tensor) -> None:
        """Add ds, (samples, H, m, n), to its buckets; one that gets NaN or inf becomes NaN."""
        ds = ds.sum(0)
        heads, m, n = ds.shape
        # Reading with rows one shorter than they are moves each row one further to the right.
        longer = torch.nn.functional.pad(ds.flip(1), (0, m)).reshape(heads, -1)
        along = longer[:, : m * (n + m - 1)].reshape(heads, m, n + m - 1).sum(1)
        buckets = torch.arange(len(self.table), device=ds.device)[:, None]
        # A product sums in a fixed order, adding at indices does not. But 0 · NaN is NaN.
        hits = (buckets == self._buckets(rows, strip)).to(ds.dtype)
        finite = torch.isfinite(along.T)
        each = hits @ torch.where(finite, along.T, 0)
        each = torch.where(hits @ (~finite).to(ds.dtype) > 0, math.nan, each)
        here = self.total[:, _heads(rows, self.table.shape[1])]
        here += _sum_to(each, here.shape)

    def gradient(self) -> Tensor:
        return self.total

    def _buckets(self, rows: QueryRows, strip: Strip) -> Tensor:
        first = self.T - rows.t1 + strip.s0
        return self.buckets[first : first + rows.t1 - rows.t0 + strip.s1 - strip.s0 - 1]


class _HostTerm(BiasTerm):
    """Any other object, evaluated on the host for one head at a time."""

    def __init__(self, problem: Problem, bias: Any):
        self.problem, self.bias = problem, bias
        self.sizes = (problem.lead, problem.H, problem.T, problem.S)
        self.total = bias.zeros(*self.sizes)

    def tile(self, rows: QueryRows, strip: Strip) -> Tensor:
        group, at = rows.group, (rows.t0, rows.t1, strip.s0, strip.s1)
        tile_shape = (rows.t1 - rows.t0, strip.s1 - strip.s0)
        values = np.stack([
            np.stack([
                np.broadcast_to(self.bias.tile(host_tile(self.sizes, b, h, *at)), tile_shape)
                for h in range(group.h0, group.h1)
            ]) for b in range(group.b0, group.b1)
        ])  # fmt: skip
        return self.problem.to_compute_dtype(to_tensor(_real(values), self.problem.device))  # type: ignore

    def add(self, rows: QueryRows, strip: Strip, ds: Tensor) -> None:
        host, group = ds.detach().cpu().numpy(), rows.group
        at = (rows.t0, rows.t1, strip.s0, strip.s1)
        for b in range(group.b0, group.b1):
            for h in range(group.h0, group.h1):
                tile = host_tile(self.sizes, b, h, *at)
                self.bias.add(self.total, tile, host[b - group.b0, h - group.h0])

    def gradient(self) -> Tensor:
        return self.problem.to_compute_dtype(to_tensor(self.total, self.problem.device))  # type: ignore


def bias_gradient(problem: Problem, ds: Tensor) -> Any:
    """Sum the gradient of all scores (..., H, T, S) to that of the bias [13]."""
    if isinstance(problem.bias, Tensor):
        return _sum_to(ds, problem.bias.shape)
    all_rows = QueryRows(Group(0, math.prod(problem.lead), 0, problem.H, True), 0, problem.T, [])
    strip = Strip(0, problem.S, False)
    terms = bias_terms(problem, problem.bias)
    sizes = (*problem.lead, problem.H, problem.T, problem.S)
    if ds.shape != sizes:  # already summed over axes of 1: each sum counts once
        once = ds.new_zeros(sizes)
        once[tuple(slice(n) for n in (1,) * (len(sizes) - ds.ndim) + tuple(ds.shape))] = ds
        ds = once
    if ds.numel():
        for term in terms:
            term.add(all_rows, strip, flatten(ds, problem.lead))
    gradients = tuple(term.gradient() for term in terms)
    return gradients if hasattr(problem.bias, "terms") else gradients[0]


def _heads(rows: QueryRows, count: int) -> slice:
    """Heads of a group in a parameter with one entry per head, or one for all."""
    return slice(rows.group.h0, rows.group.h1) if count > 1 else slice(None)


def _sum_to(x: Tensor, shape: Any) -> Tensor:
    return sum_to(x, shape)  # type: ignore[arg-type, return-value]  # of tensors too


def _real(array: Any) -> Any:
    return array.astype(np.float64) if array.dtype == np.longdouble else array


def _wide(problem: Problem, parameter: Any) -> Tensor:
    """Return a parameter in float64, or the widest dtype of the device."""
    return to_tensor(np.array(parameter, np.float64), problem.device)
