"""The forward pass, and the weights."""

import math

import torch

from npattn.torch.engine import in_one_pass
from npattn.torch.engine.operations import INF, SavedTensors, TileOps, all_finite
from npattn.torch.problem import Problem
from npattn.torch.tiles import QueryRows

Tensor = torch.Tensor
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


def forward(problem: Problem, one_tile: bool = False) -> SavedTensors:
    """Return out (..., H, T, E) and the logarithm of each row's sum, in two parts."""
    ops = TileOps(problem, one_tile)
    out, total, shift = _sum_tiles(ops) if problem.storage is None else _sum_in_storage(ops)
    shift = None if shift is None else ops.unflat(shift)
    return SavedTensors(ops.unflat(out), ops.unflat(total.log()), shift)


def weights(problem: Problem, saved: SavedTensors, one_tile: bool = False) -> Tensor:
    """Return the weights (..., H, T, S): all T × S of them, which no other pass holds."""
    ops = TileOps(problem, one_tile)
    saved = ops.flat_saved(saved)
    saved = saved._replace(log=torch.where(saved.log == -INF, 0, saved.log))
    ops.careful = not all_finite(ops.q, ops.k, saved.log)
    p = ops.zeros(problem.T, problem.S)
    for rows in ops.plan.rows:
        q = ops.scale_queries(rows)
        for strip in rows.strips:
            s, live, _ = ops.scores(rows, strip, q)
            p[(*rows.at, slice(strip.s0, strip.s1))] = ops.weights(rows, s, live, saved)
    return ops.unflat(p)


def max_score(problem: Problem, one_tile: bool = False) -> Tensor:
    """Return the largest score of each row, (..., H, T); −inf for a row without any."""
    ops = TileOps(problem, one_tile)
    top = ops.zeros(problem.T)
    for rows in ops.plan.rows:
        top[rows.at] = _row_maxima(ops, rows, None)
    return ops.unflat(top)


def fully_masked_rows(ops: TileOps) -> Tensor:
    """Return where a query has no visible key: (B, H, T)."""
    masked = ops.zeros(ops.problem.T).bool()
    for rows in ops.plan.rows:
        masked[rows.at] = _row_maxima(ops, rows, None) == -INF
    return masked


def _sum_tiles(ops: TileOps) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out, the sum of exp(s − shift) of each row, and shift, if there is one."""
    at_once = in_one_pass.sum_exp(ops)
    if at_once is not None:
        out, total = at_once
        total = total if ops.sinks is None else total + ops.sinks.exp()
    else:
        out, total = _sum_blocks(ops)
    if _in_range(total, out):
        return out / total.unsqueeze(-1), total, None
    shift = torch.zeros_like(total)
    _repeat_with_maxima(ops, out, total, shift)
    # A sum of 0 is that of a fully masked row.  [8]
    return out / torch.where(total == 0, 1, total)[..., None], total, shift


def _sum_blocks(ops: TileOps) -> tuple[Tensor, Tensor]:
    """Return Σ exp(s) v of each row, and Σ exp(s), sink included, tile by tile."""
    blocks, problem = ops.plan.rows, ops.problem
    if len(blocks) == 1 and blocks[0].every:
        return _sum_block(ops, blocks[0], None)
    out, total = ops.zeros(problem.T, problem.E), ops.zeros(problem.T)
    for rows in blocks:
        out[rows.at], total[rows.at] = _sum_block(ops, rows, None)
    return out, total


def _sum_block(ops: TileOps, rows: QueryRows, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return Σ exp(s − shift) v of each row, and Σ exp(s − shift), sink included [8, 11]."""
    q, out, total = ops.scale_queries(rows), None, None
    for strip in rows.strips:
        s, live, _ = ops.scores(rows, strip, q)
        p = ops.exp(s if shift is None else ops.subtract(s, shift))
        sums, keep = p.sum(-1), ops.dropout_factor(rows, strip)
        o = ops.sum(p if keep is None else p * keep, ops.keys(ops.v, rows, strip), live)
        out, total = (o, sums) if out is None or total is None else (out + o, total + sums)
    if out is None or total is None:  # no strip is visible
        out, total = q.new_zeros((*q.shape[:-1], ops.problem.E)), q.new_zeros(q.shape[:-1])
    if ops.sinks is not None:
        sinks = ops.sinks[rows.at[1]]
        total = total + torch.exp(sinks if shift is None else sinks - shift)
    return out, total


def _row_maxima(ops: TileOps, rows: QueryRows, sinks: Tensor | None) -> Tensor:
    """Return the largest score of each row, or its sink; −inf for a row without any."""
    q = ops.scale_queries(rows)
    m = q.new_full(q.shape[:-1], -INF)
    for strip in rows.strips:
        m = torch.maximum(m, ops.scores(rows, strip, q)[0].amax(-1))
    return m if sinks is None else torch.maximum(m, sinks[rows.at[1]])


def _in_range(total: Tensor, out: Tensor) -> bool:
    """Check that no row lost a term that counts: the one wait for the device of a call."""
    if not total.numel():
        return True
    (least, most), out_sum = torch.aminmax(total), out.sum()
    if total.is_cpu:  # item() waits for nothing here
        return least.item() > EPS[total.dtype] and math.isfinite(most.item() + out_sum.item())
    a, b, c = torch.stack((least, most, out_sum)).tolist()
    return a > EPS[total.dtype] and math.isfinite(b + c)


def _repeat_with_maxima(ops: TileOps, out: Tensor, total: Tensor, shift: Tensor) -> None:
    """Compute blocks with a bad row again, shifted by its maximum; good rows do not change."""
    good = (total > EPS[total.dtype]) & torch.isfinite(total + out.sum(-1))
    ops.careful = not all_finite(ops.q, ops.k, ops.v)
    blocks = ops.plan.rows
    bad = torch.stack([~good[rows.at].all() for rows in blocks]).tolist()
    blocks = [rows for rows, is_bad in zip(blocks, bad, strict=True) if is_bad]
    needed = []
    for rows in blocks:
        m, fine = _row_maxima(ops, rows, ops.sinks), good[rows.at]
        shift[rows.at] = torch.where(fine | (m == -INF), 0, m)
        # For a fully masked row, 0 is the right sum.
        needed.append((~fine & (m != -INF)).any())
    repeat = torch.stack(needed).tolist() if needed else []
    for rows, again in zip(blocks, repeat, strict=True):
        if again or ops.careful:
            out[rows.at], total[rows.at] = _sum_block(ops, rows, shift[rows.at])


def _sum_in_storage(ops: TileOps) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sum in mixed precision: weights are rounded before they meet v, so their sum comes first."""
    problem, round_to_storage = ops.problem, ops.problem.round_to_storage
    ops.careful = not all_finite(ops.q, ops.k, ops.v)
    out = ops.zeros(problem.T, problem.E)
    total, shift = ops.zeros(problem.T), ops.zeros(problem.T)
    for rows in ops.plan.rows:
        m = _row_maxima(ops, rows, ops.sinks)
        m = shift[rows.at] = torch.where(m == -INF, 0, m)
        sums = total[rows.at] = _sum_block(ops, rows, m)[1]
        sums, q = torch.where(sums == 0, 1, sums), ops.scale_queries(rows)
        for strip in rows.strips:
            s, live, _ = ops.scores(rows, strip, q)
            p, keep = torch.exp(s - m[..., None]) / sums[..., None], ops.dropout_factor(rows, strip)
            p = p if live is None else torch.where(live, p, 0)
            w = round_to_storage(p if keep is None else p * keep)  # [15]
            out[rows.at] += ops.sum(w, ops.keys(ops.v, rows, strip), live)
    return out, total, shift
