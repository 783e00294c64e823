"""Find out what an implementation accepts: structure and options, each tried on a plain problem.

Structure that it refuses with an exception is not applicable, is listed on top of the report, and
is never sampled. On accepted structure an option that raises is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from npattn.options import OPTIONS
from npattn.problem import Cotangents, Problem
from npattn.testing.adapters.base import ImplementationError, ResultError, Results
from npattn.testing.cases.recipe import Recipe, repeat_for_view
from npattn.testing.cases.space import STRUCTURE
from npattn.testing.levels import Level
from npattn.testing.trial import GRADIENTS, Trial, Violation

__all__ = ["Capabilities", "Finding", "probe"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with what an implementation accepts.

    Attributes
    ----------
    rule : str
        "structure", or "option-" and the option.
    status : {"failed", "error", "not applicable"}
    message : str
    problem : Problem or None
    recipe : Recipe or None
    error : Exception or None
    examples : int
        Number of problems that show it.
    level : str
        One of `LEVELS`.
    """

    rule: str
    status: Literal["failed", "error", "not applicable"]
    message: str
    problem: Problem | None = None
    recipe: Recipe | None = None
    error: Exception | None = None
    examples: int = 0
    level: Level = "values"


@dataclass(frozen=True)
class Capabilities:
    """Structure and options that an implementation accepts.

    Attributes
    ----------
    trial : Trial
        Trial with its space narrowed to what is accepted.
    refused : tuple of str
        Structure and options that it refuses, and why, a line each.
    findings : tuple of Finding
        Empty if everything that was accepted was also answered.
    """

    trial: Trial
    refused: tuple[str, ...]
    findings: tuple[Finding, ...]


def probe(trial: Trial) -> Capabilities:
    """Try structure, then each option alone, then gradients and sizes of 0."""
    probing = _Probe(trial)
    findings = probing.run()
    probing.trial.first_calls = tuple(probing.calls)
    return Capabilities(probing.trial, tuple(probing.refused), tuple(findings))


class _Probe:
    """The steps of `probe`, which narrow a copy of the trial."""

    def __init__(self, trial: Trial) -> None:
        self.trial = replace(trial)
        self.refused: list[str] = []
        self.calls: list[tuple[Problem, Cotangents, Results]] = []

    def _call(self, recipe: Recipe, *, gradients: bool = True) -> Results:
        """Return results of one problem, and record them if it is among the first."""
        f = self.trial.implementation
        problem = self.trial.problem(recipe)
        cotangents = self.trial.cotangents(recipe, problem)
        problem, cotangents = repeat_for_view(recipe, problem, cotangents)
        results = f.forward(problem, recipe.view)
        if gradients and f.has_gradients:
            try:
                results += f.gradients(problem, cotangents, recipe.view)
            except ImplementationError as err:
                err.cotangents = cotangents
                raise
        if recipe.view == "contiguous" and len(self.calls) < FIRST_CALLS:
            self.calls.append((problem, cotangents, results))
        return results

    def run(self) -> list[Finding]:
        findings = self._structure()
        if self.trial.space.structure:
            findings += self._options()
            self._gradients()
            findings += self._zeros()
        return findings

    def _structure(self) -> list[Finding]:
        space = self.trial.space
        base = space.base()
        accepted: set[str] = set()
        wrong: list[Finding] = []
        first = ""
        for rank in RANKS:
            if self.trial.implementation.layout == "BTHD" and rank != "rank 4":
                continue
            shape = _with_rank(base, rank)
            try:
                self._call(shape, gradients=False)
            except ResultError as err:
                wrong = wrong or [self._unreadable(shape, err)]
                first = first or str(err)
            except ImplementationError as err:
                self.refused.append(f"{rank}: refused ({err})")
                first = first or str(err)
            else:
                accepted.add(rank)
                base = shape if len(accepted) == 1 else base
        if not accepted:
            self.trial.space = replace(space, structure=frozenset())
            if wrong:
                return wrong
            self.refused[:] = [f"nothing: even the plainest problem is refused ({first})"]
            return [Finding("structure", "not applicable", first)]
        wrong = wrong or self._forward_only(base)
        accepted |= self._variations(base)
        self.trial.space = replace(space, structure=frozenset(accepted))
        return wrong

    def _forward_only(self, base: Recipe) -> list[Finding]:
        """Mark it forward-only if even the plainest problem has no gradient."""
        implementation = self.trial.implementation
        if not implementation.has_gradients:
            return []
        try:
            self._call(base)
        except ResultError as err:
            implementation.forward_only = True
            return [self._unreadable(base, err)]
        except ImplementationError as err:
            implementation.forward_only = True
            self.refused.append(f"gradients: refused ({err})")
        return []

    def _unreadable(self, recipe: Recipe, err: ResultError) -> Finding:
        """Report that it took the problem, and answered with something that is not a result."""
        problem = self.trial.problem(recipe)
        return Finding("structure", "error", str(err), problem, recipe, err)

    def _variations(self, base: Recipe) -> set[str]:
        accepted = set()
        for name, change in _variations(base, self.trial.space.sizes).items():
            if name not in self.trial.space.structure:  # a profile refuses it
                continue
            try:
                self._call(replace(base, **change))
            except ImplementationError as err:
                self.refused.append(f"{name}: refused ({err})")
            else:
                accepted.add(name)
        return accepted

    def _options(self) -> list[Finding]:
        """Try each option alone, on accepted structure: an exception is an error."""
        trial, findings = self.trial, []
        space = trial.space
        base = self._base()
        for feature in OPTIONS:
            if feature not in space.features:
                continue
            recipe = replace(base, **_probe_of(feature))
            try:
                self._call(recipe)
            except ImplementationError as err:
                message = f"{feature} alone: {err}"
                problem = trial.problem(recipe)
                err.cotangents = err.cotangents or trial.cotangents(recipe, problem)
                findings.append(
                    Finding(f"option-{feature}", "error", message, problem, recipe, err)
                )
                space = replace(space, features=space.features - {feature})
                self.refused.append(f"{feature}: raised, so it is not sampled again ({err})")
        trial.space = space
        return findings

    def _gradients(self) -> None:
        """Find the gradients that it returns: a backward may leave some inputs out."""
        trial = self.trial
        if not trial.implementation.has_gradients:
            return
        base = self._base()
        bias = "matrix" if "bias" in trial.space.features else None
        recipe = replace(base, bias=bias, sinks="sinks" in trial.space.features)
        try:
            returned = {n for n in self._call(recipe) if n in GRADIENTS}
        except ImplementationError as err:
            self.refused.append(f"gradients: refused ({err})")
            return
        trial.gradients = frozenset(returned)
        expected = {"dq": True, "dk": True, "dv": True, "dbias": bias, "dsinks": recipe.sinks}
        for name, there in expected.items():
            if there and name not in returned:
                self.refused.append(f"{name}: backward does not return it")

    def _zeros(self) -> list[Finding]:
        """Check accepted sizes of 0; if one is wrong, none is sampled."""
        trial, wrong = self.trial, []
        base = self._base()
        changes: dict[str, dict[str, Any]] = {"": {}} | _variations(base, trial.space.sizes)
        # With E = D a result as wide as q, and not as v, would go unnoticed.
        wide = changes.get("E != D", {}) if "E != D" in trial.space.structure else {}
        for name, change in changes.items():
            if name and (not name.endswith("= 0") or name not in trial.space.structure):
                continue
            sinks = name == "S = 0" and "sinks" in trial.space.features  # which are left alone
            recipe = replace(base, **(wide | change), sinks=sinks)
            problem = trial.problem(recipe)
            cotangents = trial.cotangents(recipe, problem)
            try:
                trial.check(trial.against_oracle(problem, cotangents), problem, cotangents)
            except (Violation, ImplementationError) as err:
                wrong.append((name, recipe, problem, err))
                if not name:
                    return []  # wrong without any 0: the business of the other rules
        if not wrong:
            return []
        names = [name for name, *_ in wrong]
        trial.space = replace(trial.space, structure=trial.space.structure - set(names))
        self.refused.append(f"{', '.join(names)}: accepted and wrong, so not sampled again")
        _, recipe, problem, first = wrong[0]
        message = "\n".join(f"{name}: {err}" for name, _, _, err in wrong)
        return [Finding("structure", "failed", message, problem, recipe, first, len(wrong))]

    def _base(self) -> Recipe:
        base = self.trial.space.base()
        return _with_rank(base, next(rank for rank in RANKS if rank in self.trial.space.structure))


FIRST_CALLS = 64
"""Calls of the probe that are recorded, and made again by a rule."""
RANKS = ("rank 4", "rank 3", "rank 2", "rank 5")


def _with_rank(base: Recipe, rank: str) -> Recipe:
    if rank == "rank 2":
        return replace(base, lead=None, H=1, K=1)
    return replace(base, lead={"rank 3": (), "rank 4": base.lead, "rank 5": (2, 3)}[rank])


PROBES: dict[str, dict[str, Any]] = {
    "mask": {"mask": "full"},
    "window": {"window": (2, 3)},
    "bias": {"bias": "full"},
    "score_mod": {"score_mod": "distance"},
    "sinks": {"sinks": True},
    "dropout_mask": {"dropout": 0.5},
    "dropout_rate": {"dropout": 0.5},
}
"""Fields of a recipe that probe an option, if not its first example or True."""


def _probe_of(feature: str) -> dict[str, Any]:
    examples = OPTIONS[feature].examples
    return PROBES.get(feature, {feature: examples[0] if examples else True})


def _variations(base: Recipe, sizes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
    """Return the structure to probe, by name: changes of the plainest problem.

    Sizes that the user restricts stay.
    """
    free = {letter: letter not in sizes for letter in "BHKTSDE"}
    tests: dict[str, dict[str, Any]] = {}
    if base.lead is not None and free["H"] and free["K"]:
        tests["K < H"] = {"H": 3 * base.K}
    elif "H" in sizes and "K" in sizes and max(sizes["H"]) > min(sizes["K"]):
        tests["K < H"] = {"H": max(sizes["H"]), "K": min(sizes["K"])}
    tests["E != D"] = {"E": base.E + 8 if free["E"] else max(sizes["E"])}
    if free["D"] and not free["E"]:
        tests["E != D"] = {"D": base.D + 8}
    tests["D % 8"] = {"D": 13} if free["D"] else {}
    if tests["D % 8"] and free["E"]:
        tests["D % 8"]["E"] = 13
    long = 2 * base.S + 1 if free["S"] else max(sizes["S"])
    tests["T != S"] = (
        {"S": long} if long != base.T else {"T": base.T + 1 if free["T"] else min(sizes["T"])}
    )
    late = 2 * base.T + 1 if free["T"] else max(sizes["T"])
    tests["T > S"] = {"T": late}
    if base.lead and len(base.lead) >= 1:
        tests["broadcast"] = {"broadcast": True}
    if base.lead and free["B"]:
        tests["B = 0"] = {"lead": (0, *base.lead[1:])}
    if base.lead is not None and free["H"] and free["K"]:
        tests["H = 0"] = {"H": 0, "K": 0}
    for letter in "TSDE":
        if free[letter]:
            tests[f"{letter} = 0"] = {letter: 0}
    for view in ("transposed", "stepped", "expanded", "reversed"):
        tests[view] = {"view": view}
    legal = {name: change for name, change in tests.items() if change and name in STRUCTURE}
    if "T > S" in legal and legal["T > S"]["T"] <= base.S:
        del legal["T > S"]
    return legal
