"""The backward pass: forward, read upwards."""

from typing import Any

import torch

from npattn.problem import Gradients
from npattn.problem.arrays import sum_to
from npattn.torch.engine import in_one_pass
from npattn.torch.engine.operations import (
    INF,
    SavedTensors,
    TileOps,
    all_finite,
    matmul_shared,
    rows_of,
)
from npattn.torch.engine.outputs import fully_masked_rows
from npattn.torch.problem import Problem
from npattn.torch.score_mod import check_slopes
from npattn.torch.tiles import QueryRows, Strip, flatten, tile_of

Tensor = torch.Tensor


def backward(
    problem: Problem, saved: SavedTensors, do: Tensor, dlse: Tensor | None = None,
    dweights: Tensor | None = None, one_tile: bool = False,
) -> Gradients:  # fmt: skip
    """Gradients of Σ do·out + Σ dlse·lse + Σ dweights·weights."""
    ops = TileOps(problem, one_tile)
    gradients = _GradientPass(ops, saved, do, dlse, dweights)
    for rows in ops.plan.rows:
        q, do = ops.scale_queries(rows), rows_of(gradients.do, rows)
        for strip in rows.strips:
            gradients.add_tile(rows, strip, q, do)
    return gradients.result()


class _GradientPass:
    """Cotangents in, gradients out."""

    def __init__(
        self, ops: TileOps, saved: SavedTensors, do: Tensor, dlse: Tensor | None,
        dweights: Tensor | None,
    ):  # fmt: skip
        self.ops, problem = ops, ops.problem
        n = ops.plan.samples
        saved = ops.flat_saved(saved)
        rank = len(problem.lead)
        self.do: Tensor = problem.round_to_storage(do)
        if rank != 1:
            self.do = self.do.reshape(n, *do.shape[rank:])
            dlse = None if dlse is None else dlse.reshape(n, *dlse.shape[rank:])
        self.dweights = None if dweights is None else flatten(dweights, problem.lead)
        self.saved, empty = saved, None
        if not all_finite(ops.q, ops.k, ops.v, self.do, saved.log):
            empty = saved.log == -INF
            self.saved = saved._replace(log=torch.where(empty, 0, saved.log))
            ops.careful = not all_finite(ops.q, ops.k, ops.v, self.do, self.saved.log)
        self.delta = self._delta()
        if empty is not None:  # a fully masked row has 0, whatever its cotangent is  [8]
            masked = empty if ops.sinks is None else fully_masked_rows(ops)
            self.delta = torch.where(masked, 0, self.delta)
        if dlse is not None:  # from lse = log Σ exp(s)
            self.delta = self.delta - dlse
        self.dq = _RunningSum(ops.q, (n, problem.H, problem.T, problem.D))
        self.dk, self.dv = (
            _RunningSum(ops.q, (n, problem.K, problem.S, size)) for size in (problem.D, problem.E)
        )

    def _delta(self) -> Tensor:
        """Σ p dp of each row: do · o, unless w is rounded or weights have a cotangent."""
        ops = self.ops
        if self.dweights is None and ops.problem.storage is None:
            return (self.do * self.saved.out).sum(-1)
        delta = ops.zeros(ops.problem.T)
        for rows in ops.plan.rows:
            q, do = ops.scale_queries(rows), rows_of(self.do, rows)
            for strip in rows.strips:
                s, live, _ = ops.scores(rows, strip, q, slope=True)
                p = ops.weights(rows, s, live, self.saved)
                dp = p * self._dp(rows, strip, do)
                delta[rows.at] += (dp if live is None else torch.where(live, dp, 0)).sum(-1)
        return delta

    def _dp(self, rows: QueryRows, strip: Strip, do: Tensor) -> Tensor:
        """Gradient of the weights, before the softmax subtracts its mean."""
        dp = matmul_shared(do, self.ops.keys(self.ops.v, rows, strip).mT)
        keep = self.ops.dropout_factor(rows, strip)
        dp = dp if keep is None else dp * keep
        return dp if self.dweights is None else dp + tile_of(self.dweights, rows, strip)

    def add_tile(self, rows: QueryRows, strip: Strip, q: Tensor, do: Tensor) -> None:
        """Add the gradients of a tile."""
        ops, round_to_storage = self.ops, self.ops.problem.round_to_storage
        s, live, slope = ops.scores(rows, strip, q, slope=True)
        p, ds = self._weights_and_ds(rows, s, self._dp(rows, strip, do), live)
        keep = ops.dropout_factor(rows, strip)
        w = round_to_storage(p if keep is None else p * keep)
        at = (*ops.key_planes(rows), slice(strip.s0, strip.s1))
        self.dv.add(at, ops.sum_shared(w, do, live))
        for term in ops.bias:
            term.add(rows, strip, ds)
        dx = ds if slope is None else ds * slope
        dx = dx if slope is None or live is None else torch.where(live, dx, 0)
        dx = round_to_storage(dx)
        self.dk.add(at, ops.sum_shared(dx, q, live))
        self.dq.add(rows.at, ops.sum(dx, ops.keys(ops.k, rows, strip), live))

    def _weights_and_ds(
        self, rows: QueryRows, s: Tensor, dp: Tensor, live: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the weights of a tile, and the gradients of its scores."""
        ops, delta = self.ops, rows_of(self.delta, rows)
        if in_one_pass.weights_and_gradients(ops, rows, s, dp, self.saved, delta):
            return s, dp
        p = ops.weights(rows, s, live, self.saved)
        ds = ops.multiply(ops.subtract(dp, delta), p)
        return p, ds if live is None else torch.where(live, ds, 0)

    def result(self) -> Gradients:
        """Return the sums, each shaped as its input."""
        ops, problem = self.ops, self.ops.problem
        check_slopes(ops.differs)
        dsinks = None
        if ops.sinks is not None:  # one more key, with dp = 0
            dsinks = (-ops.sink_weights(self.saved) * self.delta).sum((0, 2))
        terms = tuple(term.gradient() for term in ops.bias)
        alone = isinstance(problem.bias, Tensor) or not hasattr(problem.bias, "terms")
        grads: dict[str, Any] = {}
        dq, dk, dv = (total.value() for total in (self.dq, self.dk, self.dv))
        for name, total in (("q", ops.scale * dq), ("k", dk), ("v", dv)):
            x: Any = ops.unflat(total)
            x = x[0] if problem.headless else x
            grads[name] = sum_to(x, getattr(problem, name).shape)
        return Gradients(
            **grads,
            bias=None if not terms else terms[0] if alone else terms,
            sinks=dsinks,  # type: ignore[arg-type]
        )


class _RunningSum:
    """A sum of pieces; a single piece that is the whole is kept without a copy."""

    def __init__(self, like: Tensor, shape: tuple[int, ...]):
        self.like, self.shape = like, torch.Size(shape)
        self.x: Tensor | None = None

    def add(self, at: tuple[slice, ...], piece: Tensor) -> None:
        if self.x is None and piece.shape == self.shape:
            self.x = piece
        else:
            self.x = self.value()
            self.x[at].add_(piece)  # x[at] += piece would also copy x[at] onto itself

    def value(self) -> Tensor:
        return self.like.new_zeros(self.shape) if self.x is None else self.x
