"""Probe an implementation: structure, each option alone, pairs of options, gradients, sizes of 0.

Structure and options that it refuses with an exception are not applicable, are listed in the
report, and are never sampled. What it accepts and answers wrongly is a finding, and is not sampled
again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from npattn.testing.adapters.base import ImplementationError
from npattn.testing.capabilities.options import (
    probe_elsewhere,
    probe_options,
    probe_pairs,
    values_of,
)
from npattn.testing.capabilities.probing import Finding, Probing
from npattn.testing.capabilities.structure import probe_plain, probe_variations, probe_zeros
from npattn.testing.trial import GRADIENTS, Trial


@dataclass(frozen=True)
class Capabilities:
    """Structure and options that an implementation accepts."""

    trial: Trial  # trial with its space narrowed to what is accepted
    refused: tuple[str, ...]  # structure and options that it refuses, and why, a line each
    findings: tuple[Finding, ...]  # empty if everything that was accepted was also answered


def probe(trial: Trial) -> Capabilities:
    """Try structure, then options, alone and in pairs, then gradients and sizes of 0."""
    probing = Probing(replace(trial))
    trial.implementation.ask_everything()  # it may return in this dtype what it raises in another
    if probe_plain(probing):
        _read_gradients(probing)
        probe_variations(probing)
        probe_options(probing)
        probe_pairs(probing)
        _read_gradients(probing, report=True)
        probe_zeros(probing)
        probe_elsewhere(probing)
    probing.trial.first_calls += tuple(probing.calls)
    probing.trial.refusals = tuple(probing.refusals)
    return Capabilities(probing.trial, tuple(probing.refused), tuple(probing.findings))


def _read_gradients(probing: Probing, report: bool = False) -> None:
    """Find the gradients that it returns: a backward may leave some inputs out."""
    trial = probing.trial
    if not trial.implementation.has_gradients:
        return
    base, features = trial.space.base(), trial.space.features if report else frozenset[str]()
    bias = _plainest(probing, "bias") if "bias" in features else None
    gate = _plainest(probing, "gate") if "gate" in features else None
    recipe = replace(base, bias=bias, sinks=base.sinks or "sinks" in features, gate=gate)
    recipes = [recipe]
    if not probing.allows(recipe):
        alone = [replace(base, gate=gate)] if gate else []
        recipes = [replace(recipe, sinks=base.sinks, gate=None), *alone, base]
    try:
        returned = {n for recipe in recipes for n in probing.call(recipe) if n in GRADIENTS}
    except ImplementationError as err:
        probing.refused.append(f"gradients: refused ({err})")
        trial.gradients = frozenset()
        return
    trial.gradients = frozenset(returned)
    tied = trial.implementation.latent is not None  # dk has the share of v
    expected = {
        "dq": True,
        "dk": True,
        "dv": not tied,
        "dbias": bias is not None,
        "dsinks": recipe.sinks,
        "dgate": gate is not None,
    }
    for name, there in expected.items():
        if report and there and name not in returned:
            probing.refused.append(f"{name}: backward does not return it")


def _plainest(probing: Probing, field: str) -> str | None:
    """Return the plainest bias or gate that is accepted."""
    space = probing.trial.space
    base, accepted = space.base(), values_of(space, field)
    return next((x for x in accepted if probing.allows(replace(base, **{field: x}))), None)
