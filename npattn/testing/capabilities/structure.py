"""Probe structure, which has no parameter: ranks, sizes, heads that share keys, views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from npattn.testing.adapters.base import (
    MISSING,
    MISTAKES,
    Crash,
    ImplementationError,
    ResultError,
    TimedOut,
)
from npattn.testing.capabilities.probing import Finding, Probing, level_of
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.shapes import SHAPES
from npattn.testing.cases.space import RANKS, STRUCTURE, Space, with_rank
from npattn.testing.levels import LEVELS
from npattn.testing.trial import Violation

ALWAYS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"window": (2, 3)},
    {"window": (7, 0)},
    {"causal": True, "window": (7, 0)},
    {"sinks": True},
)
"""Options that may be on in everything that an implementation accepts."""


# --- the plainest problem -------------------------------------------------------------------------


def probe_plain(probing: Probing) -> bool:
    """Find the ranks that it accepts, if need be with an option always on, or with o alone."""
    first = _probe_ranks(probing, {})
    if isinstance(first, ImplementationError) and (first.is_refusal or _needs_option(probing)):
        _probe_ways(probing, first)
    if not probing.trial.space.structure:
        probing.refused[:] = []
        if _is_failure(first):
            return False  # a finding says so
        verb = "is refused" if first is None or first.is_refusal else "fails"
        probing.refused.append(f"nothing: even the plainest problem {verb} ({first})")
        probing.findings.append(Finding("structure", "not applicable", str(first)))
        return False
    if not any(finding.status == "error" for finding in probing.findings):
        _probe_gradients(probing)
    return True


def _needs_option(probing: Probing) -> bool:
    """Return True if an option of `ALWAYS` has no default: None may raise anything."""
    signature = probing.trial.implementation.signature
    needed = {ours for theirs in signature.required for ours in signature.carries.get(theirs, ())}
    return any(needed & options.keys() for options in ALWAYS)


def _probe_ways(probing: Probing, first: ImplementationError) -> None:
    """Find a way in which the plainest problem is accepted, if there is one."""
    f, features = probing.trial.implementation, probing.trial.space.features
    named = f.returns
    ways = [options for options in ALWAYS if options.keys() <= features]
    for returns in dict.fromkeys((named, ())):
        f.returns, err = returns, first
        probing.refusals.clear()  # which are asked again: with what is returned in the end
        for options in ways if returns == named else ({}, *ways):
            refusal = _probe_ranks(probing, options)
            if refusal is None:
                if options:
                    _force(probing, options, err)
                if returns != named:
                    _find_returns(probing, named)
                return
            err = err if options else refusal
    f.returns = named


def _find_returns(probing: Probing, named: tuple[str, ...]) -> None:
    """Ask for each result that it names; those that are refused are read no more."""
    f, kept = probing.trial.implementation, []
    calls, refusals = [*probing.calls], [*probing.refusals]
    for name in named:
        f.returns = (name,)
        err = probing.attempt(probing.trial.space.base())
        kept += [name] if err is None else []
        if err is not None:
            result, flag = name.removeprefix("return_"), f.signature.names.get(name, name)
            probing.refused.append(f"{result}: refused, so it is not read ({flag}=True {err})")
    f.returns, probing.calls, probing.refusals = tuple(kept), calls, refusals


def _probe_ranks(probing: Probing, options: Mapping[str, Any]) -> ImplementationError | None:
    """Try each rank; return the first exception if none is accepted."""
    base = replace(probing.trial.space.base(), **options)
    accepted: set[str] = set()
    errors: list[ImplementationError] = []
    probing.refused, probing.findings = [], []
    for rank in RANKS:
        swaps = probing.trial.implementation.layout == "BTHD"  # of rank 4 alone
        if rank not in probing.offered or (swaps and rank != "rank 4"):
            continue
        recipe = with_rank(base, rank)
        if _passes_whole(probing, base, rank):
            accepted.add(rank)
            continue
        try:
            probing.call(recipe, gradients=False)
        except ImplementationError as err:
            errors.append(err)
            if not _is_failure(err):
                probing.refused.append(f"{rank}: refused ({err})")
            elif not probing.findings:
                probing.error("structure", recipe, err, str(err), "values")
        else:
            accepted.add(rank)
    probing.narrow(structure=frozenset(accepted))
    wrong = [err for err in errors if _is_failure(err)]
    return None if accepted else (wrong or errors)[0]


def _is_failure(err: ImplementationError | None) -> bool:
    """Return True for an exception that refuses nothing, whatever was asked."""
    ends = isinstance(err, (ResultError, Crash, TimedOut))
    return ends or (err is not None and isinstance(err.__cause__, SystemExit))


def _force(probing: Probing, options: Mapping[str, Any], err: ImplementationError) -> None:
    probing.narrow(always=dict(options))
    probing.refuse(frozenset({f"no {name}"}) for name in options)
    text = str(err).removeprefix("raised ")
    probing.refused.append(f'always {" and ".join(options)}: refused without "{text}"')


def _probe_gradients(probing: Probing) -> None:
    """Ask for no gradients if even the plainest problem has none; a backward should have them."""
    implementation, base = probing.trial.implementation, probing.trial.space.base()
    err = probing.attempt(base) if implementation.has_gradients else None
    if err is None:
        return
    implementation.gradients_raise = True
    if implementation.backward is None:
        is_wrong, way_out = isinstance(err.__cause__, MISTAKES), ""
    else:  # whoever names a backward says that there are gradients
        is_wrong = not isinstance(err.__cause__, NotImplementedError)
        way_out = "; without backward= (--backward) the forward alone is judged"
    if is_wrong or _is_failure(err):
        probing.error("gradients", base, err, f"{err}{way_out}", "values")
    else:
        probing.refused.append(f"gradients: refused ({err})")


# --- variations of it -----------------------------------------------------------------------------


def probe_variations(probing: Probing) -> None:
    """Try each other structure; what is accepted and wrong is a finding, by level.

    If the plainest problem is wrong, structure is not to blame.
    """
    space = probing.trial.space
    base = space.base()
    ranks = {
        n: None if _passes_whole(probing, base, n) else _judge(probing, with_rank(base, n), n)
        for n in RANKS
        if n in space.structure
    }
    blames = next(iter(ranks.values())) is None
    violated = {n: found for n, found in ranks.items() if found and isinstance(found[1], Violation)}
    wrong = [(n, *found) for n, found in violated.items() if blames]
    accepted = {n for n, found in ranks.items() if not found or (n in violated and not blames)}
    for name, change in variations(base, space.sizes).items():
        if name not in probing.offered:
            continue
        if name.endswith("= 0") or not blames or (space.always and name in ("T != S", "T > S")):
            # Sizes of 0 are judged last; options are judged by the rules.
            accepted |= {name} if _accepts(probing, name, replace(base, **change)) else set()
            continue
        recipe = replace(base, **change)
        if _passes_whole(probing, base, name, shares="K < H" in {name, *accepted}):
            accepted.add(name)
            continue
        found = _judge(probing, recipe, name)
        if found is None or (isinstance(found[1], Violation) and _blames_sizes(probing, recipe)):
            accepted.add(name)
        elif isinstance(found[1], Violation):
            wrong.append((name, *found))
    probing.narrow(structure=frozenset(accepted))
    _report_wrong(probing, wrong)


def _passes_whole(probing: Probing, base: Recipe, name: str, shares: bool = False) -> bool:
    """Return True if a whole shape with this structure is right, which rules ask anyway.

    Where a framework compiles for each shape that saves one in which nothing else is peculiar.
    """
    space = probing.trial.space
    if not space.few_shapes or space.sizes or name == "rank 4":
        return False
    others = Space(structure=frozenset(STRUCTURE) - {name})
    for shape in SHAPES:
        (H, K), sizes = shape.heads, {x: getattr(shape, x) for x in "TSDE"}
        recipe = replace(base, lead=(shape.B,), H=H, K=K if shares else H, **sizes)
        recipe = replace(with_rank(recipe, shape.rank), broadcast=shape.broadcast)
        if name != shape.rank and others.takes(recipe):
            continue
        try:
            return probing.judge(recipe) is None
        except ImplementationError:
            return False
    return False


def _blames_sizes(probing: Probing, recipe: Recipe) -> bool:
    """Return True if plain structure is wrong at these sizes too: the rules judge that."""
    T, D = max(recipe.T, recipe.S), max(recipe.D, recipe.E)
    plain = replace(recipe, T=T, S=T, D=D, E=D, K=recipe.H, broadcast=False)
    allowed = probing.trial.space.sizes
    restricted = any(getattr(plain, x) not in allowed.get(x, (getattr(plain, x),)) for x in "KTSDE")
    if plain == recipe or restricted:
        return False
    try:
        return probing.judge(plain) is not None
    except ImplementationError:
        return False  # the rules report what it raises here


def probe_zeros(probing: Probing) -> None:
    """Judge accepted sizes of 0; if the same problem without any is wrong, ask none of them."""
    trial = probing.trial
    base = trial.space.base()
    changes = variations(base, trial.space.sizes)
    # With E = D a result as wide as q, and not as v, would go unnoticed.
    wide = changes.get("E != D", {}) if "E != D" in trial.space.structure else {}
    names = [n for n in changes if n.endswith("= 0") and n in trial.space.structure]
    if not names:
        return
    if _judge(probing, replace(base, **wide), ""):
        probing.narrow(structure=trial.space.structure - set(names))
        probing.refused.append("sizes of 0: not asked, for the plainest problem is wrong")
        return
    wrong = []
    for name in names:
        sinks = name == "S = 0" and "sinks" in trial.space.features  # which are left alone
        sinks = sinks or base.sinks
        recipe = replace(base, **(wide | changes[name]), sinks=sinks)
        recipe = recipe if probing.allows(recipe) else replace(recipe, sinks=False)
        found = _judge(probing, recipe, name)
        wrong += [(name, *found)] if found else []
    _report_wrong(probing, wrong)


def _accepts(probing: Probing, name: str, recipe: Recipe) -> bool:
    err = probing.attempt(recipe)
    if err is not None:
        _refuse(probing, name, recipe, err)
    return err is None


def _judge(
    probing: Probing, recipe: Recipe, name: str
) -> tuple[Recipe, Violation | ImplementationError] | None:
    """Return how the answer is wrong, or what is raised; the latter is refused then."""
    try:
        found = probing.judge(recipe)
    except ImplementationError as err:
        _refuse(probing, name, recipe, err)
        return recipe, err
    return None if found is None else (recipe, found)


def _refuse(probing: Probing, name: str, recipe: Recipe, err: ImplementationError) -> None:
    """Note structure that is refused; an exception that refuses nothing is an error."""
    probing.refused.append(f"{name}: refused ({err})")
    mistakes = (*(x for x in MISTAKES if x not in MISSING), SystemExit)
    if isinstance(err.__cause__, mistakes) or err.status != "error":
        probing.error("structure", recipe, err, f"{name}: {err}", level_of(name))


def _report_wrong(
    probing: Probing, wrong: Sequence[tuple[str, Recipe, Violation | ImplementationError]]
) -> None:
    """Report wrong answers, a finding for each level, and sample their structure no more."""
    if not wrong:
        return
    names = [name for name, *_ in wrong]
    probing.narrow(structure=probing.trial.space.structure - set(names))
    probing.refused.append(f"{', '.join(names)}: accepted and wrong, so not sampled again")
    for level in LEVELS:
        rows = [row for row in wrong if level_of(row[0]) == level]
        if rows:
            _, recipe, err = rows[0]
            problem = err.problem or probing.trial.problem(recipe)
            text = "\n".join(f"{name}: {err}" for name, _, err in rows)
            probing.findings.append(
                Finding("structure", "failed", text, problem, recipe, err, len(rows), level)
            )


def variations(base: Recipe, sizes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
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
    long = 2 * base.S if free["S"] else max(sizes["S"])
    tests["T != S"] = (
        {"S": long} if long != base.T else {"T": base.T + 1 if free["T"] else min(sizes["T"])}
    )
    late = 2 * base.T if free["T"] else max(sizes["T"])
    tests["T > S"] = {"T": late}
    batches = [base.lead] if base.lead else []
    if base.lead and len(base.lead) == 1:
        batches += [(n,) for n in sizes.get("B", ())]
    if several := [lead for lead in batches if max(lead) > 1]:  # with one sample all is the same
        tests["broadcast"] = {"broadcast": True, "lead": several[0]}
    if base.lead and free["B"]:
        tests["B = 0"] = {"lead": (0, *base.lead[1:])}
    if base.lead is not None and free["H"] and free["K"]:
        tests["H = 0"] = {"H": 0, "K": 0}
    for letter in "TSDE":
        if free[letter]:
            tests[f"{letter} = 0"] = {letter: 0}
    for view in ("transposed", "stepped", "reversed"):
        tests[view] = {"view": view}
    if several or base.lead == ():  # one sample has no stride to be 0
        tests["expanded"] = {"view": "expanded", **({"lead": several[0]} if several else {})}
    legal = {name: change for name, change in tests.items() if change and name in STRUCTURE}
    if "T > S" in legal and legal["T > S"]["T"] <= base.S:
        del legal["T > S"]
    return legal
