"""Bounds: the matrix products of the tiled engine alone, with its shapes, on its threads.

Only tiles with a visible element are computed. `products` is the ceiling of any engine with such
tiles; `products_and_exp` adds the exponential of each score, which NumPy computes in a pass of its
own: the floor of any such engine in NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.speed.cases import Task
from benchmarks.speed.contestants import Calls
from npattn.engines import threads as pool
from npattn.engines import tiled
from npattn.engines.tiled.operations import Call, WorkSpace
from npattn.problem.arrays import Array


def products(task: Task, threads: int) -> Calls:
    return _calls(task, exp=False)


def products_and_exp(task: Task, threads: int) -> Calls:
    return _calls(task, exp=True)


def _calls(task: Task, exp: bool) -> Calls:
    call = Call(task.problem())
    tiles = tiled.visible_tiles(call.problem)
    q = task.q[0] * np.asarray(task.scale, task.q.dtype)
    k, v, do = task.k[0], task.v[0], task.dout[0]
    # The backward pass has Σ do·out as one more column of do and v.
    v1, do1 = _with_column(v), _with_column(do)

    def forward() -> None:
        def work(block: Any, space: _Buffers) -> None:
            for head, kv, t0, t1, s0, s1 in block:
                s = np.matmul(q[head, t0:t1], k[kv, s0:s1].T, out=space.scores(t1 - t0, s1 - s0))
                if exp:
                    call.exp(s, out=s)
                np.matmul(s, v[kv, s0:s1], out=space.queries(t1 - t0))

        pool.each(tiles, lambda: _Buffers(call), work)

    def backward() -> None:
        def work(block: Any, space: _Buffers) -> None:
            for head, kv, t0, t1, s0, s1 in block:
                n, m = t1 - t0, s1 - s0
                p = np.matmul(q[head, t0:t1], k[kv, s0:s1].T, out=space.scores(n, m))
                if exp:
                    call.exp(p, out=p)
                np.matmul(p.T, do[head, t0:t1], out=space.keys(m))
                ds = np.matmul(do1[head, t0:t1], v1[kv, s0:s1].T, out=space.more_scores(n, m))
                np.matmul(ds.T, q[head, t0:t1], out=space.keys(m))
                np.matmul(ds, k[kv, s0:s1], out=space.queries(n))

        pool.each(tiles, lambda: _Buffers(call), work)

    def both() -> None:
        forward()
        backward()

    return Calls(forward, both, None, task.bytes)


class _Buffers:
    """Memory that one thread computes in."""

    def __init__(self, call: Call) -> None:
        self.space, self.D = WorkSpace(call), call.problem.D

    def scores(self, n: int, m: int) -> Array:
        return self.space("s", n, m)

    def more_scores(self, n: int, m: int) -> Array:
        return self.space("ds", n, m)

    def queries(self, n: int) -> Array:
        return self.space("t", n, self.D)

    def keys(self, m: int) -> Array:
        return self.space("k", m, self.D)


def _with_column(x: Array) -> Array:
    return np.concatenate([x, np.ones_like(x[..., :1])], -1)
