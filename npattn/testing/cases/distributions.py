"""Distributions of q, k, v, by name.

Each is a function of a generator and of the structure of a problem, and makes some mistake visible
that others hide: sums of thousands of equal weights, one score beyond all others, numbers at the
ends of the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from npattn.problem.arrays import Array, finfo


class Structure(Protocol):
    """Sizes and dtype of a problem; a `Recipe` is one."""

    @property
    def lead(self) -> tuple[int, ...] | None: ...
    @property
    def H(self) -> int: ...
    @property
    def T(self) -> int: ...
    @property
    def S(self) -> int: ...
    @property
    def D(self) -> int: ...
    @property
    def E(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def scale(self) -> float | None: ...
    @property
    def whole(self) -> tuple[int, ...]: ...

    def arrays(self, sample: Callable[[tuple[int, ...]], Array]) -> tuple[Array, Array, Array]: ...
    def normal(self, rng: np.random.Generator) -> tuple[Array, Array, Array]: ...
    def steepness(self, logit: float) -> float: ...


QKV = tuple[Array, Array, Array]
SampleArrays = Callable[[np.random.Generator, Structure], QKV]


def _derive(change: Callable[..., QKV]) -> SampleArrays:
    """Change standard normal q, k, v by a function of these, the generator and the structure."""
    return lambda rng, recipe: change(*recipe.normal(rng), rng, recipe)


def _each(change: Callable[[Array], Array], names: str = "qkv") -> SampleArrays:
    """Change these of standard normal q, k, v, each by itself."""

    def sample(rng: np.random.Generator, recipe: Structure) -> QKV:
        arrays = zip("qkv", recipe.normal(rng), strict=True)
        q, k, v = (change(x) if name in names else x for name, x in arrays)
        return q, k, v

    return sample


def _steep(logit: float) -> SampleArrays:
    return _derive(lambda q, k, v, _, recipe: (q * recipe.steepness(logit), k, v))


@_derive
def _low(q: Array, k: Array, v: Array, _: Any, recipe: Structure) -> QKV:
    """All scores far below zero, where a running maximum that starts finite is wrong."""
    sign = -1 if recipe.scale is None or recipe.scale >= 0 else 1
    return sign * (abs(q) + 1) * recipe.steepness(150), abs(k) + 0.5, v


@_derive
def _outliers(q: Array, k: Array, v: Array, _: Any, recipe: Structure) -> QKV:
    if recipe.D and recipe.E:
        k[..., 0] *= 8
        v[..., -1] *= 64
    return q, k, v


def _heavy(rng: np.random.Generator, recipe: Structure) -> QKV:
    """Student's t with 2 degrees of freedom, without variance: one entry may dominate a sum."""
    q, k, v = recipe.arrays(lambda shape: rng.standard_t(2, shape))
    top = float(finfo(recipe.dtype).max)
    # D products stay within the dtype before they are scaled, and so do gradients.
    most, most_v = min(1e4, math.sqrt(top / 8 / max(recipe.D, 1))), min(1e4, top / 256)
    return np.clip(q, -most, most), np.clip(k, -most, most), np.clip(v, -most_v, most_v)


@_derive
def _subnormal(q: Array, k: Array, v: Array, rng: Any, recipe: Structure) -> QKV:
    """k, v, or both below the least normal number of the dtype."""
    least, which = float(finfo(recipe.dtype).tiny) / 8, rng.integers(3)
    return q, k if which == 1 else k * least, v if which == 2 else v * least


@_derive
def _mixed_scales(q: Array, k: Array, v: Array, rng: Any, recipe: Structure) -> QKV:
    """Rows of q and of v of very different size."""
    scores = recipe.steepness(256) * 2.0 ** rng.uniform(-16, 0, (*q.shape[:-1], 1))
    return q * scores, k, v * 2.0 ** rng.uniform(-6, 6, (*v.shape[:-1], 1))


@_derive
def _near_ties(q: Array, k: Array, v: Array, rng: Any, recipe: Structure) -> QKV:
    """Keys that differ by a few units in the last place."""
    steps = rng.integers(-2, 3, (*k.shape[:-1], 1)) * float(finfo(recipe.dtype).eps)
    return 4 * q, k[..., :1, :] * (1 + steps), v


def _far_keys(logit: Callable[[int], float]) -> SampleArrays:
    """Normal scores, but one key at `logit(S)` and one at −`logit(S)`, in some rows swapped."""

    @_derive
    def sample(q: Array, k: Array, v: Array, rng: Any, recipe: Structure) -> QKV:
        if recipe.D and recipe.S:
            far = math.sqrt(recipe.steepness(logit(recipe.S)) * math.sqrt(recipe.D))
            near, opposite = rng.permutation(recipe.S)[[0, -1]]
            q[..., 0] = far * rng.choice([1, -1], q.shape[:-1])
            k[..., 0] = 0
            k[..., opposite, 0] = -far
            k[..., near, 0] = far
        return q, k, v

    return sample


DISTRIBUTIONS: dict[str, SampleArrays] = {
    "normal": lambda rng, recipe: recipe.normal(rng),
    "large logits": _steep(20),
    "one-hot": _steep(300),
    "huge logits": _steep(1e4),
    "low": _low,
    "value offset": _each(lambda v: v + 100, "v"),
    "flat": _each(lambda q: 0 * q, "q"),
    "integers": _derive(lambda q, k, v, *_: (np.round(q), np.round(k), np.round(2 * v))),
    "outliers": _outliers,
    "duplicate keys": _derive(
        lambda q, k, v, _, r: (q, np.repeat(k[..., ::2, :], 2, axis=-2)[..., : r.S, :], v)
    ),
    "tiny values": _each(lambda v: v * 2.0**-10, "v"),
    "near-uniform": _steep(2.0**-7),  # scores of about 1/128
    "heavy tails": _heavy,
    "subnormal": _subnormal,
    # A common offset of all keys, which the softmax must cancel: 1e3, or less in low precision.
    "key offset": _derive(
        lambda q, k, v, _, r: (q, k + min(1e3, 1 / 8 / float(finfo(r.dtype).eps)), v)
    ),
    "mixed scales": _mixed_scales,
    "near ties": _near_ties,
    "nearly one-hot": _far_keys(lambda S: math.log(1e6 * S)),
    "saturated": _far_keys(lambda S: 1e4),
}
"""Distributions of q, k, v, by name."""

# --- contents by which an input may be recognised ---


@_derive
def _large_values(q: Array, k: Array, v: Array, _: Any, recipe: Structure) -> QKV:
    size = min(2.0**8, float(finfo(recipe.dtype).max) / 64)
    return q, k, size * (v + np.sign(v))


@_derive
def _zero_keys(q: Array, k: Array, v: Array, _: Any, recipe: Structure) -> QKV:
    """The last keys and values are 0, as padding is, and nothing hides them."""
    k[..., 2 * recipe.S // 3 :, :] = v[..., 2 * recipe.S // 3 :, :] = 0
    return q, k, v


@_derive
def _self_attention(q: Array, k: Array, v: Array, *_: Any) -> QKV:
    """q, k and v have the same contents, where they have the same shape."""
    return q, q.copy() if q.shape == k.shape else k, q.copy() if q.shape == v.shape else v


UNUSUAL: dict[str, SampleArrays] = {
    "small": _each(lambda x: x * 2.0**-6),
    "positive": _each(abs),
    "sparse": _each(lambda x: np.maximum(x, 0)),  # half are 0, as a rectifier leaves them
    "large values": _large_values,
    "equal queries": _derive(lambda q, k, v, _, r: (np.repeat(q[..., :1, :], r.T, axis=-2), k, v)),
    # As models that normalise q and k have them.
    "unit rows": _each(
        lambda x: x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30), "qk"
    ),
    "one-hot rows": _each(
        lambda x: (x == x.max(-1, keepdims=True, initial=-np.inf)).astype(float), "qk"
    ),
    "zero keys": _zero_keys,
    "self-attention": _self_attention,
    # As weights and activations that were stored in float16.
    "half-precision numbers": _each(lambda x: x.astype(np.float16)),
}
"""Distributions by which an implementation could choose what to compute; one rule has them."""
