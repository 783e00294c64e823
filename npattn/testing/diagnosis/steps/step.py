"""Steps of attention that may be wrong: a register, and a candidate of each in either pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from npattn.mistakes import Attention
from npattn.mistakes.attention import Inputs
from npattn.problem import Problem
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.evidence import Evidence
from npattn.testing.diagnosis.mistakes import implement, predict_by

Change = Callable[[Any], dict[str, Any]]
"""`Inputs` → the fields that are changed."""

NEEDS: dict[str, Callable[[Problem], bool]] = {
    "mask": lambda p: p.mask is not None,
    "causal": lambda p: bool(p.causal),
    "window": lambda p: p.window is not None,
    "diagonal": lambda p: bool(p.causal) or p.window is not None,
    "hidden": lambda p: bool(p.causal) or p.window is not None or p.mask is not None,
    "bias": lambda p: p.bias is not None,
    "softcap": lambda p: p.softcap is not None,
    "sinks": lambda p: p.sinks is not None,
    "dropout": lambda p: p.dropout_mask is not None,
    "heads": lambda p: p.H != p.K,
    "precision of float64": lambda p: p.q.dtype == np.float64,
}
"""Problems on which a topic matters; others matter on all."""


@dataclass(frozen=True)
class Step:
    """One step that is wrong.

    Attributes
    ----------
    topic : str
        Part of attention that it belongs to; with an entry of `NEEDS`, what a problem must have.
    text : str
        The mistake in words.
    make : callable
        Returns an instance of `Attention` with this step changed.
    backward_only : bool
        It has no meaning in the forward pass.
    """

    topic: str
    text: str
    make: Callable[[], Attention]
    backward_only: bool = False


STEPS: list[Step] = []


def change(topic: str, text: str, changes: Change) -> None:
    """Register a step that takes other inputs or options than those given."""

    def inputs(self: Attention, *arrays: Any, **options: Any) -> Inputs:
        c = Attention.inputs(self, *arrays, **options)
        if topic in ("mask", "window") and getattr(c, topic) is None:
            return c
        return c._replace(**changes(c))

    overrides(topic, text, inputs=inputs)


def overrides(
    topic: str, text: str, *, backward_only: bool = False, **methods: Callable[..., Any]
) -> None:
    """Register a step that replaces methods of `Attention`."""
    STEPS.append(Step(topic, text, replaces(**methods), backward_only))


def replaces(**methods: Callable[..., Any]) -> type[Attention]:
    """Return `Attention` with other methods."""
    return type("Wrong", (Attention,), methods)


def step_candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Yield every step that matters to a problem, wrong in both passes and in one alone."""
    wrong = evidence.wrong
    right_backward = bool(wrong) and not any(name.startswith("d") for name in wrong)
    for step in STEPS:
        if NEEDS.get(step.topic, bool)(evidence.problem):
            if not step.backward_only:
                yield candidate_of(step)
            if not evidence.trial.gradients:
                continue
            if right_backward and not step.backward_only:
                yield candidate_of(step, " in forward")
            elif not right_backward:
                yield candidate_of(step, "" if step.backward_only else " in backward")


def candidate_of(step: Step, where: str = "", kind: str = "step") -> Candidate:
    """Return the candidate of a step that is wrong " in forward" or " in backward"; "" is both."""
    in_forward = not step.backward_only and where != " in backward"
    in_backward = where != " in forward"
    name = step.text + where
    explains = partial(_explains, step, in_forward, in_backward)
    return Candidate(kind, name, name, explains, step.topic)


def _explains(step: Step, in_forward: bool, in_backward: bool, evidence: Evidence) -> bool:
    wrong, right = step.make(), Attention()
    forward, backward = wrong if in_forward else right, wrong if in_backward else right
    implementation = implement(forward, backward, evidence.trial.implementation)
    try:
        return evidence.reproduced_by(predict_by(implementation, evidence))
    except ImplementationError:
        return False
