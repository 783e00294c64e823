"""Check an implementation against every rule of the semantics."""

from __future__ import annotations

import itertools
import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import numpy as np

from npattn.checks import check_integer
from npattn.conventions import Conventions, check_conventions
from npattn.errors import DtypeError, OptionError
from npattn.options import FEATURES
from npattn.profiles import Profile
from npattn.testing.adapters.base import format_exception_line
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.capabilities.refusals import read_refusals
from npattn.testing.cases.asked import Asked
from npattn.testing.cases.space import STRUCTURE, Space
from npattn.testing.diagnosis.ahead import Submit
from npattn.testing.diagnosis.causes import diagnose
from npattn.testing.levels import REQUIRED, check_levels
from npattn.testing.report.cause import Cause
from npattn.testing.report.expected import asked_of, check_expected
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.progress import Progress, ProgressBar, check_progress
from npattn.testing.report.report import Report
from npattn.testing.report.sensitivity import Sensitivity
from npattn.testing.rules import PROPERTIES, RULES, Property
from npattn.testing.runner.describe import (
    describe_model,
    describe_skipped,
    describe_untested,
)
from npattn.testing.runner.journal import Journal
from npattn.testing.runner.rounds import (
    FIRST_ROUNDS,
    OUT_OF_TIME,
    ROBUSTNESS,
    Judge,
    Round,
)
from npattn.testing.runner.schedule import ERRORS, InProcess, Processes
from npattn.testing.trial import GRADIENTS, Trial
from npattn.testing.worker.connect import isolate as isolate_in_worker
from npattn.testing.worker.remote import Remote
from npattn.testing.worker.supervisor import Limits

__all__ = ["check"]

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
SHORT_DTYPES = {
    **{name: name for name in DTYPES},
    "double": "float64",
    "fp64": "float64",
    "f64": "float64",
    "float": "float32",
    "single": "float32",
    "fp32": "float32",
    "f32": "float32",
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "bfloat": "bfloat16",
    "fp8": "float8_e4m3fn",
    "float8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "fp8_e5m2": "float8_e5m2",
}
"""Other words for the dtypes, for errors."""
SWEEPS = ("sweep", "long")
"""Rules asked with ``sweep=``, which sample on the device."""


def check(
    f: Callable[..., Any] | Implementation,
    *,
    backward: Callable[..., Any] | None = None,
    framework: str = "auto",
    layout: str | None = None,
    conventions: Conventions | None = None,
    like: str | Profile | None = None,
    quantized: str | None = None,
    rename: Mapping[str, str] | None = None,
    features: str | Iterable[str] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    dtypes: Sequence[str] = ("float32",),
    device: str | None = None,
    examples: int = 200,
    seed: int = 0,
    rounding: Rounding | str | None = None,
    strict: bool = False,
    require: Iterable[str] | str = REQUIRED,
    expect: Mapping[str, str] | None = None,
    only: str | Iterable[str] | None = None,
    shrink: bool = True,
    processes: int = 1,
    fail_fast: bool = False,
    progress: Progress | bool | None = None,
    sweep: int = 0,
    diagnosis: bool = True,
    isolate: bool = False,
    timeout: float | None = None,
    must: Iterable[str] = (),
    budget: float | None = None,
    journal: str | os.PathLike[str] | Journal | None = None,
    resume: str | os.PathLike[str] | None = None,
) -> Report:
    """Judge whether an attention implementation is right, forward and backward.

    Parameters
    ----------
    f : callable or Implementation
        ``f(q, k, v, <options it has>)``; it is tested on the options that it names.
    backward : callable, optional
        Gradients of a NumPy function: ``backward(dout, q, k, v, *, out, lse, ...)``.
    framework : {"auto", "numpy", "torch", "jax"}
        Arrays that it takes; "auto" finds out by its module, annotations or a tiny call.
    layout : {"BHTD", "BTHD"}, optional
        Axes of q, k, v, o, dout and their gradients; "BTHD" is for rank 4. Default: "BHTD", or
        those of `like`.
    conventions : Conventions, optional
        Its promises where systems disagree; default: those of `like`, or of docs/semantics.md,
        with causal="top_left" for a parameter ``is_causal``.
    like : str or Profile, optional
        System that it stands in for, one of `npattn.profiles.PROFILES`: signature, layout,
        conventions and refusals come from there, and rules that it takes back are not required.
    quantized : {"fp8", "float8_e4m3fn", "float8_e5m2", "int8"}, optional
        Format of q, k, v and o, of those that it has a factor for (``q_descale``, ``o_scale``, …);
        the others are in the dtypes tested. Factors of blocks: `Implementation`.
    rename : mapping, optional
        Its parameter names → npattn's: ``{"cap": "softcap"}``.
    features : str or iterable of str, optional
        Its options, instead of those of its signature.
    sizes : mapping, optional
        Sizes to sample, for a kernel that takes no others: ``{"D": (64, 128)}``. Letters that are
        not named keep the sizes of a known target, if it has any. ``"P": (16,)`` is a page size.
    dtypes : sequence of str, default ("float32",)
    device : str, optional
        Device of its tensors.
    examples : int, default 200
        Number of different problems. Most rules of agreement are asked all of them, most others a
        tenth, 20 at least, for each looks for one kind of mistake. A rule that `only` names is
        asked all.
    seed : int, default 0
        Seed of everything random.
    rounding : Rounding or str, optional
        Rounding model: "upcast", "fused", "eager", "fp8", "int8"; default: that of a known target,
        else the loosest that the dtype explains.
    strict : bool
        A suspect counts as failed.
    require : iterable of str, or "all"
        Levels that must pass: among "values", "edges", "conduct", "non-finite", "degenerate",
        "reproducible"; "all" is every one but the last. Other levels are shown, and cost nothing.
    expect : mapping, optional
        Expected failures, with reasons: ``{"hidden-nan-v[float32]": "multiplies by 0"}``.
    only : str or iterable of str, optional
        Rules, or beginnings of their names, which are then required whatever their level;
        "robustness" for notes on wrong input.
    shrink : bool
        Search for the smallest failing problem.
    processes : int, default 1
        Number of processes, with one thread each; the report is the same. They have to import `f`:
        a function of a module, or an Implementation with a `spec`.
    fail_fast : bool
        Stop at the first failure of a required level that is not expected; the report has what is
        known by then.
    progress : callable or bool, optional
        Called with ``(dtype, rule, done, total)``. Default, or True: a bar on the error stream of a
        terminal, or in a notebook, if it takes more than two seconds. False: none.
    sweep : int, default 0
        For torch functions: number of problems of every length up to 4096 that are sampled,
        computed and judged on the device; a few very long ones are added.
    diagnosis : bool, default True
        Search for the causes of failures, for a second or two.
    isolate : bool
        Call `f` in a worker, a process of its own: if that ends, or does not answer, it costs the
        rule that asked. Functions that cannot be imported need cloudpickle.
    timeout : float, optional
        Seconds a call of an isolated `f`; default: 10, or 120 for the first call of a shape where
        its framework compiles.
    must : iterable of str
        Options, "lse", "weights" and gradients ("dk") that have to be tested: if one is not, the
        report does not pass.
    budget : float, optional
        Seconds after which nothing more is asked. Every rule is asked a few examples first, then
        more, and once all have `examples`, as many more with the next seeds as there is time for.
        The report does not pass if a required rule could not be asked at all.
    journal : path, optional
        New file that each step is written to before it is taken: a check that was ended goes on
        from it, and it says what was being asked.
    resume : path, optional
        Journal of a check of the same, which goes on where that ended.

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
    deadline = math.inf if budget is None else time.monotonic() + _check_budget(budget, sweep)
    kept = _open(journal, resume, budget)
    implementation = _read(
        f,
        framework=framework,
        backward=backward,
        features=features,
        layout=layout,
        like=like,
        rename=rename,
        quantized=quantized,
    )
    if device is not None:
        implementation.on(device)
    if isolate:
        implementation = isolate_in_worker(implementation, Limits(timeout), alone=processes == 1)
    elif timeout is not None:
        raise OptionError(f"timeout is {timeout}, must be None without isolate=True")
    dtypes = (dtypes,) if isinstance(dtypes, str) else dtypes
    _check_numbers(dtypes, sweep)
    examples, seed = check_integer("examples", examples), check_integer("seed", seed, 0)
    only = (only,) if isinstance(only, str) else only
    _check_mapping("expect", expect, '{"nan-query": "why it fails"}')
    _check_mapping("sizes", sizes, '{"D": (64, 128)}')
    _check_some_size(sizes or {})
    check_conventions(conventions)
    processes = check_integer("processes", processes)
    levels, expected = check_levels(require), check_expected(expect or {})
    must = _check_must(must)
    rules, robust = _choose_rules(only), ROBUSTNESS in (only or ())
    check_progress(progress)
    bar = ProgressBar(progress is None or progress is True)
    advance = progress if callable(progress) else bar.advance
    rounding = implementation.rounding if rounding is None else rounding
    storage = implementation.weights_storage
    models = [Rounding.choose(rounding, dtype, storage) for dtype in dtypes]
    sweeps = _choose_sweeps(implementation, sweep, only, models)
    if conventions is not None:
        implementation.conventions = conventions
    conventions = implementation.conventions
    sizes = implementation.restrict({**implementation.sizes, **(sizes or {})})
    refused, unasked, together = read_refusals(implementation)
    alone = {name for classes in together if len(classes) == 1 for name in classes}
    space = Space(
        features=implementation.features - alone,
        structure=frozenset(STRUCTURE) - unasked,
        sizes=sizes,
        few_shapes=implementation.framework.compiles,
        refused=together,
    )
    required = (*levels, *(rule.rule for rule in rules if only is not None))
    ends = frozenset(required if fail_fast else ()), frozenset(expect or ()), deadline
    limits = (*ends, kept, only is not None)
    first = examples if budget is None else min(examples, FIRST_ROUNDS[0])
    judges: list[Judge] = []
    for dtype, model in zip(dtypes, models, strict=True):
        own = replace(space, dtype=dtype)
        first_calls = () if judges else implementation.first_calls
        trial = Trial(implementation, conventions, model, own, first_calls=first_calls)
        judges.append(Judge(trial, first, seed, advance, shrink, *limits))
    if kept is not None:
        asked = {"dtypes": dtypes, "examples": examples, "seed": seed, "shrink": shrink}
        asked |= {"sizes": sizes, "only": None if only is None else [rule.rule for rule in rules]}
        kept.begin(_question(implementation, rounding, **asked))
        if isinstance(implementation, Remote):
            implementation.watch = kept.note_request
    if not implementation.is_isolated:
        implementation.note_error_state(np.geterr() != ERRORS)
    rounds: list[Round] = []
    judged: list[tuple[Trial, list[Outcome]]] = []
    outcomes: list[Outcome] = []
    causes: tuple[Cause, ...] = ()
    defect: dict[str, str] = {}
    interrupt: KeyboardInterrupt | None = None
    left = "what was not asked yet"  # if it is interrupted now
    try:
        several = Processes(processes, implementation) if processes > 1 else InProcess()
        with np.errstate(**ERRORS), bar, several as executor:
            _ask(judges, rules, robust, implementation, executor, rounds)
            if budget is not None:
                _ask_more(rounds, examples, executor, deadline)
            judged, given_up = _collect(rounds), implementation.given_up_lines
            if not any(done.stopped for done in rounds):
                _sweep(rounds, judged, sweeps, sweep)
            left = "the causes"
            if diagnosis:
                with implementation.framework.one_thread():
                    outcomes, causes, defect = _diagnose(judged, executor.submit)
    except KeyboardInterrupt as err:
        interrupt = err
    if not judged:
        judged, given_up = _collect(rounds), implementation.given_up_lines
    for dtype, done in zip(dtypes, rounds, strict=interrupt is None):
        refused += [f"{dtype}: {line}" for line in done.judge.refused]
    refused += given_up
    outcomes = outcomes or [o for _, own in judged for o in own]
    if kept is not None and interrupt is None:
        kept.note_end()
    behaves = {d: done.behaves for d, done in zip(dtypes, rounds, strict=False) if done.behaves}
    covered = {
        dtype: Asked.union([done.asked, *(o.asked for o in outcomes if o.dtype == dtype)])
        for dtype, done in zip(dtypes, rounds, strict=False)
    }
    settings = {
        "seed": seed,
        "examples": examples,
        **({} if budget is None else {"budget": f"{budget:g} s"}),
        **({"sweep": sweep} if sweeps else {}),
        **describe_model(implementation, rounding, behaves),
        **implementation.notes,
        **defect,
    }
    if only is not None:
        expected = asked_of(expected, [*RULES, *SWEEPS], outcomes)
    report = Report(
        implementation.name,
        tuple(outcomes),
        describe_untested(implementation, rounds, left if interrupt else ""),
        settings,
        strict,
        require=required,
        causes=causes,
        refused=tuple(refused),
        expected=expected,
        taken_back=dict(implementation.profile.promises) if implementation.profile else {},
        interrupted=interrupt is not None,
        missing=tuple(n for n in must if not all(_tests(done.judge.trial, n) for done in rounds)),
        sensitivity=_sensitivity(implementation),
        asked=covered,
        skipped={
            dtype: describe_skipped(done, covered[dtype])
            for dtype, done in zip(dtypes, rounds, strict=False)
        },
    )
    late = tuple(o.id for o in outcomes if o.message == OUT_OF_TIME and report.requires(o))
    report = replace(report, missing=(*report.missing, *late))
    if interrupt is not None:
        interrupt.report = report  # type: ignore[attr-defined]
        interrupt.add_note(str(report))  # what a prompt or a notebook prints below the traceback
        raise interrupt.with_traceback(None) from None
    return report


def _check_budget(budget: float, sweep: int) -> float:
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if not number or not 0 < budget < math.inf:
        raise OptionError(f"budget is {budget!r}, must be a number of seconds > 0")
    if sweep:
        raise OptionError(f"sweep is {sweep}, must be 0 with a budget: it takes its own time")
    return budget


def _open(
    journal: str | os.PathLike[str] | Journal | None,
    resume: str | os.PathLike[str] | None,
    budget: float | None,
) -> Journal | None:
    """Return the journal of this check, new or one to go on from; None without one."""
    if journal is not None and resume is not None:
        raise OptionError("got journal beside resume, which goes on in its own file: pass one")
    if budget is not None and (journal is not None or resume is not None):
        raise OptionError("got a journal beside budget, which ends in time: pass one of them")
    if resume is not None:
        return Journal.resume(resume)
    return Journal.create(journal) if isinstance(journal, (str, os.PathLike)) else journal


def _question(
    implementation: Implementation, rounding: Rounding | str | None, **asked: Any
) -> dict[str, Any]:
    """Return all that the answers depend on, for a journal."""
    return {
        "target": implementation.name,
        "source": implementation.source,
        "layout": implementation.layout,
        "quantized": None if implementation.quantized is None else implementation.quantized.words,
        "device": implementation.device,
        **asked,
        **describe_model(implementation, rounding, {}),
    }


def _sensitivity(implementation: Implementation) -> Sensitivity | None:
    """Return what a check of an implementation that nobody trusts would have seen."""
    untrusted = implementation.untrusted
    if untrusted is None or not untrusted.judged.times:
        return None
    return Sensitivity(*untrusted.judged)


def _check_must(must: Iterable[str]) -> tuple[str, ...]:
    names = (must,) if isinstance(must, str) else tuple(must)
    legal = (*FEATURES, "lse", "weights", "max_score", *GRADIENTS)
    for name in names:
        if name not in legal:
            raise OptionError(f"must has {name!r}, must be among {', '.join(legal)}")
    return names


def _tests(trial: Trial, name: str) -> bool:
    """Return True if an option, a result or a gradient is in what a trial has narrowed to."""
    f = trial.implementation
    has = {"lse": f.returns_lse, "weights": f.returns_weights}
    has["max_score"] = f.returns_max_score
    return name in trial.gradients or name in trial.space.features or has.get(name, False)


def _read(
    f: Callable[..., Any] | Implementation, *, framework: str, **arguments: Any
) -> Implementation:
    """Return `f` as an implementation, after checking that nothing is said of one twice."""
    if not isinstance(f, Implementation):
        return Implementation(f, framework=framework, **arguments)
    beside = [name for name, value in arguments.items() if value is not None]
    beside += ["framework"] if framework != "auto" else []
    if beside:
        raise OptionError(
            f"got {', '.join(beside)} beside an Implementation: pass it to "
            "Implementation(f, ...) instead"
        )
    return f


def _check_mapping(name: str, value: Any, example: str) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise OptionError(f"{name} is {value!r}, must be a mapping, as in {example}")


def _check_some_size(sizes: Mapping[str, Sequence[int]]) -> None:
    """Check that no letter has sizes of 0 alone: a check begins with a problem that has none."""
    for letter, values in sizes.items():
        if isinstance(values, Sequence) and values and not any(values):
            raise OptionError(
                f"sizes has {letter}={values!r}, must have one ≥ 1: a size of 0 leaves nothing to "
                "compare, and is tried beside others"
            )


def _check_numbers(dtypes: Sequence[str], sweep: int) -> None:
    for dtype in dtypes:
        if dtype not in DTYPES:
            hint = SHORT_DTYPES.get(str(dtype).removeprefix("torch."))
            hint = f"; did you mean {hint}?" if hint else ""
            raise DtypeError(f"dtypes has {dtype!r}, must be among {', '.join(DTYPES)}{hint}")
    if isinstance(sweep, bool) or not isinstance(sweep, int) or sweep < 0:
        raise OptionError(f"sweep is {sweep!r}, must be an integer ≥ 0: how many problems")
    if not dtypes:
        raise OptionError("dtypes is empty, must have 1 or more")


def _ask(
    judges: Sequence[Judge],
    rules: Sequence[Property],
    robust: bool,
    implementation: Implementation,
    executor: InProcess | Processes,
    rounds: list[Round],
) -> None:
    """Let each judge probe its dtype, and ask the rules, in this process or in others.

    Each dtype is added to `rounds` as it begins.
    """
    for judge in judges:
        with implementation.framework.one_thread():
            stopped = any(done.stopped for done in rounds)
            rounds.append(Round(judge, [], []) if stopped else judge.begin(rules, robust))
            rounds[-1].restore()
            executor.ask(rounds[-1])
    executor.finish()


def _ask_more(
    rounds: Sequence[Round], examples: int, executor: InProcess | Processes, deadline: float
) -> None:
    """Ask other problems, of the next seeds, until the deadline."""
    sizes = [n for n in FIRST_ROUNDS[1:] if n < examples]
    seeds = itertools.count(1)
    for size in itertools.chain(sizes, itertools.repeat(examples)):
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


def _collect(rounds: Sequence[Round]) -> list[tuple[Trial, list[Outcome]]]:
    """Return the trial of each dtype and what is known of it."""
    return [(done.judge.trial, done.outcomes()) for done in rounds]


def _sweep(
    rounds: Sequence[Round],
    judged: Sequence[tuple[Trial, list[Outcome]]],
    rules: Sequence[str],
    count: int,
) -> None:
    """Add the outcomes of the rules that sample on the device."""
    for done, (trial, outcomes) in zip(rounds, judged, strict=True):
        if trial.space.structure:
            outcomes.extend(done.judge.sweep(rule, count) for rule in rules)


def _diagnose(
    judged: Sequence[tuple[Trial, list[Outcome]]], submit: Submit
) -> tuple[list[Outcome], tuple[Cause, ...], dict[str, str]]:
    """Return the outcomes with their causes, the causes, and a setting that says a defect."""
    try:
        return *diagnose(judged, submit=submit), {}
    except Exception as err:  # noqa: BLE001  a defect must not cost the report
        warnings.warn(
            "the diagnosis failed, which is a defect of npattn; the report has no causes: "
            + "".join(traceback.format_exception(err)),
            RuntimeWarning,
            stacklevel=3,
        )
        defect = f"failed, a defect of npattn: {format_exception_line(err)}"
        return [], (), {"diagnosis": defect}


def _choose_rules(only: Iterable[str] | None) -> list[Property]:
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


def _choose_sweeps(
    implementation: Implementation,
    sweep: int,
    only: Iterable[str] | None,
    models: Sequence[Rounding],
) -> tuple[str, ...]:
    """Return the rules to ask that sample on the device."""
    named = tuple(rule for rule in SWEEPS if rule in (only or ()))
    if named and not sweep:
        raise OptionError(
            f"sweep is 0: pass the number of problems that {' and '.join(named)} may sample"
        )
    if sweep and implementation.is_isolated:
        raise OptionError(
            f"sweep is {sweep}, must be 0 for what lives in a worker: it judges tensors of this "
            "process (--in-process, or without isolate=True)"
        )
    if sweep and implementation.framework.name != "torch":
        raise OptionError(
            f"sweep is {sweep}, must be 0 for functions of {implementation.framework.name} "
            "arrays: it samples torch tensors"
        )
    if sweep and any(model.needs_whole_rows for model in models):
        raise OptionError(
            f"sweep is {sweep}, must be 0 with rounding={models[0].name!r}: its integers and "
            "partial sums are not covered on the device"
        )
    return (named or SWEEPS) if sweep else ()
