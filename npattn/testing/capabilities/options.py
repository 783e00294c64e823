"""Probe options: each kind and value of one, pairs of them, and options at ranks and sizes of 0.

A refusal is learned only if every problem of its class raises the same type of exception. Whatever
raises otherwise is an error. Neither is sampled again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from npattn.testing.adapters.base import ImplementationError, NotAsked
from npattn.testing.capabilities.probing import Probing, level_of
from npattn.testing.capabilities.structure import variations
from npattn.testing.cases.classes import classes_of_value
from npattn.testing.cases.recipe import OPTION_FIELDS, Recipe
from npattn.testing.cases.space import RANKS, Space, with_rank
from npattn.testing.cases.strategies import Pools
from npattn.testing.levels import Level

OTHERS = 3
"""Further problems of a class that must raise the same, if there are as many."""
PLAIN = Recipe()
Values = dict[frozenset[str], list[Any]]


def values_of(space: Space, field: str) -> list[Any]:
    """Return the values of an option that are sampled, the plainest first."""
    values = dict.fromkeys(Pools(space).lists.get(field, ()))
    return [x for x in values if x != getattr(PLAIN, field) or x is True]


def _kinds(space: Space, field: str, recipe: Recipe) -> Values:
    """Return the values of an option by their classes, each kind by itself."""
    kinds: Values = {}
    rank = 2 if recipe.lead is None else 3 + len(recipe.lead)
    for value in values_of(space, field):
        kinds.setdefault(classes_of_value(field, value, rank), []).append(value)
    # Names whose kind depends on the seed are excluded with either of their kinds.
    return {kind: values for kind, values in kinds.items() if len(kind) <= 2}


# --- alone ----------------------------------------------------------------------------------------


def probe_options(probing: Probing) -> None:
    """Try every kind and value of each option alone."""
    for field in OPTION_FIELDS:
        if field not in probing.trial.space.always:
            _probe_option(probing, field, probing.trial.space.base())


def _probe_option(probing: Probing, field: str, base: Recipe) -> None:
    """Refuse the kinds of an option that raise, and list or report them; drop it if all raise."""
    kinds = _kinds(probing.trial.space, field, base)
    raised = _try_kinds(probing, field, kinds, base)
    if raised and len(raised) == len(kinds) and _needs_causal(probing, field, raised, base):
        base = replace(base, causal=True)
        raised = _try_kinds(probing, field, kinds, base)
    if not raised:
        return
    if len(raised) == len(kinds):
        _drop(probing, field, base, raised, kinds)
        return
    refused: dict[frozenset[str], ImplementationError] = {}
    for kind, err in raised.items():
        first, *rest = (replace(base, **{field: value}) for value in kinds[kind])
        if probing.confirm(err, [*rest[:OTHERS], *probing.at_other_sizes(first)]):
            refused[kind - {field}] = err
        else:
            _report(probing, field, first, err, kind - {field})
        probing.refuse([kind - {field} or kind])
    title = (
        f"{field} kinds refused" if field in ("mask", "bias", "gate") else "option values refused"
    )
    names = {kind: ", ".join(sorted(kind)).removeprefix("mask ") for kind in refused}
    prefix = "gate " if field == "gate" else "bias "
    _list(probing, title, {names[kind].removeprefix(prefix): e for kind, e in refused.items()})


def _try_kinds(
    probing: Probing, field: str, kinds: Values, base: Recipe
) -> dict[frozenset[str], ImplementationError]:
    attempts = ((k, probing.attempt(replace(base, **{field: v[0]}))) for k, v in kinds.items())
    return {kind: err for kind, err in attempts if err is not None}


def _needs_causal(
    probing: Probing, field: str, raised: Mapping[frozenset[str], ImplementationError], base: Recipe
) -> bool:
    """Learn that an option is refused without causal, if it is accepted with it."""
    space = probing.trial.space
    if "causal" not in space.features or base.causal or field == "causal":
        return False
    kinds = {kind: _kinds(space, field, base)[kind] for kind in raised}
    with_causal = _try_kinds(probing, field, kinds, replace(base, causal=True))
    types = {type(err.__cause__) for err in raised.values()}
    err = next(iter(raised.values()))
    if len(with_causal) == len(kinds) or len(types) > 1 or not err.is_refusal:
        return False
    probing.refuse([frozenset({field, "no causal"})])
    _list(probing, "option combinations refused", {f"{field} without causal": err})
    return True


def _drop(
    probing: Probing,
    field: str,
    base: Recipe,
    raised: Mapping[frozenset[str], ImplementationError],
    kinds: Values,
) -> None:
    """Sample an option no more that raises in every kind and value.

    It is refused if every exception may say so, at another size too; else it does not work.
    """
    kind, err = next(iter(raised.items()))
    recipe = replace(base, **{field: kinds[kind][0]})
    # Other exceptions, of shapes that do not fit, say as often that the option is broken.
    says_so = (AssertionError, NotImplementedError)
    refuses = all(e.is_refusal and isinstance(e.__cause__, says_so) for e in raised.values())
    refuses = refuses and probing.confirm(err, probing.at_other_sizes(recipe))
    if not refuses:
        probing.error(f"option-{_feature(field)}", recipe, err, f"{field} alone: {err}", "values")
    names = {"dropout_mask", "dropout_rate"} if field == "dropout" else {field}
    probing.narrow(features=probing.trial.space.features - names)
    verb = "refused" if refuses else "raised, so it is not sampled again"
    probing.refused.append(f"{_feature(field)}: {verb} ({err})")


def _feature(field: str) -> str:
    return "dropout_mask" if field == "dropout" else field


def _report(
    probing: Probing,
    rule: str,
    recipe: Recipe,
    err: ImplementationError,
    classes: frozenset[str],
    level: Level = "values",
) -> None:
    """Report an exception that is no refusal; its class is not sampled again."""
    if isinstance(err, NotAsked):
        return  # the report says so once
    name = ", ".join(sorted(classes))
    why = " (other problems of its kind do not raise it)" if err.is_refusal else ""
    probing.error(f"option-{rule}", recipe, err, f"{name}: {err}{why}", level)
    probing.refused.append(f"{name}: raised, so it is not sampled again ({err})")


def _list(probing: Probing, title: str, refused: Mapping[str, ImplementationError]) -> None:
    """Add a line for each message to what the report says is refused."""
    for text in dict.fromkeys(str(err) for err in refused.values()):
        names = [name for name, err in refused.items() if str(err) == text]
        probing.refused.append(f'{title}: {", ".join(names)} "{text.removeprefix("raised ")}"')


# --- in pairs -------------------------------------------------------------------------------------


def probe_pairs(probing: Probing) -> None:
    """Try all options together, and if that is refused every pair."""
    base = probing.trial.space.base()
    plain = _plainest(probing, base)
    if len(plain) < 2 or _accepts_all(probing, base, plain):
        return
    refused: dict[str, ImplementationError] = {}
    for pair in combinations(plain, 2):
        recipe = replace(base, **{field: plain[field] for field in pair})
        err = probing.attempt(recipe) if probing.allows(recipe) else None
        if err is None:
            continue
        if probing.confirm(err, [*_other_pairs(probing, recipe, pair)]):
            refused["+".join(pair)] = err
        else:
            _report(probing, "+".join(pair), recipe, err, frozenset(pair))
        probing.refuse([frozenset(pair)])
    _list(probing, "option combinations refused", refused)


def _plainest(probing: Probing, base: Recipe) -> dict[str, Any]:
    """Return a value of each option that is accepted alone, the plainest."""
    space = probing.trial.space
    plain: dict[str, Any] = {}
    for field in OPTION_FIELDS:
        values = [x for x in values_of(space, field) if field not in space.always]
        needs = {"causal": True} if space.refuses(frozenset({field, "no causal"})) else {}
        allowed = (x for x in values if probing.allows(replace(base, **{**needs, field: x})))
        first = next(allowed, None)
        if first is not None:
            plain[field] = first
    return plain


def _accepts_all(probing: Probing, base: Recipe, plain: Mapping[str, Any]) -> bool:
    """Return True if no exception is raised with all options on that may be on together."""
    crowd = base
    for field, value in plain.items():
        more = replace(crowd, **{field: value})
        crowd = more if probing.allows(more) else crowd
    return probing.allows(crowd) and probing.attempt(crowd) is None


def _other_pairs(probing: Probing, recipe: Recipe, pair: tuple[str, str]) -> Iterator[Recipe]:
    """Yield problems with other kinds of two options, and of another size."""
    yield from probing.at_other_sizes(recipe)
    for field in pair:
        kinds = _kinds(probing.trial.space, field, recipe).values()
        others = (replace(recipe, **{field: values[0]}) for values in kinds)
        yield from [r for r in others if r != recipe and probing.allows(r)][:OTHERS]


# --- at other ranks, and at sizes of 0 ------------------------------------------------------------


def probe_elsewhere(probing: Probing) -> None:
    """Try all options at each other rank and size of 0, and if that is refused each kind alone."""
    space = probing.trial.space
    base, structure = space.base(), space.structure
    plain = _plainest(probing, base)
    changes = variations(base, space.sizes)
    zeros = {n: replace(base, **change) for n, change in changes.items() if n.endswith("= 0")}
    for name, place in ({rank: with_rank(base, rank) for rank in RANKS} | zeros).items():
        if name in structure and plain and not _accepts_all(probing, place, plain):
            refused: dict[str, ImplementationError] = {}
            for field in plain:
                refused |= _probe_there(probing, name, place, field)
            _list(probing, "option combinations refused", refused)


def _probe_there(
    probing: Probing, name: str, place: Recipe, field: str
) -> dict[str, ImplementationError]:
    """Try the kinds of an option at a rank or a size of 0; return what is refused."""
    kinds = _kinds(probing.trial.space, field, place)
    recipes = {kind: replace(place, **{field: values[0]}) for kind, values in kinds.items()}
    recipes = {kind: recipe for kind, recipe in recipes.items() if probing.allows(recipe)}
    attempts = {kind: probing.attempt(recipe) for kind, recipe in recipes.items()}
    raised = {kind: err for kind, err in attempts.items() if err is not None}
    if not raised:
        return {}
    if len(raised) == len(recipes) and len({type(e.__cause__) for e in raised.values()}) == 1:
        err = next(iter(raised.values()))
        raised = {frozenset({field}): err}
        recipes = {frozenset({field}): next(iter(recipes.values()))}
    refused: dict[str, ImplementationError] = {}
    for kind, err in raised.items():
        classes = (kind - {field} or kind) | {name}
        if err.is_refusal:
            refused[" with ".join(sorted(classes, key=lambda x: x != name))] = err
        else:
            _report(probing, field, recipes[kind], err, classes, level_of(name))
        probing.refuse([classes])
    return refused
