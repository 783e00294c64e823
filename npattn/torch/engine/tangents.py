"""The tangent pass (forward mode): forward, line by line."""

from collections.abc import Iterator

import torch

from npattn.problem.arrays import BiasLike
from npattn.torch.bias_terms import bias_terms
from npattn.torch.engine.operations import (
    INF,
    SavedTensors,
    TileOps,
    all_finite,
    matmul_shared,
    rows_of,
)
from npattn.torch.problem import Problem
from npattn.torch.tiles import QueryRows, Strip

Tensor = torch.Tensor


def jvp(
    problem: Problem, saved: SavedTensors, dq: Tensor | None = None, dk: Tensor | None = None,
    dv: Tensor | None = None, dbias: Tensor | BiasLike | None = None, dsinks: Tensor | None = None,
    one_tile: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Change (do, dlse) of (out, lse) along a direction."""
    ops = TileOps(problem, one_tile)
    tangents = _TangentPass(ops, saved, dq, dk, dv, dbias)
    of_sinks = None if dsinks is None else ops.sink_weights(tangents.saved) * dsinks[:, None]
    do, dlse = ops.zeros(problem.T, problem.E), ops.zeros(problem.T)
    for rows in ops.plan.rows:
        # The mean of ds first, then ds without it: where one weight is almost 1, that is little.
        mean = tangents.mean(rows)
        if of_sinks is not None:  # one more key, without a value
            mean = mean + rows_of(of_sinks, rows)
        dlse[rows.at], do[rows.at] = mean, tangents.out(rows, mean)
    return ops.unflat(do), ops.unflat(dlse)


class _TangentPass:
    """A direction in, the change of a block's rows out."""

    def __init__(
        self, ops: TileOps, saved: SavedTensors, dq: Tensor | None, dk: Tensor | None,
        dv: Tensor | None, dbias: Tensor | BiasLike | None,
    ):  # fmt: skip
        self.ops, problem = ops, ops.problem
        self.dq = None if dq is None else ops.flat(dq, problem.H)
        self.dk, self.dv = (None if x is None else ops.flat(x, problem.K) for x in (dk, dv))
        self.dbias = bias_terms(problem, dbias)
        saved = ops.flat_saved(saved)
        self.saved = saved._replace(log=torch.where(saved.log == -INF, 0, saved.log))
        ops.careful = not all_finite(ops.q, ops.k, ops.v, self.dq, self.dk, self.dv)

    def mean(self, rows: QueryRows) -> Tensor:
        """Σ p ds of each row: the change of lse."""
        mean = torch.zeros_like(self.saved.log[rows.at])
        for _, p, ds, live in self._tiles(rows):
            term = p * ds
            mean = mean + (term if live is None else torch.where(live, term, 0)).sum(-1)
        return mean

    def out(self, rows: QueryRows, mean: Tensor) -> Tensor:
        """Σ p (ds − mean) v + Σ p dv of each row."""
        ops = self.ops
        do = mean.new_zeros((*mean.shape, ops.problem.E))
        for strip, p, ds, live in self._tiles(rows):
            dp, keep = p * (ds - mean[..., None]), ops.dropout_factor(rows, strip)
            dp = dp if live is None else torch.where(live, dp, 0)
            dw, w = (dp, p) if keep is None else (dp * keep, p * keep)
            do = do + ops.sum(dw, ops.keys(ops.v, rows, strip), live)
            if self.dv is not None:
                do = do + ops.sum(w, ops.keys(self.dv, rows, strip), live)
        return do

    def _tiles(self, rows: QueryRows) -> Iterator[tuple[Strip, Tensor, Tensor, Tensor | None]]:
        """Yield each tile's strip, its weights, the change of its scores, and what is live."""
        ops, q = self.ops, self.ops.scale_queries(rows)
        for strip in rows.strips:
            s, live, slope = ops.scores(rows, strip, q, slope=True)
            ds = torch.zeros_like(s)
            if self.dq is not None:
                dq = ops.scale * self.dq[rows.at]
                ds = ds + matmul_shared(dq, ops.keys(ops.k, rows, strip).mT)
            if self.dk is not None:
                ds = ds + matmul_shared(q, ops.keys(self.dk, rows, strip).mT)
            ds = ds if slope is None else ds * slope
            for term in self.dbias:
                ds = ds + term.tile(rows, strip)
            yield strip, ops.weights(rows, s, live, self.saved), ds, live
