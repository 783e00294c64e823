"""The two sides of a difference: implementations, narrowed to the problems that both accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npattn.errors import OptionError
from npattn.problem import Cotangents
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.capabilities import Capabilities, probe
from npattn.testing.capabilities.refusals import read_refusals
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import STRUCTURE, Space
from npattn.testing.trial import GRADIENTS, Trial


@dataclass(frozen=True)
class Sides:
    """Two implementations, judged by problems that both accept."""

    a: Trial  # with one space, and the gradients that both give
    b: Trial
    only: tuple[str, ...] = ()  # what one of them takes or returns alone, a line each
    # what the probe found: structure that one answers wrongly, calls that ended its process
    wrong: tuple[str, ...] = ()


def open_sides(
    a: Implementation, b: Implementation, dtype: str, sizes: Mapping[str, Sequence[int]]
) -> Sides | tuple[str, ...]:
    """Probe two implementations; return what they have in common.

    If one of them does not answer the plainest problem, the answer is why, a line each.
    """
    both = [_probe(f, dtype, sizes) for f in (a, b)]
    wrong = [_format_findings(x, side) for x, side in zip("AB", both, strict=True)]
    if any(not side.trial.space.structure for side in both):
        for f, side in zip((a, b), both, strict=True):
            if any(finding.status == "not applicable" for finding in side.findings):
                raise OptionError(f"{f.name} accepts {side.refused[0]}")
        return tuple(x for found in wrong for x in found)
    trials = [side.trial for side in both]
    space = _common_space(*(trial.space for trial in trials))
    gradients = trials[0].gradients & trials[1].gradients
    one, other = (replace(x, space=space, gradients=gradients, memo={}) for x in trials)
    return Sides(one, other, tuple(_list_alone(*both)), tuple(x for found in wrong for x in found))


def share_cotangents(sides: Sides, recipe: Recipe) -> Cotangents:
    """Return cotangents that both take: of the lse if both differentiate it, 0 in empty rows."""
    lse = sides.a.takes_dlse and sides.b.takes_dlse
    problems = [(trial, trial.problem(recipe)) for trial in (sides.a, sides.b)]
    random = recipe.cotangents(problems[0][1], lse=lse)
    dlse = random.dlse
    if dlse is not None:
        empty = np.logical_or(*(trial.empty(problem) for trial, problem in problems))
        dlse = np.where(empty, np.zeros_like(dlse), dlse)
    return Cotangents(random.dout, dlse)


def _probe(f: Implementation, dtype: str, sizes: Mapping[str, Sequence[int]]) -> Capabilities:
    """Return the capabilities of an implementation in a dtype, from refusals and a few calls."""
    _, structure, together = read_refusals(f)
    alone = {name for names in together if len(names) == 1 for name in names}
    space = Space(
        features=f.features - alone,
        structure=frozenset(STRUCTURE) - structure,
        dtype=dtype,
        sizes={**f.sizes, **sizes},
        few_shapes=f.framework.compiles,
        refused=together,
    )
    trial = Trial(f, f.conventions, Rounding.choose(f.rounding, dtype, f.weights_storage), space)
    with f.framework.one_thread():
        return probe(trial)


def _format_findings(name: str, found: Capabilities) -> list[str]:
    lines = []
    for finding in found.findings:
        first, *rest = finding.message.splitlines() or [""]
        more = f" (and {len(rest)} more)" if rest else ""
        lines.append(f"{name} {finding.status} in {finding.rule}: {first}{more}")
    return lines


def _common_space(a: Space, b: Space) -> Space:
    """Return the space of problems that both accept."""
    features, structure = a.features & b.features, a.structure & b.structure
    ranks = [name for name in structure if name.startswith("rank")]
    always = {**a.always, **b.always}
    if not ranks or not features >= set(always):
        missing = ", ".join(sorted(set(always) - features)) or "a rank of q, k and v"
        raise OptionError(f"A and B accept no problem in common: {missing} is not in both")
    return replace(
        a,
        features=features,
        structure=structure,
        refused=a.refused | b.refused,
        always=always,
        few_shapes=a.few_shapes or b.few_shapes,
    )


def _list_alone(a: Capabilities, b: Capabilities) -> list[str]:
    """Return what one of them takes or returns alone, and what neither does."""
    lines = []
    for name, here_side, other in (("A", a, b), ("B", b, a)):
        refused = {line.partition(":")[0] for line in other.refused}
        here, there = here_side.trial, other.trial
        kinds: dict[str, Sequence[Any]] = {
            "takes": sorted(here.space.features - there.space.features),
            "accepts": [x for x in STRUCTURE if x in here.space.structure and x in refused],
            "returns": [x for x in _results(here) if x not in _results(there)],
        }
        lines += [f"only {name} {verb}: {', '.join(x)}" for verb, x in kinds.items() if x]
    if not a.trial.gradients and not b.trial.gradients:
        way = "diff(Implementation(f, backward=...), ...) takes those of a NumPy function"
        lines.append(f"gradients are not compared, for neither has any: {way}")
    return lines


def _results(trial: Trial) -> list[str]:
    f = trial.implementation
    returned = {"lse": f.returns_lse, "weights": f.returns_weights}
    returned["max_score"] = f.returns_max_score
    of_forward = [name for name, there in returned.items() if there]
    return [*of_forward, *(name for name in GRADIENTS if name in trial.gradients)]
