"""Attention in torch operations, tile by tile: what `npattn.tiled` computes, on any device.

    B samples (the leading axes in one)   H query heads   K key/value heads   T queries   S keys
    D query/key size   E value size
    A tile is a block of queries against a strip of keys, of as many samples and heads at once as
    see the same (`npattn.torch.tiles`). T × S numbers are never held.

A score is exponentiated as it is, and the row maximum is looked for only where the sum of a row
leaves the range of the dtype: docs/derivations/tiled.md. Whether that is so is asked once a call,
when all tiles are done: a device is never waited for in between. Every operation is out of place,
but for adding up, so that autograd can go through the backward. Numbers in brackets are the rules
of docs/semantics.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from npattn.arrays import sum_to
from npattn.problem import Gradients
from npattn.torch.biases import added
from npattn.torch.problem import Problem
from npattn.torch.score_mod import call_score_mod, check_slopes
from npattn.torch.score_mod import slope as score_mod_slope
from npattn.torch.tiles import Part, Rows, flat, piece, plan_of

__all__ = ["Saved", "backward", "forward", "jvp", "weights"]

Tensor = torch.Tensor
INF = math.inf
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


class Saved(NamedTuple):
    """What backward and jvp need: both in the dtype computed in, with a head axis."""

    out: Tensor  # (..., H, T, E)
    log: Tensor  # (..., H, T) of the sum of exp(s − shift): lse is the sum of the two
    # (..., H, T) what was subtracted before exp, None if nothing was: of lse alone, little would
    # be left.
    shift: Tensor | None

    @property
    def lse(self) -> Tensor:
        return self.log if self.shift is None else self.shift + self.log


def forward(problem: Problem, whole: bool = False) -> Saved:
    """out (..., H, T, E), and the logarithm of each row's sum, in two parts."""
    call = _Call(problem, whole)
    out, total, shift = _tiled(call) if problem.storage is None else _narrow(call)
    shift = None if shift is None else call.unflat(shift)
    return Saved(call.unflat(out), call.unflat(total.log()), shift)


def backward(
    problem: Problem,
    saved: Saved,
    do: Tensor,
    dlse: Tensor | None = None,
    dweights: Tensor | None = None,
    whole: bool = False,
) -> Gradients:
    """Gradients of Σ do·out + Σ dlse·lse + Σ dweights·weights: forward, read upwards."""
    call = _Call(problem, whole)
    pull = _Pull(call, saved, do, dlse, dweights)
    for rows in call.plan.rows:
        q, do = call.scaled(rows), of(pull.do, rows)
        for part in rows.parts:
            pull.part(rows, part, q, do)
    return pull.result()


def jvp(
    problem: Problem,
    saved: Saved,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    dbias: Tensor | None = None,
    dsinks: Tensor | None = None,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    """The change (do, dlse) of (out, lse) along a direction: forward, line by line."""
    call = _Call(problem, whole)
    push = _Push(call, saved, dq, dk, dv, dbias)
    moved = None if dsinks is None else call.sink_weights(push.saved) * dsinks[:, None]
    do, dlse = call.zeros(problem.T, problem.E), call.zeros(problem.T)
    for rows in call.plan.rows:
        # The mean of ds first, then what is left of ds: where one weight is almost 1, that is
        # little.
        mean = push.mean(rows)
        if moved is not None:  # one more key, without a value
            mean = mean + of(moved, rows)
        dlse[rows.at], do[rows.at] = mean, push.out(rows, mean)
    return call.unflat(do), call.unflat(dlse)


def weights(problem: Problem, saved: Saved, whole: bool = False) -> Tensor:
    """The weights (..., H, T, S), which are as large as everything that is avoided here."""
    call = _Call(problem, whole)
    saved = call.saved(saved)
    saved = saved._replace(log=torch.where(saved.log == -INF, 0, saved.log))
    call.careful = not _all_finite(call.q, call.k, saved.log)
    p = call.zeros(problem.T, problem.S)
    for rows in call.plan.rows:
        q = call.scaled(rows)
        for part in rows.parts:
            s, live, _ = call.scores(rows, part, q)
            p[(*rows.at, slice(part.s0, part.s1))] = call.weights(rows, s, live, saved)
    return call.unflat(p)


# --- what all tiles of a problem have in common ---------------------------------------------------


class _Call:
    """Operands in the dtype computed in, with one axis for all samples, and what is seen."""

    def __init__(self, problem: Problem, whole: bool):
        self.problem = problem
        assert problem.scale is not None  # Problem has put the default there  [1]
        self.scale = problem.scale
        self.q: Tensor = problem.q
        self.k: Tensor = problem.k
        self.v: Tensor = problem.v
        if not problem.ready:
            self.q = self.operand(self.q, problem.H)
            self.k = self.operand(self.k, problem.K)
            self.v = self.operand(self.v, problem.K)
        self.plan = plan_of(problem, whole)
        self.bias = added(problem)
        self.keep: Tensor | None = None
        if problem.dropout_mask is not None:
            self.keep = flat(problem.dropout_mask, problem.lead)
        self.sinks: Tensor | None = None
        if problem.sinks is not None:
            self.sinks = problem.to_compute_dtype(problem.sinks)[:, None]  # (H, 1)
        # Where something is not finite, each product asks what is live: 0 · NaN is NaN.  [10]
        self.careful = False
        self.differs: list[Tensor] = []  # whether score_mod's slope is what its values say

    def operand(self, x: Tensor, heads: int) -> Tensor:
        """An input in the dtype computed in, (B, heads, n, size)."""
        problem = self.problem
        if x.dtype != problem.dtype:
            x = x.to(problem.dtype)
        x = x if problem.storage is None else problem.round_to_storage(x)
        return x if problem.straight else self.flat(x, heads)

    def flat(self, x: Tensor, heads: int) -> Tensor:
        lead = self.problem.lead
        x = x[None] if x.ndim == 2 else x
        x = x.expand(*lead, heads, *x.shape[-2:])
        return x.reshape(math.prod(lead), heads, *x.shape[-2:])

    def unflat(self, x: Tensor) -> Tensor:
        lead = self.problem.lead
        return x if len(lead) == 1 else x.reshape(*lead, *x.shape[1:])

    def zeros(self, *shape: int) -> Tensor:
        """Room for something of each sample and query head."""
        return self.q.new_zeros((self.plan.samples, self.problem.H, *shape))

    def saved(self, saved: Saved) -> Saved:
        n, rank = self.plan.samples, len(self.problem.lead)
        if rank == 1:
            return saved
        return Saved(*(None if x is None else x.reshape(n, *x.shape[rank:]) for x in saved))  # type: ignore

    def shared(self, rows: Rows) -> tuple[slice, slice]:
        """The samples and key/value heads of a group.  [1]"""
        group, G = rows.group, self.problem.H // self.problem.K
        return slice(group.b0, group.b1), slice(group.h0 // G, (group.h1 - 1) // G + 1)

    def keys(self, x: Tensor, rows: Rows, part: Part) -> Tensor:
        """(B', K', n, size): the keys or values of a tile."""
        if rows.every and part.s1 - part.s0 == self.problem.S:
            return x
        return x[(*self.shared(rows), slice(part.s0, part.s1))]

    def scaled(self, rows: Rows) -> Tensor:
        """scale · q of a block of queries: (B', H', m, D)."""
        return of(self.q, rows) * self.scale

    def scores(
        self, rows: Rows, part: Part, q: Tensor, slope: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The final scores of a tile, which of them are in the softmax (None: all), their slope."""
        problem, rate = self.problem, None
        s = _times(q, self.keys(self.k, rows, part).mT)  # [1]
        if problem.softcap is not None:
            tanh = torch.tanh(s / problem.softcap)
            rate = 1 - tanh**2 if slope else None
            s = problem.softcap * tanh  # [2]
        if problem.score_mod is not None:
            at = self.indices(rows, part)
            if slope:
                own, differs = score_mod_slope(problem, s, at)
                self.differs.append(differs)
                rate = own if rate is None else rate * own
            s = call_score_mod(problem, s, at)  # [3]
        for term in self.bias:
            s = s + term.tile(rows, part)  # [4]
        if part.partial:
            s = torch.where(self.plan.visible(rows, part), s, -INF)  # [5-7]
        # A weight of 0 is enough, unless it is multiplied by what is not finite: in the forward
        # pass what was given, in a backward pass what is made of it and of finite cotangents too.
        asked = slope and (part.partial or self.bias or problem.score_mod is not None)
        return s, (s != -INF if asked or self.careful else None), rate

    def indices(self, rows: Rows, part: Part) -> Any:
        """b, h, t, s_index as score_mod gets them, with four axes."""
        group, device = rows.group, self.q.device
        ends = ((group.b0, group.b1), (group.h0, group.h1), (rows.t0, rows.t1), part[:2])
        return tuple(
            torch.arange(*pair, device=device).reshape((1,) * i + (-1,) + (1,) * (3 - i))
            for i, pair in enumerate(ends)
        )

    def kept(self, rows: Rows, part: Part) -> Tensor | None:
        """What the weights are multiplied by.  [9]"""
        if self.keep is None:
            return None
        keep: Tensor = self.problem.to_compute_dtype(piece(self.keep, rows, part))
        return keep / (1 - self.problem.dropout_rate)

    def weights(self, rows: Rows, s: Tensor, live: Tensor | None, saved: Saved) -> Tensor:
        """exp(s − lse); in a row of NaN, hidden keys still have weight 0.  [10]"""
        s = s if saved.shift is None else s - of(saved.shift, rows)[..., None]
        p = torch.exp(s - of(saved.log, rows)[..., None])
        return torch.where(live, p, 0) if self.careful and live is not None else p

    def sink_weights(self, saved: Saved) -> Tensor:
        """What the sinks take of each row."""
        assert self.sinks is not None
        return torch.exp(
            (self.sinks if saved.shift is None else self.sinks - saved.shift) - saved.log
        )

    def sum(self, w: Tensor, x: Tensor, live: Tensor | None) -> Tensor:
        """w @ x, in which x counts only where it is live, if anything is not finite."""
        if not self.careful:
            return _times(w, x)
        assert live is not None
        finite = torch.isfinite(x)
        touched = _times(live.to(w.dtype), (~finite).to(w.dtype)) > 0
        return torch.where(touched, math.nan, _times(w, torch.where(finite, x, 0)))

    def sum_shared(self, w: Tensor, x: Tensor, live: Tensor | None) -> Tensor:
        """wᵀ @ x, summed over the query heads that share a head: (B', K', n, size)."""
        B, H, m, n = w.shape
        heads = 1 if H == 1 else H * self.problem.K // self.problem.H
        w, x = w.reshape(B, heads, -1, n), x.reshape(B, heads, H * m // heads, x.shape[-1])
        asked = live.reshape(w.shape).mT if self.careful and live is not None else None
        return self.sum(w.mT, x, asked)


def of(x: Tensor, rows: Rows) -> Tensor:
    """The rows of a block in what has them all."""
    return x if rows.every else x[rows.at]


def _times(q: Tensor, k: Tensor) -> Tensor:
    """q @ k, where several heads of q share one of k: (B, H, m, n) of (B, K, ·, n)."""
    if q.size(1) == k.size(1):
        return q @ k
    (B, H, m, D), heads = q.shape, k.shape[1]
    return (q.reshape(B, heads, H * m // heads, D) @ k).reshape(B, H, m, k.shape[-1])


def _all_finite(*tensors: Tensor | None) -> bool:
    """Whether everything is finite: one wait, however many tensors."""
    sums = [x.detach().sum() for x in tensors if x is not None]
    # A sum that overflows is no harm: whoever hears False looks more closely.
    return math.isfinite(float(torch.stack(sums).sum()))


# --- forward --------------------------------------------------------------------------------------


def _tiled(call: _Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, the sum of exp(s − shift) of each row, and shift, if there is one."""
    blocks, problem = call.plan.rows, call.problem
    if len(blocks) == 1 and blocks[0].every:
        out, total = _sums(call, blocks[0], None)
    else:
        out, total = call.zeros(problem.T, problem.E), call.zeros(problem.T)
        for rows in blocks:
            out[rows.at], total[rows.at] = _sums(call, rows, None)
    if _in_range(total, out):
        return out / total.unsqueeze(-1), total, None
    shift = torch.zeros_like(total)
    _again(call, out, total, shift)
    return out / torch.where(total == 0, 1, total)[..., None], total, shift  # 0: nothing seen  [8]


def _sums(call: _Call, rows: Rows, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """Σ exp(s − shift) v of each row of a block, and Σ exp(s − shift), with the sink.  [8, 11]"""
    q, out, total = call.scaled(rows), None, None
    for part in rows.parts:
        s, live, _ = call.scores(rows, part, q)
        p = torch.exp(s if shift is None else s - shift[..., None])
        sums, keep = p.sum(-1), call.kept(rows, part)
        o = call.sum(p if keep is None else p * keep, call.keys(call.v, rows, part), live)
        out, total = (o, sums) if out is None or total is None else (out + o, total + sums)
    if out is None or total is None:  # nothing is seen
        out, total = q.new_zeros((*q.shape[:-1], call.problem.E)), q.new_zeros(q.shape[:-1])
    if call.sinks is not None:
        sinks = call.sinks[rows.at[1]]
        total = total + torch.exp(sinks if shift is None else sinks - shift)
    return out, total


def _maxima(call: _Call, rows: Rows, sinks: Tensor | None) -> Tensor:
    """The largest score of each row of a block, or its sink; −inf where there is none."""
    q = call.scaled(rows)
    m = q.new_full(q.shape[:-1], -INF)
    for part in rows.parts:
        m = torch.maximum(m, call.scores(rows, part, q)[0].amax(-1))
    return m if sinks is None else torch.maximum(m, sinks[rows.at[1]])


def _unseen(call: _Call) -> Tensor:
    """Which queries see no key: (B, H, T)."""
    unseen = call.zeros(call.problem.T).bool()
    for rows in call.plan.rows:
        unseen[rows.at] = _maxima(call, rows, None) == -INF
    return unseen


def _in_range(total: Tensor, out: Tensor) -> bool:
    """Whether no row has lost a term that counts: the one thing a call waits for."""
    if not total.numel():
        return True
    (least, most), whole = torch.aminmax(total), out.sum()
    if total.is_cpu:  # there is nothing to wait for
        return least.item() > EPS[total.dtype] and math.isfinite(most.item() + whole.item())
    a, b, c = torch.stack((least, most, whole)).tolist()
    return a > EPS[total.dtype] and math.isfinite(b + c)


def _again(call: _Call, out: Tensor, total: Tensor, shift: Tensor) -> None:
    """Do the blocks again in which a row is not good, with its maximum; no other row changes."""
    good = (total > EPS[total.dtype]) & torch.isfinite(total + out.sum(-1))
    call.careful = not _all_finite(call.q, call.k, call.v)
    blocks = call.plan.rows
    bad = torch.stack([~good[rows.at].all() for rows in blocks]).tolist()
    blocks = [rows for rows, is_bad in zip(blocks, bad, strict=True) if is_bad]
    needed = []
    for rows in blocks:
        m, fine = _maxima(call, rows, call.sinks), good[rows.at]
        shift[rows.at] = torch.where(fine | (m == -INF), 0, m)
        # Of a row that sees nothing, 0 is the right sum.
        needed.append((~fine & (m != -INF)).any())
    redo = torch.stack(needed).tolist() if needed else []
    for rows, again in zip(blocks, redo, strict=True):
        if again or call.careful:
            out[rows.at], total[rows.at] = _sums(call, rows, shift[rows.at])


def _narrow(call: _Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mixed precision: the weights are rounded before they meet v, so their sum comes first."""
    problem, stored = call.problem, call.problem.round_to_storage
    call.careful = not _all_finite(call.q, call.k, call.v)
    out, total, shift = (
        call.zeros(problem.T, problem.E),
        call.zeros(problem.T),
        call.zeros(problem.T),
    )
    for rows in call.plan.rows:
        m = _maxima(call, rows, call.sinks)
        m = shift[rows.at] = torch.where(m == -INF, 0, m)
        sums = total[rows.at] = _sums(call, rows, m)[1]
        sums, q = torch.where(sums == 0, 1, sums), call.scaled(rows)
        for part in rows.parts:
            s, live, _ = call.scores(rows, part, q)
            p, keep = torch.exp(s - m[..., None]) / sums[..., None], call.kept(rows, part)
            p = p if live is None else torch.where(live, p, 0)
            w = stored(p if keep is None else p * keep)  # [15]
            out[rows.at] += call.sum(w, call.keys(call.v, rows, part), live)
    return out, total, shift


# --- backward -------------------------------------------------------------------------------------


class _Pull:
    """Cotangents in, gradients out."""

    def __init__(
        self,
        call: _Call,
        saved: Saved,
        do: Tensor,
        dlse: Tensor | None,
        dweights: Tensor | None,
    ):
        self.call, problem = call, call.problem
        n = call.plan.samples
        saved = call.saved(saved)
        rank = len(problem.lead)
        self.do: Tensor = problem.round_to_storage(do)
        if rank != 1:
            self.do = self.do.reshape(n, *do.shape[rank:])
            dlse = None if dlse is None else dlse.reshape(n, *dlse.shape[rank:])
        self.dweights = None if dweights is None else flat(dweights, problem.lead)
        self.saved, empty = saved, None
        if not _all_finite(call.q, call.k, call.v, self.do, saved.log):
            empty = saved.log == -INF
            self.saved = saved._replace(log=torch.where(empty, 0, saved.log))
            call.careful = not _all_finite(call.q, call.k, call.v, self.do, self.saved.log)
        self.delta = self._delta()
        if empty is not None:  # a query that sees nothing has 0, whatever its cotangent is  [8]
            unseen = empty if call.sinks is None else _unseen(call)
            self.delta = torch.where(unseen, 0, self.delta)
        if dlse is not None:  # from lse = log Σ exp(s)
            self.delta = self.delta - dlse
        self.dq = _Total(call.q, (n, problem.H, problem.T, problem.D))
        self.dk, self.dv = (
            _Total(call.q, (n, problem.K, problem.S, size)) for size in (problem.D, problem.E)
        )

    def _delta(self) -> Tensor:
        """Σ p dp of each row: of o = w v without p, unless w is rounded or not all there is."""
        call = self.call
        if self.dweights is None and call.problem.storage is None:
            return (self.do * self.saved.out).sum(-1)
        delta = call.zeros(call.problem.T)
        for rows in call.plan.rows:
            q, do = call.scaled(rows), of(self.do, rows)
            for part in rows.parts:
                s, live, _ = call.scores(rows, part, q, slope=True)
                p = call.weights(rows, s, live, self.saved)
                dp = p * self._dp(rows, part, do)
                delta[rows.at] += (dp if live is None else torch.where(live, dp, 0)).sum(-1)
        return delta

    def _dp(self, rows: Rows, part: Part, do: Tensor) -> Tensor:
        """The gradient of the weights, before the softmax takes its mean off."""
        dp = _times(do, self.call.keys(self.call.v, rows, part).mT)
        keep = self.call.kept(rows, part)
        dp = dp if keep is None else dp * keep
        return dp if self.dweights is None else dp + piece(self.dweights, rows, part)

    def part(self, rows: Rows, part: Part, q: Tensor, do: Tensor) -> None:
        """Add what a tile gives."""
        call, stored = self.call, self.call.problem.round_to_storage
        s, live, slope = call.scores(rows, part, q, slope=True)
        p, keep = call.weights(rows, s, live, self.saved), call.kept(rows, part)
        w = stored(p if keep is None else p * keep)
        at = (*call.shared(rows), slice(part.s0, part.s1))
        self.dv.add(at, call.sum_shared(w, do, live))
        ds = p * (self._dp(rows, part, do) - of(self.delta, rows)[..., None])
        ds = ds if live is None else torch.where(live, ds, 0)
        for term in call.bias:
            term.add(rows, part, ds)
        dx = ds if slope is None else ds * slope
        dx = dx if slope is None or live is None else torch.where(live, dx, 0)
        dx = stored(dx)
        self.dk.add(at, call.sum_shared(dx, q, live))
        self.dq.add(rows.at, call.sum(dx, call.keys(call.k, rows, part), live))

    def result(self) -> Gradients:
        call, problem = self.call, self.call.problem
        check_slopes(call.differs)
        dsinks = None
        if call.sinks is not None:  # one more key, with dp = 0
            dsinks = (-call.sink_weights(self.saved) * self.delta).sum((0, 2))
        terms = tuple(term.gradient() for term in call.bias)
        alone = isinstance(problem.bias, Tensor) or not hasattr(problem.bias, "terms")
        grads: dict[str, Any] = {}
        dq, dk, dv = (total.value() for total in (self.dq, self.dk, self.dv))
        for name, total in (("q", call.scale * dq), ("k", dk), ("v", dv)):
            x: Any = call.unflat(total)
            x = x[0] if problem.headless else x
            grads[name] = sum_to(x, getattr(problem, name).shape)
        return Gradients(
            **grads,
            bias=None if not terms else terms[0] if alone else terms,
            sinks=dsinks,  # type: ignore[arg-type]
        )


class _Total:
    """A sum of pieces: of one piece that is all, that piece."""

    def __init__(self, like: Tensor, shape: tuple[int, ...]):
        self.like, self.shape = like, torch.Size(shape)
        self.x: Tensor | None = None

    def add(self, at: tuple[slice, ...], piece: Tensor) -> None:
        if self.x is None and piece.shape == self.shape:
            self.x = piece
        else:
            self.x = self.value()
            self.x[at] += piece

    def value(self) -> Tensor:
        return self.like.new_zeros(self.shape) if self.x is None else self.x


# --- forward mode ---------------------------------------------------------------------------------


class _Push:
    """A direction in, the change of a block's rows out."""

    def __init__(
        self,
        call: _Call,
        saved: Saved,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        dbias: Tensor | None,
    ):
        self.call, problem = call, call.problem
        self.dq = None if dq is None else call.flat(dq, problem.H)
        self.dk, self.dv = (None if x is None else call.flat(x, problem.K) for x in (dk, dv))
        self.dbias = None if dbias is None else flat(dbias, problem.lead)
        saved = call.saved(saved)
        self.saved = saved._replace(log=torch.where(saved.log == -INF, 0, saved.log))
        call.careful = not _all_finite(call.q, call.k, call.v, self.dq, self.dk, self.dv)

    def mean(self, rows: Rows) -> Tensor:
        """Σ p ds of each row: the change of lse."""
        mean = torch.zeros_like(self.saved.log[rows.at])
        for _, p, ds, live in self._tiles(rows):
            term = p * ds
            mean = mean + (term if live is None else torch.where(live, term, 0)).sum(-1)
        return mean

    def out(self, rows: Rows, mean: Tensor) -> Tensor:
        """Σ p (ds − mean) v + Σ p dv of each row."""
        call = self.call
        do = mean.new_zeros((*mean.shape, call.problem.E))
        for part, p, ds, live in self._tiles(rows):
            dp, keep = p * (ds - mean[..., None]), call.kept(rows, part)
            dp = dp if live is None else torch.where(live, dp, 0)
            dw, w = (dp, p) if keep is None else (dp * keep, p * keep)
            do = do + call.sum(dw, call.keys(call.v, rows, part), live)
            if self.dv is not None:
                do = do + call.sum(w, call.keys(self.dv, rows, part), live)
        return do

    def _tiles(self, rows: Rows) -> Iterator[tuple[Part, Tensor, Tensor, Tensor | None]]:
        """The weights of each tile, the change of its scores, and what is live."""
        call, q = self.call, self.call.scaled(rows)
        for part in rows.parts:
            s, live, slope = call.scores(rows, part, q, slope=True)
            ds = torch.zeros_like(s)
            if self.dq is not None:
                dq = call.scale * self.dq[rows.at]
                ds = ds + _times(dq, call.keys(call.k, rows, part).mT)
            if self.dk is not None:
                ds = ds + _times(q, call.keys(self.dk, rows, part).mT)
            ds = ds if slope is None else ds * slope
            ds = ds if self.dbias is None else ds + piece(self.dbias, rows, part)
            yield part, call.weights(rows, s, live, self.saved), ds, live
