"""Failed outcomes made from chosen recipes, without asking the rules."""

from __future__ import annotations

from dataclasses import replace

import npattn
from npattn.conventions import Conventions
from npattn.mistakes import Gated
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.diagnosis import causes
from npattn.testing.diagnosis.evidence import observe
from npattn.testing.report.outcome import Outcome
from npattn.testing.trial import GRADIENTS, Trial

SIZES = {"lead": (2,), "T": 3, "S": 5, "D": 7, "E": 11}
RECIPES = {
    "plain": Recipe(**SIZES, H=2, K=2),
    "wide": Recipe(lead=(1,), H=3, K=3, T=7, S=11, D=13, E=5, seed=1),
    "groups": Recipe(**SIZES, H=6, K=3, seed=2),
    "causal": Recipe(**SIZES, H=2, K=2, causal=True, seed=3),
    "bias": Recipe(**SIZES, H=2, K=2, bias="full", seed=4),
    "groups of 3": Recipe(**SIZES, H=6, K=2, seed=7),
    "square bias": Recipe(**SIZES | {"S": 3}, H=2, K=2, bias="full", seed=8),
    "mask": Recipe(**SIZES, H=2, K=2, mask="full", seed=5),
    "bias by sample": Recipe(**SIZES, H=2, K=2, bias="one for all heads", seed=9),
    "dropout": Recipe(**SIZES, H=2, K=2, dropout=0.3, seed=10),
    "longer": Recipe(**SIZES | {"S": 13}, H=2, K=2, seed=11),
    "longest": Recipe(**SIZES | {"S": 17}, H=2, K=2, seed=12),
    "empty rows": Recipe(**SIZES, H=2, K=2, mask="empty rows", seed=18),
    "one key": Recipe(**SIZES | {"S": 1}, H=2, K=2, seed=15),
    "square": Recipe(lead=(2,), H=3, K=3, T=5, S=5, D=7, E=11, seed=13),
    "no keys": Recipe(**SIZES | {"S": 0}, H=2, K=2, sinks=True, seed=14),
    "equal widths": Recipe(**SIZES | {"E": 7}, H=2, K=2, seed=20),
    "rows of tiles": Recipe(**SIZES | {"T": 67, "S": 128}, H=3, K=3, seed=19),
    "window": Recipe(**SIZES, H=2, K=2, window=(1, 2), seed=6),
}


def trial_of(
    forward,
    backward=None,
    features=None,
    conventions=None,
    dtype="float32",
    layout=None,
    framework="numpy",
):
    implementation = Implementation(
        forward, backward=backward, features=features, framework=framework, name="f", layout=layout
    )
    return Trial(
        implementation,
        conventions or Conventions(),
        Rounding.undeclared(dtype),
        Space(features=implementation.features, dtype=dtype),
        gradients=frozenset(GRADIENTS if backward else ()),
    )


def fail(trial, names, rule="agreement", status="failed", **details):
    """Outcomes as of rules that fail on these recipes, right or not."""
    outcomes = []
    for number, name in enumerate(names):
        recipe = replace(RECIPES[name], dtype=trial.space.dtype)
        problem = trial.problem(recipe)
        outcomes.append(
            Outcome(
                f"{rule}-{number}",
                "1",
                "",
                trial.space.dtype,
                status,
                problem=problem,
                cotangents=trial.cotangents(recipe, problem, weights=True),
                sampled=recipe,
                **({"kind": "value", "message": "o is wrong"} | details),
            )
        )
    return outcomes


def attention_with(of=Gated, **steps):
    """Return a right implementation but for some steps, each called with what it replaces."""

    def override(name, f):
        return lambda self, *args, **options: f(getattr(super(cls, self), name), *args, **options)

    cls = type("Changed", (of,), {name: override(name, f) for name, f in steps.items()})
    return cls()


def trial_with(dtype="float32", **steps):
    f = attention_with(**steps)
    return trial_of(f.forward, f.backward, dtype=dtype)


def evidence_of(trial, recipe):
    recipe = replace(recipe, dtype=trial.space.dtype)
    problem = trial.problem(recipe)
    return observe(trial, problem, trial.cotangents(recipe, problem), recipe.view)


def attend(q, k, v, causal=False, conventions=None):
    own = Conventions(**conventions or {})
    return npattn.attention(q, k, v, causal=causal and own.causal, conventions=own).astype(q.dtype)


def diagnose(trial, outcomes):
    """Return the causes; each outcome has exactly one."""
    explained, found = causes.diagnose([(trial, outcomes)])
    assert sorted(o.id for o in outcomes) == sorted(rule for c in found for rule in c.rules)
    named = {rule: c.name for c in found for rule in c.rules}
    assert [o.diagnosis for o in explained] == [named[o.id] for o in outcomes]
    return found


def only_cause(trial, outcomes):
    (cause,) = diagnose(trial, outcomes)
    return cause
