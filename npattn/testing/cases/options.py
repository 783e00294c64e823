"""Masks, biases, gates and score modifications, by name.

Each array is a function of a generator and of the structure of a problem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from npattn.problem.arrays import Array, finfo
from npattn.testing.cases.distributions import Structure

SampleArray = Callable[[np.random.Generator, Structure], Array]


def _random(rank: int) -> SampleArray:
    return lambda rng, recipe: rng.random(recipe.whole[-rank:]) < 0.7


def _padding(rng: np.random.Generator, recipe: Structure) -> Array:
    """Padding mask (B, 1, 1, S): one length per sample, at least one key."""
    lead = recipe.lead or ()
    heads = (1,) if recipe.lead is not None else ()
    lengths = rng.integers(1, max(recipe.S, 1) + 1, size=(*lead, *heads, 1, 1))
    return np.arange(recipe.S) < lengths


def _empty_padding(rng: np.random.Generator, recipe: Structure) -> Array:
    """Padding that leaves a sample no key."""
    mask = np.array(_padding(rng, recipe))
    mask[: 1 if recipe.lead else None] = False
    return mask


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
    of_queries, keys = (document[..., document.shape[-1] - n :] for n in (T, S))
    return np.asarray(of_queries[..., :, None] == keys[..., None, :])


def _single_key(rng: np.random.Generator, recipe: Structure) -> Array:
    """One visible key per query."""
    one = rng.integers(0, max(recipe.S, 1), (*recipe.whole[:-1], 1))
    return np.asarray(np.arange(recipe.S) == one)


# --- masks that look like another option, or like none ---


def _rank(rng: np.random.Generator, recipe: Structure) -> tuple[int, ...]:
    """Return the shape of a mask that is the same for all samples and heads, or that differs."""
    return recipe.whole[-2 if rng.integers(2) else -5 :]


def _causal_corners(rng: np.random.Generator, recipe: Structure) -> Array:
    """The four corners of a causal mask, without its triangle."""
    mask = rng.random(_rank(rng, recipe)) < 0.7
    at, keys = _positions(recipe)
    if mask.size:
        ends = np.array([0, -1])
        rows, columns = ends[:, None], ends
        mask[..., rows, columns] = (keys <= at)[rows, columns]
    return mask


def _causal_counts(rng: np.random.Generator, recipe: Structure) -> Array:
    """As many visible keys in each row as in a causal mask, but other keys."""
    at, keys = _positions(recipe)
    shift = rng.integers(0, max(recipe.S, 1), (recipe.T, 1))
    return np.asarray((keys + shift) % max(recipe.S, 1) <= at)


def _one_hidden_pair(rng: np.random.Generator, recipe: Structure) -> Array:
    """A single pair of a query and a key is hidden."""
    mask = np.ones(_rank(rng, recipe), bool)
    if mask.size:
        mask.flat[rng.integers(mask.size)] = False
    return mask


MASKS: dict[str, SampleArray] = {
    "matrix": _random(2),
    "full": _random(5),
    "heads": _random(3),
    "padding": _padding,
    "left padding": lambda *x: np.ascontiguousarray(_padding(*x)[..., ::-1]),
    "empty padding": _empty_padding,
    "empty rows": _empty_rows,
    "empty head": _empty_head,
    "first tile": _first_tile,
    "prefix": _prefix,
    "documents": _documents,
    "checkerboard": lambda _, recipe: np.add(*_positions(recipe)) % 2 == 0,
    "single key": _single_key,
    "causal corners": _causal_corners,
    "causal counts": _causal_counts,
    "all visible": lambda *x: np.ones(_rank(*x), bool),
    "one hidden pair": _one_hidden_pair,
}
"""Boolean masks, by name (True = may attend)."""


def last_axes(full_shape: tuple[int, ...], rank: int, *singletons: int) -> tuple[int, ...]:
    """Return the last axes of a shape, some of size 1."""
    shape = full_shape[-rank:]
    return tuple(1 if i - len(shape) in singletons else n for i, n in enumerate(shape))


def _normal_bias(rank: int, *singletons: int) -> SampleArray:
    return lambda rng, recipe: 2 * rng.standard_normal(last_axes(recipe.whole, rank, *singletons))


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
    return lambda rng, recipe: np.where(_padding(rng, recipe), 0, _limit(hidden, recipe))


def _low_rows(offset: float) -> SampleArray:
    """A normal bias with an offset on about every second row."""

    def sample(rng: np.random.Generator, recipe: Structure) -> Array:
        low = rng.random((*recipe.whole[:-1], 1)) < 0.5
        return 2 * rng.standard_normal(recipe.whole) + np.where(low, _limit(offset, recipe), 0)

    return sample


def _empty_bias_rows(rng: np.random.Generator, recipe: Structure) -> Array:
    """A normal bias in which every third row is −inf throughout."""
    bias = 2 * rng.standard_normal(recipe.whole)
    bias[..., rng.integers(0, min(max(recipe.T, 1), 3)) :: 3, :] = -np.inf
    return bias


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
    "-inf rows": _empty_bias_rows,
    "-1e4 rows": _low_rows(-1e4),
    "-1e9 rows": _low_rows(-1e9),
    "least rows": _low_rows(-np.finfo(float).max),
}
"""Biases, by name."""
OFFSETS = tuple(name for name in BIASES if name.startswith(("-1e", "large", "least")))
"""Biases so large that scores lose digits, and the tolerance is wide."""


# --- gates of the output ---


def _gate_shape(recipe: Structure, rank: int, *singletons: int) -> tuple[int, ...]:
    return last_axes((*recipe.whole[:-1], recipe.E), rank, *singletons)


def _sigmoid(rank: int, *singletons: int) -> SampleArray:
    """A sigmoid of normal numbers, as layers with a gate compute it."""

    def sample(rng: np.random.Generator, recipe: Structure) -> Array:
        normal = rng.standard_normal(_gate_shape(recipe, rank, *singletons))
        return np.asarray(1 / (1 + np.exp(-normal)))

    return sample


def _head_mask(rng: np.random.Generator, recipe: Structure) -> Array:
    """1 or 0 for each head, about one in three of them 0."""
    return (rng.random(_gate_shape(recipe, 3, -1, -2)) < 2 / 3).astype(float)


GATES: dict[str, SampleArray] = {
    "full": _sigmoid(5),
    "heads": _sigmoid(3, -1, -2),
    "head mask": _head_mask,
    "one a row": _sigmoid(5, -1),
    "matrix": _sigmoid(2),
    "signed": lambda rng, recipe: 2 * rng.standard_normal(_gate_shape(recipe, 5)),
    "one for all heads": _sigmoid(5, -3),
    "one for all samples": _sigmoid(3),
    "columns": _sigmoid(5, -2),
    "one number": _sigmoid(2, -1, -2),
}
"""Gates, by name."""


def _distance_mod(s: Any, b: Any, h: Any, t: Any, s_index: Any) -> Any:
    return s - 0.125 * (h + 1) * (t - s_index)


def _squash_mod(s: Any, b: Any, h: Any, t: Any, s_index: Any) -> Any:
    return s / (1 + 0.0625 * s * s)


SCORE_MODS: dict[str, Callable[..., Any]] = {"distance": _distance_mod, "squash": _squash_mod}
"""Score modifications, by name: plain arithmetic, which takes tensors of any framework."""
