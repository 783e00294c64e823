"""Statement of what separates failing from passing problems: its words, and what contradicts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from npattn.problem import Problem
from npattn.problem.options import OPTIONS
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import OPTION_FIELDS, Recipe
from npattn.testing.diagnosis.predicates import Predicate
from npattn.testing.report.outcome import Outcome

NAMES = {
    name: f"a {name}"
    for name in ("mask", "window", "bias", "scale", "softcap", "score_mod", "gate")
}
SIGNS = {(0,): "scale = 0", (-1,): "scale < 0", (-1, 0): "scale ≤ 0", (1,): "scale > 0"}


def holds_always(_: Outcome) -> bool:
    """Return True: a text without a condition contradicts no outcome."""
    return True


class Contrast(NamedTuple):
    """A condition that separates failing from passing problems.

    Attributes
    ----------
    text : str
        "" if nothing tells.
    holds : callable
        False for an outcome whose problem contradicts the text.
    """

    text: str = ""
    holds: Callable[[Outcome], bool] = holds_always


NOTHING = Contrast()


def state_views(views: Sequence[str]) -> Contrast:
    """State that problems fail on these views alone."""
    return Contrast(f"fails only on views: {', '.join(views)}", partial(_has_view, views))


def state(
    forms: Sequence[Sequence[str]],
    signs: Sequence[int] = (),
    inputs: Sequence[str] = (),
    condition: Predicate | None = None,
) -> Contrast:
    """State with which options, scales and inputs, and at which sizes, problems fail.

    Parameters
    ----------
    forms : sequence of sequences of str
        Sets of options, of which one has to be on.
    signs : sequence of int
        Signs of the scale.
    inputs : sequence of str
        Distributions.
    condition : Predicate, optional
        On the sizes.
    """
    tests: list[Callable[[Any], bool]] = [partial(_has_options, forms)]
    tests += [partial(_has_sign, signs)] if signs else []
    tests += [partial(_has_input, inputs)] if inputs else []
    tests += [condition.holds] if condition is not None else []
    text = _phrase(forms, SIGNS.get(tuple(signs), ""), _join(inputs), condition)
    return Contrast(text, partial(_holds_for, tests))


def _phrase(
    forms: Sequence[Sequence[str]], scale: str, inputs: str, condition: Predicate | None
) -> str:
    """Compose "fails only with causal at scale = 0 where T ≠ S"."""
    forms = sorted(forms, key=lambda form: [OPTION_FIELDS.index(n) for n in form])
    sets = [[NAMES.get(n, n) for n in form if n != "scale" or not scale] for form in forms]
    heads = condition is not None and "K" in condition.letters and "=" not in condition.text[:3]
    where = "" if condition is None else condition.text
    if where and heads and len(sets) == 1:
        sets, where = [[*sets[0], where]], ""
    several = len(sets) == 1 < len(forms[0]) and len(sets[0]) == len(forms[0])
    comma = "," if any(len(names) > 1 for names in sets) else ""
    with_ = f"{comma} or ".join(" and ".join(names) for names in sets)
    text = f" with {with_}" if with_ else ""
    text += " together" if several else ""
    text += f" at {scale}" if scale else ""
    text += f" on inputs of {inputs}" if inputs else ""
    return f"fails only{text}" + (f" where {where}" if where else "")


def _holds_for(tests: Sequence[Callable[[Any], bool]], outcome: Outcome) -> bool:
    """Return True if a failing problem, as sampled or as the rule changed it, passes the tests."""
    forms = [x for x in (outcome.sampled, outcome.problem) if x is not None]
    return not forms or any(all(test(x) for test in tests) for x in forms)


def _has_options(forms: Sequence[Sequence[str]], x: Recipe | Problem) -> bool:
    """Return True if all options of one of the forms are on."""
    on = set(options_on(x)) if isinstance(x, Recipe) else _options_of(x)
    return any(on.issuperset(form) for form in forms)


def _options_of(problem: Problem) -> set[str]:
    """Return the options that a problem has, by the names of a recipe."""
    values = {name: getattr(problem, name) for name in OPTIONS if name != "dropout_rate"}
    on = {name for name, x in values.items() if x is not None and x is not False}
    return {"dropout" if name == "dropout_mask" else name for name in on}


def _has_sign(signs: Sequence[int], x: Recipe | Problem) -> bool:
    return x.scale is not None and int(np.sign(x.scale)) in signs


def _has_input(inputs: Sequence[str], x: Recipe | Problem) -> bool:
    return getattr(x, "distribution", "") in inputs


def _has_view(views: Sequence[str], outcome: Outcome) -> bool:
    return outcome.view in views


def _join(inputs: Sequence[str]) -> str:
    """Name distributions, three at most."""
    more = f" and {len(inputs) - 3} more" if len(inputs) > 3 else ""
    return ", ".join(f'"{name}"' for name in inputs[:3]) + more
