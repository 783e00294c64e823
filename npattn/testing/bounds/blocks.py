"""Rectangles of an attention problem of any length, each a small `Problem` of its own.

No array of the size of the scores is made, and none is copied whole: visibility follows from
indices, and arrays, memory-mapped ones too, are read where a rectangle needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from npattn.conventions import Conventions
from npattn.problem import Problem
from npattn.problem.arrays import Array, Tile, band, diagonal, plane_of
from npattn.problem.options import ScoreMod, Window


class Block(NamedTuple):
    """Some queries and some keys of one key/value head, as one head of rank 2."""

    original: Problem  # under the conventions of single scores
    canonical: Problem


@dataclass(frozen=True, eq=False)
class ProblemInBlocks:
    """A problem whose arrays stay where they are, under conventions."""

    problem: Problem
    conventions: Conventions

    @cached_property
    def attends_hidden(self) -> bool:
        """True if hidden keys take part in the softmax."""
        return self.fills_hidden or (self.conventions.hidden_add is not None and self._hides)

    @cached_property
    def _hides(self) -> bool:
        problem = self.problem
        return problem.mask is not None or problem.window is not None or bool(problem.causal)

    @cached_property
    def fills_hidden(self) -> bool:
        """True if hidden keys take part with a number as their score."""
        if not self._hides or self.conventions.hidden_add is not None:
            return False
        after = self.problem.softcap is not None and self.conventions.softcap == "after_mask"
        return self.conventions.hidden_fill is not None or after

    @cached_property
    def block_conventions(self) -> Conventions:
        """The conventions of a block, whose mask, window and heads are canonical already."""
        c = self.conventions
        kept = ("hidden_fill", "hidden_add", "softcap", "bias", "dropout_at_rate_0")
        return Conventions(**{name: getattr(c, name) for name in kept})

    @cached_property
    def window(self) -> Window | None:
        one = np.zeros((1, 1))
        only = Conventions(window=self.conventions.window)
        return only.canonical(Problem(one, one, one, window=self.problem.window)).window

    @property
    def keys(self) -> int:
        """Number of keys that a row sums over; where hidden ones take part, each has a twin."""
        return self.problem.S * (2 if self.fills_hidden else 1)

    @property
    def group(self) -> int:
        """Number of query heads that share a key/value head."""
        return self.problem.H // max(self.problem.K, 1)

    def kv_head(self, h: int) -> int:
        return h % self.problem.K if self.conventions.kv_head == "tile" else h // self.group

    def heads(self, kv_head: int) -> list[int]:
        """Return the query heads that share a key/value head."""
        return [h for h in range(self.problem.H) if self.kv_head(h) == kv_head]

    def plane(self, x: Array, lead: tuple[int, ...]) -> Array:
        """Return q, k or v, (heads, length, size), at an index into the leading axes."""
        x = x[None] if self.problem.headless else x
        return plane_of(x, lead, rank=3)

    def block(
        self, lead: tuple[int, ...], h: Array, t: Array, s: slice | Array, *, always: bool = False
    ) -> Block | None:
        """Return queries t of heads h, which share keys, with keys s; None if all are hidden.

        h and t are (n,), s is a slice or (m,).
        """
        problem = self.problem
        keys = np.arange(s.start, s.stop) if isinstance(s, slice) else s
        visible = self._visible(lead, h, t, s, keys)
        hidden = visible is not None and not visible.any()
        if hidden and not self.attends_hidden and not always:
            return None
        if visible is None and self.attends_hidden:
            visible = np.ones((len(t), len(keys)), bool)
        keep = problem.dropout_mask
        kv = self.kv_head(int(h[0])) if len(h) else 0
        original = Problem(
            self.plane(problem.q, lead)[h, t],
            self.plane(problem.k, lead)[kv][s],
            self.plane(problem.v, lead)[kv][s],
            visible,
            bias=None if problem.bias is None else self._option(problem.bias, lead, h, t, s, keys),
            scale=problem.scale,
            softcap=problem.softcap,
            score_mod=None
            if problem.score_mod is None
            else self._shift_score_mod(lead, h, t, keys),
            dropout_mask=None if keep is None else self._option(keep, lead, h, t, s, keys),
            dropout_rate=problem.dropout_rate,
        )
        return Block(original, self.block_conventions.canonical(original))

    def _visible(
        self, lead: tuple[int, ...], h: Array, t: Array, s: slice | Array, keys: Array
    ) -> Array | None:
        """Visible keys by mask, causal and window, (queries, keys); None if all are visible."""
        problem, visible = self.problem, None
        if problem.mask is not None:
            visible = self._option(problem.mask, lead, h, t, s, keys)
            visible = ~visible if self.conventions.mask_true == "hide" else visible
        left_keys, right_keys = self.window or (None, None)
        if problem.causal:
            right_keys = 0 if right_keys is None else min(right_keys, 0)
        if left_keys is not None or right_keys is not None:
            aligned = t[:, None] + diagonal(problem.T, problem.S, problem.alignment)
            inside = band(aligned, keys, left_keys, right_keys)
            visible = inside if visible is None else visible & inside
        if visible is None or visible.all():
            return None
        return np.asarray(np.broadcast_to(visible, (len(t), len(keys))))

    def _option(
        self, option: Any, lead: tuple[int, ...], h: Array, t: Array, s: slice | Array, keys: Array
    ) -> Array:
        """Return a mask, bias or dropout mask at these queries and keys, (queries, keys or 1)."""
        if not isinstance(option, np.ndarray):
            at = zip(h.tolist(), t.tolist(), strict=True)
            rows = [self._rule_row(option, (*lead, i), j, s) for i, j in at]
            return np.array(rows).reshape(len(t), len(keys))
        planes = [*(np.full_like(h, i) for i in lead), h, t]
        axes = planes[len(planes) - (option.ndim - 1) :]
        index = [i if n > 1 else 0 * i for i, n in zip(axes, option.shape, strict=False)]
        if option.shape[-1] == 1:
            return np.asarray(option[(*index, slice(None))])
        if isinstance(s, slice):
            return np.asarray(option[(*index, s)])
        return np.asarray(option[(*(i[:, None] for i in index), keys)])

    def _rule_row(self, rule: Any, plane: tuple[int, ...], t: int, s: slice | Array) -> Array:
        """Evaluate a mask or bias object for one query, (keys)."""
        problem = self.problem
        s0, s1 = (s.start, s.stop) if isinstance(s, slice) else (int(s.min()), int(s.max()) + 1)
        values = rule.tile(
            Tile(problem.lead, problem.H, problem.T, problem.S, plane, t, t + 1, s0, s1)
        )
        row = np.broadcast_to(np.asarray(values), (1, s1 - s0))[0]
        return np.asarray(row if isinstance(s, slice) else row[s - s0])

    def _shift_score_mod(self, lead: tuple[int, ...], h: Array, t: Array, keys: Array) -> ScoreMod:
        """Return score_mod with the indices of the whole problem: h and t are (n,), keys (m,)."""
        problem = self.problem
        b = int(np.ravel_multi_index(lead, problem.lead)) if lead else 0

        def modify(x: Array, _: Array, __: Array, query: Array, key: Array) -> Array:
            assert problem.score_mod is not None
            heads, queries = h[query], t[query]
            return np.asarray(
                problem.score_mod(x, np.full_like(heads, b), heads, queries, keys[key])
            )

        return modify
