"""Describe what is judged and how, and what is not tested."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import npattn
from npattn.conventions import Conventions
from npattn.options import FEATURES
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.runner.rounds import Round

__all__ = ["describe_model", "describe_untested"]


def describe_untested(
    implementation: Implementation, rounds: Sequence[Round], sweeps: bool, interrupted: str
) -> tuple[str, ...]:
    """Say what was not tested, a line each; `interrupted` is what an interrupt has left out."""
    lines = [*_missing(implementation)]
    lines += ["ranks other than 4: layout BTHD"] if implementation.layout == "BTHD" else []
    stopped = any(done.stopped for done in rounds)
    lines += ["what comes after the first failure (fail_fast)"] if stopped else []
    lines += [f"{interrupted} (interrupted)"] if interrupted else []
    return (*lines, *([_sizes(rounds[0], sweeps)] if rounds else []))


def _sizes(done: Round, sweeps: bool) -> str:
    """Say which sizes the rules of a round sampled."""
    ranges = done.judge.trial.space.ranges.items()
    drawn = ", ".join(f"{n} {a}–{b}" if a < b else f"{n} {a}" for n, (a, b) in ranges)
    drawn += " and model-sizes" if "model-sizes" in done.names else ""
    return f"sizes outside {drawn} (sizes={'' if sweeps else ', sweep='})"


def _missing(implementation: Implementation) -> list[str]:
    """Describe options and results that npattn does not know, or the implementation lacks."""
    unknown = "unknown to the judge, keeps its default"
    lines = [n if ": " in n else f"{n}: {unknown}" for n in implementation.untested]
    absent = [n for n in FEATURES if n not in implementation.features]
    if absent:
        lines.append(f"options it does not have: {', '.join(absent)}")
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
    return here | (implementation.versions or loaded)
