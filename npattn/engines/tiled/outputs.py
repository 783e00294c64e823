"""Forward pass: outputs and lse, block of queries by block; the largest scores."""

import numpy as np

from npattn.engines import dense, threads
from npattn.engines.tiled.operations import Call, Saved, WorkSpace, scores
from npattn.engines.tiled.tiling import Block, Plane
from npattn.problem import Problem
from npattn.problem.arrays import Array


@np.errstate(**dense.QUIET)  # type: ignore[arg-type]  # a dict of literals
def forward(problem: Problem) -> tuple[Array, Array, Saved]:
    """Compute out (..., H, T, E), lse (..., H, T) and the results that backward needs."""
    call = Call(problem)
    out = np.empty((*problem.lead, problem.H, problem.T, problem.E), problem.dtype)
    shift, log = np.zeros(out.shape[:-1], problem.dtype), np.empty(out.shape[:-1], problem.dtype)

    def work(block: Block, space: WorkSpace) -> None:
        plane, t0, t1 = block
        fill_block(call, plane, t0, t1, space, *(x[plane][t0:t1] for x in (out, shift, log)))

    threads.each(call.blocks(), lambda: WorkSpace(call), work)
    saved, lse = Saved(out, shift, log), shift / call.per_nat + log
    return (out[0], lse[0], saved) if problem.headless else (out, lse, saved)


def weights(problem: Problem, saved: Saved) -> Array:
    """Weights (..., H, T, S), by the dense engine: arrays of this size are avoided elsewhere."""
    return dense.forward(problem)[2].p


def max_score(problem: Problem, _: Saved) -> Array:
    """Largest score of each row, (..., H, T) with a head axis."""
    call = Call(problem)
    top = np.empty((*problem.lead, problem.H, problem.T), problem.dtype)

    def work(block: Block, space: WorkSpace) -> None:
        plane, t0, t1 = block
        q = call.scaled_queries(plane, t0, t1, space)
        top[plane][t0:t1] = maxima(call, plane, q, t0, t1, space)

    threads.each(call.blocks(), lambda: WorkSpace(call), work)
    return top if call.per_nat == 1 else top / np.asarray(call.per_nat, top.dtype)


@np.errstate(**dense.QUIET)  # type: ignore[arg-type]  # each thread has its own
def fill_block(
    call: Call, plane: Plane, t0: int, t1: int, space: WorkSpace, out: Array, shift: Array,
    log: Array,
) -> None:  # fmt: skip
    """Fill out (n, E), shift (n,) and log (n,) of a block of queries."""
    q = call.scaled_queries(plane, t0, t1, space)
    sink = None if call.sinks is None else call.sinks[plane[-1]]
    eps = np.finfo(call.dtype).eps

    def sums(shift: Array | None, careful: bool) -> tuple[Array, Array]:
        total = _sums(call, plane, q, t0, t1, space, shift, out, careful)
        if sink is not None:
            total += np.exp(sink if shift is None else sink - shift / call.per_nat)
        # A sum that is not tiny has lost none of its terms that count to underflow.
        # That of a row of out is finite if the row is, and hardly ever otherwise.
        good = (total > eps) & np.isfinite(total + out @ space.ones[: out.shape[1]])
        return total, good

    total, good = sums(None, careful=False)
    careful = not good.all() and call.careful
    if careful:
        total, good = sums(None, careful)
    if not good.all():
        m = maxima(call, plane, q, t0, t1, space)
        m = m if sink is None else np.maximum(m, sink * call.per_nat)
        shift[...] = np.where(good | (m == -np.inf), 0, m)  # no row depends on other rows
        total, _ = sums(shift, careful)
    np.log(total, out=log)
    total[total == 0] = 1  # a query that sees nothing  [8]
    out /= total[:, None]


def _sums(
    call: Call, plane: Plane, q: Array, t0: int, t1: int, space: WorkSpace, shift: Array | None,
    out: Array, careful: bool,
) -> Array:  # fmt: skip
    """Return Σ exp(s − shift), (t1 − t0,), and write Σ exp(s − shift) v to out, (t1 − t0, E)."""
    v = call.v[call.kv_plane(plane)]
    total = np.zeros(t1 - t0, call.dtype)
    begun = False
    for tile, rows, _, s, _ in scores(call, plane, q, t0, t1, space):
        live = s != -np.inf if careful else None  # a weight of 0 is enough for the others
        if shift is not None:
            s -= shift[rows, None]
        p = call.exp(s, out=s)
        total[rows] += p @ space.ones[: p.shape[1]]
        if call.keep is not None:
            p *= call.dropout_factor(tile)
        out_rows, values = out[rows], v[tile.s0 : tile.s1]
        if live is None and not begun and len(out_rows) == len(out):
            np.matmul(p, values, out=out)
        else:
            if not begun:
                out[...] = 0
            out_rows += call.sum(p, values, live, space("o", *out_rows.shape))
        begun = True
    if not begun:
        out[...] = 0
    return total


@np.errstate(**dense.QUIET)  # type: ignore[arg-type]  # each thread has its own
def maxima(call: Call, plane: Plane, q: Array, t0: int, t1: int, space: WorkSpace) -> Array:
    m = np.full(t1 - t0, -np.inf, call.dtype)
    for _, rows, _, s, _ in scores(call, plane, q, t0, t1, space):
        m[rows] = np.maximum(m[rows], s.max(-1))
    return m
