"""Distributions of q, k, v, masks, biases and score modifications, by name.

Each is a function of a generator and of the structure of a problem. Each makes some mistake visible
that others hide: sums of thousands of equal weights, one score beyond all others, a row or a tile
that is hidden, numbers at the ends of the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from npattn.arrays import Array, finfo

__all__ = ["BIASES", "DISTRIBUTIONS", "MASKS", "SCORE_MODS"]


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
SampleArray = Callable[[np.random.Generator, Structure], Array]

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

# --- masks and biases: (rng, recipe) → array ---


def _tail(recipe: Structure, rank: int) -> tuple[int, ...]:
    return recipe.whole[-rank:]


def _random(rank: int) -> SampleArray:
    def sample(rng: np.random.Generator, recipe: Structure) -> Array:
        return rng.random(_tail(recipe, rank)) < 0.7

    return sample


def _padding(rng: np.random.Generator, recipe: Structure) -> Array:
    """Padding mask (B, 1, 1, S): one length per sample, at least one key."""
    lead = recipe.lead or ()
    heads = (1,) if recipe.lead is not None else ()
    lengths = rng.integers(1, max(recipe.S, 1) + 1, size=(*lead, *heads, 1, 1))
    return np.arange(recipe.S) < lengths


def _left_padding(rng: np.random.Generator, recipe: Structure) -> Array:
    return np.ascontiguousarray(_padding(rng, recipe)[..., ::-1])


def _empty_rows(rng: np.random.Generator, recipe: Structure) -> Array:
    """Every third query is fully masked."""
    mask = rng.random(recipe.whole) < 0.7
    mask[..., rng.integers(0, max(recipe.T, 1)) :: 3, :] = False
    return mask


def _empty_head(rng: np.random.Generator, recipe: Structure) -> Array:
    """Every query of one sample and head is fully masked."""
    mask = rng.random(recipe.whole) < 0.7
    if mask.size:
        mask[(0,) * (mask.ndim - 2)] = False
    return mask


def _first_tile(rng: np.random.Generator, recipe: Structure) -> Array:
    """The first half of the keys is hidden: whole tiles of an online softmax are empty."""
    mask = rng.random(recipe.whole) < 0.8
    mask[..., : recipe.S // 2] = False
    return mask


def _positions(recipe: Structure) -> tuple[Array, Array]:
    """Return the diagonal key of each query, (T, 1), and the keys, (S,)."""
    return np.arange(recipe.T)[:, None] + recipe.S - recipe.T, np.arange(recipe.S)


def _prefix(rng: np.random.Generator, recipe: Structure) -> Array:
    """A visible prefix, of a length per sample, and causal beyond it."""
    at, keys = _positions(recipe)
    return np.asarray(_padding(rng, recipe) | (keys <= at))


def _documents(rng: np.random.Generator, recipe: Structure) -> Array:
    """Several documents packed into one row, each of which sees only itself."""
    lead = (*recipe.lead, 1) if recipe.lead is not None else ()
    T, S = recipe.T, recipe.S
    document = np.cumsum(rng.random((*lead, max(T, S))) < 0.3, axis=-1)
    own, keys = (document[..., document.shape[-1] - n :] for n in (T, S))
    return np.asarray(own[..., :, None] == keys[..., None, :])


def _checkerboard(rng: np.random.Generator, recipe: Structure) -> Array:
    at, keys = _positions(recipe)
    return np.asarray((at + keys) % 2 == 0)


def _single_key(rng: np.random.Generator, recipe: Structure) -> Array:
    """One visible key per query."""
    one = rng.integers(0, max(recipe.S, 1), (*recipe.whole[:-1], 1))
    return np.asarray(np.arange(recipe.S) == one)


MASKS: dict[str, SampleArray] = {
    "matrix": _random(2),
    "full": _random(5),
    "heads": _random(3),
    "padding": _padding,
    "left padding": _left_padding,
    "empty rows": _empty_rows,
    "empty head": _empty_head,
    "first tile": _first_tile,
    "prefix": _prefix,
    "documents": _documents,
    "checkerboard": _checkerboard,
    "single key": _single_key,
}
"""Boolean masks, by name (True = may attend)."""


def _normal_bias(rank: int, *singletons: int) -> SampleArray:
    def sample(rng: np.random.Generator, recipe: Structure) -> Array:
        shape = list(_tail(recipe, rank))
        for axis in singletons:
            if len(shape) >= -axis:
                shape[axis] = 1
        return 2 * rng.standard_normal(shape)

    return sample


def _alibi(rng: np.random.Generator, recipe: Structure) -> Array:
    t, s = np.ogrid[: recipe.T, : recipe.S]
    distance = -abs(t + recipe.S - recipe.T - s).astype(float)
    if recipe.lead is None:
        return distance / 2
    slopes = 2.0 ** (-8 * np.arange(1, recipe.H + 1) / max(recipe.H, 1))
    return np.asarray(slopes[:, None, None] * distance)


def _relative(rng: np.random.Generator, recipe: Structure) -> Array:
    """One number per head and bucket of distances, which widen with the distance, as in T5."""
    at, keys = _positions(recipe)
    ahead = keys - at
    bucket = np.log2(1 + abs(ahead)).astype(int) + 16 * (ahead > 0)
    heads = () if recipe.lead is None else (recipe.H,)
    return np.asarray(2 * rng.standard_normal((*heads, 32))[..., bucket])


def _additive(hidden: float) -> SampleArray:
    """An additive padding mask: 0, and `hidden` at hidden keys; at least one key is visible."""

    def sample(rng: np.random.Generator, recipe: Structure) -> Array:
        return np.where(_padding(rng, recipe), 0, _limit(hidden, recipe))

    return sample


def _low_rows(offset: float) -> SampleArray:
    """A normal bias with an offset on about every second row."""

    def sample(rng: np.random.Generator, recipe: Structure) -> Array:
        low = rng.random((*recipe.whole[:-1], 1)) < 0.5
        return 2 * rng.standard_normal(recipe.whole) + np.where(low, _limit(offset, recipe), 0)

    return sample


def _limit(offset: float, recipe: Structure) -> float:
    """Limit a finite offset to half of the lowest number of the dtype."""
    return offset if offset == -np.inf else max(offset, float(finfo(recipe.dtype).min) / 2)


BIASES: dict[str, SampleArray] = {
    "matrix": _normal_bias(2),
    "full": _normal_bias(5),
    "heads": _normal_bias(3),
    "keys": _normal_bias(5, -2),
    "one for all heads": _normal_bias(5, -3),
    "one for all samples": _normal_bias(5, -4),
    "one a row": _normal_bias(5, -1),
    "keys of samples": _normal_bias(5, -2, -3),
    "one a head": _normal_bias(3, -1, -2),
    "one number": _normal_bias(2, -1, -2),
    "alibi": _alibi,
    "relative": _relative,
    "-inf padding": _additive(-np.inf),
    "-1e4 padding": _additive(-1e4),
    "large negative padding": _additive(-1e9),
    "least padding": _additive(-np.finfo(float).max),
    "-1e4 rows": _low_rows(-1e4),
    "-1e9 rows": _low_rows(-1e9),
    "least rows": _low_rows(-np.finfo(float).max),
}
"""Biases, by name."""


def _distance_mod(s: Any, b: Any, h: Any, t: Any, s_index: Any) -> Any:
    return s - 0.125 * (h + 1) * (t - s_index)


def _squash_mod(s: Any, b: Any, h: Any, t: Any, s_index: Any) -> Any:
    return s / (1 + 0.0625 * s * s)


SCORE_MODS: dict[str, Callable[..., Any]] = {"distance": _distance_mod, "squash": _squash_mod}
"""Score modifications, by name: plain arithmetic, which takes tensors of any framework."""
