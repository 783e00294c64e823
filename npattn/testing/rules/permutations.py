"""Rules about order: keys, queries, heads and samples may be permuted [1, 8, 10, 13, 14]."""

from __future__ import annotations

import numpy as np

from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules.picks import (
    another_order,
    generator,
    pick_heads,
    pick_keys,
    pick_queries,
    pick_samples,
    relate_reordered,
)
from npattn.testing.rules.register import rule
from npattn.testing.rules.requirements import (
    first,
    nonempty,
    refuses,
    single,
    without_numbering,
    without_positions,
)
from npattn.testing.rules.terms import head_of
from npattn.testing.trial import Trial


@rule("permute-keys", "8, 10, 13", unless=single("S"), draw=without_positions)
def permute_keys(trial: Trial, recipe: Recipe) -> float | None:
    """Keys and values in another order give the same results, but for rounding.

    A softmax and a sum do not know the order of their terms; mask, bias and dropout columns move
    with their keys, and so do dk, dv, dbias and the columns of the weights. Broken by a tail of
    keys that is dropped (pytorch/pytorch#159247), by a fixed largest number of keys
    (NVIDIA/TensorRT#2541), by a rescaling that forgets earlier tiles, by a dbias that is written
    and not summed.
    """
    if recipe.S < 2:
        return None
    problem = trial.problem(recipe)
    order = another_order(generator(recipe), problem.S)
    return relate_reordered(trial, recipe, [pick_keys(problem, order)])


@rule("permute-queries", "8, 13", unless=single("T"), draw=without_positions)
def permute_queries(trial: Trial, recipe: Recipe) -> float | None:
    """Queries in another order give the same rows in that order, and the same dk and dv.

    No row depends on another; mask, bias and dropout rows move with their queries. Broken by rows
    that are written over at the tail of a tile (flagos-ai/FlagGems#898), by one dropout mask for
    all rows (NVIDIA/TransformerEngine#227), by a dbias of the last row alone.
    """
    if recipe.T < 2:
        return None
    problem = trial.problem(recipe)
    order = another_order(generator(recipe), problem.T)
    return relate_reordered(trial, recipe, [pick_queries(problem, order)])


@rule(
    "permute-heads",
    "1, 13, 14",
    unless=first(refuses("rank 3", "rank 4", "rank 5"), single("H")),
    draw=without_numbering,
)
def permute_heads(trial: Trial, recipe: Recipe) -> float | None:
    """Heads in another order give the same results in that order.

    Key/value heads move with the query heads that use them, and with everything that belongs to a
    head: bias, mask, dropout, sink. Broken by heads that are tiled instead of repeated
    (onnx/onnx#7274), by groups rounded up to a power of two (ggml-org/llama.cpp#19115), by a bias
    or a sink that is read of another head.
    """
    if recipe.H < 2:
        return None
    problem, rng = trial.problem(recipe), generator(recipe)
    used = head_of(trial, problem)
    shared_order, order = another_order(rng, problem.K), np.empty(problem.H, int)
    for new, old in enumerate(shared_order):
        group = np.flatnonzero(used == old)
        order[used == new] = group[another_order(rng, len(group))]
    return relate_reordered(trial, recipe, pick_heads(problem, order, shared_order))


@rule(
    "permute-batch",
    "13, 14",
    unless=first(refuses("rank 4", "rank 5"), single("B")),
    draw=nonempty,
)
def permute_batch(trial: Trial, recipe: Recipe) -> float | None:
    """Samples in another order give the same results in that order.

    Arrays that they share by broadcasting stay, and get the same gradient. Broken by a mask of the
    first sample that is used for all, by masks laid over the heads of other samples
    (line/lighthouse#77), by a dbias of the last sample alone
    (HKUSTDial/flash-sparse-attention#194).
    """
    if not recipe.lead or recipe.lead[0] < 2:
        return None
    problem = trial.problem(recipe)
    order = another_order(generator(recipe), problem.lead[0])
    return relate_reordered(trial, recipe, [pick_samples(problem, order)])
