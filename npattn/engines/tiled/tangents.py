"""Directional derivatives, block of queries by block."""

from typing import Any

import numpy as np

from npattn import biases
from npattn.engines import dense, threads
from npattn.engines.tiled.operations import Call, Saved, WorkSpace, is_finite, scores
from npattn.engines.tiled.tiling import Block
from npattn.problem import Problem
from npattn.problem.arrays import Array, BiasLike


@np.errstate(**dense.QUIET)  # type: ignore[arg-type]
def jvp(
    problem: Problem, saved: Saved, dq: Array | None = None, dk: Array | None = None,
    dv: Array | None = None, dbias: Array | BiasLike | None = None, dsinks: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Directional derivative (do, dlse) of (out, lse): forward, line by line."""
    call = Call(problem)
    careful = call.careful or not all(is_finite(x) for x in (dq, dk, dv) if x is not None)
    saved = saved._replace(log=np.where(saved.log == -np.inf, 0, saved.log))  # [8]
    do, dlse = np.zeros_like(saved.out), np.zeros_like(saved.log)
    moved_bias = None if dbias is None else biases.of(dbias)
    along = {
        name: None if x is None else call.operand(x, heads)
        for name, x, heads in (("q", dq, problem.H), ("k", dk, problem.K), ("v", dv, problem.K))
    }

    def work(block: Block, space: WorkSpace) -> None:
        _add_jvp(call, saved, block, space, along, moved_bias, dsinks, do, dlse, careful)

    threads.each(call.blocks(), lambda: WorkSpace(call), work)
    return (do[0], dlse[0]) if problem.headless else (do, dlse)


@np.errstate(**dense.QUIET)  # type: ignore[arg-type]
def _add_jvp(
    call: Call, saved: Saved, block: Block, space: WorkSpace, along: dict[str, Array | None],
    dbias: biases.Bias | None, dsinks: Array | None, do: Array, dlse: Array, careful: bool,
) -> None:  # fmt: skip
    """Add Σ p ds to dlse, (..., H, T), and Σ w (ds − dlse) v + Σ w dv to do, (..., H, T, E)."""
    plane, t0, t1 = block
    kv_plane, scale = call.kv_plane(plane), call.scale
    k, v = call.k[kv_plane], call.v[kv_plane]
    dq, dk, dv = along["q"], along["k"], along["v"]
    scaled = call.scaled_queries(plane, t0, t1, space)
    # The mean of ds first, then ds less its mean: little is left where one weight is almost 1.
    for centred in (False, True):
        for tile, part, _, s, slope in scores(call, plane, scaled, t0, t1, space, slope=True):
            rows: Any = (*plane, slice(tile.t0, tile.t1))
            keys = slice(tile.s0, tile.s1)
            live = s != -np.inf
            p = call.exp(s - saved.shift[rows][:, None] - call.per_nat * saved.log[rows][:, None])
            p = np.where(live, p, 0)
            ds = np.zeros_like(p)
            if dq is not None:
                ds += scale * dq[rows] @ k[keys].T
            if dk is not None:
                ds += scaled[part] @ dk[kv_plane][keys].T / call.per_nat
            ds = ds if slope is None else ds * slope
            ds = ds if dbias is None else ds + dbias.tile(tile).astype(call.dtype, copy=False)
            if not centred:
                dlse[rows] += np.where(live, p * ds, 0).sum(-1)
                continue
            ds = np.where(live, p * (ds - dlse[rows][:, None]), 0)
            keep, asked = call.dropout_factor(tile), live if careful else None
            o = space("o", tile.t1 - tile.t0, v.shape[1])
            do[rows] += call.sum(ds * keep, v[keys], asked, o)
            if dv is not None:
                do[rows] += call.sum(p * keep, dv[kv_plane][keys], asked, o)
        if dsinks is not None and not centred:  # one more key, without a value
            assert call.sinks is not None
            at: Any = (*plane, slice(t0, t1))
            shift = saved.shift[at] / call.per_nat
            p_sink = np.exp(call.sinks[plane[-1]] - shift - saved.log[at])
            dlse[at] += p_sink * dsinks[plane[-1]]
