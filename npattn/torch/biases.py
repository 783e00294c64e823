"""Biases on the device: the objects of `npattn.biases`, and tensors, for tiles of many heads.

What an object is made of stays as it is; its numbers are made where they are needed, from its
parameter in float64. Each class answers for a tile and takes the gradient of the scores of a tile
back to its parameter, without an operation whose order of sums could change between two runs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from npattn import biases
from npattn.arrays import Tile, diagonal, sum_to
from npattn.torch.problem import Problem, moved
from npattn.torch.tiles import Group, Part, Rows, flat, piece

__all__ = ["Added", "added", "bias_gradient"]

Tensor = torch.Tensor


class Added:
    """One term of a bias."""

    def tile(self, rows: Rows, part: Part) -> Tensor:
        """What is added to the scores of a tile, in the dtype computed in; it broadcasts."""
        raise NotImplementedError

    def add(self, rows: Rows, part: Part, ds: Tensor) -> None:
        """Add the gradient of the scores of a tile, (b1 − b0, h1 − h0, t1 − t0, s1 − s0)."""
        raise NotImplementedError

    def gradient(self) -> Tensor:
        """What was added, shaped as the parameter."""
        raise NotImplementedError


def added(problem: Problem) -> list[Added]:
    """The terms of the bias of a problem."""
    bias = problem.bias
    if bias is None:
        return []
    if isinstance(bias, Tensor):
        return [_Given(problem, bias)]
    return [_term(problem, part) for part in getattr(bias, "parts", (bias,))]


def _term(problem: Problem, bias: Any) -> Added:
    if isinstance(bias, biases.Dense):
        return _Given(problem, moved(_real(bias.array), problem.device))
    if isinstance(bias, biases.Alibi):
        return _Alibi(problem, bias)
    if isinstance(bias, biases.Relative):
        return _Relative(problem, bias)
    return _Told(problem, bias)


class _Given(Added):
    """A tensor."""

    def __init__(self, problem: Problem, given: Tensor):
        self.problem, self.given = problem, given
        self.flat = flat(given, problem.lead)
        self.total: Tensor | None = None

    def tile(self, rows: Rows, part: Part) -> Tensor:
        return self.problem.to_compute_dtype(piece(self.flat, rows, part))  # type: ignore[no-any-return]

    def add(self, rows: Rows, part: Part, ds: Tensor) -> None:
        if self.total is None:
            self.total = torch.zeros(self.flat.shape, dtype=ds.dtype, device=ds.device)
        here = piece(self.total, rows, part)
        here += _summed(ds, here.shape)

    def gradient(self) -> Tensor:
        given, lead = self.given, self.problem.lead
        if self.total is None:
            return torch.zeros(given.shape, dtype=self.problem.dtype, device=self.problem.device)
        if self.total.numel() == math.prod(given.shape):
            return self.total.reshape(given.shape)
        return _summed(self.total.reshape(*lead, *self.total.shape[1:]), given.shape)


class _Alibi(Added):
    """−slope · distance."""

    def __init__(self, problem: Problem, bias: biases.Alibi):
        self.dtype, self.shape = problem.dtype, bias.slopes.shape
        self.offset = diagonal(problem.T, problem.S, bias.alignment)
        self.slopes = _wide(problem, bias.slopes)  # (H,)
        self.total = torch.zeros(self.shape, dtype=problem.dtype, device=problem.device)

    def tile(self, rows: Rows, part: Part) -> Tensor:
        distance = self._distance(rows, part).to(self.slopes.dtype)
        return (-self.slopes[_heads(rows, self.shape[0]), None, None] * distance).to(self.dtype)

    def add(self, rows: Rows, part: Part, ds: Tensor) -> None:
        each = (ds * self._distance(rows, part)).sum((0, 2, 3))
        here = self.total[_heads(rows, self.shape[0])]
        here -= _summed(each, here.shape)

    def gradient(self) -> Tensor:
        return self.total

    def _distance(self, rows: Rows, part: Part) -> Tensor:
        device = self.slopes.device
        t = torch.arange(rows.t0, rows.t1, device=device)[:, None]
        return (t + self.offset - torch.arange(part.s0, part.s1, device=device)).abs()


class _Relative(Added):
    """A number for each bucket of distances, looked up once for each diagonal of a tile."""

    def __init__(self, problem: Problem, bias: biases.Relative):
        self.dtype, self.T = problem.dtype, problem.T
        self.table = _wide(problem, bias.table)  # (num_buckets, H)
        # (T + S − 1,) of the diagonals, that of the last query and the first key first.
        whole = Tile((), 1, problem.T, problem.S, (0,), 0, problem.T, 0, problem.S)
        self.buckets = torch.as_tensor(bias.diagonals(whole), device=problem.device)
        self.total = torch.zeros(self.table.shape, dtype=problem.dtype, device=problem.device)

    def tile(self, rows: Rows, part: Part) -> Tensor:
        of_head = self.table[:, _heads(rows, self.table.shape[1])].to(self.dtype)
        along = of_head[self._buckets(rows, part)].T  # (H, m + n − 1)
        return along.unfold(-1, part.s1 - part.s0, 1).flip(-2)

    def add(self, rows: Rows, part: Part, ds: Tensor) -> None:
        ds = ds.sum(0)
        heads, m, n = ds.shape
        # Read in rows of one less than they are long, each row moves one further to the right.
        longer = torch.nn.functional.pad(ds.flip(1), (0, m)).reshape(heads, -1)
        along = longer[:, : m * (n + m - 1)].reshape(heads, m, n + m - 1).sum(1)
        buckets = torch.arange(len(self.table), device=ds.device)[:, None]
        # A product adds in an order that stays; adding at indices does not. 0 · NaN is NaN.
        hits = (buckets == self._buckets(rows, part)).to(ds.dtype)
        finite = torch.isfinite(along.T)
        each = hits @ torch.where(finite, along.T, 0)
        each = torch.where(hits @ (~finite).to(ds.dtype) > 0, math.nan, each)
        here = self.total[:, _heads(rows, self.table.shape[1])]
        here += _summed(each, here.shape)

    def gradient(self) -> Tensor:
        return self.total

    def _buckets(self, rows: Rows, part: Part) -> Tensor:
        first = self.T - rows.t1 + part.s0
        return self.buckets[first : first + rows.t1 - rows.t0 + part.s1 - part.s0 - 1]


class _Told(Added):
    """Any other object: it answers on the host, for one head at a time."""

    def __init__(self, problem: Problem, bias: Any):
        self.problem, self.bias = problem, bias
        self.sizes = (problem.lead, problem.H, problem.T, problem.S)
        self.total = bias.zeros(*self.sizes)

    def tile(self, rows: Rows, part: Part) -> Tensor:
        group, whole = rows.group, (rows.t1 - rows.t0, part.s1 - part.s0)
        told = np.stack([
            np.stack([
                np.broadcast_to(self.bias.tile(self._tile(b, h, rows, part)), whole)
                for h in range(group.h0, group.h1)
            ]) for b in range(group.b0, group.b1)
        ])  # fmt: skip
        return self.problem.to_compute_dtype(moved(_real(told), self.problem.device))  # type: ignore

    def add(self, rows: Rows, part: Part, ds: Tensor) -> None:
        host, group = ds.detach().cpu().numpy(), rows.group
        for b in range(group.b0, group.b1):
            for h in range(group.h0, group.h1):
                tile = self._tile(b, h, rows, part)
                self.bias.add(self.total, tile, host[b - group.b0, h - group.h0])

    def gradient(self) -> Tensor:
        return self.problem.to_compute_dtype(moved(self.total, self.problem.device))  # type: ignore

    def _tile(self, b: int, h: int, rows: Rows, part: Part) -> Tile:
        lead = self.sizes[0]
        sample = np.unravel_index(b, lead) if lead else ()
        plane = (*map(int, sample), h)
        return Tile(*self.sizes, plane, rows.t0, rows.t1, part.s0, part.s1)


def bias_gradient(problem: Problem, ds: Tensor) -> Any:
    """The gradient of a bias from that of all scores (..., H, T, S).  [13]"""
    if isinstance(problem.bias, Tensor):
        return _summed(ds, problem.bias.shape)
    whole = Rows(Group(0, math.prod(problem.lead), 0, problem.H, True), 0, problem.T, [])
    part = Part(0, problem.S, False)
    terms = added(problem)
    sizes = (*problem.lead, problem.H, problem.T, problem.S)
    if ds.shape != sizes:  # it has been summed over axes of 1: each sum counts once
        once = ds.new_zeros(sizes)
        once[tuple(slice(n) for n in (1,) * (len(sizes) - ds.ndim) + tuple(ds.shape))] = ds
        ds = once
    if ds.numel():
        for term in terms:
            term.add(whole, part, flat(ds, problem.lead))
    found = tuple(term.gradient() for term in terms)
    return found if hasattr(problem.bias, "terms") else found[0]


# --- the parts ------------------------------------------------------------------------------------


def _heads(rows: Rows, count: int) -> slice:
    """The heads of a group in a parameter that has one for each, or one for all."""
    return slice(rows.group.h0, rows.group.h1) if count > 1 else slice(None)


def _summed(x: Tensor, shape: Any) -> Tensor:
    return sum_to(x, shape)  # type: ignore[arg-type, return-value]  # of tensors too


def _real(array: Any) -> Any:
    return array.astype(np.float64) if array.dtype == np.longdouble else array


def _wide(problem: Problem, parameter: Any) -> Tensor:
    """A parameter in float64, or in what the device has."""
    return moved(np.array(parameter, np.float64), problem.device)
