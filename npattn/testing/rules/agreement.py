"""Rules about shape, dtype, and agreement with the oracle [1-11, 13, 15, 16]."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.oracle.api import evaluate
from npattn.problem.arrays import finfo
from npattn.testing.cases.model_sizes import model_recipes
from npattn.testing.cases.options import GATES
from npattn.testing.cases.recipe import Recipe
from npattn.testing.comparison import compare_arrays
from npattn.testing.rules.register import (
    Check,
    needs,
    no_gradients,
    no_lse,
    no_max_score,
    rule,
    sampling,
)
from npattn.testing.trial import Trial, Violation


@rule("shape-dtype", "13, 15", share=2)
def shape_and_dtype(trial: Trial, recipe: Recipe) -> float:
    """Results have the right shape, and a dtype that loses no precision.

    o, dq, dk, dv have the dtype of q, k, v; lse, dbias, dsinks, dgate any floating dtype not
    narrower than the smaller of float32 and that of the input. A gradient has the shape of its
    input, even if the input broadcasts. Broken by a bias gradient that is not reduced, o left in
    float32.
    """
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    lead = (*problem.lead, *(() if problem.headless else (problem.H,)))
    shapes = {
        "o": (*lead, problem.T, problem.E),
        "lse": (*lead, problem.T),
        "weights": (*lead, problem.T, problem.S),
        "max_score": (*lead, problem.T),
        **{
            f"d{n}": getattr(getattr(problem, n), "shape", None)
            for n in ("q", "k", "v", "bias", "sinks", "gate")
        },
    }
    dtype = problem.q.dtype
    least, of_bytes = min(finfo(dtype).bits, 32), trial.implementation.output is not None
    for name, array in trial.results(problem, cotangents).pairs:
        if array.shape != shapes[name]:
            text = f"{name} has shape {array.shape}, expected {shapes[name]}"
            raise Violation(text, problem, cotangents, "shape")
        same = name in ("o", "dq", "dk", "dv") and not (name == "o" and of_bytes)
        real = array.dtype.kind == "f" or array.dtype.name.startswith(("bfloat", "float"))
        if same and array.dtype != dtype:
            text = f"{name} has dtype {array.dtype}, expected {dtype}, that of q, k, v"
            raise Violation(text, problem, cotangents, "shape")
        if not real or finfo(array.dtype).bits < least:
            text = f"{name} has dtype {array.dtype}, expected a float of {least} bits or more"
            raise Violation(text, problem, cotangents, "shape")
    return 0.0


def _agreement(name: str) -> Check:
    """Return the check that one result, of all that a problem has, agrees with the oracle."""

    def check(trial: Trial, recipe: Recipe) -> float | None:
        comparison = trial.agreement(recipe).get(name)
        if comparison is None:
            return None
        problem = trial.problem(recipe)
        cotangents = trial.cotangents(recipe, problem, weights=True)
        return trial.agree({name: comparison}, problem, cotangents)

    agrees = "agree" if name == "weights" else "agrees"
    check.__doc__ = f"""{name} {agrees} with the oracle, element by element.

    The tolerance is derived from the rounding model. Gradients are taken of random cotangents of
    o, lse and weights together, so that no term can hide behind another. Broken by nearly
    everything: a wrong scale, alignment, window, head, order of softcap, bias and mask; in
    gradients by a term of the Jacobian that is missing, not reduced, or of another mask.
    """
    return check


rule("agreement-o", "1-10", share=1)(_agreement("o"))
rule("agreement-lse", "8, 11", unless=no_lse, share=1)(_agreement("lse"))
rule("agreement-max-score", "11", unless=no_max_score, share=1)(_agreement("max_score"))


@rule("agreement-weights", "8, 9", share=4)
def agreement_weights(trial: Trial, recipe: Recipe) -> float | None:
    """weights agree with the oracle, returned or read as o with v = I.

    If none are returned, v has one column of the unit matrix for each of E keys, some at a time: o
    is then the weight of each of these keys, and its tolerance the worst case of this problem.
    Broken by weights after dropout or before the mask, by a key whose weight goes to another.
    """
    if trial.implementation.returns_weights:
        return _agreement("weights")(trial, recipe)
    problem = trial.problem(recipe)
    if 0 in problem.v.shape:
        return None
    last = max(problem.S - problem.E, 0)  # the first of E keys to read: the last, and any, in turn
    start = int(np.random.default_rng([recipe.seed, 14]).integers(last + 1))
    start = last if recipe.seed // 2 % 2 else start
    columns = start + np.arange(problem.E) == np.arange(problem.S)[:, None]  # (S, E)
    problem = problem.replace(v=np.broadcast_to(columns, problem.v.shape).astype(problem.v.dtype))
    fwd = evaluate(problem, trial.conventions, engine="dense")
    allowed = trial.bounds(problem, fwd.out)
    o = trial.implementation.forward(problem)["o"]
    cotangents = recipe.cotangents(problem, lse=False)
    if o.shape != fwd.out.shape:
        raise Violation(f"o has shape {o.shape}, expected {fwd.out.shape}", problem, cotangents)
    last = min(start + problem.E, problem.S) - 1
    name = f"weights of keys {start} to {last} (o with v = I)"
    return trial.agree(
        {"weights": compare_arrays(name, o, fwd.out, allowed["o"])}, problem, cotangents
    )


for _name in ("dq", "dk", "dv"):
    rule(f"agreement-{_name}", "13", unless=no_gradients, share=1)(_agreement(_name))
_OPTIONS: dict[str, tuple[str, Any]] = {
    "bias": (
        "4, 13",
        (*("full", "matrix", "heads", "keys", "one for all heads", "one a row"),
         *("one for all samples", "alibi")),
    ),
    "sinks": ("8, 13", True),
    "gate": ("13, 16", tuple(GATES)),
}  # fmt: skip
for _name, (_section, _values) in _OPTIONS.items():
    rule(
        f"agreement-d{_name}",
        _section,
        unless=needs(_name, f"d{_name}"),
        draw=sampling(nonempty=False, **{_name: _values}),
        share=4,
    )(_agreement(f"d{_name}"))


@rule(
    "model-sizes",
    "1-11, 13",
    recipes=lambda trial, seed, examples: model_recipes(
        trial.space, seed, examples, lambda recipe: trial.skips(recipe, "model-sizes")
    ),
)
def model_sizes(trial: Trial, recipe: Recipe) -> float:
    """The sizes that models have give right results and gradients, as small ones do.

    Head sizes from 24 to 576, the heads of eighteen models with one query and with five, 9 samples,
    384 heads in all, lengths of whole tiles and one beside them up to 1025 queries and 8192 keys,
    windows narrower and wider than a tile: one problem each, with options drawn from the seed.
    Kernels are compiled for such sizes one by one. Broken by a tile that holds 64 of 96 columns, by
    a tile of heads that crosses a group of 7, by a split of the keys that loses the last part, by
    one without a key that overwrites the lse of the others.
    """
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    return trial.agree(trial.against_oracle(problem, cotangents), problem, cotangents)
