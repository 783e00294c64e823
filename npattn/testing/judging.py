"""Check an implementation against every rule of the semantics."""

from __future__ import annotations

import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import chain, count, repeat
from typing import Any

import numpy as np

from npattn.engines.threads import one_thread
from npattn.errors import OptionError
from npattn.testing.adapters.child import format_exception_line
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.capabilities.refusals import read_refusals
from npattn.testing.cases.asked import Asked
from npattn.testing.cases.space import STRUCTURE, Space, describe_limits
from npattn.testing.cases.strategies import Pools
from npattn.testing.levels import check_levels
from npattn.testing.report.cause import Cause
from npattn.testing.report.expected import asked_of, check_expected
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.progress import ProgressBar
from npattn.testing.report.report import Report
from npattn.testing.report.sensitivity import Sensitivity
from npattn.testing.report.words import failure_lines, verdict
from npattn.testing.rules import PROPERTIES, RULES, Property
from npattn.testing.runner.describe import describe_model, describe_skipped, describe_untested
from npattn.testing.runner.journal import Journal
from npattn.testing.runner.rounds import FIRST_ROUNDS, ROBUSTNESS, Judge, Round
from npattn.testing.runner.schedule import ERRORS, InProcess, Processes
from npattn.testing.runner.sharper import describe_sharper
from npattn.testing.settings import DTYPES, EXAMPLES, Settings, options, takes_settings
from npattn.testing.trial import Trial

__all__ = ["DTYPES", "OF_IMPLEMENTATION", "check", "choose_rules", "name_rules"]

SWEEPS = ("sweep", "long")
"""Rules asked with ``sweep=``, which sample on the device."""
LEAST_SHARE = 0.1
"""Share of the problems that has to be taken; else there is no verdict without `sizes`."""
SAMPLED = 300
"""Problems of which it is counted."""
OF_IMPLEMENTATION = ("framework", "backward", "features", "layout", "like", "rename", "quantized")
"""Settings that an `Implementation` has of its own."""


@takes_settings(Settings)
def check(f: Callable[..., Any] | Implementation, settings: Settings) -> Report:
    """Judge whether an attention implementation is right, forward and backward.

    Parameters
    ----------
    f : callable or Implementation
        ``f(q, k, v, <options it has>)``; it is tested on the options that it names.

    Returns
    -------
    Report

    Raises
    ------
    DtypeError
        If `dtypes` has an unknown dtype.
    OptionError
        If another argument is not legal, `f` cannot be called with q, k, v alone, or other
        processes cannot import it. Both are raised before any work.
    KeyboardInterrupt
        If it is interrupted; its attribute `report` is the report of what is known by then, which
        a prompt and a notebook print.

    Examples
    --------
    >>> from npattn.testing import check
    >>> from npattn.testing.targets.numpy import naive
    >>> report = check(naive, examples=5, only=["empty-row"])
    >>> report.passed
    False
    """
    if settings.reference is not None:
        return _check_reference(f, settings)
    plan = _plan(f, settings)
    answers, n = _Answers(), settings.processes
    try:
        several = Processes(n, plan.implementation) if n > 1 else InProcess()
        # Small products cost twice their time on two threads, most of which wait.
        with np.errstate(**ERRORS), one_thread(), plan.bar, several as executor:
            _ask(plan, answers, executor)
            _explain(plan, answers)
            _find_way_out(plan, answers)
            _find_sharper(plan, answers)
    except KeyboardInterrupt as interrupt:
        report = _report(plan, answers, interrupted=True)
        interrupt.report = report  # type: ignore[attr-defined]
        interrupt.add_note(str(report))  # what a prompt or a notebook prints below the traceback
        raise
    if plan.journal is not None:
        plan.journal.note_end()
    return _report(plan, answers)


OF_REFERENCE = (
    *("reference", "inputs", "options", "sizes", "dtypes", "backward", "framework", "device"),
    *("reference_framework", "examples", "budget", "seed", "shrink", "diagnosis"),
    *("accept", "progress"),
)
"""Settings of a check by a reference."""


def _check_reference(f: Callable[..., Any] | Implementation, settings: Settings) -> Report:
    """Judge by another function; settings that say what attention is are refused."""
    from npattn.testing.reference.check import check_reference  # slow to load, and seldom needed

    refused = [
        name for name, (spec, _) in options(Settings).items()
        if name not in OF_REFERENCE and getattr(settings, name) not in (spec.default, None)
    ]  # fmt: skip
    if refused:
        raise OptionError(f"got {refused[0]} beside reference, which alone says what is right")
    kwargs = {name: getattr(settings, name) for name in OF_REFERENCE[:-2]}
    kwargs["examples"] = settings.examples or EXAMPLES
    with np.errstate(**ERRORS), one_thread():
        return replace(check_reference(f, **kwargs), accept=tuple(settings.accept))


# --- what is asked, and of whom -------------------------------------------------------------------


@dataclass
class _Plan:
    """Settings of a check, read: the judges of its dtypes, and what they ask."""

    settings: Settings
    implementation: Implementation
    rounding: Rounding | str | None
    rules: list[Property]
    sweeps: tuple[str, ...]  # rules that sample on the device
    required: tuple[str, ...]  # levels and rules that must pass
    refused: list[str]  # structure that its profile refuses
    judges: list[Judge]
    journal: Journal | None
    bar: ProgressBar


def _plan(f: Callable[..., Any] | Implementation, settings: Settings) -> _Plan:
    """Read the settings; what is not legal is an error before any work."""
    s, examples = settings, settings.examples or EXAMPLES
    deadline = math.inf if s.budget is None else time.monotonic() + s.budget
    journal = _open(s)
    implementation = _read(f, s)
    rules = choose_rules(s.only)
    rounding = implementation.rounding if s.rounding is None else s.rounding
    storage = implementation.weights_storage
    models = [Rounding.choose(rounding, dtype, storage) for dtype in s.dtypes]
    sweeps = _choose_sweeps(implementation, s.sweep, s.only)
    if s.conventions is not None:
        if s.conventions.causal == "unless_masked":
            raise OptionError(
                'causal is "unless_masked", a convention of modules and of the oracle: wrap the '
                "function in one that adds the triangle to a mask"
            )
        implementation.conventions = s.conventions
    sizes = implementation.restrict({**implementation.sizes, **(s.sizes or {})})
    space, refused = _read_space(implementation, sizes)
    required = (*check_levels(s.require), *(rule.rule for rule in rules if s.only is not None))
    bar = ProgressBar(s.progress is None or s.progress is True)
    judges: list[Judge] = []
    for dtype, model in zip(s.dtypes, models, strict=True):
        first_calls = () if judges else implementation.first_calls
        setting = implementation.conventions, model, replace(space, dtype=dtype)
        trial = Trial(implementation, *setting, first_calls=first_calls)
        judge = Judge(
            trial,
            min(examples, FIRST_ROUNDS[0]) if s.budget is not None and s.goes_on else examples,
            s.seed,
            s.progress if callable(s.progress) else bar.advance,
            s.shrink,
            stops_at=frozenset(required if s.fail_fast else ()),
            expected=frozenset(s.expect or ()),
            deadline=deadline,
            journal=journal,
            evenly=s.only is not None,
            fits=s.examples is None,
        )
        judges.append(judge)
    if journal is not None:
        only = None if s.only is None else [rule.rule for rule in rules]
        question = s.for_journal() | {"sizes": sizes, "only": only}
        _begin(journal, implementation, question | describe_model(implementation, rounding, {}))
    if not implementation.is_isolated:
        implementation.note_error_state(np.geterr() != ERRORS)
    chosen = rules, sweeps, required, refused
    return _Plan(s, implementation, rounding, *chosen, judges, journal, bar)


def _read_space(
    implementation: Implementation, sizes: Mapping[str, Sequence[int]]
) -> tuple[Space, list[str]]:
    """Return the problems that are sampled, and the structure that its profile refuses."""
    refused, unasked, together = read_refusals(implementation)
    alone = {name for classes in together if len(classes) == 1 for name in classes}
    space = Space(
        features=implementation.features - alone,
        structure=frozenset(STRUCTURE) - unasked,
        sizes=sizes,
        few_shapes=implementation.framework.compiles,
        refused=together,
    )
    return space, refused


def _open(settings: Settings) -> Journal | None:
    """Return the journal of this check, new or one to go on from; None without one."""
    if settings.resume is not None:
        return Journal.resume(settings.resume)
    journal = settings.journal
    return Journal.create(journal) if isinstance(journal, (str, os.PathLike)) else journal


def _begin(journal: Journal, implementation: Implementation, question: dict[str, Any]) -> None:
    """Write what is asked, of what, and let a worker's requests be written too."""
    journal.begin(
        {
            "target": implementation.name,
            "source": implementation.source,
            "layout": implementation.layout,
            "quantized": implementation.quantized and implementation.quantized.words,
            "device": implementation.device,
            **question,
        }
    )
    from npattn.testing.worker.remote import Remote  # slow to load, and seldom needed

    if isinstance(implementation, Remote):
        implementation.watch = journal.note_request


def _read(f: Callable[..., Any] | Implementation, settings: Settings) -> Implementation:
    """Return `f` as an implementation, where it is called; nothing may be said of one twice."""
    settings_of_function = {name: getattr(settings, name) for name in OF_IMPLEMENTATION}
    if not isinstance(f, Implementation):
        f = Implementation(f, **settings_of_function)
    elif refused := [n for n, value in settings_of_function.items() if value not in (None, "auto")]:
        raise OptionError(
            f"got {', '.join(refused)} beside an Implementation: pass it to "
            "Implementation(f, ...) instead"
        )
    if settings.device is not None:
        f.on(settings.device)
    if settings.isolate:
        from npattn.testing.worker.connect import isolate  # slow to load, and seldom needed here
        from npattn.testing.worker.supervisor import Limits

        return isolate(f, Limits(settings.timeout), alone=settings.processes == 1)
    if settings.timeout is not None:
        raise OptionError(f"timeout is {settings.timeout}, must be None without isolate=True")
    return f


def choose_rules(only: Iterable[str] | None) -> list[Property]:
    """Return the rules that `only` names, in its order; all for None."""
    if only is None:
        return list(PROPERTIES.values())
    chosen: list[Property] = []
    for wanted in only:
        matches = [p for name, p in PROPERTIES.items() if name.startswith(wanted)]
        matches = [RULES[wanted]] if wanted in RULES else matches  # the whole name wins
        if not matches and wanted not in ("structure", ROBUSTNESS, *SWEEPS):  # the first: always
            rules = ["structure", *RULES, ROBUSTNESS, *SWEEPS]
            beginnings = {name.partition("-")[0] for name in PROPERTIES}
            near = get_close_matches(wanted, [*rules, *beginnings], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            must = f"must be one of {', '.join(rules)}, or how some begin"
            raise OptionError(f"{wanted!r} is not a rule{hint or f', {must}'}")
        chosen += [p for p in matches if p not in chosen]
    return chosen


def name_rules(only: Iterable[str] | None, sweep: int) -> list[str]:
    """Return the ids of all rules that a check may have an outcome of, but findings of options."""
    asked = tuple(only or ())
    sweeps = [rule for rule in SWEEPS if rule in asked] or SWEEPS
    names = ["structure", *(rule.rule for rule in choose_rules(only))]
    names += [ROBUSTNESS] if ROBUSTNESS in asked else []
    return names + list(sweeps if sweep else ())


def _choose_sweeps(
    implementation: Implementation, sweep: int, only: Iterable[str] | None
) -> tuple[str, ...]:
    """Return the rules to ask that sample on the device."""
    named = tuple(rule for rule in SWEEPS if rule in (only or ()))
    if named and not sweep:
        raise OptionError(
            f"sweep is 0: pass the number of problems that {' and '.join(named)} may sample"
        )
    framework = implementation.framework.name
    reasons = {
        "for what lives in a worker: it judges tensors of this process (--in-process, or without "
        "isolate=True)": implementation.is_isolated,
        f"for functions of {framework} arrays: it samples torch tensors": framework != "torch",
    }
    for reason, holds in reasons.items():
        if sweep and holds:
            raise OptionError(f"sweep is {sweep}, must be 0 {reason}")
    return (named or SWEEPS) if sweep else ()


# --- ask, explain, report -------------------------------------------------------------------------


@dataclass
class _Answers:
    """Answers that are known, also if the check is interrupted."""

    rounds: list[Round] = field(default_factory=list)  # one for each dtype that was begun
    # the same, when everything was asked
    judged: list[tuple[Trial, list[Outcome]]] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    explained: list[Outcome] = field(default_factory=list)  # their outcomes with causes
    causes: tuple[Cause, ...] = ()
    # a setting of the report, if the diagnosis failed
    defect: dict[str, str] = field(default_factory=dict)
    left_out: str = "what was not asked yet"  # steps that an interrupt leaves out
    # settings with which problems are taken, where all were refused: a line each
    way_out: tuple[str, ...] = ()
    few: tuple[str, ...] = ()  # dtypes in which few problems are taken
    sharper: tuple[str, ...] = ()  # which errors a declared rounding would see

    def collect(self, implementation: Implementation) -> None:
        """Take the outcomes of the rounds."""
        self.judged = [(done.judge.trial, done.outcomes()) for done in self.rounds]
        self.given_up = implementation.given_up_lines


def _ask(plan: _Plan, answers: _Answers, executor: InProcess | Processes) -> None:
    """Let each judge probe its dtype, and ask the rules, in this process or in others."""
    rounds, implementation = answers.rounds, plan.implementation
    robust = ROBUSTNESS in (plan.settings.only or ())
    for judge in plan.judges:
        with implementation.framework.one_thread():
            stopped = any(done.stopped for done in rounds)
            begun = Round(judge, [], []) if stopped else judge.begin(plan.rules, robust)
            rounds.append(begun)
            begun.restore()
            executor.ask(begun)
    executor.finish()
    if plan.settings.budget is not None and plan.settings.goes_on:
        examples = plan.settings.examples or EXAMPLES
        _ask_more(rounds, examples, executor, plan.judges[0].deadline)
    answers.collect(implementation)
    if any(done.stopped for done in rounds):
        return
    for done, (trial, outcomes) in zip(rounds, answers.judged, strict=True):
        if trial.space.structure:
            outcomes += [done.judge.sweep(rule, plan.settings.sweep) for rule in plan.sweeps]


def _ask_more(
    rounds: Sequence[Round], examples: int, executor: InProcess | Processes, deadline: float
) -> None:
    """Ask other problems, of the next seeds, until the deadline."""
    sizes = [n for n in FIRST_ROUNDS[1:] if n < examples]
    seeds = count(1)
    for size in chain(sizes, repeat(examples)):
        number = next(seeds)
        later = [done.again(done.judge.seed + number, size) for done in rounds]
        asked = [again for again in later if again.names and not again.stopped]
        if time.monotonic() > deadline or not asked or any(done.stopped for done in rounds):
            return
        for again in asked:
            with again.judge.trial.implementation.framework.one_thread():
                executor.ask(again)
        executor.finish()
        for done, again in zip(rounds, later, strict=True):
            done.merge(again)
        if not any(outcome.examples for again in asked for outcome in again.outcomes()):
            return  # there is nothing more to ask


def _explain(plan: _Plan, answers: _Answers) -> None:
    """Find the causes of what failed."""
    answers.left_out = "the causes"
    all_outcomes = [outcome for _, outcomes in answers.judged for outcome in outcomes]
    bad = any(outcome.failed or outcome.status == "suspect" for outcome in all_outcomes)
    if not plan.settings.diagnosis or not bad:
        return
    _announce(plan, answers)
    from npattn.testing.diagnosis import causes  # slow to load, and not needed if all is right

    try:
        with plan.implementation.framework.one_thread():
            answers.explained, answers.causes = causes.diagnose(answers.judged)
    except Exception as err:  # noqa: BLE001  a defect must not cost the report
        warnings.warn(
            "the diagnosis failed, which is a defect of npattn; the report has no causes: "
            + "".join(traceback.format_exception(err)),
            RuntimeWarning,
            stacklevel=4,
        )
        defect = f"failed, a defect of npattn: {format_exception_line(err)}"
        answers.defect = {"diagnosis": defect}


def _find_way_out(plan: _Plan, answers: _Answers) -> None:
    """Find settings with which problems are taken, if none was, or few were."""
    trials = [trial for trial, _ in answers.judged]
    ended = any(outcome.has_ended for _, outcomes in answers.judged for outcome in outcomes)
    if not trials or ended:
        return
    few = {}
    for judge, trial in zip(plan.judges, trials, strict=False):
        if trial.space.structure and (share := _share_taken(judge.asked_of, trial)) < LEAST_SHARE:
            few[trial.space.dtype] = share
    answers.few = tuple(
        f"in {dtype} it takes {share:.0%} of the problems" for dtype, share in few.items()
    )
    if any(trial.space.structure for trial in trials) and not few:
        return
    from npattn.testing.capabilities.way_out import find_way_out  # seldom needed

    judge = next((x for x in plan.judges if x.asked_of.space.dtype in few), plan.judges[0])
    with plan.implementation.framework.one_thread():
        found = find_way_out(judge.asked_of)
    if found is not None:
        arguments = f"in Python: check(f, {found.arguments})"
        answers.way_out = f"it takes problems with {found.flags}", arguments


def _find_sharper(plan: _Plan, answers: _Answers) -> None:
    """Find which errors a declared rounding would see, where none is and little is seen."""
    if plan.rounding is None:
        lines = (
            describe_sharper(trial, outcomes, judge.seed, judge.examples)
            for judge, (trial, outcomes) in zip(plan.judges, answers.judged, strict=False)
        )
        answers.sharper = tuple(filter(None, lines))


def _share_taken(asked: Trial, judged: Trial) -> float:
    """Return the share of the problems that are sampled anyway for which no refusal is known."""
    space = judged.space
    if not space.excluded and not space.only:
        return 1.0
    pools = Pools(asked.space, nonempty=True)
    recipes = pools.recipes(range(SAMPLED))
    return sum(space.has_sizes(r) and not space.excludes(r) for r in recipes) / SAMPLED


def _announce(plan: _Plan, answers: _Answers) -> None:
    """Show the verdict and a failure before causes are looked for, if there is a bar for it."""
    bar = getattr(plan.judges[0].progress, "__self__", None)
    if not isinstance(bar, ProgressBar):
        return
    report = _report(plan, answers)
    for group in report.groups()[:1]:
        told, *_ = failure_lines(group.smallest, problem=False)
        bar.announce(f"{verdict(report)}\n{told}\nlooking for the cause (Ctrl-C leaves it out)")


def _report(plan: _Plan, answers: _Answers, interrupted: bool = False) -> Report:
    """Return the report of what is known."""
    settings, implementation, rounds = plan.settings, plan.implementation, answers.rounds
    if not answers.judged:
        answers.collect(implementation)
    outcomes = answers.explained or [
        o for _, outcomes_of_unit in answers.judged for o in outcomes_of_unit
    ]
    by_dtype = {done.judge.trial.space.dtype: done for done in rounds}
    refused = [f"{d}: {line}" for d, done in by_dtype.items() for line in done.judge.refused]
    behaves = {d: done.behaves for d, done in by_dtype.items() if done.behaves}
    covered = {
        d: Asked.union([done.sizes, *(o.asked for o in outcomes if o.dtype == d)])
        for d, done in by_dtype.items()
    }
    expected = check_expected(settings.expect or {})
    if settings.only is not None:
        expected = asked_of(expected, [*RULES, *SWEEPS], outcomes)
    untrusted = implementation.untrusted
    seen = untrusted is not None and untrusted.judged.times
    return Report(
        implementation.name,
        tuple(outcomes),
        describe_untested(implementation, rounds, answers.left_out if interrupted else ""),
        {
            "seed": settings.seed,
            **_describe_amount(plan),
            **settings.for_report(),
            **describe_model(implementation, plan.rounding, behaves),
            **implementation.notes,
            **answers.defect,
        },
        settings.strict,
        require=plan.required,
        causes=answers.causes,
        refused=(*plan.refused, *refused, *answers.given_up),
        expected=expected,
        taken_back=dict(implementation.profile.promises) if implementation.profile else {},
        interrupted=interrupted,
        missing=tuple(
            n for n in settings.must if not all(_tests(done.judge.trial, n) for done in rounds)
        ),
        sensitivity=Sensitivity(*untrusted.judged) if untrusted and seen else None,
        confined=implementation.confined,
        asked=covered,
        way_out=answers.way_out,
        limits=_limits(plan, by_dtype),
        few=answers.few,
        sharper=answers.sharper,
        skipped={d: describe_skipped(done, covered[d]) for d, done in by_dtype.items()},
        accept=tuple(settings.accept),
    )


def _describe_amount(plan: _Plan) -> dict[str, Any]:
    """Return the number of examples, and why it is smaller than the default."""
    examples = plan.settings.examples or EXAMPLES
    fewest = min(plan.judges, key=lambda judge: judge.examples)
    if plan.settings.budget is not None or fewest.examples == examples:
        return {"examples": examples}
    least = fewest.trial.space.least_scores
    return {"examples": fewest.examples, "planned for": f"{least} scores a head at least"}


def _limits(plan: _Plan, rounds: Mapping[str, Round]) -> tuple[str, str]:
    """Return for which problems the verdict is, and what is refused, by dtype if that differs."""
    sizes = plan.settings.sizes or {}
    found = {d: describe_limits(done.judge.trial.space, sizes) for d, done in rounds.items()}
    sides = []
    for texts in zip(*found.values(), strict=True):
        by_dtype = {d: text for d, text in zip(found, texts, strict=True) if text}
        alike = len({*texts}) == 1
        sides.append(texts[0] if alike else "; ".join(f"{d}: {x}" for d, x in by_dtype.items()))
    taken, refused = sides or ("", "")
    return taken, refused


def _tests(trial: Trial, name: str) -> bool:
    """Return True if an option, a result or a gradient is in what a trial has narrowed to."""
    f = trial.implementation
    has = {"o": True, "lse": f.returns_lse, "weights": f.returns_weights}
    has["max_score"] = f.returns_max_score
    return name in trial.gradients or name in trial.space.features or has.get(name, False)
