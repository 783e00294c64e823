"""Check an implementation against every rule of the semantics."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import npattn
from npattn.checks import check_integer
from npattn.conventions import Conventions, check_conventions
from npattn.errors import DtypeError, OptionError
from npattn.options import FEATURES
from npattn.profiles import Profile
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.space import STRUCTURE, Space
from npattn.testing.diagnosis.causes import diagnose
from npattn.testing.levels import REQUIRED, check_levels
from npattn.testing.report.cause import Cause
from npattn.testing.report.expected import asked_of, check_expected
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.report import Report
from npattn.testing.rules import PROPERTIES, Property
from npattn.testing.runner.rounds import ROBUSTNESS, Judge, Progress, Round
from npattn.testing.runner.schedule import InProcess, Processes
from npattn.testing.trial import GRADIENTS, Trial
from npattn.testing.worker.connect import isolate as isolate_in_worker
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
ERRORS: dict[str, Any] = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
"""NumPy's own error state."""
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
    rename: Mapping[str, str] | None = None,
    features: Iterable[str] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    dtypes: Sequence[str] = ("float32",),
    device: str | None = None,
    examples: int = 100,
    seed: int = 0,
    rounding: Rounding | str | None = None,
    strict: bool = False,
    require: Iterable[str] | str = REQUIRED,
    expect: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
    shrink: bool = True,
    processes: int = 1,
    fail_fast: bool = False,
    progress: Progress | None = None,
    sweep: int = 0,
    diagnosis: bool = True,
    isolate: bool = False,
    timeout: float | None = None,
    must: Iterable[str] = (),
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
    rename : mapping, optional
        Its parameter names → npattn's: ``{"cap": "softcap"}``.
    features : iterable of str, optional
        Its options, instead of those of its signature.
    sizes : mapping, optional
        Sizes to sample, for a kernel that takes no others: ``{"D": (64, 128)}``.
    dtypes : sequence of str, default ("float32",)
    device : str, optional
        Device of its tensors.
    examples : int, default 100
        Number of different problems per rule.
    seed : int, default 0
        Seed of everything random.
    rounding : Rounding or str, optional
        Rounding model: "upcast", "fused", "eager"; default: the loosest that the dtype explains.
    strict : bool
        A suspect counts as failed.
    require : iterable of str, or "all"
        Levels that must pass: among "values", "edges", "conduct", "non-finite", "degenerate",
        "reproducible"; "all" is every one but the last. Other levels are shown, and cost nothing.
    expect : mapping, optional
        Expected failures, with reasons: ``{"hidden-nan-v[float32]": "multiplies by 0"}``.
    only : iterable of str, optional
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
    progress : callable, optional
        Called with ``(dtype, rule, done, total)``.
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
        If it is interrupted; its attribute `report` is the report of what is known by then.

    Examples
    --------
    >>> from npattn.testing import check
    >>> from npattn.testing.targets.numpy import naive
    >>> report = check(naive, examples=5, only=["empty-row"])
    >>> report.passed
    False
    """
    implementation = _read(
        f,
        framework=framework,
        backward=backward,
        features=features,
        layout=layout,
        like=like,
        rename=rename,
    )
    if device is not None:
        implementation.on(device)
    if isolate:
        implementation = isolate_in_worker(implementation, Limits(timeout))
    elif timeout is not None:
        raise OptionError(f"timeout is {timeout}, must be None without isolate=True")
    dtypes = (dtypes,) if isinstance(dtypes, str) else dtypes
    _check_numbers(dtypes, examples, sweep)
    check_conventions(conventions)
    processes = check_integer("processes", processes)
    levels, expected = check_levels(require), check_expected(expect or {})
    must = _check_must(must)
    rules, robust = _choose_rules(only), ROBUSTNESS in (only or ())
    progress = progress or (lambda *_: None)
    sweeps = _choose_sweeps(implementation, sweep, only)
    refused, unasked, together = _refusals(implementation.profile)
    alone = {name for classes in together if len(classes) == 1 for name in classes}
    space = Space(
        features=implementation.features - alone,
        structure=frozenset(STRUCTURE) - unasked,
        sizes=dict(sizes or {}),
        few_shapes=implementation.framework.compiles,
        refused=together,
    )
    if conventions is not None:
        implementation.conventions = conventions
    conventions = implementation.conventions
    required = (*levels, *(rule.rule for rule in rules if only is not None))
    limits = frozenset(required if fail_fast else ()), frozenset(expect or ())
    judges = []
    for dtype in dtypes:
        model, own = _model(rounding, dtype), replace(space, dtype=dtype)
        trial = Trial(implementation, conventions, model, own)
        judges.append(Judge(trial, examples, seed, progress, shrink, *limits))
    rounds: list[Round] = []
    interrupt: KeyboardInterrupt | None = None
    try:
        # What a target does to NumPy's error state must not reach the oracle.
        with np.errstate(**ERRORS):
            _ask(judges, rules, robust, processes, implementation, rounds)
    except KeyboardInterrupt as err:
        interrupt = err
    stopped = any(done.stopped for done in rounds)
    judged: list[tuple[Trial, list[Outcome]]] = []
    for dtype, done in zip(dtypes, rounds, strict=interrupt is None):
        judged.append((done.judge.trial, done.outcomes()))
        if done.judge.trial.space.structure and not stopped and not interrupt:
            judged[-1][1].extend(done.judge.sweep(rule, sweep) for rule in sweeps)
        refused += [f"{dtype}: {line}" for line in done.judge.refused]
    refused += implementation.given_up_lines
    outcomes = [outcome for _, own in judged for outcome in own]
    causes: tuple[Cause, ...] = ()
    if diagnosis and not interrupt:
        with implementation.framework.one_thread(), np.errstate(**ERRORS):
            outcomes, causes = diagnose(judged)
    behaves = {d: done.behaves for d, done in zip(dtypes, rounds, strict=False) if done.behaves}
    settings = {
        "seed": seed,
        "examples": examples,
        **({"sweep": sweep} if sweeps else {}),
        **_describe_model(implementation, rounding, behaves),
    }
    if only is not None:
        expected = asked_of(expected, [*PROPERTIES, *SWEEPS], outcomes)
    report = Report(
        implementation.name,
        tuple(outcomes),
        _describe_untested(implementation, rounds, bool(sweeps), interrupt is not None),
        settings,
        strict,
        require=required,
        causes=causes,
        refused=tuple(refused),
        expected=expected,
        taken_back=dict(implementation.profile.promises) if implementation.profile else {},
        interrupted=interrupt is not None,
        missing=tuple(n for n in must if not all(_tests(done.judge.trial, n) for done in rounds)),
    )
    if interrupt is not None:
        interrupt.report = report  # type: ignore[attr-defined]
        raise interrupt
    return report


def _check_must(must: Iterable[str]) -> tuple[str, ...]:
    names = (must,) if isinstance(must, str) else tuple(must)
    legal = (*FEATURES, "lse", "weights", *GRADIENTS)
    for name in names:
        if name not in legal:
            raise OptionError(f"must has {name!r}, must be among {', '.join(legal)}")
    return names


def _tests(trial: Trial, name: str) -> bool:
    """Return True if an option, a result or a gradient is in what a trial has narrowed to."""
    f = trial.implementation
    has = {"lse": f.returns_lse, "weights": f.returns_weights}
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


def _refusals(
    profile: Profile | None,
) -> tuple[list[str], frozenset[str], frozenset[frozenset[str]]]:
    """Return what a profile refuses: a line each, structure, and options alone or together."""
    if profile is None:
        return [], frozenset(), frozenset()
    names = set(profile.refused_names)
    names |= {"D = 0", "E = 0"} if "E != D" in names else set()
    options = (frozenset(name.split("+")) for name in names)
    said = [f"{line} (not promised by {profile.name})" for line in profile.refuses]
    return (
        said,
        frozenset(names & set(STRUCTURE)),
        frozenset(x for x in options if x <= set(FEATURES)),
    )


def _check_numbers(dtypes: Sequence[str], examples: int, sweep: int) -> None:
    for dtype in dtypes:
        if dtype not in DTYPES:
            hint = SHORT_DTYPES.get(str(dtype).removeprefix("torch."))
            hint = f"; did you mean {hint}?" if hint else ""
            raise DtypeError(f"dtypes has {dtype!r}, must be among {', '.join(DTYPES)}{hint}")
    if isinstance(sweep, bool) or not isinstance(sweep, int) or sweep < 0:
        raise OptionError(f"sweep is {sweep!r}, must be an integer ≥ 0: how many problems")
    if not dtypes or examples < 1:
        raise OptionError(f"dtypes is {dtypes!r} and examples {examples}, must be 1 or more each")


def _ask(
    judges: Sequence[Judge],
    rules: Sequence[Property],
    robust: bool,
    processes: int,
    implementation: Implementation,
    rounds: list[Round],
) -> None:
    """Let each judge probe its dtype, and ask the rules, in this process or in others.

    Each dtype is added to `rounds` as it begins.
    """
    with Processes(processes, implementation) if processes > 1 else InProcess() as executor:
        for judge in judges:
            with implementation.framework.one_thread():
                stopped = any(done.stopped for done in rounds)
                rounds.append(Round(judge, [], []) if stopped else judge.begin(rules, robust))
                executor.ask(rounds[-1])
        executor.finish()


def _versions(implementation: Implementation) -> dict[str, str]:
    loaded = {n: sys.modules[n].__version__ for n in ("torch", "jax") if n in sys.modules}
    python = platform.python_version()
    here = {"npattn": npattn.__version__, "numpy": np.__version__, "python": python}
    return here | (implementation.versions or loaded)


def _choose_rules(only: Iterable[str] | None) -> list[Property]:
    """Return the rules that `only` names, in its order; all for None."""
    if only is None:
        return list(PROPERTIES.values())
    chosen: list[Property] = []
    for wanted in only:
        matches = [p for name, p in PROPERTIES.items() if name.startswith(wanted)]
        matches = [PROPERTIES[wanted]] if wanted in PROPERTIES else matches  # the whole name wins
        if not matches and wanted not in ("structure", ROBUSTNESS, *SWEEPS):  # the first: always
            rules = ", ".join([*PROPERTIES, ROBUSTNESS, *SWEEPS])
            raise OptionError(f"{wanted!r} is not a rule, must be one of {rules}")
        chosen += [p for p in matches if p not in chosen]
    return chosen


def _model(rounding: Rounding | str | None, dtype: str) -> Rounding:
    if isinstance(rounding, Rounding):
        return rounding
    return Rounding.undeclared(dtype) if rounding is None else Rounding.from_name(rounding)


def _choose_sweeps(
    implementation: Implementation, sweep: int, only: Iterable[str] | None
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
    return (named or SWEEPS) if sweep else ()


def _describe_untested(
    implementation: Implementation, rounds: Sequence[Round], sweeps: bool, interrupted: bool
) -> tuple[str, ...]:
    """Say what was not tested, a line each."""
    lines = [*_missing(implementation)]
    lines += ["ranks other than 4: layout BTHD"] if implementation.layout == "BTHD" else []
    stopped = any(done.stopped for done in rounds)
    lines += ["what comes after the first failure (fail_fast)"] if stopped else []
    lines += ["what was not asked yet (interrupted)"] if interrupted else []
    return (*lines, *([_describe_sizes(rounds[0], sweeps)] if rounds else []))


def _describe_sizes(done: Round, sweeps: bool) -> str:
    """Say which sizes the rules of a round sampled."""
    ranges = done.judge.trial.space.ranges.items()
    drawn = ", ".join(f"{n} {a}–{b}" if a < b else f"{n} {a}" for n, (a, b) in ranges)
    drawn += " and model-sizes" if "model-sizes" in done.names else ""
    return f"sizes outside {drawn} (sizes={'' if sweeps else ', sweep='})"


def _describe_model(
    implementation: Implementation, rounding: Rounding | str | None, behaves: Mapping[str, str]
) -> dict[str, Any]:
    """Return what it is judged as, for the settings of a report."""
    return {
        "features": tuple(sorted(implementation.features)),
        **({"reads": implementation.reads} if implementation.reads else {}),
        "rounding": rounding.name if isinstance(rounding, Rounding) else rounding or "undeclared",
        "conventions": _describe(implementation.conventions),
        **({"behaves as": behaves} if behaves else {}),
        "versions": _versions(implementation),
    }


def _missing(implementation: Implementation) -> list[str]:
    """Describe options and results that npattn does not know, or the implementation lacks."""
    unknown = "unknown to the judge, keeps its default"
    lines = [n if ": " in n else f"{n}: {unknown}" for n in implementation.untested]
    absent = [n for n in FEATURES if n not in implementation.features]
    if absent:
        lines.append(f"options it does not have: {', '.join(absent)}")
    if not implementation.has_gradients:
        lines.append("gradients: no backward= was given")
    if not implementation.returns_lse:
        lines.append("lse: no return_lse parameter")
    elif not implementation.takes_dlse and implementation.backward is not None:
        lines.append("gradients through lse: backward has no dlse parameter")
    elif not implementation.takes_dlse:
        flag = implementation.signature.names["return_lse"]
        lines.append(f"gradients through lse: {flag} returns one that is not differentiated")
    return lines


def _describe(conventions: Conventions) -> dict[str, Any]:
    """Return what the conventions change, by name."""
    default = Conventions()
    return {
        name: value for name, value in vars(conventions).items() if value != getattr(default, name)
    }
