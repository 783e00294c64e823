"""The engines as tests drive them, NumPy in and NumPy out, and problems for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import npattn.oracle.api
from npattn import biases, masks
from npattn.engines.tiled import tiling
from npattn.problem import Problem
from tests.make import normal

TILES = {"QUERIES": 7, "FEWEST": 4, "ROUND": 1, "KEYS": 11, "CELL": 5}
"""Tiles so small that small problems have many, with partial ones at the ends."""


@dataclass(frozen=True)
class Run:
    """A forward pass, and what it was computed with."""

    fwd: Any
    backend: Any

    def __getattr__(self, name: str) -> Any:  # out, lse, weights
        return self.backend.numpy(getattr(self.fwd, name))

    def backward(self, do, dlse=None, dweights=None):
        cotangents = (self.backend.array(x) for x in (do, dlse, dweights))
        return self.backend.gradients(self.backend.module.backward(self.fwd, *cotangents))

    def jvp(self, **along):
        along = {name: self.backend.array(x) for name, x in along.items()}
        return tuple(map(self.backend.numpy, self.backend.module.jvp(self.fwd, **along)))


class NumPy:
    """One of the engines of npattn."""

    module = npattn

    def __init__(self, engine):
        self.engine = engine

    def small(self, monkeypatch):
        for name, n in TILES.items():
            monkeypatch.setattr(tiling, name, n)

    def evaluate(self, problem, conventions=None):
        return Run(npattn.oracle.api.evaluate(problem, conventions, engine=self.engine), self)

    def array(self, x):
        return x

    numpy = array

    def gradients(self, grads):
        return grads


class Torch:
    """npattn.torch on a device."""

    def __init__(self, device):
        self.torch = pytest.importorskip("torch")
        if device == "cuda" and not self.torch.cuda.is_available():
            pytest.skip("there is no GPU here")
        if device == "elsewhere":
            pytest.importorskip("tests.elsewhere", exc_type=ImportError)
        import npattn.torch.api

        self.module, self.device = npattn.torch, device

    def small(self, monkeypatch):
        from npattn.torch import tiles

        monkeypatch.setattr(tiles, "TILE", {self.device: 7 * 11 * 2})
        monkeypatch.setattr(tiles, "QUERIES", 7)
        monkeypatch.setattr(tiles, "CELL", 5)

    def evaluate(self, problem, conventions=None):
        return Run(npattn.torch.api.evaluate(self.problem(problem), conventions), self)

    def problem(self, problem):
        """The same problem on tensors."""
        names = ("q", "k", "v", "mask", "bias", "sinks", "dropout_mask", "gate")
        words = {n: self.array(getattr(problem, n)) for n in names}
        kept = ("window", "softcap", "score_mod", "dropout_rate")
        words |= {n: getattr(problem, n) for n in kept}
        given = ("causal", "scale", "dtype", "alignment")
        return self.module.Problem(
            **words, **dict(zip(given, problem.__dict__["_given"], strict=True))
        )

    def array(self, x):
        if isinstance(x, tuple):
            return tuple(map(self.array, x))
        if not isinstance(x, np.ndarray):
            return x
        from npattn.torch.tensors import to_tensor

        return to_tensor(x, self.torch.device(self.device))

    def numpy(self, x):
        if isinstance(x, tuple):
            return tuple(map(self.numpy, x))
        return x.detach().cpu().numpy() if isinstance(x, self.torch.Tensor) else x

    def gradients(self, grads):
        names = ("q", "k", "v", "bias", "sinks", "gate")
        return replace(grads, **{n: self.numpy(getattr(grads, n)) for n in names})


BACKENDS = {
    "dense": lambda: NumPy("dense"),
    "tiled": lambda: NumPy("tiled"),
    "torch": lambda: Torch("cpu"),
    "torch elsewhere": lambda: Torch("elsewhere"),
    "torch on a GPU": lambda: Torch("cuda"),
}
MARKS = {"torch elsewhere": pytest.mark.nightly, "torch on a GPU": pytest.mark.gpu}
EACH = [pytest.param(n, marks=MARKS.get(n, ())) for n in BACKENDS]
TENSORS = [p for p in EACH if "torch" in p.values[0]]


# --- problems -------------------------------------------------------------------------------------

B, H, K, G, T, S, D, E = 2, 6, 3, 2, 23, 29, 5, 7


def rng(seed=0):
    return np.random.default_rng(seed)


def problem(seed=0, sizes=(T, S), **options):
    n, m = sizes
    q, k, v = normal(B, H, n, D, seed=seed), normal(B, K, m, D, seed=1), normal(B, K, m, E, seed=2)
    return Problem(q, k, v, **options)


def mod(s, b, h, t, j):
    """Modify scores that are arrays or tensors."""
    return s * 0.5 + 0.01 * (h - t + j + b) * s / (1 + s * s)


OPTIONS = {
    "plain": {},
    "mask of each sample": {"mask": rng().random((B, 1, T, S)) < 0.5},
    "mask of each head": {"mask": rng().random((H, T, S)) < 0.1},
    "causal": {"causal": "top_left"},
    "window": {"window": (3, 2)},
    "prefix": {"mask": masks.prefix(4, alignment="top_left")},
    "documents": {"mask": masks.documents(np.arange(T) // 8, np.arange(S) // 9)},
    "lengths": {"mask": masks.lengths([3, S], [0, T])},
    "blocks": {"mask": masks.blocks(rng().random((H, 5, 6)) < 0.4, 5)},
    "custom": {"mask": masks.custom(lambda b, h, t, s: (t + s + h) % 3 == b)},
    "two masks": {"mask": masks.window(2, 2) | masks.lengths(2), "causal": "bottom_right"},
    "none of a mask": {"mask": ~masks.window(4, 4)},
    "bias": {"bias": normal(H, T, S)},
    "bias of all heads": {"bias": normal(T, S)},
    "bias of keys": {"bias": normal(B, 1, 1, S)},
    "bias of queries": {"bias": normal(T, 1)},
    "bias of -inf": {"bias": np.where(rng().random((T, S)) < 0.9, -np.inf, 0.0)},
    "bias of -1e9": {"bias": np.where(rng().random((T, S)) < 0.5, -1e9, 0.0)},
    "offset": {"bias": np.full((1, 1), -1e4)},
    "alibi": {"bias": biases.alibi(H)},
    "T5": {"bias": biases.relative(normal(32, H))},
    "a sum of biases": {"bias": biases.alibi(H) + normal(T, S)},
    "sinks": {"sinks": 30 * normal(H), "window": (2, 2)},
    "dropout": {"dropout_mask": rng().random((B, H, T, S)) < 0.7, "dropout_rate": 0.3},
    "dropout of queries": {"dropout_mask": rng().random((T, 1)) < 0.7},
    "softcap": {"softcap": 2.0, "causal": "top_left"},
    "score_mod alone": {"score_mod": mod},
    "score_mod": {"score_mod": mod, "softcap": 2.0, "mask": masks.window(4, 4)},
    "huge scores": {"scale": 1e3},
    "huge scores, causal": {"scale": -1e4, "causal": "top_left"},
    "scale of 0": {"scale": 0.0},
}
POISON = {
    "sound": lambda q, k, v, do: None,
    "NaN value": lambda q, k, v, do: v.__setitem__((0, 0, 10), np.nan),
    "infinite key": lambda q, k, v, do: k.__setitem__((1, 1, 11, 3), -np.inf),
    "NaN query": lambda q, k, v, do: q.__setitem__((0, 1, 7), np.nan),
    "NaN cotangent": lambda q, k, v, do: do.__setitem__((0, 1, 9), np.nan),
}
