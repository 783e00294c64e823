"""Properties: what may be reordered, cut, padded, split, or said in other words.

Each asks for two problems whose exact results are the same numbers, perhaps in other places, and
holds one answer against the other: no reference is needed.

    B batch   H query heads   K key/value heads (K divides H)   T queries   S keys
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from npattn.api import evaluate
from npattn.arrays import Array, sum_to
from npattn.conventions import Conventions
from npattn.problem import Cotangents, Problem
from npattn.testing.bounds.ulp import half_ulp
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import WINDOWS
from npattn.testing.rules.register import fills, first, no_lse, rule
from npattn.testing.trial import GRADIENTS, Across, Judged, Later, Trial

INPUTS = ("q", "k", "v", "mask", "bias", "dropout_mask", "sinks")
FORWARD = ("o", "lse", "weights")
RESULTS = (*FORWARD, *GRADIENTS)

# Where arrays have keys, queries and heads: axes, from the end. A gradient has those of its input.
KEYS = {"k": -2, "v": -2, "mask": -1, "bias": -1, "dropout_mask": -1, "weights": -1}
QUERIES = {"q": -2, "mask": -2, "bias": -2, "dropout_mask": -2, "o": -2, "lse": -1, "weights": -2}
HEADS = {n: axis - 1 for n, axis in QUERIES.items()} | {"sinks": -1}
SHARED = {"k": -3, "v": -3}


class Pick(NamedTuple):
    """Some entries along an axis, in some order.

    An array that lacks the axis, or broadcasts along it, stays as it is.
    """

    axes: Mapping[str, int]  # by the name of the array
    order: Array
    size: int  # of the axis


def _keys(problem: Problem, order: Array) -> Pick:
    return Pick(KEYS, order, problem.S)


def _queries(problem: Problem, order: Array) -> Pick:
    return Pick(QUERIES, order, problem.T)


def _samples(problem: Problem, order: Array) -> Pick:
    """Along the first of the leading axes."""
    axis = -3 - len(problem.lead)
    names = ("q", "k", "v", "mask", "bias", "dropout_mask", "o", "weights")
    return Pick(dict.fromkeys(names, axis) | {"lse": axis + 1}, order, problem.lead[0])


def _picked(name: str, x: Array, picks: Sequence[Pick]) -> Array:
    own = name[1:] if name in GRADIENTS else name
    for axes, order, size in picks:
        axis = axes.get(own, 0)
        if axis and x.ndim >= -axis and x.shape[axis] == size:
            x = np.take(x, order, axis)
    return x


def _placed(name: str, x: Array, picks: Sequence[Pick], shape: tuple[int, ...]) -> Array:
    """x where it was picked from an array of this shape, and 0 elsewhere."""
    places = _picked(name, np.arange(math.prod(shape)).reshape(shape), picks)
    whole = np.zeros(math.prod(shape), x.dtype)
    whole[places] = x
    return whole.reshape(shape)


def _part(problem: Problem, picks: Sequence[Pick]) -> Problem:
    arrays = {name: getattr(problem, name) for name in INPUTS}
    return problem.replace(**{n: _picked(n, x, picks) for n, x in arrays.items() if x is not None})


def _cotangents(cotangents: Cotangents, picks: Sequence[Pick]) -> Cotangents:
    """Those of the part."""
    return _each(cotangents, partial(_picked, picks=picks))


def _spread(cotangents: Cotangents, picks: Sequence[Pick], whole: Problem) -> Cotangents:
    """Those of the part as cotangents of the whole: 0 for everything else."""
    rows = (*whole.lead, *(() if whole.headless else (whole.H,)), whole.T)
    shapes = {"o": (*rows, whole.E), "lse": rows, "weights": (*rows, whole.S)}
    return _each(cotangents, lambda name, x: _placed(name, x, picks, shapes[name]))


def _each(cotangents: Cotangents, change: Callable[[str, Array], Array]) -> Cotangents:
    more = {"lse": cotangents.dlse, "weights": cotangents.dweights}
    return Cotangents(
        change("o", cotangents.dout),
        *(None if x is None else change(name, x) for name, x in more.items()),
    )


def _alike(
    trial: Trial, plain: Judged, problem: Problem, cotangents: Cotangents, across: Across
) -> float:
    """Results of a problem whose exact results are the plain one's, carried across. So are its
    bounds, which take the inputs as the results do."""
    given = dict(reversed(trial.results(problem, cotangents)))

    def carried(found: Mapping[str, Array]) -> dict[str, Array]:
        return {n: across[n](x) for n, x in found.items() if n in across}

    allowed = Later(lambda: carried(plain.allowed))
    other = Judged(problem, cotangents, given, carried(plain.want), allowed)
    return trial.relate(plain, other, across)


def _reordered(trial: Trial, recipe: Recipe, picks: Sequence[Pick]) -> float:
    plain = trial.judged(recipe)
    across = {name: partial(_picked, name, picks=picks) for name in RESULTS}
    moved, cotangents = _part(plain.problem, picks), _cotangents(plain.cotangents, picks)
    return _alike(trial, plain, moved, cotangents, across)


def _reworded(trial: Trial, recipe: Recipe, other: Problem) -> float:
    plain = trial.judged(recipe)
    return _alike(trial, plain, other, plain.cotangents, SAME)


def _within(
    trial: Trial,
    whole: Judged,
    part: Judged,
    picks: Sequence[Pick],
    nothing_else: Sequence[str] = GRADIENTS,
) -> float:
    """Results of the part are those of the whole; some are 0 everywhere else in the whole."""
    cut = {n: partial(_picked, n, picks=picks) for n in FORWARD}
    back = {
        name: partial(_placed, name, picks=picks, shape=whole.want[name].shape)
        for name in nothing_else
        if name in whole.want
    }
    return max(trial.relate(whole, part, cut), trial.relate(part, whole, back))


def _as_is(x: Array) -> Array:
    return x


SAME: Across = dict.fromkeys(RESULTS, _as_is)


# --- what a rule needs, and what it draws ---


def _lacks(*features: str) -> Callable[[Trial], str | None]:
    def unless(trial: Trial) -> str | None:
        missing = [name for name in features if name not in trial.space.features]
        return f"has no {' and no '.join(missing)}" if missing else None

    return unless


def _refuses(*structure: str) -> Callable[[Trial], str | None]:
    """Unless it accepts one of these."""

    def unless(trial: Trial) -> str | None:
        some = trial.space.structure & set(structure)
        return None if some else f"refuses {', '.join(structure)}"

    return unless


def _fixed(letter: str) -> Callable[[Trial], str | None]:
    """Unless sizes leave a choice."""

    def unless(trial: Trial) -> str | None:
        stuck = len(set(trial.space.sizes.get(letter, (1, 2)))) == 1
        return f"sizes allow one {letter} only" if stuck else None

    return unless


def _single(letter: str) -> Callable[[Trial], str | None]:
    def unless(trial: Trial) -> str | None:
        most = max(trial.space.sizes.get(letter, (2,)))
        return f"sizes allow no {letter} above {most}" if most < 2 else None

    return unless


def _fits(trial: Trial, **sizes: int) -> bool:
    """Whether T queries and S keys, or B samples, are among what it takes."""
    space = trial.space
    if any(size not in space.sizes.get(letter, (size,)) for letter, size in sizes.items()):
        return False
    T, S = sizes.get("T", 0), sizes.get("S", 0)
    return (T == S or "T != S" in space.structure) and (T <= S or "T > S" in space.structure)


def _nonempty(trial: Trial) -> dict[str, Any]:
    return {"nonempty": True}


def _unnumbered(trial: Trial) -> dict[str, Any]:
    """No score_mod that reads the numbers of heads, queries or keys."""
    mods = {"score_mod": (None, None, "squash")} if "score_mod" in trial.space.features else {}
    return {"force": mods, "nonempty": True}


def _anywhere(trial: Trial) -> dict[str, Any]:
    """Nothing in the problem depends on where a query or a key stands."""
    return _unnumbered(trial) | {"forbid": frozenset({"causal", "window"})}


def _draw_bias(trial: Trial) -> dict[str, Any]:
    """Masks with which most queries keep a key; and −inf stays −inf."""
    conventions, forbid = trial.conventions, set()
    if conventions.softcap != "before_bias":  # −inf comes back as −softcap
        forbid.add("softcap")
    if conventions.bias == "before_scale":  # or as NaN or +inf
        forbid.add("scale")
    masks = ("padding", "left padding", "matrix", "full")
    return {"force": {"mask": masks}, "forbid": frozenset(forbid), "nonempty": True}


def _draw_scale(trial: Trial) -> dict[str, Any]:
    scaled = trial.conventions.bias == "before_scale"
    return {"forbid": frozenset({"bias"} if scaled else ()), "nonempty": True}


def _no_inf(trial: Trial) -> str | None:
    least = np.array(-np.inf, trial.space.dtype).astype(float)
    return None if np.isinf(least) else f"{trial.space.dtype} has no −inf"


def _rng(recipe: Recipe) -> np.random.Generator:
    return np.random.default_rng([recipe.seed, 12])


def _shuffled(rng: np.random.Generator, n: int) -> Array:
    """Another order of 0, ..., n − 1, if there is one."""
    order = rng.permutation(n)
    return order if (order != np.arange(n)).any() else order[::-1]


def _head_of(trial: Trial, problem: Problem) -> Array:
    """(H,) the key/value head that each query head uses."""
    h, K = np.arange(problem.H), problem.K
    return h % K if trial.conventions.kv_head == "tile" else h // (problem.H // K)


def _hidden_count(trial: Trial, problem: Problem) -> bool:
    """Whether hidden keys take part by the conventions: as a fill, or in the mean of all values."""
    if trial.conventions.fill(problem) is not None:
        return True
    return trial.conventions.empty_row == "mean" and bool(trial.empty(problem).any())


def _turned(trial: Trial, mask: Array) -> Array:
    """A mask in which True means attend, in the terms of the conventions; and back."""
    return ~mask if trial.conventions.mask_true == "hide" else mask


# --- another order ---


@rule("permute-keys", "8, 10, 13", unless=_single("S"), draw=_anywhere)
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
    return _reordered(trial, recipe, [_keys(problem, _shuffled(_rng(recipe), problem.S))])


@rule("permute-queries", "8, 13", unless=_single("T"), draw=_anywhere)
def permute_queries(trial: Trial, recipe: Recipe) -> float | None:
    """Queries in another order give the same rows in that order, and the same dk and dv.

    No row knows of another; mask, bias and dropout rows move with their queries. Broken by rows
    that are written over at the tail of a tile (flagos-ai/FlagGems#898), by one dropout mask for
    all rows (NVIDIA/TransformerEngine#227), by a dbias of the last row alone.
    """
    if recipe.T < 2:
        return None
    problem = trial.problem(recipe)
    return _reordered(trial, recipe, [_queries(problem, _shuffled(_rng(recipe), problem.T))])


@rule(
    "permute-heads",
    "1, 13, 14",
    unless=first(_refuses("rank 3", "rank 4", "rank 5"), _single("H")),
    draw=_unnumbered,
)
def permute_heads(trial: Trial, recipe: Recipe) -> float | None:
    """Heads in another order give the same results in that order.

    Key/value heads move with the query heads that use them, and with whatever there is for each
    head: bias, mask, dropout, sink. Broken by heads that are tiled where they are repeated
    (onnx/onnx#7274), by groups rounded up to a power of two (ggml-org/llama.cpp#19115), by a bias
    or a sink that is read of another head.
    """
    if recipe.H < 2:
        return None
    problem, rng = trial.problem(recipe), _rng(recipe)
    used = _head_of(trial, problem)
    heads, order = _shuffled(rng, problem.K), np.empty(problem.H, int)
    for new, old in enumerate(heads):
        group = np.flatnonzero(used == old)
        order[used == new] = group[_shuffled(rng, len(group))]
    picks = [Pick(HEADS, order, problem.H), Pick(SHARED, heads, problem.K)]
    return _reordered(trial, recipe, picks)


@rule(
    "permute-batch",
    "13, 14",
    unless=first(_refuses("rank 4", "rank 5"), _single("B")),
    draw=_nonempty,
)
def permute_batch(trial: Trial, recipe: Recipe) -> float | None:
    """Samples in another order give the same results in that order.

    What they share by broadcasting stays, and gets the same gradient. Broken by a mask of the first
    sample that is used for all, by masks laid over the heads of other samples (line/lighthouse#77),
    by a dbias of the last sample alone (HKUSTDial/flash-sparse-attention#194).
    """
    if not recipe.lead or recipe.lead[0] < 2:
        return None
    problem = trial.problem(recipe)
    return _reordered(trial, recipe, [_samples(problem, _shuffled(_rng(recipe), problem.lead[0]))])


# --- a part of the problem ---


@rule("batch-alone", "13, 14", draw=_nonempty)
def batch_alone(trial: Trial, recipe: Recipe) -> float | None:
    """A sample alone, or a query alone, gives what it gives among the others.

    Within the bound, not to the bit: kernels may choose another order of summation by the batch.
    Gradients are taken of that sample or query only, so that nothing of the others may enter them.
    Broken by a softmax over the wrong axis, by masks laid over the wrong sample, by a path for one
    query that forgets an option (karpathy/nanochat#452), by sums over the batch that mix.
    """
    problem, rng = trial.problem(recipe), _rng(recipe)
    choices = []
    if problem.lead and problem.lead[0] > 1 and _fits(trial, B=1):
        choices.append(_samples(problem, rng.integers(problem.lead[0], size=1)))
    queries = np.arange(problem.T)
    if recipe.causal or recipe.window:  # alone it must stand at the same key
        queries = queries[-1:] if trial.conventions.causal == "bottom_right" else queries[:1]
    if recipe.score_mod == "distance":
        queries = queries[queries == 0]
    if problem.T > 1 and queries.size and _fits(trial, T=1, S=problem.S):
        choices.append(_queries(problem, rng.choice(queries, size=1)))
    if not choices:
        return None
    picks = [choices[rng.integers(len(choices))]]
    cotangents = _cotangents(trial.cotangents(recipe, problem), picks)
    part = trial.judge(_part(problem, picks), cotangents)
    whole = trial.judge(problem, _spread(cotangents, picks, problem))
    return _within(trial, whole, part, picks)


@rule("shared-heads", "1, 13", unless=_refuses("K < H"), draw=_nonempty)
def shared_heads(trial: Trial, recipe: Recipe) -> float | None:
    """Sharing key/value heads is repeating them; dk and dv are then sums over the group.

    Grouped-query attention is a saving of memory, not another function. Broken by another order of
    the heads (onnx/onnx#7274), by a wrong divisor (PSAL-POSTECH/ONNXim#34), by groups that are no
    power of two, by dk of one query head of each group.
    """
    plain = trial.problem(recipe)
    if plain.K == plain.H or plain.H not in trial.space.sizes.get("K", (plain.H,)):
        return None
    used = _head_of(trial, plain)
    repeated = plain.replace(k=plain.k[..., used, :, :], v=plain.v[..., used, :, :])
    shared = trial.judged(recipe)

    def summed(x: Array) -> Array:
        return np.stack([x[..., used == head, :, :].sum(-3) for head in range(plain.K)], -3)

    across = dict(SAME) | {"dk": summed, "dv": summed}
    return trial.relate(trial.judge(repeated, shared.cotangents), shared, across)


@rule(
    "padded-keys",
    "5, 10, 13",
    unless=first(_lacks("mask"), fills, _refuses("T != S"), _fixed("S")),
    draw=_unnumbered,
)
def padded_keys(trial: Trial, recipe: Recipe) -> float | None:
    """More keys that the mask hides from every query change nothing, and get no gradient.

    They are put where they do not move the diagonal, and their scores are the opposite of others,
    so that a maximum over them would show. Broken by a mask that is ignored or added as a number
    (HKUSTDial/flash-sparse-attention#146), by lengths that are counted from a mask
    (microsoft/onnxruntime#27885), by hidden scores that are finite.
    """
    problem, rng = trial.problem(recipe), _rng(recipe)
    sizes = trial.space.sizes.get("S", [problem.S + n for n in (1, 3, 17, 64)])
    sizes = [S for S in sizes if S > problem.S and _fits(trial, T=problem.T, S=S)]
    if not sizes or _hidden_count(trial, problem):
        return None
    n, last = int(rng.choice(sizes)) - problem.S, bool(rng.integers(2))
    if recipe.causal or recipe.window:
        last = trial.conventions.causal == "top_left"
    hidden = np.arange(problem.S + n) >= problem.S
    where = np.concatenate([np.arange(problem.S), rng.integers(problem.S, size=n)])
    if not last:
        hidden, where = np.roll(hidden, n), np.roll(where, n)
    padded = _part(problem, [_keys(problem, where)])
    sign = np.where(hidden, -1, 1).astype(problem.k.dtype)[:, None]
    visible = (
        np.ones((problem.T, 1), bool)
        if padded.mask_array is None
        else _turned(trial, padded.mask_array)
    )
    mask = _turned(trial, visible & ~hidden)
    padded = padded.replace(k=padded.k * sign, v=padded.v * sign, mask=mask)
    plain = trial.judged(recipe)
    picks = [_keys(padded, np.flatnonzero(~hidden))]
    whole = trial.judge(padded, _spread(plain.cotangents, picks, padded))
    return _within(trial, whole, plain, picks, ("weights", *GRADIENTS))


@rule(
    "causal-prefix",
    "6, 13",
    unless=first(_lacks("causal"), fills, _fixed("T")),
    draw=lambda t: {"force": {"causal": True}, "nonempty": True},
)
def causal_prefix(trial: Trial, recipe: Recipe) -> float | None:
    """With causal, what comes later does not matter: the first queries need the first keys only.

    Both are cut so that the diagonal stays where it is. The keys that are cut off get no gradient
    from these queries. Broken by causal that is dropped beside a mask (keras-team/keras#23040) or
    where T ≠ S (mlx-node/mlx-node#24), by a row maximum over hidden scores, by a softcap that lets
    the future in.
    """
    problem = trial.problem(recipe)
    T, S = problem.T, problem.S
    shift = S - T if trial.conventions.causal == "bottom_right" else 0
    cuts = [(n, min(n + shift, S)) for n in range(max(1, 1 - shift), T)]
    cuts = [(t, s) for t, s in cuts if _fits(trial, T=t, S=s)]
    if not cuts or _hidden_count(trial, problem):
        return None
    t, s = cuts[_rng(recipe).integers(len(cuts))]
    picks = [_queries(problem, np.arange(t)), _keys(problem, np.arange(s))]
    cotangents = _cotangents(trial.cotangents(recipe, problem), picks)
    part = trial.judge(_part(problem, picks), cotangents)
    whole = trial.judge(problem, _spread(cotangents, picks, problem))
    return _within(trial, whole, part, picks)


@rule(
    "split-merge",
    "8, 11",
    unless=first(no_lse, _refuses("T != S"), _fixed("S")),
    draw=_anywhere,
)
def split_merge(trial: Trial, recipe: Recipe) -> float | None:
    """Two parts of the keys, each with its lse, merge to the whole.

    So do split-KV decoding, ring attention and caches in pages: o = Σ exp(lseᵢ − lse) oᵢ and
    lse = log Σ exp(lseᵢ), in which a part that a query does not see has weight 0. A sink is in the
    first part alone. Broken by an lse to base 2 (vllm-project/vllm#43919), by an lse without the
    row maximum, by an lse that is not −inf where nothing is seen (flashinfer-ai/flashinfer#4484).
    """
    problem = trial.problem(recipe)
    T, S = problem.T, problem.S
    cuts = [n for n in range(1, S) if _fits(trial, T=T, S=n) and _fits(trial, T=T, S=S - n)]
    if not cuts or (trial.conventions.empty_row == "mean" and trial.empty(problem).any()):
        return None
    cut = int(_rng(recipe).choice(cuts))
    picks = [[_keys(problem, keys)] for keys in np.split(np.arange(S), [cut])]
    parts = [_part(problem, pick) for pick in picks]
    parts[1] = parts[1].replace(sinks=None)
    if trial.shuns_empty_rows and any(trial.empty(part).any() for part in parts):
        return None
    whole, forward = trial.judged(recipe), replace(trial, gradients=frozenset())
    found = [
        forward.judge(part, _cotangents(whole.cotangents, pick))
        for part, pick in zip(parts, picks, strict=True)
    ]
    if any(
        getattr(x.results.get(n), "shape", None) != x.want[n].shape
        for x in found
        for n in ("o", "lse")
    ):
        return None  # the business of another rule
    # Where the whole is right, a part is wrong: that is what a script must show.
    shown = next((x for x in found if trial._is_wrong(x)), found[1])
    canonical = map(trial.conventions.canonical, parts)
    gone = [evaluate(part, engine="dense").lse == -np.inf for part in canonical]
    merged, room = _merged(trial.conventions, found, np.stack(gone))
    both = replace(shown, results=merged, want=whole.want, allowed=room)
    return trial.relate(both, whole, {"o": _as_is, "lse": _as_is})


U = 2.0**-53  # unit roundoff of float64, in which the parts are merged


@np.errstate(all="ignore")  # −inf where a query does not see a part
def _merged(
    conventions: Conventions, parts: Sequence[Judged], gone: Array
) -> tuple[dict[str, Array], dict[str, Array]]:
    """What two parts merge to, and how far that can be from the exact result; `gone` are the rows
    that see nothing of a part.

    Let lseᵢ be off by at most βᵢ and oᵢ by αᵢ, x = lse₁ − lse₂, σ the logistic function. The
    weights w₁ = σ(x) and w₂ = σ(−x) = 1 − w₁ depend on the difference alone. It is off by at most
    b = β₁ + β₂ + u (|x| + 2), the subtraction and the exponential in float64 included, so that a
    weight is off by at most m, the larger of σ(±x + b) − σ(±x), where
    σ(a) − σ(c) = σ(a) σ(−c) (1 − exp(c − a)). With W, O, LSE for what is exact,

        o − O     = Σ Wᵢ (oᵢ − Oᵢ) + (w₁ − W₁)(o₁ − o₂)   is at most  Σ (wᵢ + m) αᵢ + m |o₁ − o₂|
        LSE − lse = log Σ wᵢ exp(LSEᵢ − lseᵢ)              is at most  log(1 + Σ wᵢ (exp βᵢ − 1))

    To this float64 adds 4u of each term wᵢ oᵢ (two for wᵢ, product, sum); and to lse 4u for the
    logarithm, of a number from 1 to 2, and u |lse| for the sum. Another base costs 2u |lse| on the
    way in and on the way out.
    """
    base, bent = (math.log(2), 2 * U) if conventions.lse_base == "2" else (1.0, 0.0)
    lse = base * np.stack([x.results["lse"].astype(np.float64) for x in parts])
    if conventions.lse_empty != -np.inf:  # what stands for an empty row is known to who merges
        lse = np.where(gone, -np.inf, lse)
    beta = base * np.stack([x.allowed["lse"] + half_ulp(x.results["lse"]) for x in parts])
    beta = np.where(gone, 0, beta + bent * abs(lse))
    o = np.stack([x.results["o"].astype(np.float64) for x in parts])
    alpha = np.stack([x.allowed["o"] + half_ulp(x.results["o"]) for x in parts])

    x = _between(lse)
    w = _logistic(x)
    o = np.where(w[..., None] == 0, 0, o)  # a part that is not seen adds nothing, not even NaN
    b = np.where(np.isfinite(x), beta.sum(0) + U * (abs(x) + 2), 0)
    m = (_logistic(x + b) * w[::-1] * -np.expm1(-b)).max(0)
    terms = w[..., None] * o
    t_o = ((w + m)[..., None] * alpha + 4 * U * abs(terms)).sum(0)
    t_o = t_o + m[..., None] * abs(o[0] - o[1])

    total = np.logaddexp(lse[0], lse[1])
    t_lse = np.log1p(np.where(w == 0, 0, w * np.expm1(beta)).sum(0))
    size = np.where(np.isfinite(total), abs(total), 0)
    t_lse = (t_lse + 4 * U + (U + bent) * size) / base
    total = np.where(gone.all(0), conventions.lse_empty, total / base)
    return {"o": terms.sum(0), "lse": total}, {"o": t_o, "lse": t_lse}


def _logistic(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _between(lse: Array) -> Array:
    """lse₁ − lse₂ and lse₂ − lse₁; 0 where both are −inf, for a row that is empty in both parts."""
    other = lse[::-1]
    return np.where((lse == -np.inf) & (other == -np.inf), 0, lse - other)


# --- the same in other words ---


@rule(
    "window-infinite",
    "6, 7",
    unless=_lacks("window"),
    draw=lambda t: {"forbid": frozenset({"window"}), "nonempty": True},
)
def window_infinite(trial: Trial, recipe: Recipe) -> float:
    """A window as wide as the sequence is no window, and with no keys to the right it is causal.

    The narrowest such window reaches from corner to corner: max(T, S) − 1 keys to either side;
    the widest is the largest int32, to which no position may be added in 32 bits.
    Broken by a window whose left end is exclusive (NVIDIA/TransformerEngine#1212), that clobbers
    the mask (huggingface/transformers#31670), or replaces causal.
    """
    problem, rng = trial.problem(recipe), _rng(recipe)
    right = max(problem.T, problem.S) - 1 + int(rng.integers(3))
    left = right + (trial.conventions.window == "inclusive")
    if rng.integers(4) == 0:  # what callers write for infinity
        left = right = 2**31 - 1
    same: list[dict[str, Any]] = [{"window": w} for w in ((left, right), (left, None))]
    same += [{"window": (None, right)}]
    if recipe.causal:
        same += [{"window": (None, 0)}, {"window": (left, 0)}]
        same += [{"causal": False, "window": w} for w in ((None, 0), (left, 0))]
    chosen = same[rng.integers(len(same))]
    return _reworded(trial, recipe, problem.replace(**chosen))


@rule(
    "causal-as-mask",
    "5, 6",
    unless=_lacks("causal", "mask"),
    draw=lambda t: {"force": {"causal": True}, "nonempty": True},
)
def causal_as_mask(trial: Trial, recipe: Recipe) -> float:
    """Causal gives what the same triangle gives as a mask.

    They go through different code in every kernel. Broken by the other alignment
    (Dao-AILab/flash-attention#282), in backward alone (xlite-dev/ffpa-attn#300), by a triangle
    without its diagonal, by causal that is dropped beside a mask (keras-team/keras#23040).
    """
    problem = trial.problem(recipe)
    triangle = np.tril(np.ones((problem.T, problem.S), bool), _shift(trial, problem))
    other = problem.replace(causal=False, mask=_narrowed(trial, problem, triangle))
    return _reworded(trial, recipe, other)


@rule(
    "window-as-mask",
    "5, 7",
    unless=_lacks("window", "mask"),
    draw=lambda t: {"force": {"window": WINDOWS}, "nonempty": True},
)
def window_as_mask(trial: Trial, recipe: Recipe) -> float:
    """A window gives what the same band gives as a mask.

    Broken by a window that is one key wider (huggingface/transformers#39408) or narrower
    (NVIDIA/TransformerEngine#1212), that starts at the other corner, that backward ignores
    (meta-pytorch/MSLK#263), that a single query forgets (karpathy/nanochat#452).
    """
    problem, shift = trial.problem(recipe), _shift(trial, trial.problem(recipe))
    left, right = recipe.window or (None, None)
    band = np.ones((problem.T, problem.S), bool)
    band = band if left is None else np.triu(band, shift - left)
    band = band if right is None else np.tril(band, shift + right)
    other = problem.replace(window=None, mask=_narrowed(trial, problem, band))
    return _reworded(trial, recipe, other)


def _shift(trial: Trial, problem: Problem) -> int:
    """The key at which query 0 stands."""
    return problem.S - problem.T if trial.conventions.causal == "bottom_right" else 0


def _narrowed(trial: Trial, problem: Problem, visible: Array) -> Array:
    """The mask of the problem, narrowed to what is visible."""
    return _turned(
        trial,
        visible if problem.mask_array is None else _turned(trial, problem.mask_array) & visible,
    )


@rule(
    "mask-as-bias",
    "4, 5",
    unless=first(_lacks("mask", "bias"), fills, _no_inf),
    draw=_draw_bias,
)
def mask_as_bias(trial: Trial, recipe: Recipe) -> float | None:
    """Hiding by mask gives what hiding by a bias of −inf gives, where every query keeps a key.

    Either way a hidden key has weight 0 and gradient 0. Broken by a mask of the wrong polarity
    (lucidrains/x-transformers#160), by a bias of −inf that is read as a boolean
    (pytorch/pytorch#92554), by a mask added as 1 and 0 (HKUSTDial/flash-sparse-attention#146), by
    a softcap after the bias.
    """
    problem = trial.problem(recipe)
    if problem.mask_array is None or trial.empty(problem).any() or _hidden_count(trial, problem):
        return None
    zero = np.zeros((1, 1), problem.q.dtype)
    bias = zero if problem.bias_array is None else problem.bias_array
    hidden = ~_turned(trial, problem.mask_array)
    other = problem.replace(mask=None, bias=np.where(hidden, np.array(-np.inf, bias.dtype), bias))
    masked = trial.judged(recipe)
    across = dict(SAME)
    if problem.bias_array is not None:
        across["dbias"] = partial(sum_to, shape=problem.bias_array.shape)
    return trial.relate(trial.judge(other, masked.cotangents), masked, across)


@rule("scale-of-query", "1, 13", unless=_lacks("scale"), draw=_draw_scale)
def scale_of_query(trial: Trial, recipe: Recipe) -> float:
    """Minus twice the scale with minus half the query gives the same, and minus twice the dq.

    Powers of two are exact, and so are signs. Where the first call leaves the scale to its default,
    the second names it: −2/√D. Broken by a maximum that is taken before the scale, by a scale that
    is ignored (pytorch/pytorch#174049), applied twice (huggingface/transformers#38290), left out
    of dq, put on the bias or the sink; by a default of other sizes
    (karpathy/ng-video-lecture#6, intel/ipex-llm#12619).
    """
    plain, q = trial.problem(recipe), trial.problem(recipe).q
    half = (q / 2).astype(q.dtype)
    cotangents = trial.cotangents(recipe, plain)
    if (2 * half == q).all():
        whole = trial.judged(recipe)
    else:  # half of the least number of the dtype is none of its numbers
        whole = trial.judge(plain.replace(q=2 * half), cotangents)
    other = plain.replace(q=-half, scale=-2 * cast(float, plain.scale))
    across = dict(SAME) | {"dq": lambda x: 2 * x}
    return trial.relate(whole, _minus_dq(trial.judge(other, cotangents)), across)


def _minus_dq(judged: Judged) -> Judged:
    """With the other sign of dq, for what is carried across has a factor that is not negative."""
    if "dq" not in judged.results or "dq" not in judged.want:
        return judged
    return replace(
        judged,
        results=judged.results | {"dq": -judged.results["dq"]},
        want=judged.want | {"dq": -judged.want["dq"]},
    )
