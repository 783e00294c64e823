"""check: probe what an implementation accepts, hold it against every rule, shrink what fails."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis.errors import Flaky

import npattn
from npattn.conventions import Conventions
from npattn.errors import DtypeError, OptionError
from npattn.testing.evidence import model_of, plain
from npattn.testing.implementation import Implementation, ImplementationError
from npattn.testing.outcome import outcome_of
from npattn.testing.probe import Probe
from npattn.testing.properties import PROPERTIES, Property
from npattn.testing.recipe import Recipe
from npattn.testing.report import Outcome, Report, Status
from npattn.testing.robustness import notes
from npattn.testing.strategies import FEATURES, Pools, Space
from npattn.testing.tolerance import Rounding
from npattn.testing.trial import Suspicion, Trial, Violation

__all__ = ["check"]

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
ROBUSTNESS = "robustness"  # asked only by name: it gives notes, and needs child processes
SWEEPS = ("sweep", "long")  # asked with sweep=: they draw on the device
SHRINK_SECONDS = 8.0  # per failing rule; the smallest problem found by then is reported
DEFAULTS = {"framework": "auto", "layout": "BHTD"}
Progress = Callable[[str, str, int, int], None]  # dtype, rule, done, total


def check(
    f: Callable[..., Any] | Implementation,
    *,
    backward: Callable[..., Any] | None = None,
    framework: str = "auto",
    layout: str = "BHTD",
    conventions: Conventions | None = None,
    features: Iterable[str] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    dtypes: Sequence[str] = ("float32",),
    device: str | None = None,
    examples: int = 100,
    seed: int = 0,
    rounding: Rounding | str | None = None,
    strict: bool = False,
    only: Iterable[str] | None = None,
    shrink: bool = True,
    progress: Progress | None = None,
    sweep: int = 0,
) -> Report:
    """Judge an attention implementation: is it right, forward and backward?

    Parameters
    ----------
    f : callable or Implementation
        ``f(q, k, v, <options it has>)``; the options that it names are what it is tested on.
    backward : callable, optional
        Of a NumPy function: ``backward(dout, q, k, v, *, out, lse, ...)``.
    framework : {"auto", "numpy", "torch"}
    layout : {"BHTD", "BTHD"}
    conventions : Conventions, optional
        What it promises where systems disagree; default: docs/semantics.md.
    features : iterable of str, optional
        Instead of what its signature says.
    sizes : mapping, optional
        Restricts what is drawn to what a kernel takes: ``{"D": (64, 128)}``.
    dtypes : sequence of str, default ("float32",)
    device : str, optional
        Of torch tensors.
    examples : int, default 100
        Different problems a rule.
    seed : int, default 0
        Everything random comes from it.
    rounding : Rounding or str, optional
        What it rounds: "upcast", "fused", "eager"; default: the loosest that the dtype explains.
    strict : bool
        A suspect counts as failed.
    only : iterable of str, optional
        Rules, or beginnings of their names; "robustness" for notes on wrong input.
    shrink : bool
        Look for the smallest problem that fails, and not just for one.
    progress : callable, optional
        Told ``(dtype, rule, done, total)``.
    sweep : int, default 0
        With so many problems of every length up to 4096, of torch functions: drawn, computed and
        judged on the device, which they do not leave; and with a few very long ones.

    Returns
    -------
    Report

    Raises
    ------
    OptionError, DtypeError
        Before any work, where an argument is not legal.

    Examples
    --------
    >>> from npattn.testing import check
    >>> from npattn.testing.targets.numpy import naive
    >>> report = check(naive, examples=5, only=["empty-row"])
    >>> report.passed
    False
    """
    if isinstance(f, Implementation):
        named = [n for n, x in (("backward", backward), ("features", features)) if x is not None]
        named += [n for n, x in (("framework", framework), ("layout", layout)) if x != DEFAULTS[n]]
        if named:
            raise OptionError(
                f"{', '.join(named)} is given beside an Implementation, must be said when it is "
                "made: Implementation(f, ...)"
            )
        implementation = f
    else:
        implementation = Implementation(
            f, backward=backward, features=features, framework=framework, layout=layout
        )
    if device is not None:
        implementation.on(device)
    dtypes = (dtypes,) if isinstance(dtypes, str) else dtypes
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise DtypeError(f"dtypes has {dtype!r}, must be among {', '.join(DTYPES)}")
    if isinstance(sweep, bool) or not isinstance(sweep, int) or sweep < 0:
        raise OptionError(f"sweep is {sweep!r}, must be an integer ≥ 0: how many problems")
    if not dtypes or examples < 1:
        raise OptionError(f"dtypes is {dtypes!r} and examples {examples}, must be 1 or more each")
    if conventions is not None and not isinstance(conventions, Conventions):
        raise OptionError(
            f"conventions is {conventions!r}, must be a Conventions, "
            'such as npattn.conventions.PROFILES["torch.sdpa"]'
        )
    rules = _chosen(only)
    swept = _sweeps(implementation, sweep, only)
    space = Space(features=implementation.features, sizes=dict(sizes or {}))
    outcomes: list[Outcome] = []
    behaves: dict[str, str] = {}
    untested = [
        f"{name}: unknown to the judge, keeps its default" for name in implementation.untested
    ]
    untested += _missing(implementation)
    untested.append(f"sizes above {space.largest} (others: sizes={'' if swept else ', sweep='})")
    for dtype in dtypes:
        model = rounding
        if not isinstance(model, Rounding):
            model = Rounding.undeclared(dtype) if model is None else Rounding.named(model)
        trial = Trial(
            implementation, conventions or Conventions(), model, replace(space, dtype=dtype)
        )
        judge = _Judge(trial, examples, seed, progress or (lambda *_: None), shrink)
        with implementation.framework.one_thread():
            outcomes += judge.run(rules)
            if ROBUSTNESS in (only or ()):
                outcomes.append(_robustness(trial))
            if any(rule.rule == "aggregate" for rule in rules) and trial.space.structure:
                behaves[dtype] = _behaviour(trial, seed)
        if trial.space.structure:
            outcomes += [judge.sweep(rule, sweep) for rule in swept]
        untested += [f"{dtype}: {line}" for line in judge.refused]
    facts = {
        "seed": seed,
        "examples": examples,
        **({"sweep": sweep} if swept else {}),
        "features": ", ".join(sorted(implementation.features)) or "none",
        "rounding": rounding.name if isinstance(rounding, Rounding) else rounding or "undeclared",
        "conventions": _said(conventions),
        **({"behaves as": behaves} if behaves else {}),
        "versions": {
            "npattn": npattn.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            **({"torch": sys.modules["torch"].__version__} if "torch" in sys.modules else {}),
        },
    }
    return Report(implementation.name, tuple(outcomes), tuple(untested), facts, strict)


def _chosen(only: Iterable[str] | None) -> list[Property]:
    if only is None:
        return list(PROPERTIES.values())
    chosen: list[Property] = []
    for wanted in only:
        found = [p for name, p in PROPERTIES.items() if name.startswith(wanted)]
        found = [PROPERTIES[wanted]] if wanted in PROPERTIES else found  # the whole name wins
        if not found and wanted not in ("structure", ROBUSTNESS, *SWEEPS):  # the first: always
            rules = ", ".join([*PROPERTIES, ROBUSTNESS, *SWEEPS])
            raise OptionError(f"{wanted!r} is not a rule, must be one of {rules}")
        chosen += [p for p in found if p not in chosen]
    return chosen


def _sweeps(
    implementation: Implementation, sweep: int, only: Iterable[str] | None
) -> tuple[str, ...]:
    """Which of the two rules are asked that draw on the device."""
    named = tuple(rule for rule in SWEEPS if rule in (only or ()))
    if named and not sweep:
        raise OptionError(f"sweep is 0, must be how many problems {' and '.join(named)} may draw")
    if sweep and implementation.framework.name != "torch":
        raise OptionError(
            f"sweep is {sweep}, must be 0 for functions of {implementation.framework.name} "
            "arrays: it draws torch tensors"
        )
    return (named or SWEEPS) if sweep else ()


def _missing(implementation: Implementation) -> list[str]:
    """What the implementation does not have."""
    lines = []
    absent = [n for n in FEATURES if n not in implementation.features]
    if absent:
        lines.append(f"options it does not have: {', '.join(absent)}")
    if not implementation.has_gradients:
        lines.append("gradients: no backward= was given")
    if not implementation.returns_lse:
        lines.append("lse: no return_lse parameter")
    elif implementation.backward is not None and "dlse" not in implementation.backward_takes:
        lines.append("gradients through lse: backward has no dlse parameter")
    return lines


def _robustness(trial: Trial) -> Outcome:
    """Notes on what becomes of wrong input; they pass, whatever they say."""
    lines = notes(trial.implementation, trial.space)
    about = "What it does with wrong input: notes, and no verdict."
    return Outcome(
        ROBUSTNESS,
        "—",
        about,
        trial.space.dtype,
        "passed",
        examples=len(lines),
        message="\n".join(lines),
    )


def _behaviour(trial: Trial, seed: int) -> str:
    """The tightest rounding model that explains what it does on plain inputs."""
    try:
        model = model_of(trial, plain(trial.space, seed))
    except ImplementationError as err:
        return f"no model: {err}"
    if model is None:
        return "no model: its errors are larger than any preset explains"
    return f"{model[0].name}, χ² {model[1]:.2g}"


def _said(conventions: Conventions | None) -> str:
    default = Conventions()
    changed = {
        name: value
        for name, value in vars(conventions or default).items()
        if value != getattr(default, name)
    }
    return ", ".join(f"{n}={v!r}" for n, v in changed.items()) or "default"


@dataclass
class _Judge:
    """One dtype's worth of `check`."""

    trial: Trial
    examples: int
    seed: int
    progress: Progress
    shrinks: bool

    def __post_init__(self) -> None:
        self.refused: list[str] = []

    def run(self, rules: list[Property]) -> list[Outcome]:
        outcomes = Probe(self.trial, self.refused).run()
        if not self.trial.space.structure:
            return outcomes
        judged: dict[str, Outcome] = {}
        # Empty rows first: where they are wrong, the other rules are asked without them, so that
        # one defect does not hide the others, nor look like them.
        for number, rule in enumerate(sorted(rules, key=lambda r: r.rule != "empty-row")):
            self.progress(self.trial.space.dtype, rule.rule, number, len(rules))
            judged[rule.rule] = self.judge(rule)
            if rule.rule == "empty-row" and judged["empty-row"].status in ("failed", "error"):
                self.trial.shuns_empty_rows = True
                self.refused.append("queries that see nothing: wrong, so only empty-row has them")
        self.progress(self.trial.space.dtype, "", len(rules), len(rules))
        return outcomes + [judged[rule.rule] for rule in rules]

    def sweep(self, rule: str, count: int) -> Outcome:
        """One of the rules that draw on the device."""
        from npattn.testing.sweep import Sweep  # and with it torch

        sweep = Sweep(self.trial, self.seed, self.progress, self.shrinks)
        return sweep.run(count) if rule == "sweep" else sweep.long()

    def judge(self, rule: Property) -> Outcome:
        """One rule over the planned problems, the failing one shrunk."""
        trial, dtype = self.trial, self.trial.space.dtype
        reason = rule.unless(trial)
        if reason is not None:
            return outcome_of(rule, dtype, "not applicable", message=reason)
        search = _Search(rule, trial, self.examples, self.shrinks)
        search.run(self.seed)
        if search.failure is not None:
            recipe, err = search.failure
            status: Status = "failed"
            if isinstance(err, (ImplementationError, Suspicion)):
                status = "error" if isinstance(err, ImplementationError) else "suspect"
            return outcome_of(
                rule,
                dtype,
                status,
                worst=getattr(err, "ratio", 0.0),
                examples=search.tried,
                message=str(err) + search.note,
                problem=getattr(err, "problem", None) or trial.problem(recipe),
                recipe=recipe,
                trial=trial,
                error=err,
            )
        if search.tried == 0:
            told = "no problem drawn could show it, or all were wrong before"
            return outcome_of(rule, dtype, "not applicable", message=told)
        return outcome_of(rule, dtype, "passed", worst=search.worst, examples=search.tried)


class _Search:
    """One rule over different recipes; what fails is shrunk."""

    def __init__(self, rule: Property, trial: Trial, examples: int, shrinks: bool = True) -> None:
        self.rule, self.trial, self.examples, self.shrinks = rule, trial, examples, shrinks
        self.worst, self.tried, self.note = 0.0, 0, ""
        self.failure: tuple[Recipe, Violation | ImplementationError] | None = None
        self._seen: dict[Recipe, Violation | ImplementationError | None] = {}
        self._deadline = float("inf")

    def run(self, seed: int) -> None:
        pools = Pools(self.trial.space, **self.rule.draw(self.trial))
        chosen = self.rule.recipes
        try:
            if chosen is not None:
                for recipe in chosen(self.trial, seed, self.examples):
                    self.one(recipe)
                return
            for recipe in self.trial.planned(pools, seed, self.examples):
                if self.tried < self.examples:
                    self.one(recipe)
        except (Violation, ImplementationError):  # what failed is in self.failure
            if chosen is None and self.shrinks:
                self._shrink(pools, seed)

    def _shrink(self, pools: Pools, seed: int) -> None:
        """Let Hypothesis find the simplest failing recipe that is like the one that failed."""
        assert self.failure is not None
        self._deadline = time.monotonic() + SHRINK_SECONDS
        profile = settings(
            max_examples=200,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        near = pools.near(self.failure[0].seed)
        test = hypothesis_seed(seed)(profile(given(near)(self.one)))
        try:
            test()
        except (Violation, ImplementationError):
            pass  # the last one, the simplest, is in self.failure
        except Flaky:
            self.note = "\n(it did not fail every time that the same problem was tried)"

    def one(self, recipe: Recipe) -> None:
        if recipe in self._seen:
            err = self._seen[recipe]
            if err is not None:
                self.failure = recipe, err
                raise err
            return
        if time.monotonic() > self._deadline:
            return
        self._seen[recipe] = None
        if self.trial.shuns(recipe, self.rule.rule):
            return
        try:
            ratio = self.rule.check(self.trial, recipe)
        except (Violation, ImplementationError) as err:
            if self.rule.alters and self.trial.wrong_anyway(recipe):
                return
            self._seen[recipe] = err
            self.failure = recipe, err
            raise
        if ratio is not None and self.failure is None:
            self.tried += 1
            self.worst = max(self.worst, ratio)
