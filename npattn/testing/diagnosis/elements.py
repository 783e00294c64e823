"""Places of faults: the elements that are wrong, and the problems on which they are.

The problems are asked for and attacked (`borders`), the elements learned from those that fail.
What is told holds on every failing problem at hand and on no other that could show the fault; if
nothing does, nothing is told.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npattn.errors import NpattnError
from npattn.oracle.api import evaluate
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis.amount import NUMBERS, SEEN
from npattn.testing.diagnosis.borders import LEAST, Neighbours, neighbours_of
from npattn.testing.diagnosis.evidence import Evidence, group, observe
from npattn.testing.diagnosis.explore import (
    HIDING,
    OF_SEVERAL_KEYS,
    OFF,
    VALUES,
    Point,
    fit,
    narrow,
    sample,
    sample_of,
    shape_of,
    shown_in,
)
from npattn.testing.diagnosis.kinds import OPTIONS
from npattn.testing.diagnosis.locate import Fault, visible_keys
from npattn.testing.diagnosis.place import (
    CONFIRMED,
    EVERYWHERE,
    LENGTH,
    Sample,
    Table,
    Where,
    learn,
)
from npattn.testing.diagnosis.place import Atom as PlaceAtom
from npattn.testing.diagnosis.sources import differs_from_own, is_seen
from npattn.testing.places import Atom, Place, read_condition
from npattn.testing.trial import Trial

COARSE = 0.05
"""Margin by which elements must be better, for each axis that is left out."""
MOST_ATOMS = 2
"""Conditions on elements: more are learned of what one or two do not say, and are no place."""
MOST_OF_CLAUSES = 3
"""Atoms of several clauses: more of them fit what was asked, and are no place."""
REFUTED = 0.1
"""Share of the wrong elements of one problem that a place of others may leave out."""
UNLIKELY = 1e-3
"""Chance, in any of the problems, that so many elements are right where a place holds."""
ROWS: tuple[dict[str, Any], ...] = ({"T": 64}, {"T": 64, "S": 83})
"""Sizes that are asked where a fault shows in a few rows or keys, which some numbers lack."""
ATTACKED = 10
"""Problems that must have been asked and not refused for an attack to have been one."""
ATOM = 0.02
"""Share of elements that each condition must set right."""
NO_ELEMENTS = Where(EVERYWHERE, 0.0, ())


def neighbours_of_fault(
    evidence: Evidence, points: Sequence[Point], fault: Fault, amount: str, reached: Set[str]
) -> Neighbours | None:
    """Return the problems around a failing one; what could not show the fault tells nothing.

    `points` are the failing problem and those that were tried around it.
    `reached` are the results that the fault may make wrong; others are of another one.
    """
    outcome, point = evidence.outcome, points[0]
    if outcome is None or point.fault is None:
        return None
    near = neighbours_of(evidence.trial, outcome, point.evidence.wrong)
    if near is None:
        return None
    source = (fault.step == "visible" and amount not in SEEN) or fault.form == "bias of"
    names = frozenset(point.evidence.wrong) & reached or frozenset(point.evidence.wrong)
    factor = amount.rpartition("× ")[2]
    of_empty = all(_is_of_empty_rows(p) for p in points if p.fault is not None)
    several = _has_several_keys(near.trial, point.evidence.problem)
    of_several = fault.step in OF_SEVERAL_KEYS and several

    def tells(other: Evidence) -> bool:
        trial, problem = other.trial, other.problem
        if of_empty:
            return True
        if fault.form == "rows of zeros" and problem.sinks is not None:
            weights = evaluate(problem, trial.conventions).weights
            if (trial.visible(problem).any(-1) & ~weights.any(-1)).any():
                return False  # the sink takes all weight of rows that may have lost it
        if factor in NUMBERS and "scale" in factor and NUMBERS[factor](problem) == 1:
            return False
        if of_several and not _has_several_keys(trial, problem):
            return False  # a row of one key has weight 1, whatever its score is
        if problem.bias_array is not None and not problem.bias_array.any():
            return False  # it adds nothing and hides nothing
        if fault.step == "visible" and _shares_masks(problem, point.evidence.problem):
            return False  # another head, sample or query has the same mask
        if source:  # without the option whose meaning is wrong, that it passes is a condition
            off = (
                HIDING
                - list_hiding(problem)
                - ({"bias"} if problem.bias_array is not None else set())
            )
            return bool({*amount.split()} & off) or is_seen(amount, trial, problem)
        hiding = list_hiding(problem)
        if any(_is_idle(other, name) for name in hiding):
            return False
        # A key that is hidden may be the wrong one.
        could = fault.step == "visible" or not hiding or list_hiding(point.evidence.problem)
        return bool(could or trial.visible(problem).all())

    trial = replace(near.trial, gradients=point.evidence.trial.gradients)
    weights = evidence.cotangents.dweights is not None
    near = replace(near, trial=trial, base=point.recipe, names=names, weights=weights, tells=tells)
    near = replace(near, of_empty=of_empty)
    for sizes in ROWS if near.is_chancy else ():
        longer = replace(near, base=fit(trial.space, replace(near.base, **sizes), near.base))
        if not longer.is_chancy and longer.fails(longer.sample(longer.base)):
            return longer
    return near


def _has_several_keys(trial: Trial, problem: Problem) -> bool:
    """Return True if a row of a problem sees more than one key."""
    return bool((trial.visible(problem).sum(-1) > 1).any())


def _shares_masks(problem: Problem, failing: Problem) -> bool:
    """Return True if samples, heads or queries share a mask, and do not in a failing problem."""
    own, other = problem.mask_array, failing.mask_array
    if own is None or other is None:
        return False
    sizes = {-4: math.prod(problem.lead), -3: problem.H, -2: problem.T}
    return any(n > 1 and _is_shared(own, x) and not _is_shared(other, x) for x, n in sizes.items())


def _is_shared(mask: Array, axis: int) -> bool:
    """Return True if a mask is the same along one of its last axes."""
    return mask.ndim < -axis or not np.diff(mask.astype(np.int8), axis=axis).any()


def _is_of_empty_rows(point: Point) -> bool:
    """Return True if all that is wrong is of rows that see no key."""
    fault = point.fault
    if fault is None or fault.axes[:3] != "bht":
        return False
    rows = fault.wrong.any(tuple(range(3, fault.wrong.ndim))).ravel()
    empty = np.ravel(point.evidence.trial.empty(point.evidence.problem))
    # A gradient of what rows share is of none.
    return rows.shape == empty.shape and not (rows & ~empty).any()


def list_hiding(problem: Problem) -> set[str]:
    """Return the options of a problem that hide keys."""
    arrays = {"mask": problem.mask_array, "window": problem.window}
    on = {name for name, x in arrays.items() if x is not None}
    return on | ({"causal"} if problem.causal else set())


def hides_nothing(trial: Trial, problem: Problem, name: str) -> bool:
    """Return True if an option hides no key that the others show."""
    other = problem.replace(**{name: OFF[name]})
    return not (trial.visible(other) != trial.visible(problem)).any()


def _is_idle(evidence: Evidence, name: str) -> bool:
    """Return True if an option hides no key that the others show, and all is right without it."""
    trial, problem = evidence.trial, evidence.problem
    if not hides_nothing(trial, problem, name):
        return False
    other = problem.replace(**{name: OFF[name]})
    try:
        return not observe(trial, other, evidence.cotangents, evidence.view).wrong
    except ImplementationError:
        return False  # it may take no window without causal


@dataclass(frozen=True)
class Asked:
    """On which problems a function fails, as it was asked."""

    near: Neighbours
    place: Place
    held: bool  # it was attacked, and no problem at hand refutes it

    @classmethod
    def of(cls, near: Neighbours, points: Sequence[Point], seconds: float) -> Asked | None:
        """Ask for the place around a failing problem; None if that is right now."""
        told = [
            (p.recipe, bool(near.names & {*p.evidence.wrong}))
            for p in points
            if p.fault or near.shows(p.evidence)
        ]
        place = near.place(seconds=seconds, known=told)
        if place is None:
            return None
        place = _split_atoms(_join_heads(place))
        # Windows and masks that the failing problem has not hide keys, and maybe the fault.
        own = {*options_on(near.base)}
        told = [(r, x) for r, x in told if x or near.is_asked(r) or {*options_on(r)} <= own]
        held = place.held and place.attacked >= ATTACKED
        refuting = _refute(near, place, told) if held else []
        for name in OPTIONS:  # with other values of an option it may pass
            if all(not x and name in options_on(r) for r, x in refuting) and name in place.text:
                failing = [(r, x) for r, x in told if x]
                trait = near.find_trait(name, failing + refuting) if refuting else ""
                if trait:
                    near = replace(near, traits={name: trait})
                    place = _rename(place, near)
                    refuting = _refute(near, place, told)
        # With some numbers a size passes by chance, all others fail.
        by_chance = near.is_chancy and bool(re.search(r"\b[A-Z] ≠ \d", place.text))
        return cls(near, place, held and not refuting and not by_chance)

    def fails_on(self, recipe: Recipe | None, problem: Problem | None = None) -> bool | None:
        """Return True if it says that a problem fails; None if it says nothing of it."""
        if recipe is None or not self.held:
            return None
        return self.near.holds(self.place, recipe, problem)

    @property
    def condition(self) -> str:
        """The condition of problems, as a sentence; "" if it is not known, or there is none."""
        return f"fails only where {self.problems}" if self.problems else ""

    @property
    def problems(self) -> str:
        """The condition of problems; "" if it is not known, or there is none."""
        clauses = self.place.clauses
        numbers = all(any(" = " in x.text for x in atoms) for atoms in clauses)
        is_fit = len(clauses) > 1 and (numbers or sum(map(len, clauses)) > MOST_OF_CLAUSES)
        known = self.held and self.place.text != EVERYWHERE and not is_fit
        return self.place.text if known else ""


def _join_heads(place: Place) -> Place:
    """Return a place that says "H > 1" for K > 1 or G > 1, with all else the same."""
    several = [{atom.text: atom for atom in clause} for clause in place.clauses]
    if len(several) == 2 and {*several[0]} ^ {*several[1]} == {"K > 1", "G > 1"}:
        first = tuple(
            replace(x, text="H > 1", names=("K", "G"), holds=lambda p: p["K"] * p["G"] > 1)
            if x.text in ("K > 1", "G > 1")
            else x
            for x in place.clauses[0]
        )
        return replace(place, clauses=(first,))
    return place


def _split_atoms(place: Place) -> Place:
    """Return a place with an atom for each condition: the elements may say one of them."""
    clauses = (
        tuple(
            replace(atom, text=part, holds=read_condition(part)) if part != atom.text else atom
            for atom in clause
            for part in atom.text.split(" and ")
        )
        for clause in place.clauses
    )
    return replace(place, clauses=tuple(clauses))


def _refute(
    near: Neighbours, place: Place, told: Iterable[tuple[Recipe, bool]]
) -> list[tuple[Recipe, bool]]:
    """Return the problems of which a place says otherwise than was seen."""
    return [
        (recipe, x)
        for recipe, x in told
        if near.holds(place, recipe) == (not x) and (x or not near.fails_somehow(recipe))
    ]


def _rename(place: Place, near: Neighbours) -> Place:
    """Return a place whose condition on an option is one on its value, and on what follows it.

    A size beyond which a window is no longer as long as the keys was no border of its own.
    """
    ((name, trait),) = near.traits.items()
    clauses = []
    for clause in place.clauses:
        own = (
            atom
            for atom in clause
            if name in atom.names
            or near.sample(near.recipe(atom.pair.passing))[name]
            or not atom.pair.failing[name]
        )
        clauses.append(
            tuple(replace(atom, text=trait) if atom.text == name else atom for atom in own)
        )
    return replace(place, clauses=tuple(clauses))


def say_where(points: Sequence[Point], fault: Fault, asked: Asked | None, amount: str) -> str:
    """Return where it is wrong, of points that share a fault; "" if nothing holds.

    Where the amount names a source, it is wrong where that is not the right one. `asked` says on
    which problems it fails, None if that could not be asked.
    """
    if fault.facts.get("of_inputs"):
        return _say_inputs(points[0].evidence, fault)
    source = amount if fault.step == "visible" and amount not in SEEN else ""
    near = None if asked is None else asked.near
    tells = [p for p in points if p.fault or near is None or near.tells(p.evidence)]
    if near is not None and near.traits:  # what passes for its value of an option tells nothing
        tells = [p for p in tells if p.fault or not near.list_without_trait(p.recipe)]
    told = [(p, s) for p in tells if (s := sample_of(p, fault)) is not None]
    failing = [(p, s) for p, s in told if (s.wrong & s.known).any()]
    if asked is not None and asked.near.is_of_numbers and not asked.place.clauses:
        return "contents"
    if origin := differs_from_own(amount):
        return _say_origin(PlaceAtom(origin[0], 1.0, origin[1]), amount, fault, asked, told)
    tried = failing
    if asked is not None and asked.near.of_empty:  # what passes there has no such rows
        tried = failing + [x for x in told if not x[0].fault and asked.fails_on(x[0].recipe)]
    of_failing, of_all = (_learn(some, fault, bool(source)) for some in (tried, told))
    own, every = ({atom.text for atom in w.atoms} if w else set() for w in (of_failing, of_all))
    # Where the conditions of problems hold, they say what an atom more would guess.
    is_more = len(every) > MOST_ATOMS or (asked is not None and asked.held and set() < own < every)
    best = of_failing if of_all is None or is_more else of_all
    if best is None or len(best.atoms) > MOST_ATOMS or _is_of_one_length(best, failing):
        return ""
    if asked is None or not asked.held:
        mistaken = (best.errors_on([s]) > CONFIRMED * bool(s.wrong.any()) for _, s in told)
        if len(failing) == 1 or any(mistaken):
            return ""  # of one problem alone, many predicates hold
        passed = asked is not None and asked.place.pairs
        return best.text if best.atoms or (len(told) >= LEAST and not passed) else ""
    base = asked.near.base
    turned = fit(asked.near.trial.space, replace(base, T=base.S, S=base.T), base)
    others = [p.recipe for p in points if p.fault and asked.fails_on(p.recipe)]
    others += [turned] if asked.near.fails(asked.near.sample(turned)) else []
    if any(_implies(best, recipe, asked.near, fault) for recipe in others):
        best = Where(EVERYWHERE, 0.0, ())  # it fails where none of its elements is
    conditions = _conditions(asked, best, fault)
    if conditions is None:
        return ""
    conditions += _options_in_common(source, conditions, failing)
    return " and ".join([*(atom.text for atom in best.atoms), *conditions]) or EVERYWHERE


def _say_inputs(evidence: Evidence, fault: Fault) -> str:
    """Return whether what is not finite is hidden from all that is wrong, or is "contents"."""
    problem = evidence.problem
    arrays = (problem.q, problem.k, problem.v)
    bad_q, bad_k, bad_v = (~np.isfinite(np.asarray(x, np.float64)).all(-1) for x in arrays)
    visible = visible_keys(evidence.trial, problem)  # (..., H, T, S)
    if fault.axes[:3] == "bht":
        rows = fault.wrong.any(tuple(range(3, fault.wrong.ndim)))
        visible = visible & rows.reshape(visible.shape[:-1])[..., None]
    elif fault.axes[:3] == "bhs":
        keys = fault.wrong.any(tuple(range(3, fault.wrong.ndim))).repeat(problem.H // problem.K, 1)
        visible = visible & keys.reshape(*visible.shape[:-2], 1, problem.S)
    seen = visible.any(-2)
    if not problem.headless:
        seen = seen.reshape(*problem.lead, problem.K, -1, problem.S).any(-2)
    is_seen = (bad_q & visible.any(-1)).any() or ((bad_k | bad_v) & seen).any()
    return "contents" if is_seen else "hidden keys and contents"


def _is_of_one_length(best: Where, failing: Sequence[tuple[Point, Sample]]) -> bool:
    """Return True if nearly all problems have one length along an index of a predicate.

    Whether its numbers count from the first element or from the last is not known then, unless no
    other length is taken.
    """
    for x in {*re.findall(r"\b[bhtsde]\b", best.text)}:
        space = failing[0][0].evidence.trial.space
        lengths = Counter(s.sizes[LENGTH[x]] for _, s in failing)
        ((_, most),) = lengths.most_common(1)
        several = len(space.sizes.get(LENGTH[x], (1, 2))) > 1 and not space.few_shapes
        least = REFUTED * lengths.total() if x in "bh" else 1  # of these few lengths are tried
        if several and lengths.total() - most < least:
            return True
    return False


def _say_origin(
    atom: PlaceAtom,
    amount: str,
    fault: Fault,
    asked: Asked | None,
    told: Sequence[tuple[Point, Sample]],
) -> str:
    """Return where a source is not the right one; "" if a problem that has the same passes."""
    origin = Where(atom.text, 0.0, (atom,))
    failing = [(p, s) for p, s in told if s.wrong.any()]
    passing = [s for _, s in told if not s.wrong.any()]
    known = asked is not None and asked.held
    conditions = _conditions(asked, origin, fault) if asked is not None and known else None
    if conditions is None and any(origin.errors_on([s]) > CONFIRMED for s in passing):
        return ""
    conditions = conditions or []
    return " and ".join([atom.text, *conditions, *_options_in_common(amount, conditions, failing)])


def _options_in_common(
    amount: str, conditions: Sequence[str], failing: Sequence[tuple[Point, Sample]]
) -> list[str]:
    """Return the options that an amount names, and all failing problems have, if no condition does.

    A problem without the option whose meaning is wrong hides nothing, and tells nothing.
    """
    named = {*re.findall(r"\w+", " ".join(conditions))}
    names = sorted((HIDING & {*amount.split()}) - named)
    return [name for name in names if all(s.options >= {name} for _, s in failing)]


def requested_with(points: Sequence[Point]) -> str:
    """Return the results with which it is wrong, "weights"; "" if it is wrong in a plain call."""
    if all(p.fault is None or p.fault.quantity.name == "weights" for p in points):
        return "weights"
    failing = [p.evidence for p in points if p.fault is not None and "o" in p.evidence.wrong]
    if not failing or not all(e.is_right("o", 0) for e in failing):
        return ""
    evidence, found = failing[0], []
    for name in evidence.trial.implementation.returns:
        f = copy(evidence.trial.implementation)
        f.returns = (name,)
        try:
            results = group(f.forward(evidence.problem, evidence.view))
        except ImplementationError:
            continue
        if not replace(evidence, observed=results).is_right("o", -1):
            found.append(name.removeprefix("return_"))
    return " or ".join(found)


def _learn(tried: Sequence[tuple[Point, Sample]], fault: Fault, follows: bool) -> Where | None:
    """Return which elements of problems are wrong; None if no predicate says so."""
    axes = len(fault.axes)
    on = [{*options_on(p.recipe)} for p, s in tried if s.wrong.any()]
    shared = set.intersection(*on) & HIDING if on else set()
    found: list[tuple[float, Where]] = []
    for dropped in range(axes if follows else 0, axes + 1):
        whole = [s if dropped else narrow(s, p, fault, shared) for p, s in tried]
        own = [s.reduce(axes - dropped) for s in whole]
        place = learn(own)
        if place is None or place.errors > CONFIRMED:
            continue
        if _is_refuted(place, own):
            if dropped < len(fault.axes[3:]) or not place.atoms:
                continue
            break  # of more than a row, all that is wrong would be said to be wrong everywhere
        found.append((COARSE * dropped + place.errors + ATOM * len(place.atoms), place))
    return min(found, key=lambda x: x[0])[1] if found else None


def _is_refuted(place: Where, samples: Sequence[Sample]) -> bool:
    """Return True if one problem is against a place that others make likely.

    Elements may be right by chance, as often in each problem.
    """
    counts = []
    for table in (Table([s]) for s in samples if s.wrong.any()):
        holds = place.holds(table)
        if (table.y & ~holds).sum() > REFUTED * table.y.sum():
            return True
        counts.append(((holds & ~table.y).sum(), holds.sum()))
    right, every = np.transpose(counts)
    return bool((_bound_chance(right, every) * len(counts) < UNLIKELY).any())


def _bound_chance(right: Array, every: Array) -> Array:
    """Return Chernoff's bound of P(X ≥ right), X of `every` draws at the common share."""
    share, p = right / np.maximum(every, 1), right.sum() / max(every.sum(), 1)
    with np.errstate(all="ignore"):
        kl = [np.where(x > 0, x * np.log(x / y), 0) for x, y in ((share, p), (1 - share, 1 - p))]
    return np.where(share > p, np.exp(-every * sum(kl)), 1.0)


def say_problems(asked: Asked) -> str:
    """Return on which problems it fails, where no element is wrong; "" if that is not known."""
    conditions = _conditions(asked, NO_ELEMENTS, None) if asked.held else None
    return "" if conditions is None else " and ".join(conditions) or EVERYWHERE


def _conditions(asked: Asked, best: Where, fault: Fault | None) -> list[str] | None:
    """Return the conditions of problems that the elements do not say already; None if too many."""
    place, near = asked.place, asked.near
    first = place.clauses[0]
    shared = [atom for atom in first if all(_has(clause, atom) for clause in place.clauses)]
    options = {trait: name for name, trait in near.traits.items()}  # the condition says the value
    of_rows = "rows" in best.text
    told = [
        options.get(atom.text, atom.text)
        for atom in shared
        # No index says that an option is on, but rows that see no key may.
        if (options.get(atom.text, atom.text) in VALUES and not of_rows)
        or not all(_implies(best, near.recipe(x), near, fault) for x in _passing(atom, first, near))
    ]
    rest = [[atom for atom in clause if not _has(shared, atom)] for clause in place.clauses]
    if len(rest) > 1 and any(len(atoms) > 1 for atoms in rest):
        return None
    if len(rest) > 1 and all(" = " in atom.text for (atom,) in rest):
        return None  # a list of numbers is no place
    passing = [near.recipe(atom.pair.passing) for atoms in rest for atom in atoms]
    if all(rest) and not all(_implies(best, recipe, near, fault) for recipe in passing):
        told.append(" or ".join(atom.text for (atom,) in rest))
    return told


def _passing(atom: Atom, clause: Sequence[Atom], near: Neighbours) -> list[Any]:
    """Return problems that pass for lack of a condition: of one head, no place holds anyway."""
    name, passing = atom.pair.name, atom.pair.passing
    other = {"G": "K", "K": "G"}.get(name)
    several = dict(passing) | ({other: 2} if other in passing else {})
    # Beside the border another condition may be broken as well.
    sizes = ({**atom.pair.failing, name: n} for n in near.domains.get(name, ()))
    alone = [x for x in sizes if [a for a in clause if not a.holds(x)] == [atom]]
    return [passing, *alone[:1], *alone[-1:], *([several] if near.fails(several) is False else [])]


def _has(clause: Iterable[Atom], atom: Atom) -> bool:
    return any(atom.text == other.text for other in clause)


def _implies(best: Where, passing: Recipe, near: Neighbours, fault: Fault | None) -> bool:
    """Return True if a predicate holds for no element of a problem that passes."""
    if fault is None or not best.atoms:
        return False
    try:
        problem = near.trial.problem(passing)
    except NpattnError:
        return False
    every = np.ones(shape_of(fault, problem), bool)
    if fault.step == "visible" and fault.axes == "bhts":  # of hidden keys, or of visible ones
        every &= shown_in(visible_keys(near.trial, problem).reshape(every.shape), fault)
    if not every.any():
        return True
    whole = sample(near.trial, passing, problem, fault.axes, every, every)
    return best.errors_on([whole]) >= 1
