"""Distributions of q, k, v, by name.

Each is a function of a generator and of the structure of a problem, and makes some mistake visible
that others hide: sums of thousands of equal weights, one score beyond all others, numbers at the
ends of the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from npattn.arrays import Array, finfo


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


SampleArrays = Callable[[np.random.Generator, Structure], tuple[Array, Array, Array]]

# --- q, k, v ---


def _normal(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    return recipe.normal(rng)


def _steep(logit: float) -> SampleArrays:
    def sample(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
        q, k, v = recipe.normal(rng)
        return q * recipe.steepness(logit), k, v

    return sample


def _low(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    """All scores far below zero, where a running maximum that starts finite is wrong."""
    q, k, v = recipe.normal(rng)
    sign = -1 if recipe.scale is None or recipe.scale >= 0 else 1
    return sign * (abs(q) + 1) * recipe.steepness(150), abs(k) + 0.5, v


def _offset(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    return q, k, v + 100


def _flat(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    return 0 * q, k, v


def _integers(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    return np.round(q), np.round(k), np.round(2 * v)


def _outliers(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    if recipe.D and recipe.E:
        k[..., 0] *= 8
        v[..., -1] *= 64
    return q, k, v


def _duplicates(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    return q, np.repeat(k[..., ::2, :], 2, axis=-2)[..., : recipe.S, :], v


def _tiny(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    return q, k, v * 2.0**-10


def _faint(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    """Scores of about 1/128: rows that are nearly uniform."""
    q, k, v = recipe.normal(rng)
    return q * recipe.steepness(2.0**-7), k, v


def _heavy(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    """Student's t with 2 degrees of freedom, without variance: one entry may dominate a sum."""
    q, k, v = recipe.arrays(lambda shape: rng.standard_t(2, shape))
    top = float(finfo(recipe.dtype).max)
    # D products stay within the dtype before they are scaled, and so do gradients.
    most, most_v = min(1e4, math.sqrt(top / 8 / max(recipe.D, 1))), min(1e4, top / 256)
    return np.clip(q, -most, most), np.clip(k, -most, most), np.clip(v, -most_v, most_v)


def _subnormal(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    """k, v, or both below the least normal number of the dtype."""
    q, k, v = recipe.normal(rng)
    least, which = float(finfo(recipe.dtype).tiny) / 8, rng.integers(3)
    return q, k if which == 1 else k * least, v if which == 2 else v * least


def _key_offset(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    """A common offset of all keys, which the softmax must cancel: 1e3, or less in low precision."""
    q, k, v = recipe.normal(rng)
    return q, k + min(1e3, 1 / 8 / float(finfo(recipe.dtype).eps)), v


def _mixed_scales(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    """Rows of q and of v of very different size."""
    q, k, v = recipe.normal(rng)
    scores = recipe.steepness(256) * 2.0 ** rng.uniform(-16, 0, (*q.shape[:-1], 1))
    return q * scores, k, v * 2.0 ** rng.uniform(-6, 6, (*v.shape[:-1], 1))


def _near_ties(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    """Keys that differ by a few units in the last place."""
    q, k, v = recipe.normal(rng)
    steps = rng.integers(-2, 3, (*k.shape[:-1], 1)) * float(finfo(recipe.dtype).eps)
    return 4 * q, k[..., :1, :] * (1 + steps), v


def _far_keys(logit: Callable[[int], float]) -> SampleArrays:
    """Normal scores, but one key at `logit(S)` and one at −`logit(S)`, in some rows swapped."""

    def sample(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
        q, k, v = recipe.normal(rng)
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
    "normal": _normal,
    "large logits": _steep(20),
    "one-hot": _steep(300),
    "huge logits": _steep(1e4),
    "low": _low,
    "value offset": _offset,
    "flat": _flat,
    "integers": _integers,
    "outliers": _outliers,
    "duplicate keys": _duplicates,
    "tiny values": _tiny,
    "near-uniform": _faint,
    "heavy tails": _heavy,
    "subnormal": _subnormal,
    "key offset": _key_offset,
    "mixed scales": _mixed_scales,
    "near ties": _near_ties,
    "nearly one-hot": _far_keys(lambda S: math.log(1e6 * S)),
    "saturated": _far_keys(lambda S: 1e4),
}
"""Distributions of q, k, v, by name."""

# --- contents by which an input may be recognised ---


def _small(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    return q * 2.0**-6, k * 2.0**-6, v * 2.0**-6


def _positive(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    return abs(q), abs(k), abs(v)


def _sparse(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    """Zeros in half of the places, as a rectifier leaves them."""
    q, k, v = recipe.normal(rng)
    return np.maximum(q, 0), np.maximum(k, 0), np.maximum(v, 0)


def _large_values(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    size = min(2.0**8, float(finfo(recipe.dtype).max) / 64)
    return q, k, size * (v + np.sign(v))


def _equal_queries(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    return np.repeat(q[..., :1, :], recipe.T, axis=-2), k, v


def _unit_rows(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    """Rows of q and k of norm 1, as models that normalise both have them."""
    q, k, v = recipe.normal(rng)
    q, k = (x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30) for x in (q, k))
    return q, k, v


def _one_hot_rows(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    q, k, v = recipe.normal(rng)
    q, k = ((x == x.max(-1, keepdims=True, initial=-np.inf)).astype(float) for x in (q, k))
    return q, k, v


def _zero_keys(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    """The last keys and values are 0, as padding is, and nothing hides them."""
    q, k, v = recipe.normal(rng)
    k[..., 2 * recipe.S // 3 :, :] = v[..., 2 * recipe.S // 3 :, :] = 0
    return q, k, v


def _self_attention(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    """q, k and v have the same contents, where they have the same shape."""
    q, k, v = recipe.normal(rng)
    return q, q.copy() if q.shape == k.shape else k, q.copy() if q.shape == v.shape else v


def _half_precision(rng: np.random.Generator, recipe: Structure) -> tuple[Array, Array, Array]:
    """Numbers that float16 has, as weights and activations that were stored in it."""
    q, k, v = recipe.normal(rng)
    return q.astype(np.float16), k.astype(np.float16), v.astype(np.float16)


UNUSUAL: dict[str, SampleArrays] = {
    "small": _small,
    "positive": _positive,
    "sparse": _sparse,
    "large values": _large_values,
    "equal queries": _equal_queries,
    "unit rows": _unit_rows,
    "one-hot rows": _one_hot_rows,
    "zero keys": _zero_keys,
    "self-attention": _self_attention,
    "half-precision numbers": _half_precision,
}
"""Distributions by which an implementation could choose what to compute; one rule has them."""
