"""Properties: shape, dtype, and agreement with the oracle."""

from __future__ import annotations

from collections.abc import Callable

from npattn.arrays import finfo
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules.register import Check, no_gradients, no_lse, rule
from npattn.testing.trial import Trial, Violation


@rule("shape-dtype", "13, 15")
def shape_and_dtype(trial: Trial, recipe: Recipe) -> float:
    """Results have the shape of what they belong to and a dtype that loses nothing.

    o, dq, dk, dv have the dtype of q, k, v; lse, dbias, dsinks any floating dtype not narrower
    than the smaller of float32 and that of the input. A gradient is shaped as its input, also
    where the input broadcasts. Broken by a bias gradient that is not reduced, o left in float32.
    """
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    lead = (*problem.lead, *(() if problem.headless else (problem.H,)))
    shapes = {
        "o": (*lead, problem.T, problem.E),
        "lse": (*lead, problem.T),
        "weights": (*lead, problem.T, problem.S),
        **{
            f"d{n}": getattr(getattr(problem, n), "shape", None)
            for n in ("q", "k", "v", "bias", "sinks")
        },
    }
    own = problem.q.dtype
    least = min(finfo(own).bits, 32)
    for name, array in trial.results(problem, cotangents):
        if array.shape != shapes[name]:
            text = f"{name} has shape {array.shape}, want {shapes[name]}"
            raise Violation(text, problem, cotangents, "shape")
        same = name in ("o", "dq", "dk", "dv")
        real = array.dtype.kind == "f" or array.dtype.name.startswith(("bfloat", "float"))
        if same and array.dtype != own:
            text = f"{name} has dtype {array.dtype}, want {own}, that of q, k, v"
            raise Violation(text, problem, cotangents, "shape")
        if not real or finfo(array.dtype).bits < least:
            text = f"{name} has dtype {array.dtype}, want a float of {least} bits or more"
            raise Violation(text, problem, cotangents, "shape")
    return 0.0


def _agreement(name: str) -> Check:
    def check(trial: Trial, recipe: Recipe) -> float | None:
        found = trial.agreement(recipe)
        if name not in found:
            return None
        if found[name].passed:
            return found[name].ratio
        problem = trial.problem(recipe)
        cotangents = trial.cotangents(recipe, problem, weights=True)
        return trial.check({name: found[name]}, problem, cotangents)

    check.__doc__ = f"""{name} agrees with the oracle, element by element.

    The allowed error is derived from the rounding model. Gradients are taken of random
    cotangents on o, lse and weights together, so that no term can hide behind another. Broken by
    nearly everything: a wrong scale, alignment, window, head, order of softcap, bias and mask; in
    gradients by a term of the Jacobian that is missing, not reduced, or of another mask.
    """
    return check


def _lacks(feature: str, gradient: str) -> Callable[[Trial], str | None]:
    def unless(trial: Trial) -> str | None:
        if feature not in trial.space.features:
            return f"has no {feature}"
        return None if gradient in trial.gradients else f"gives no {gradient}"

    return unless


rule("agreement-o", "1-10")(_agreement("o"))
rule("agreement-lse", "8, 11", unless=no_lse)(_agreement("lse"))
rule(
    "agreement-weights",
    "8, 9",
    unless=lambda t: None if t.implementation.returns_weights else "returns no weights",
)(_agreement("weights"))
for _name in ("dq", "dk", "dv"):
    rule(f"agreement-{_name}", "13", unless=no_gradients)(_agreement(_name))
rule(
    "agreement-dbias",
    "4, 13",
    unless=_lacks("bias", "dbias"),
    draw=lambda t: {
        "force": {
            "bias": (
                "full",
                "matrix",
                "heads",
                "keys",
                "one for all heads",
                "one a row",
                "one for all samples",
                "alibi",
            )
        }
    },
)(_agreement("dbias"))
rule(
    "agreement-dsinks",
    "8, 13",
    unless=_lacks("sinks", "dsinks"),
    draw=lambda t: {"force": {"sinks": True}},
)(_agreement("dsinks"))
