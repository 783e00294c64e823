"""Sample the problem of a recipe on a device.

The counterpart of `Recipe.problem`, for recipes of the names defined here. Numbers come from one
`torch.Generator` of the device, seeded by the recipe: the same kind of device gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from npattn.problem.arrays import finfo
from npattn.testing.cases.options import SCORE_MODS, last_axes
from npattn.testing.cases.recipe import Recipe
from npattn.torch.problem import Problem

Tensor = torch.Tensor


class DeviceSample(NamedTuple):
    """Problem on a device, and cotangents of its out and lse."""

    problem: Problem
    dout: Tensor
    dlse: Tensor


def sample_on_device(
    # its names are among `DISTRIBUTIONS`, `MASKS`, `BIASES` and `GATES` of this module
    recipe: Recipe,
    device: Any = "cpu",
    *,
    alignment: str = "bottom_right",  # as for `Recipe.problem`
    mask_true: str = "attend",
) -> DeviceSample:
    """Sample the tensors of a recipe on a device."""
    device = torch.device(device)
    rng = torch.Generator(device).manual_seed(recipe.seed)
    low = getattr(torch, recipe.dtype)
    wide = torch.float64 if recipe.dtype == "float64" else torch.float32
    shapes = [
        recipe.shape(recipe.H, recipe.T, recipe.D), recipe.shape(recipe.K, recipe.S, recipe.D),
        recipe.shape(recipe.K, recipe.S, recipe.E), recipe.shape(recipe.H, recipe.T, recipe.E),
        recipe.shape(recipe.H, recipe.T, 1)[:-1],
    ]  # fmt: skip
    counts = [math.prod(shape) for shape in shapes]
    numbers = torch.randn(sum(counts), generator=rng, device=device, dtype=wide)
    parts = torch.split(numbers, counts)
    q, k, v, do, dlse = (x.reshape(n) for x, n in zip(parts, shapes, strict=True))
    q, k, v = (x.to(low) for x in DISTRIBUTIONS[recipe.distribution](recipe, q, k, v))
    mask: Any = None if recipe.mask is None else MASKS[recipe.mask](recipe, rng)
    if mask is not None and mask_true == "hide":
        mask = ~mask
    bias: Any = None if recipe.bias is None else BIASES[recipe.bias](recipe, rng).to(low)
    sinks = 2 * torch.randn(recipe.H, generator=rng, device=device) if recipe.sinks else None
    rate = recipe.dropout or 0.0
    problem = Problem(
        q, k, v, mask=mask, causal=recipe.causal, window=recipe.window,
        bias=bias, scale=recipe.scale, softcap=recipe.softcap,
        score_mod=None if recipe.score_mod is None else SCORE_MODS[recipe.score_mod],
        sinks=None if sinks is None else sinks.to(low),
        dropout_mask=_uniform(recipe.whole, rng) >= rate if rate else None, dropout_rate=rate,
        gate=None if recipe.gate is None else GATES[recipe.gate](recipe, rng).to(low),
        alignment=alignment,
    )  # fmt: skip
    return DeviceSample(problem, do.to(low), dlse.clone())


# --- distributions of q, k, v ---------------------------------------------------------------------

QKV = tuple[Tensor, Tensor, Tensor]


def _steep(logit: float) -> Callable[..., QKV]:
    """Scale scores to about `logit`; to 3 at most if they may be stored in 16 bits.

    Rounding larger scores to 16 bits leaves no digit of the weights.
    """

    def sample(recipe: Recipe, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        most = logit if float(finfo(recipe.dtype).eps) < 2.0**-20 else min(logit, 3)
        return q * recipe.steepness(most), k, v

    return sample


def _normal(recipe: Recipe, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    # Undo a scale other than the default, so that scores keep their size.
    return (q if recipe.scale is None else q * recipe.steepness(1)), k, v


def _with_values(change: Callable[[Tensor], Tensor]) -> Callable[..., QKV]:
    def sample(recipe: Recipe, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        q, k, v = _normal(recipe, q, k, v)
        return q, k, change(v)

    return sample


def _outliers(v: Tensor) -> Tensor:
    v[..., -1] *= 64
    return v


def _mixed_scales(v: Tensor) -> Tensor:
    """Scale the rows from 2⁻⁶ to 2⁶: the last keys count most."""
    powers = torch.linspace(-6, 6, v.shape[-2], device=v.device, dtype=v.dtype)
    return v * torch.exp2(powers)[:, None]


def _integers(recipe: Recipe, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    return _normal(recipe, q.round(), k.round(), (2 * v).round())


def _duplicates(recipe: Recipe, q: Tensor, k: Tensor, v: Tensor) -> QKV:
    twice = k[..., ::2, :].repeat_interleave(2, -2)[..., : recipe.S, :]
    return _normal(recipe, q, twice, v)


DISTRIBUTIONS: dict[str, Callable[..., QKV]] = {
    "normal": _normal,
    "large logits": _steep(20),
    "value offset": _with_values(lambda v: v + 100),
    "flat": lambda recipe, q, k, v: (0 * q, k, v),
    "integers": _integers,
    "outliers": _with_values(_outliers),
    "duplicate keys": _duplicates,
    "tiny values": _with_values(lambda v: v * 2.0**-10),
    "near-uniform": _steep(2.0**-7),
    "mixed scales": _with_values(_mixed_scales),
}
"""Distributions of q, k, v by name, whose tolerance says something at any length."""

# --- masks and biases -----------------------------------------------------------------------------


def _random(rank: int) -> Callable[[Recipe, torch.Generator], Tensor]:
    def make(recipe: Recipe, rng: torch.Generator) -> Tensor:
        mask = _uniform(recipe.whole[-rank:], rng) < 0.7
        t, s = (torch.arange(n, device=rng.device) for n in (recipe.T, recipe.S))
        return mask | (t[:, None] % recipe.S == s)  # each query has a visible key

    return make


def _padding(recipe: Recipe, rng: torch.Generator) -> Tensor:
    """Return a padding mask (B, 1, 1, S), with a length of at least 1 for each sample."""
    shape = (*(recipe.lead or ()), *([] if recipe.lead is None else [1]), 1, 1)
    lengths = torch.randint(1, recipe.S + 1, shape, generator=rng, device=rng.device)
    return torch.arange(recipe.S, device=rng.device) < lengths


def _empty_rows(recipe: Recipe, rng: torch.Generator) -> Tensor:
    """Return a random mask in which every third row is fully masked."""
    mask = _uniform(recipe.whole, rng) < 0.7
    mask[..., recipe.seed % 3 :: 3, :] = False
    return mask


def _documents(recipe: Recipe, rng: torch.Generator) -> Tensor:
    """Return a mask of packed documents, aligned at the end; each attends to itself alone."""
    document = (_uniform((max(recipe.T, recipe.S),), rng) < 8 / recipe.S).cumsum(0)
    of_queries, keys = (document[len(document) - n :] for n in (recipe.T, recipe.S))
    return of_queries[:, None] == keys


def _uniform(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng, device=rng.device)


MASKS: dict[str, Callable[[Recipe, torch.Generator], Tensor]] = {
    "matrix": _random(2),
    "full": _random(5),
    "padding": _padding,
    "left padding": lambda recipe, rng: _padding(recipe, rng).flip(-1),
    "documents": _documents,
    "empty rows": _empty_rows,
}
"""Boolean masks by name (True = may attend). All but the last two leave every query a key."""


def _normal_bias(rank: int, *singletons: int) -> Callable[[Recipe, torch.Generator], Tensor]:
    def make(recipe: Recipe, rng: torch.Generator) -> Tensor:
        shape = last_axes(recipe.whole, rank, *singletons)
        return 2 * torch.randn(shape, generator=rng, device=rng.device)

    return make


def _distance(recipe: Recipe, rng: torch.Generator) -> Tensor:
    """Return a bias with one slope per head, as in ALiBi, but of at least −8 over all keys."""
    t, s = (torch.arange(n, device=rng.device) for n in (recipe.T, recipe.S))
    far = (t[:, None] + recipe.S - recipe.T - s).abs() * (8 / max(recipe.T, recipe.S))
    if recipe.lead is None:
        return -far
    return -far / torch.arange(1, recipe.H + 1, device=rng.device)[:, None, None]


BIASES: dict[str, Callable[[Recipe, torch.Generator], Tensor]] = {
    "matrix": _normal_bias(2),
    "full": _normal_bias(5),
    "keys": _normal_bias(5, -2),
    "one for all heads": _normal_bias(5, -3),
    "one a head": _normal_bias(3, -1, -2),
    "alibi": _distance,
    "-inf padding": lambda recipe, rng: torch.where(_padding(recipe, rng), 0.0, -math.inf),
}
"""Biases by name."""


def _gate(*singletons: int) -> Callable[[Recipe, torch.Generator], Tensor]:
    def make(recipe: Recipe, rng: torch.Generator) -> Tensor:
        whole = (*recipe.whole[:-1], recipe.E)
        return torch.sigmoid(_uniform(last_axes(whole, 5, *singletons), rng) * 8 - 4)

    return make


GATES: dict[str, Callable[[Recipe, torch.Generator], Tensor]] = {
    "full": _gate(),
    "one a row": _gate(-1),
    "heads": _gate(-1, -2),
}
"""Gates by name."""
