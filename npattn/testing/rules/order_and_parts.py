"""Rules about order and parts: keys, queries, heads, samples [1, 5, 6, 8, 10, 13, 14].

Their results are those of the whole, which padding and repetition do not change.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.testing.cases.classes import classes_of_problem
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules.register import (
    first,
    fixed_size,
    hidden_keys_matter,
    needs,
    nonempty,
    refuses,
    rule,
    sampling,
    single,
    without_numbering,
    without_positions,
)
from npattn.testing.rules.relate import (
    SAME,
    another_order,
    generator,
    pick_cotangents,
    pick_heads,
    pick_keys,
    pick_problem,
    pick_queries,
    pick_samples,
    put_back_cotangents,
    relate,
    relate_part,
    relate_reordered,
)
from npattn.testing.rules.terms import (
    diagonal_shift,
    fits_sizes,
    head_of,
    hidden_keys_count,
    narrow,
    translate_mask,
)
from npattn.testing.trial import GRADIENTS, Trial


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
    "permute-batch", "13, 14", unless=first(refuses("rank 4", "rank 5"), single("B")), draw=nonempty
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


# --- parts --------------------------------------------------------------------------------------


@rule("batch-alone", "13, 14", draw=sampling(shapes=1))
def batch_alone(trial: Trial, recipe: Recipe) -> float | None:
    """A sample alone, or a query alone, gives the same result as among the others.

    Within the bound, not to the bit: kernels may choose another order of summation by the batch.
    Only that sample or query has cotangents, so that nothing of the others may enter the gradients.
    Broken by a softmax over the wrong axis, by masks laid over the wrong sample, by a path for one
    query that forgets an option (karpathy/nanochat#452), by sums over the batch that mix.
    """
    problem, rng = trial.problem(recipe), generator(recipe)
    choices = []
    if problem.lead and problem.lead[0] > 1 and fits_sizes(trial, B=1):
        choices.append(pick_samples(problem, rng.integers(problem.lead[0], size=1)))
    queries = np.arange(problem.T)
    if recipe.causal or recipe.window:  # alone it must be aligned with the same key
        queries = queries[-1:] if trial.conventions.causal == "bottom_right" else queries[:1]
    if recipe.score_mod == "distance":
        queries = queries[queries == 0]
    if problem.T > 1 and queries.size and fits_sizes(trial, T=1, S=problem.S):
        choices.append(pick_queries(problem, rng.choice(queries, size=1)))
    if not choices:
        return None
    picks = [choices[rng.integers(len(choices))]]
    cotangents = pick_cotangents(trial.cotangents(recipe, problem), picks)
    part = trial.evaluate(pick_problem(problem, picks), cotangents)
    together = trial.evaluate(problem, put_back_cotangents(cotangents, picks, problem))
    return relate_part(trial, together, part, picks)


@rule("shared-heads", "1, 13", unless=refuses("K < H"), draw=sampling(shapes=2))
def shared_heads(trial: Trial, recipe: Recipe) -> float | None:
    """Sharing key/value heads is repeating them; dk and dv are then sums over the group.

    Grouped-query attention saves memory, and is no other function. Broken by another order of
    the heads (onnx/onnx#7274), by a wrong divisor (PSAL-POSTECH/ONNXim#34), by groups that are no
    power of two, by dk of one query head of each group.
    """
    plain = trial.problem(recipe)
    if plain.K == plain.H or plain.H not in trial.space.sizes.get("K", (plain.H,)):
        return None
    used = head_of(trial, plain)
    repeated = plain.replace(k=plain.k[..., used, :, :], v=plain.v[..., used, :, :])
    shared = trial.evaluation(recipe)

    def sum_groups(x: Array) -> Array:
        return np.stack([x[..., used == head, :, :].sum(-3) for head in range(plain.K)], -3)

    across = dict(SAME) | {"dk": sum_groups, "dv": sum_groups}
    return relate(trial.evaluate(repeated, shared.cotangents), shared, across)


@rule(
    "padded-keys",
    "5, 10, 13",
    unless=first(needs("mask"), hidden_keys_matter, refuses("T != S"), fixed_size("S")),
    draw=partial(without_numbering, shapes=2),
)
def padded_keys(trial: Trial, recipe: Recipe) -> float | None:
    """More keys that the mask hides from every query change nothing, and get no gradient.

    They are put where they do not move the diagonal, and their scores are the opposite of others,
    so that a maximum over them would show. Broken by a mask that is ignored or added as a number
    (HKUSTDial/flash-sparse-attention#146), by lengths that are counted from a mask
    (microsoft/onnxruntime#27885), by hidden scores that are finite.
    """
    problem, rng = trial.problem(recipe), generator(recipe)
    sizes = trial.space.sizes.get("S", [problem.S + n for n in (1, 3, 17, 64)])
    sizes = [S for S in sizes if S > problem.S and fits_sizes(trial, T=problem.T, S=S)]
    if not sizes or hidden_keys_count(trial, problem):
        return None
    n, last = int(rng.choice(narrow(trial, sizes))) - problem.S, bool(rng.integers(2))
    if recipe.causal or recipe.window:
        last = trial.conventions.causal == "top_left"
    padding = np.arange(problem.S + n) >= problem.S
    keys = np.concatenate([np.arange(problem.S), rng.integers(problem.S, size=n)])
    if not last:
        padding, keys = np.roll(padding, n), np.roll(keys, n)
    padded = pad(trial, problem, padding, keys)
    if trial.space.refuses(classes_of_problem(padded)):
        return None
    plain = trial.evaluation(recipe)
    picks = [pick_keys(padded, np.flatnonzero(~padding))]
    in_padding = trial.evaluate(padded, put_back_cotangents(plain.cotangents, picks, padded))
    return relate_part(trial, in_padding, plain, picks, ("weights", *GRADIENTS), part_is_plain=True)


def pad(trial: Trial, problem: Problem, padding: Array, keys: Array) -> Problem:
    """Repeat these keys, and hide and negate the padding among them, (S,)."""
    padded = pick_problem(problem, [pick_keys(problem, keys)])
    sign = np.where(padding, -1, 1).astype(problem.k.dtype)[:, None]
    visible = np.ones((problem.T, 1), bool)
    if padded.mask_array is not None:
        visible = translate_mask(trial, padded.mask_array)
    mask = translate_mask(trial, visible & ~padding)
    return padded.replace(k=padded.k * sign, v=padded.v * sign, mask=mask)


@rule(
    "causal-prefix",
    "6, 13",
    unless=first(needs("causal"), hidden_keys_matter, fixed_size("T")),
    draw=sampling(shapes=2, causal=True),
)
def causal_prefix(trial: Trial, recipe: Recipe) -> float | None:
    """With causal, later positions do not matter: the first queries need the first keys only.

    Both are cut so that the diagonal stays in place. The keys that are cut off get no gradient
    from these queries. Broken by causal that is dropped beside a mask (keras-team/keras#23040) or
    if T ≠ S (mlx-node/mlx-node#24), by a row maximum over hidden scores, by a softcap that lets
    the future in.
    """
    problem = trial.problem(recipe)
    T, S = problem.T, problem.S
    shift = diagonal_shift(trial, problem)
    cuts = [(n, min(n + shift, S)) for n in range(max(1, 1 - shift), T)]
    cuts = [(t, s) for t, s in cuts if fits_sizes(trial, T=t, S=s)]
    cuts = list(narrow(trial, cuts))
    if not cuts or hidden_keys_count(trial, problem):
        return None
    t, s = cuts[generator(recipe).integers(len(cuts))]
    picks = [pick_queries(problem, np.arange(t)), pick_keys(problem, np.arange(s))]
    cotangents = pick_cotangents(trial.cotangents(recipe, problem), picks)
    part = trial.evaluate(pick_problem(problem, picks), cotangents)
    together = trial.evaluate(problem, put_back_cotangents(cotangents, picks, problem))
    return relate_part(trial, together, part, picks)
