"""Describe what is judged and how, and what is not tested."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import npattn
from npattn.conventions import Conventions
from npattn.problem.options import FEATURES
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.asked import MODELS, Asked
from npattn.testing.cases.model_sizes import SHARE, find_obstacle
from npattn.testing.report.outcome import OUT_OF_TIME, Outcome
from npattn.testing.runner.rounds import Round

ALL_FROM = SHARE * len(MODELS)
"""Examples with which all model sizes are asked."""


def describe_untested(
    implementation: Implementation, rounds: Sequence[Round], interrupted: str
) -> tuple[str, ...]:
    """Say what was not tested, a line each; `interrupted` is what an interrupt has left out."""
    lines = [f"{interrupted} (interrupted)"] if interrupted else []
    stopped = any(done.stopped for done in rounds)
    lines += ["what comes after the first failure (fail_fast)"] if stopped else []
    lines += _missing_results(implementation)
    lines += ["ranks other than 4: layout BTHD"] if implementation.layout == "BTHD" else []
    unknown = "unknown to the judge, keeps its default"
    lines += [n if ": " in n else f"{n}: {unknown}" for n in implementation.untested]
    absent = [n for n in FEATURES if n not in implementation.features]
    return (*lines, *([f"options it does not have: {', '.join(absent)}"] if absent else []))


def _missing_results(implementation: Implementation) -> list[str]:
    """Describe gradients and lse that the implementation lacks."""
    lines = []
    if not implementation.has_gradients and not implementation.gradients_raise:
        lines.append("gradients: no backward= was given")
    flag = implementation.signature.names.get("return_lse", "return_lse")
    if "return_lse" not in implementation.signature.returns:
        lines.append("lse: no return_lse parameter")
    elif not implementation.returns_lse:
        lines.append(f"lse: {flag} raises")
    elif not implementation.takes_dlse and implementation.backward is not None:
        lines.append("gradients through lse: backward has no dlse parameter")
    elif not implementation.takes_dlse:
        lines.append(f"gradients through lse: {flag} returns one that is not differentiated")
    return lines


def describe_skipped(done: Round, asked: Asked) -> dict[str, str]:
    """Return the model sizes that were not asked, by name, each with the reason."""
    space, rule = done.judge.trial.space, "model-sizes"
    answer = done.answers.get(rule)
    reason = "every problem drawn was refused, or left out"
    skipped = {name: shape for name, shape in MODELS.items() if name not in asked.models}
    if rule not in done.names:
        return dict.fromkeys(skipped, "only other rules were asked")
    if answer is None:
        reason = "the check ended before"
    elif isinstance(answer, Outcome) and answer.failed:
        reason = "after a failure of model-sizes"
    elif done.judge.deadline < math.inf:
        reason = OUT_OF_TIME
    elif done.judge.examples < ALL_FROM:
        reason = f"all are asked with {ALL_FROM} examples"
    return {name: find_obstacle(space, shape) or reason for name, shape in skipped.items()}


def describe_model(
    implementation: Implementation, rounding: Rounding | str | None, behaves: Mapping[str, str]
) -> dict[str, Any]:
    """Return what it is judged as, for the settings of a report."""
    return {
        "features": tuple(sorted(implementation.features)),
        **({"reads": implementation.reads} if implementation.reads else {}),
        "rounding": rounding.name if isinstance(rounding, Rounding) else rounding or "undeclared",
        "conventions": _name_changes(implementation.conventions),
        **({"behaves as": behaves} if behaves else {}),
        "versions": _versions(implementation),
    }


def _name_changes(conventions: Conventions) -> dict[str, Any]:
    """Return what the conventions change, by name."""
    default = Conventions()
    return {
        name: value for name, value in vars(conventions).items() if value != getattr(default, name)
    }


def _versions(implementation: Implementation) -> dict[str, str]:
    loaded = {n: sys.modules[n].__version__ for n in ("torch", "jax") if n in sys.modules}
    python = platform.python_version()
    here = {"npattn": npattn.__version__, "numpy": np.__version__, "python": python}
    return here | dict(implementation.versions or loaded)
