"""Operations on the tiles of one problem, shared by the forward, backward and tangent passes.

Numbers in brackets are the rules of docs/semantics.md.
"""

import math
from typing import Any, NamedTuple

import torch

from npattn.torch.bias_terms import bias_terms
from npattn.torch.problem import Problem
from npattn.torch.score_mod import call_score_mod
from npattn.torch.score_mod import slope as score_mod_slope
from npattn.torch.tiles import QueryRows, Strip, flatten, plan_of, tile_of

Tensor = torch.Tensor
INF = math.inf
# True inside a transform of torch.func, and where torch does not say.
transforms_active: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


class SavedTensors(NamedTuple):
    """Results that backward and jvp need, in the dtype computed in, with a head axis."""

    out: Tensor  # (..., H, T, E)
    log: Tensor  # (..., H, T) of the sum of exp(s − shift): lse = shift + log
    # (..., H, T) subtracted before exp, None for nothing. Kept apart, because lse alone, where it
    # is large, has too few digits left for log.
    shift: Tensor | None

    @property
    def lse(self) -> Tensor:
        return self.log if self.shift is None else self.shift + self.log


class TileOps:
    """Operands in the dtype computed in, with one axis for all samples, and the tiling plan."""

    def __init__(self, problem: Problem, one_tile: bool):
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
        self.plan = plan_of(problem, one_tile)
        self.bias = bias_terms(problem, problem.bias)
        self.keep: Tensor | None = None
        if problem.dropout_mask is not None:
            self.keep = flatten(problem.dropout_mask, problem.lead)
        self.sinks: Tensor | None = None
        if problem.sinks is not None:
            self.sinks = problem.to_compute_dtype(problem.sinks)[:, None]  # (H, 1)
        # Where something is not finite, each product needs the live scores: 0 · NaN is NaN.  [10]
        self.careful = False
        self.differs: list[Tensor] = []  # per tile: score_mod's slope contradicts its values
        self.overwrites = problem.score_mod is None and not transforms_active()

    def operand(self, x: Tensor, heads: int) -> Tensor:
        """Return an input in the dtype computed in, (B, heads, n, size)."""
        x = self.problem.to_operand(x)
        return x if self.problem.straight else self.flat(x, heads)

    def flat(self, x: Tensor, heads: int) -> Tensor:
        """Merge the leading axes: (..., heads, n, size) → (B, heads, n, size)."""
        lead = self.problem.lead
        x = x[None] if x.ndim == 2 else x
        x = x.expand(*lead, heads, *x.shape[-2:])
        return x.reshape(math.prod(lead), heads, *x.shape[-2:])

    def unflat(self, x: Tensor) -> Tensor:
        """Restore the leading axes: (B, ...) → (..., ...)."""
        lead = self.problem.lead
        return x if len(lead) == 1 else x.reshape(*lead, *x.shape[1:])

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros of a shape for each sample and query head."""
        return self.q.new_zeros((self.plan.samples, self.problem.H, *shape))

    def flat_saved(self, saved: SavedTensors) -> SavedTensors:
        """Merge the leading axes of saved results."""
        n, rank = self.plan.samples, len(self.problem.lead)
        if rank == 1:
            return saved
        return SavedTensors(*(None if x is None else x.reshape(n, *x.shape[rank:]) for x in saved))  # type: ignore

    def key_planes(self, rows: QueryRows) -> tuple[slice, slice]:
        """Samples and key/value heads of a group [1]."""
        group, G = rows.group, self.problem.H // self.problem.K
        return slice(group.b0, group.b1), slice(group.h0 // G, (group.h1 - 1) // G + 1)

    def keys(self, x: Tensor, rows: QueryRows, strip: Strip) -> Tensor:
        """Keys or values of a tile: (B', K', n, size)."""
        if rows.every and strip.s1 - strip.s0 == self.problem.S:
            return x
        return x[(*self.key_planes(rows), slice(strip.s0, strip.s1))]

    def scale_queries(self, rows: QueryRows) -> Tensor:
        """Return scale · q of a block of queries: (B', H', m, D)."""
        return rows_of(self.q, rows) * self.scale

    def scores(
        self, rows: QueryRows, strip: Strip, q: Tensor, slope: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return a tile's final scores, which of them are live (None: all), and their slope."""
        problem, rate = self.problem, None
        s = matmul_shared(q, self.keys(self.k, rows, strip).mT)  # [1]
        if problem.softcap is not None:
            tanh = torch.tanh(s / problem.softcap)
            rate = 1 - tanh**2 if slope else None
            s = problem.softcap * tanh  # [2]
        if problem.score_mod is not None:
            at = self.indices(rows, strip)
            if slope:
                rate_here, differs = score_mod_slope(problem, s, at)
                self.differs.append(differs)
                rate = rate_here if rate is None else rate * rate_here
            s = call_score_mod(problem, s, at)  # [3]
        for term in self.bias:
            s = s + term.tile(rows, strip)  # [4]
        if strip.partial:
            s = torch.where(self.plan.visible(rows, strip), s, -INF)  # [5-7]
        # A weight of 0 suffices, unless it meets a factor that is not finite: in the forward pass
        # an input; in a backward pass something computed, from finite cotangents too.
        needed = slope and (strip.partial or self.bias or problem.score_mod is not None)
        return s, (s != -INF if needed or self.careful else None), rate

    def indices(self, rows: QueryRows, strip: Strip) -> Any:
        """Return b, h, t, s_index for score_mod, with four axes."""
        group, device = rows.group, self.q.device
        ends = ((group.b0, group.b1), (group.h0, group.h1), (rows.t0, rows.t1), strip[:2])
        return tuple(
            torch.arange(*pair, device=device).reshape((1,) * i + (-1,) + (1,) * (3 - i))
            for i, pair in enumerate(ends)
        )

    def dropout_factor(self, rows: QueryRows, strip: Strip) -> Tensor | None:
        """Return keep / (1 − rate) of a tile, None without dropout [9]."""
        if self.keep is None:
            return None
        keep: Tensor = self.problem.to_compute_dtype(tile_of(self.keep, rows, strip))
        return keep / (1 - self.problem.dropout_rate)

    def weights(
        self, rows: QueryRows, s: Tensor, live: Tensor | None, saved: SavedTensors
    ) -> Tensor:
        """Return exp(s − lse); in a row of NaN, hidden keys still have weight 0 [10]."""
        s = s if saved.shift is None else self.subtract(s, rows_of(saved.shift, rows))
        p = self.exp(self.subtract(s, rows_of(saved.log, rows)))
        return torch.where(live, p, 0) if self.careful and live is not None else p

    def may_overwrite(self, x: Tensor) -> bool:
        """Return True if a tile of scores, weights or their gradients may be changed in place."""
        # Autograd may need it later; score_mod may have returned a tensor of the user.
        return self.overwrites and not x.requires_grad

    def subtract(self, x: Tensor, each: Tensor) -> Tensor:
        """Return x minus one number per row, in place where x may be overwritten."""
        each = each[..., None]
        return x.sub_(each) if self.may_overwrite(x) and not each.requires_grad else x - each

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x · y, in place where x may be overwritten."""
        return x.mul_(y) if self.may_overwrite(x) and not y.requires_grad else x * y

    def exp(self, s: Tensor) -> Tensor:
        """Return exp(s), in place where s may be overwritten."""
        return s.exp_() if self.may_overwrite(s) else s.exp()

    def sink_weights(self, saved: SavedTensors) -> Tensor:
        """Return the weight of the sinks in each row."""
        assert self.sinks is not None
        return torch.exp(
            (self.sinks if saved.shift is None else self.sinks - saved.shift) - saved.log
        )

    def sum(self, w: Tensor, x: Tensor, live: Tensor | None) -> Tensor:
        """Return w @ x; if anything is not finite, only live entries of x count."""
        if not self.careful:
            return matmul_shared(w, x)
        assert live is not None
        finite = torch.isfinite(x)
        touched = matmul_shared(live.to(w.dtype), (~finite).to(w.dtype)) > 0
        rest = matmul_shared(w, torch.where(finite, x, 0))
        # Added, and not put in its place: the rest has a gradient of its own, if taken again.
        return rest + torch.zeros_like(rest).masked_fill(touched, math.nan)

    def sum_shared(self, w: Tensor, x: Tensor, live: Tensor | None) -> Tensor:
        """Return wᵀ @ x, summed over the query heads that share a head: (B', K', n, size)."""
        B, H, m, n = w.shape
        heads = 1 if H == 1 else H * self.problem.K // self.problem.H
        w, x = w.reshape(B, heads, -1, n), x.reshape(B, heads, H * m // heads, x.shape[-1])
        transposed = live.reshape(w.shape).mT if self.careful and live is not None else None
        return self.sum(w.mT, x, transposed)


def rows_of(x: Tensor, rows: QueryRows) -> Tensor:
    """Take the rows of a block from a tensor (B, H, T, ...) of all of them."""
    return x if rows.every else x[rows.at]


def matmul_shared(q: Tensor, k: Tensor) -> Tensor:
    """Return q @ k where several heads of q share one of k: (B, H, m, n) of (B, K, ·, n)."""
    if q.size(1) == k.size(1):
        return q @ k
    (B, H, m, D), heads = q.shape, k.shape[1]
    return (q.reshape(B, heads, H * m // heads, D) @ k).reshape(B, H, m, k.shape[-1])


def all_finite(*tensors: Tensor | None) -> bool:
    """Check that all tensors are finite, with one wait for the device."""
    sums = [x.detach().sum() for x in tensors if x is not None]
    # A sum may overflow where no element does: False only makes the caller more careful.
    return math.isfinite(float(torch.stack(sums).sum()))
