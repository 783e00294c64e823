"""Compare two profiles, or two implementations."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from npattn.errors import DtypeError, MissingExtraError, OptionError
from npattn.problem.checks import check_integer
from npattn.profiles import PROFILES, Profile
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.difference.answer import (
    EXPLAINS,
    describe_conventions,
    describe_distance,
    describe_explanation,
    describe_factors,
    describe_lost,
    describe_wrong,
)
from npattn.testing.difference.factors import answer_plain, change_factors
from npattn.testing.difference.measure import Measurement, measure, sample_recipes
from npattn.testing.difference.precision import PASSES, explain_errors, predict_roundings, remaining
from npattn.testing.difference.profiles import diff_conventions, diff_profiles
from npattn.testing.difference.record import Change, ConventionDifference, Difference
from npattn.testing.difference.wrong import compare_pair, explain_wrong, is_plain
from npattn.testing.power import conclude, describe, find_unjudged
from npattn.testing.reference.sides import Sides, open_sides
from npattn.testing.rules.systematic_error import plain_recipes
from npattn.testing.targets import TARGETS
from npattn.testing.worker.connect import connect
from npattn.testing.worker.connect import isolate as isolate_in_worker
from npattn.testing.worker.supervisor import Limits


def choose_kind(a: Any, b: Any, profiles: bool) -> tuple[str, tuple[str, ...]]:
    """Choose what two names or objects are compared as: "profiles" or "implementations".

    Names are the latter if both run here, unless `profiles` asks for the other. Notes say why,
    where a name stands for both.
    """
    if isinstance(a, str) and isinstance(b, str):
        return _choose_by_name(a, b, profiles)
    are_profiles = [isinstance(x, Profile) or (isinstance(x, str) and profiles) for x in (a, b)]
    if all(are_profiles):
        return "profiles", ()
    if profiles or any(are_profiles):
        raise OptionError("got a profile and an implementation: check(f, like=...) judges it by it")
    return "implementations", ()


def _choose_by_name(a: str, b: str, profiles: bool) -> tuple[str, tuple[str, ...]]:
    names = (a, b)
    for name in names:
        (profile_of if profiles else _check_name)(name)
    if profiles:
        return "profiles", ()
    if all(map(_runs_here, names)):
        both = all(name in PROFILES for name in names)
        note = f"{a} and {b} are run; --profiles compares their profiles."
        return "implementations", (note,) if both else ()
    if all(name in PROFILES for name in names):
        lacking = [n for n in names if not _runs_here(n)]
        why = "; ".join(
            f"{n} needs {TARGETS[n].lacks}" if n in TARGETS else f"{n} is a profile alone"
            for n in lacking
        )
        is_run = any(name in TARGETS for name in names)
        return "profiles", (f"Their profiles are compared, since {why}.",) if is_run else ()
    for name in names:
        if name in TARGETS and name not in PROFILES and not _runs_here(name):
            raise MissingExtraError(f"{name} needs {TARGETS[name].lacks}")
    alone, other = sorted(names, key=_runs_here)
    more = f"; --profiles compares it with the profile of {other}" if other in TARGETS else ""
    raise OptionError(
        f"{alone} is a profile here, and {other} an implementation: "
        f"npattn check {other} --like {alone} judges it by that profile{more}"
    )


def profile_of(name: str) -> Profile:
    """Return the profile of this name, or the profile of the target."""
    if name in PROFILES:
        return PROFILES[name]
    if name in TARGETS:
        return TARGETS[name].profile
    raise OptionError(f"{name} has no profile, must be one of {', '.join(PROFILES)}")


def _check_name(name: str) -> None:
    if name in PROFILES or name in TARGETS or ":" in name.strip(":"):
        return
    near = difflib.get_close_matches(name, [*PROFILES, *TARGETS], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise OptionError(
        f"{name!r} is no name of a profile ({', '.join(PROFILES)}), none that npattn list shows, "
        f"and not module:function or path/file.py:function{hint}"
    )


def _runs_here(name: str) -> bool:
    return TARGETS[name].runs_here if name in TARGETS else name not in PROFILES


DTYPES = ("float64", "float32", "float16", "bfloat16")
EXAMPLES = 24
INCOMPARABLE = "They cannot be compared: one does not answer the plainest problem."
Side = str | Profile | Callable[..., Any] | Implementation


def diff(
    a: Side,
    b: Side,
    *,
    profiles: bool = False,
    dtype: str = "float32",
    examples: int = EXAMPLES,
    seed: int = 0,
    sizes: Mapping[str, Sequence[int]] | None = None,
    isolate: bool = False,
    timeout: float | None = None,
    accept: Iterable[str] = (),
) -> Difference:
    """Compare two profiles, or two implementations of the same function.

    Profiles: each convention in which they differ, with the smallest problem on which it shows, and
    what else they take, refuse and promise. Implementations: how far their results are apart, which
    is nearer to the exact ones, which rounding explains it, and what changes the bits of either.

    Parameters
    ----------
    a, b : str, Profile, callable or Implementation
        A name of `npattn.profiles.PROFILES` or of ``npattn list``, ``module:function`` or
        ``path/file.py:function``, or the object itself. Two names that are both run as
        implementations if they can be run here, else compared as profiles. What is named runs in a
        worker, a process of its own.
    profiles : bool
        Compare the profiles of both.
    dtype : {"float64", "float32", "float16", "bfloat16"}
        Of q, k, v.
    examples : int, default 24
        Number of problems, of every option that both take.
    seed : int, default 0
        Seed of everything random.
    sizes : mapping, optional
        Sizes to sample, for kernels that take no others: ``{"D": (64, 128)}``.
    isolate : bool
        Call what is given as an object in a worker, too.
    timeout : float, optional
        Seconds a call in a worker.
    accept : iterable of str
        Results that need no verdict: one that could differ by a factor of two unseen leaves none.

    Returns
    -------
    Difference
        ``str(difference)`` is the text, ``difference.as_dict()`` all of it for JSON.

    Raises
    ------
    OptionError
        If a name stands for nothing, one is a profile and the other an implementation, they accept
        no problem in common, or another argument is not legal.
    DtypeError
        If `dtype` is another one.
    MissingExtraError
        If a name is a target whose package is not installed.
    """
    if dtype not in DTYPES:
        raise DtypeError(f"dtype is {dtype!r}, must be one of {', '.join(DTYPES)}")
    check_integer("examples", examples)
    kind, notes = choose_kind(a, b, profiles)
    if kind == "profiles":
        first, other = (x if isinstance(x, Profile) else profile_of(str(x)) for x in (a, b))
        return diff_profiles(first, other, notes)
    one, two = (_open(x, isolate, Limits(timeout)) for x in (a, b))
    settings = {"dtype": dtype, "examples": examples, "seed": seed}
    return _diff_implementations(one, two, sizes or {}, settings, notes, tuple(accept))


def _open(x: Side, isolate: bool, limits: Limits) -> Implementation:
    """Return an implementation; what is named lives in a worker."""
    if isinstance(x, str):
        return connect(x, limits=limits)
    assert not isinstance(x, Profile)
    f = x if isinstance(x, Implementation) else Implementation(x)
    return isolate_in_worker(f, limits) if isolate and not f.is_isolated else f


def _diff_implementations(
    a: Implementation,
    b: Implementation,
    sizes: Mapping[str, Sequence[int]],
    settings: dict[str, Any],
    notes: tuple[str, ...],
    accept: tuple[str, ...],
) -> Difference:
    """Measure how far two implementations are apart, and look for the reasons."""
    seed, sides = settings["seed"], open_sides(a, b, settings["dtype"], sizes)
    found = Difference(a.name, b.name, "implementations", False, (), settings=settings)
    if not isinstance(sides, Sides):
        return replace(found, answer=(INCOMPARABLE, *sides))
    recipes = sample_recipes(sides, seed, settings["examples"])
    measured = measure(sides, recipes)
    trials = (sides.a, sides.b)
    wrong = [explain_wrong(t, e) for t, e in zip(trials, measured.evidence, strict=True)]
    if not is_plain(measured, wrong):
        alike, reason, lines = compare_pair(sides, recipes, accept)
        answer = (*notes, *lines, *describe_lost(measured))
        return replace(found, alike=alike, answer=answer, beside=sides.only, reason=reason)
    if any(side.follows for side in wrong):
        one, other = (
            replace(t, conventions=side.conventions, memo={})
            for t, side in zip(trials, wrong, strict=True)
        )
        sides = replace(sides, a=one, b=other)
        measured = measure(sides, recipes)
    differing = _differing(sides)
    results = measured.results()
    same = bool(results) and all(one.same == one.elements for one in results)
    right = all(x.a_ratio <= 1 and x.b_ratio <= 1 for x in results)
    factors, explanation = ((), []) if same else _explain(sides, seed, right)
    alike = not differing and _are_alike(sides, measured)
    tested = any(one.elements for one in results)
    powers = {x.name: x.power for x in results if x.same < x.elements and x.power.elements}
    conclusion = conclude(
        failed=tested and not alike,
        tested=tested,
        unjudged=find_unjudged(powers),
        accept=accept,
        reasons=[f"a defect of npattn: {x} in {one.name}" for one in results for x in one.defects],
    )
    answer = (
        *notes,
        *describe_conventions(differing, wrong),
        *describe_distance(measured),
        *describe(powers),
        *describe_wrong(results, wrong, any(EXPLAINS in line for line in explanation)),
        *explanation,
        *describe_factors(factors),
        *describe_lost(measured),
        *sides.wrong,
    )
    return replace(
        found,
        alike=alike and conclusion.passed,
        answer=answer,
        conventions=differing,
        beside=sides.only,
        results=results,
        factors=factors,
        reason=conclusion.reason,
    )


def _are_alike(sides: Sides, measured: Measurement) -> bool:
    """Return True if results are within a tolerance of each other, and errors are the same."""
    found = [{line[1:] for line in sides.wrong if line[0] == name} for name in "AB"]
    return (
        found[0] == found[1]
        and measured.lost[0] == measured.lost[1]
        and all(one.ratio <= 1 and not one.by_convention for one in measured.results())
    )


def _differing(sides: Sides) -> tuple[ConventionDifference, ...]:
    """Describe the conventions that differ and that what both take and return may show."""
    one, two = sides.a, sides.b
    able = {*one.space.features, *one.space.structure}
    for name in ("lse", "weights"):
        if all(getattr(t.implementation, f"returns_{name}") for t in (one, two)):
            able.add(name)
    found = diff_conventions(one.conventions, two.conventions, frozenset(able))
    return tuple(x for x in found if x.example is not None)


def _explain(sides: Sides, seed: int, right: bool) -> tuple[tuple[Change, ...], list[str]]:
    """Return what each factor changes, and which roundings explain the difference, in words."""
    try:
        plain = answer_plain(sides, plain_recipes(sides.a.space, seed)[0])
    except ImplementationError as err:
        return (), [f"A plain problem was not answered: {err}"]
    if any(x.array.shape != x.exact.shape for side in plain for x in side.answer.judged.values()):
        return (), []
    factors = tuple(change_factors(sides, plain, seed))
    predictions = predict_roundings(sides.a, plain[0].answer)
    explained = [explain_errors(side.answer, predictions) for side in plain]
    answers = [side.answer for side in plain]
    unexplained = {name: remaining(answers, explained, predictions, name) for name in PASSES}
    return factors, list(describe_explanation(explained, unexplained, factors, right))
