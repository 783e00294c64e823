"""Causes of failures: each outcome that failed belongs to one, or is unexplained."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, takewhile
from operator import attrgetter
from typing import Any

import numpy as np

from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import STRUCTURE
from npattn.testing.diagnosis.amount import SEEN, describe
from npattn.testing.diagnosis.borders import LEAST, Neighbours, draw_again, find_pair
from npattn.testing.diagnosis.conduct import (
    conduct_causes,
    exception_causes,
    first_line,
    ids,
    say_unlike,
    state_cause,
)
from npattn.testing.diagnosis.conventions import AXES, raises_by_layout
from npattn.testing.diagnosis.elements import Asked, neighbours_of_fault, requested_with, say_where
from npattn.testing.diagnosis.evidence import Candidate, Evidence, Found, collect, observe
from npattn.testing.diagnosis.explore import (
    PLAIN,
    VALUES,
    Point,
    enlarge,
    fit,
    observe_recipe,
    scores_of,
    tame,
    try_recipe,
)
from npattn.testing.diagnosis.locate import Fault, locate, result
from npattn.testing.diagnosis.place import EVERYWHERE
from npattn.testing.diagnosis.precision import where_rounded
from npattn.testing.diagnosis.roundings import (
    collect_suspicion,
    find_looser_model,
    find_sharper_failures,
)
from npattn.testing.diagnosis.search import search
from npattn.testing.diagnosis.sentences import BACKWARD, say
from npattn.testing.diagnosis.sequences import find_sequence_causes
from npattn.testing.excerpt import Excerpt
from npattn.testing.levels import REQUIRED
from npattn.testing.report.cause import Cause
from npattn.testing.report.outcome import Outcome, recipe_line
from npattn.testing.report.pair import SIDE, Reading
from npattn.testing.rules import RULES
from npattn.testing.trial import GRADIENTS, Trial

REPEATED = 4
"""Failing problems that are run once more, to see whether the results are the same."""
READ = 4
"""Most failures from which a cause is read: each takes many calls."""
PLACE, OTHERS = 3.0, 0.7
"""Seconds in which the first place is attacked, and the least in which each later one is."""
SECONDS = 6.0
"""Processor time after which no further cause is read."""
UNSEEN = 135
"""Queries and keys more than a failing problem has: a shape that no other call had."""
KEPT = 3.0
"""Seconds in which it is asked what an earlier call left behind; a worker's count too."""
SMALL = 2**13
"""Scores of the largest failing problem whose elements a place is learned from."""
AGAIN = ("s", "visible", "p")
"""Quantities of the forward that a backward may compute again."""
ROWS_OF_ZEROS = "rows of zeros"
"""Form of a mask that hides all keys, and of weights that underflow."""
FORWARD = ("nan", "s", "visible", "p", "o", "layout", "")
"""Steps whose fault every result may show."""


def diagnose(
    judged: Sequence[tuple[Trial, Sequence[Outcome]]],
) -> tuple[list[Outcome], tuple[Cause, ...]]:
    """Find the causes of what failed, from the trial and all outcomes of each dtype.

    The space of a trial is narrowed to what is accepted. Returned are all outcomes, those that
    failed with a diagnosis, and the causes: every outcome that failed, raised or is suspect belongs
    to exactly one; the cause of most required rules comes first, what is not explained last. Bits
    that differ (level reproducible) are measured, and have none.
    """
    causes: dict[str, Cause] = {}
    named: dict[int, str] = {}
    said: dict[int, str] = {}
    required: Counter[str] = Counter()
    for trial, outcomes in judged:
        bad = [o for o in outcomes if o.failed or o.status == "suspect"]
        bad = [o for o in bad if o.level != "reproducible"]  # measured, and no mistake
        mine: dict[int, str] = {}
        found: list[Cause] = []
        with np.errstate(all="ignore"):  # results of a wrong function may be anything
            too_sharp = find_looser_model(trial, bad)
            found += [too_sharp] if too_sharp else []
            for batch in _split_repeated([] if too_sharp else bad):
                own = list(_Diagnosis(trial.fresh(), batch).causes())
                by_id = {rule: cause.name for cause in own for rule in cause.rules}
                mine |= {id(o): by_id[o.id] for o in batch}
                found += own
            found = say_unlike(trial.fresh(), found)
            # A fault with a place is what makes the errors too large; another may be small itself.
            vague = all(map(_is_vague, found))
            for o in bad if vague else ():
                if (sharper := _read_suspicion(trial, o)) is not None:
                    tail = [o, *_find_tail(trial, o, bad)]
                    ids = tuple(dict.fromkeys(x.id for x in tail))
                    found = [
                        replace(c, rules=tuple(r for r in c.rules if r not in ids)) for c in found
                    ]
                    found = [*(c for c in found if c.rules), replace(sharper, rules=ids)]
                    mine |= {id(x): sharper.name for x in tail}
                    said[id(o)] = sharper.text
        for cause in found:
            known = causes.get(cause.name)
            joined = known and replace(known, rules=known.rules + cause.rules)
            causes[cause.name] = joined or cause
        for o in bad:
            named[id(o)] = found[0].name if len(found) == 1 else mine[id(o)]
            required[named[id(o)]] += o.level in REQUIRED

    def place(cause: Cause) -> tuple[bool, int, int]:
        return cause.name == "unexplained", -required[cause.name], -len(cause.rules)

    explained = [
        replace(
            outcome,
            diagnosis=named.get(id(outcome)),
            message="\n".join(
                [*([said[id(outcome)]] if id(outcome) in said else []), outcome.message]
            ),
        )
        for _, outcomes in judged
        for outcome in outcomes
    ]
    ordered = sorted(causes.values(), key=place)
    for cause in ordered[:1]:
        if cause.pair is None and cause.step not in ("state", "refusal"):  # no single call fails
            ordered[0] = _with_pair(cause, judged, explained)
    return explained, tuple(ordered)


def _with_pair(
    cause: Cause, judged: Sequence[tuple[Trial, Sequence[Outcome]]], explained: Sequence[Outcome]
) -> Cause:
    """Return a cause with the nearest problem that passes, if one of its failures has any."""
    group = [o for o in explained if (o.failed or o.status == "suspect") and cause.explains(o)]
    for trial, _ in judged:
        own = [o for o in group if o.dtype == trial.space.dtype]
        with np.errstate(all="ignore"):
            pair = find_pair(trial.fresh(), sorted(own, key=_scores))
        if pair is not None:
            return replace(cause, pair=pair)
    return cause


def _is_vague(cause: Cause) -> bool:
    """Return True if a cause names no place, or says that all of a result is less precise."""
    place = cause.where.replace(EVERYWHERE, "") if cause.step == "precision" else cause.where
    told = place + cause.amount + cause.passes_when
    return not cause.is_known or cause.where == "contents" or not told


def _scores(outcome: Outcome) -> int:
    return scores_of(outcome.sampled) if outcome.sampled is not None else 0


def _readability(point: Point) -> tuple[bool, bool, int]:
    """Return the sort key that puts first what is best read: 2 × 3 to 8 × 8, plain, and small."""
    recipe = point.recipe
    few = not (2 <= recipe.T <= SIDE and 3 <= recipe.S <= SIDE)
    return few, recipe.distribution != "normal", point.evidence.size


def _read_window(point: Point) -> Reading | None:
    """Return a window of the first wrong quantity on a problem, at its first wrong cell."""
    if point.fault is None:
        return None
    q, step = point.fault.quantity, point.fault.step
    if step in GRADIENTS and step in point.evidence.observed:
        q = result(point.evidence, step)  # and not dS, as dk tells it
    cells = np.argwhere(q.wrong)
    if not len(cells):
        return None
    first = tuple(map(int, cells[0]))
    got, want = (np.where(q.known, x, np.nan) for x in (q.got, q.want))
    excerpt = Excerpt.around(first, got, want, q.tolerance, SIDE)
    marks = Excerpt.around(first, q.wrong, q.wrong, q.wrong, SIDE).got > 0
    line = recipe_line(point.recipe, point.evidence.trial, None)
    return Reading(q.name, q.axes, excerpt, marks, line)


def _find_tail(trial: Trial, suspect: Outcome, bad: Sequence[Outcome]) -> list[Outcome]:
    """Return the failures that errors too large by as much as those of a suspicion would make."""
    found = collect_suspicion(trial, suspect)
    excess = 0.0 if found is None else math.sqrt(max(found.wrong.values()))
    return [o for o in bad if o is not suspect and 1 < o.worst <= excess]


def _read_suspicion(trial: Trial, outcome: Outcome) -> Cause | None:
    """Return what a sharper rounding model shows of errors that are suspect together."""
    found = collect_suspicion(trial, outcome) if outcome.status == "suspect" else None
    sharper = find_sharper_failures(trial, outcome) if found and found.hides else None
    if sharper is None:
        return None
    model, sharp, failures = sharper
    known = [c for c in _Diagnosis(sharp, failures).causes() if c.is_known]
    if not known or known[0].step in ("precision", "state", "layout"):
        return None
    first = known[0]
    text = f"beyond the roundings of {model} (--rounding {model}): {first.text}"
    return replace(first, text=text, rules=(outcome.id,))


def _split_repeated(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Split outcomes so that none has an id twice: structure has an outcome at each level."""
    batches: list[list[Outcome]] = []
    seen: Counter[str] = Counter()
    for outcome in sorted(outcomes, key=lambda o: o.level not in REQUIRED):
        if seen[outcome.id] == len(batches):
            batches.append([])
        batches[seen[outcome.id]].append(outcome)
        seen[outcome.id] += 1
    return batches


def _redraw_plain(recipe: Recipe) -> Iterator[Recipe]:
    """Yield a recipe without options with other numbers."""
    if not options_on(recipe):
        yield next(draw_again(recipe))


def _change_options(recipe: Recipe) -> Iterator[Recipe]:
    """Yield the recipe without each option that it has, and with each other."""
    on = options_on(recipe)
    for name, values in VALUES.items():
        yield replace(recipe, **{name: getattr(PLAIN, name) if name in on else values[0]})


EARLIER = {EVERYWHERE: _redraw_plain, "": _change_options}
"""Place of what an earlier call left; calls that may leave it, by the recipe that is wrong then."""


@dataclass
class _Diagnosis:
    """Search for the causes of the failures in one dtype."""

    trial: Trial
    outcomes: list[Outcome]
    evidence: dict[str, Evidence] = field(default_factory=dict)
    vanished: set[str] = field(default_factory=set)
    # Queries more than a failing problem has: no array has a shape that another had
    unseen: Iterator[int] = field(default_factory=lambda: count(UNSEEN, 5))

    def causes(self) -> Iterator[Cause]:
        """Yield causes that together have every outcome once."""
        self.end = time.process_time() + SECONDS
        raised = [o for o in self.outcomes if o.kind == "raised"]
        left = [o for o in self.outcomes if o not in raised]
        for outcome in left:
            evidence = self._collect(outcome)
            if evidence is not None and evidence.wrong:
                self.evidence[outcome.rule] = evidence
            elif evidence is not None and _of_one_call(outcome):
                self.vanished.add(outcome.rule)
        told = sorted(self.evidence.values(), key=_telling)
        unsteady = any(map(self._differs, self._smallest()[:REPEATED]))
        if unsteady:
            yield from exception_causes(raised)
            yield state_cause(left, "unsteady")
            return
        for where, earlier in EARLIER.items():
            if told and self._is_kept(told[0], earlier):
                yield from exception_causes(raised)
                yield replace(state_cause(left, "after"), where=where)
                return
        written = [o for o in left if o.kind == "change"]
        if written:  # a call that comes after, for lse or gradients, has other arrays
            later = [e for e in told if e.outcome in written or e.is_right("o", 0)]
            mine = [e.outcome for e in later if e.outcome and e.outcome not in written]
            left = [o for o in left if o not in written + mine]
            self.evidence = {
                name: e for name, e in self.evidence.items() if not any(e is x for x in later)
            }
            first, *others = conduct_causes(self.trial, written)
            yield from (replace(first, rules=first.rules + ids(mine)), *others)
        views = [e for e in self._smallest() if e.view != "contiguous"]
        views = [e for e in views if not observe(e.trial, e.problem, e.cotangents).wrong]
        if views:
            mine = [e.outcome for e in views if e.outcome]
            left = [o for o in left if o not in mine]
            for e in views:
                self.evidence.pop(e.outcome.rule if e.outcome else "")
            if self._is_kept(views[0], lambda recipe: [replace(recipe, view="contiguous")]):
                yield state_cause(mine, "after")
            else:
                names = ", ".join(sorted({e.view for e in views}))
                text = (
                    f"strides are misread: contiguous arrays are right, views are wrong ({names})"
                )
                yield Cause(text, ids(mine), "layout", EVERYWHERE, names, name="strides")
        found, rest = self._whole()
        for candidate, claimed in found:
            cause = _cause_of(candidate, len(claimed))
            rules = {e.outcome.rule for e in claimed if e.outcome}
            mine = [o for o in left if o.rule in rules or self._is_so_alone(o, candidate.explains)]
            if cause.name in AXES:
                own = [o for o in raised if raises_by_layout(self.trial, o, cause.name)]
                raised = [o for o in raised if o not in own]
                mine += own
            left = [o for o in left if o not in mine]
            if mine:
                yield replace(cause, rules=ids(mine))
        yield from exception_causes(raised)
        readable = [e for e in rest if e.outcome in left]
        for cause, mine in self._read(readable, left):
            left = [o for o in left if o not in mine]
            yield cause
        vanished = [o for o in left if o.rule in self.vanished and o.kind == "value"]
        if vanished:
            left = [o for o in left if o not in vanished]
            yield state_cause(vanished, "vanished")
        for cause in conduct_causes(self.trial, [o for o in left if o.rule not in self.evidence]):
            left = [o for o in left if o.id not in cause.rules]
            yield cause
        if left:
            text = self._describe_rest(left, alone=len(left) == len(self.outcomes))
            yield Cause(text, ids(left), name="unexplained")

    def _smallest(self) -> list[Evidence]:
        return sorted(self.evidence.values(), key=attrgetter("rank"))

    def _is_kept(self, evidence: Evidence, others: Callable[[Recipe], Iterable[Recipe]]) -> bool:
        """Return True if a problem is right as the first of its sizes, and wrong after another."""
        sampled = None if evidence.outcome is None else evidence.outcome.sampled
        if sampled is None:
            return False
        recipe = replace(sampled, view=evidence.view)

        def fails(*before: Recipe) -> bool | None:
            n, found = next(self.unseen), None
            for own in (*before, recipe):
                unseen = replace(own, T=own.T + n, S=own.S + n + 2)
                found = observe_recipe(self.trial, fit(self.trial.space, unseen, own))
            return None if found is None else bool(found.wrong)

        end = time.monotonic() + KEPT
        if fails() is not False:
            return False
        # Each twice: a condition on sizes is not met by turns.
        timely = takewhile(lambda _: time.monotonic() < end, others(recipe))
        return any(fails(x) and fails(x) and fails() is False for x in timely)

    def _whole(self) -> tuple[Found, list[Evidence]]:
        """Return what conventions, layouts, formats and stored sequences explain, and the rest."""
        evidence = self._smallest()
        f = self.trial.implementation
        stored: Found = []
        found, rest = search(self.trial, evidence)
        # Another mistake, in a gradient, may meet a convention: the forward alone tells it.
        forward = [e for e in rest if {"o", "lse"} & {*e.wrong}]
        if forward and not found:
            found, _ = search(self.trial, forward, without=GRADIENTS)
            rest = [e for e in rest if not any(e in own for _, own in found)]
        if f.storage is not None or f.packing is not None:
            # What reads a δ of another sequence depends on it too, and reads none of its keys.
            stored = find_sequence_causes([e for e in rest if {"o", "lse", "dv"} & {*e.wrong}])
            claimed = [e for _, own in stored for e in own]
            rest = [e for e in rest if e not in claimed]
        return stored + found, rest

    # --- reading ---

    def _read(
        self, evidence: list[Evidence], outcomes: list[Outcome]
    ) -> Iterator[tuple[Cause, list[Outcome]]]:
        """Yield causes that are read from the implementation, each with its outcomes."""
        left = sorted(evidence, key=_telling)
        told: set[str] = set()
        found: list[tuple[Cause, list[Outcome]]] = []
        places: dict[str, Asked] = {}  # by the amount: gradients of one loop have it in common
        asked_of: dict[str, Asked | None] = {}
        seconds = PLACE
        for turn in range(READ):
            if not left or (turn and time.process_time() > self.end):
                break
            first = left[0]
            points = self._points(first)
            fault = _common_fault(points)
            if fault is None:
                left.pop(0)
                continue
            reached = _reach(fault.step)
            if not _own_names(first) <= reached:  # another result is wrong there as well
                others = [e for e in left if e is not first and _own_names(e) <= reached]
                if others:
                    first = others[0]
                elif fault.step in told:  # a cause that is told makes no other results wrong
                    rest = first.without(told)
                    points = self._points(rest, told)
                    again = _common_fault(points)
                    if again is None:
                        left.pop(0)
                        continue
                    fault = again
            if fault.form == ROWS_OF_ZEROS and self._is_of_contents(points[0]):
                fault = replace(fault, step="p")
                points = [_with_step(p, "visible", "p") for p in points]
            amount = describe([p for p in points if p.fault is not None and _same(p.fault, fault)])
            reached = _reach(fault.step)
            right = [p.recipe for p in points if not reached & {*p.evidence.wrong}]
            asked = places.get(amount) if fault.step in GRADIENTS else None
            if asked is not None and (
                any(map(asked.fails_on, right)) or not asked.fails_on(first.recipe)
            ):
                asked = None  # it is of another gradient, whose place is another
            if asked is None and fault.step != "precision":  # which sizes round too far is chance
                near = neighbours_of_fault(first, points, fault, amount, reached)
                start = time.process_time()
                asked = None if near is None else Asked.of(near, points, seconds)
                seconds = max(seconds - time.process_time() + start, OTHERS)
            claimed = [e for e in left if e is first or self._claims(fault, asked, e)]
            points += [point for e in claimed if e is not first for point in _point_of(e)]
            like = [p for p in points if p.fault is not None and _same(p.fault, fault)]
            told_by, amount = amount, describe(like)
            of_hidden = first.outcome is not None and first.outcome.rule.startswith("hidden-")
            refuted = asked is not None and any(
                asked.fails_on(e.recipe, e.problem) is False for e in claimed
            )
            # Problems in which another mask shows nothing were no answers.
            misread = fault.step == "visible" and told_by not in (amount, *SEEN)
            if asked is not None and (refuted or misread):
                asked = replace(asked, held=False)
            cause = self._state(fault, like, amount, points, asked, of_hidden)
            rules = {e.outcome.rule for e in claimed if e.outcome}
            mine = [o for o in outcomes if o.rule in rules]
            explains = partial(self._claims, fault, asked)
            mine += [o for o in outcomes if o not in mine and self._is_so_alone(o, explains)]
            outcomes = [o for o in outcomes if o not in mine]
            left = [e for e in left if e not in claimed]
            known = [x for x in found if _explains(x[0], asked_of[x[0].name], first)]
            if fault.step == "precision" and known:  # small errors are what it makes there
                known[0][1].extend(mine)
                continue
            asked_of[cause.name] = asked
            told.add(fault.step)
            if amount and asked is not None:
                places.setdefault(amount, asked)
            for twin in [x for x in found if _is_alike(x[0], cause)]:
                found.remove(twin)
                text = say(f"{twin[0].step} and {cause.step}", cause.where, amount)
                cause, mine = replace(twin[0], text=text), twin[1] + mine
            found.append((cause, mine))
        if len(told) > 1:  # dk and dv are wrong there, each by its own cause
            of_all: set[str] = set().union(*map(_reach, told - {*FORWARD}))

            def explains_each(e: Evidence) -> bool:
                return _own_names(e) <= of_all

            rules = {e.outcome.rule for e in evidence if e.outcome and explains_each(e)}
            mine = [o for o in outcomes if o.rule in rules or self._is_so_alone(o, explains_each)]
            found[0] = found[0][0], found[0][1] + mine
        yield from ((replace(cause, rules=ids(mine)), mine) for cause, mine in found)

    def _points(self, evidence: Evidence, without: Set[str] = frozenset()) -> list[Point]:
        """Return the failing problem and those around it, as far as they can be made of recipes.

        Gradients of the names `without` are left out.
        """
        outcome = evidence.outcome
        assert outcome is not None
        if outcome.sampled is None:
            return []
        recipe = replace(outcome.sampled, view=evidence.view)
        weights = evidence.cotangents.dweights is not None
        trial = replace(self.trial, gradients=self.trial.gradients - without, memo={})
        if outcome.rule not in RULES:  # structure that is answered wrongly is not sampled otherwise
            trial = replace(trial, space=replace(trial.space, structure=frozenset(STRUCTURE)))
        if trial.skips_empty_rows and trial.empty(evidence.problem).any():
            trial = replace(trial, skips_empty_rows=False)
        tried = dict.fromkeys((tame(enlarge(trial, recipe)), enlarge(trial, recipe), recipe))
        for base in tried:
            point = try_recipe(trial, base, weights)
            if point is not None and point.fault is not None:
                short = replace(trial, gradients=frozenset(), memo={})
                quick = try_recipe(short, base) if trial.gradients else None
                if quick is not None and quick.fault and _same_step(quick.fault, point.fault):
                    trial, point = short, quick  # the forward shows it, and the rest is dear
                near = Neighbours(trial, base, weights=weights)
                return _agree([point, *near.points()])
        return [Point(outcome.sampled, evidence, locate(evidence))]

    def _is_of_contents(self, point: Point) -> bool:
        """Return True if a problem that fails is right with tame numbers: no mask is wrong then."""
        plain = tame(point.recipe)
        other = try_recipe(self.trial, plain) if plain != point.recipe else None
        return other is not None and other.fault is None

    def _state(
        self,
        fault: Fault,
        like: list[Point],
        amount: str,
        tried: list[Point],
        asked: Asked | None,
        of_hidden: bool,
    ) -> Cause:
        """Return the cause in words."""
        step = fault.step
        known = [p.fault.facts.get("where", "") for p in like if p.fault is not None]
        where = EVERYWHERE if step == "state" else min(known, key=len)  # of all of them
        # No element of another shape stands for one, and those that round too far are chance.
        has_elements = fault.form != "shape" and step != "precision"
        if step == "precision":
            where = where_rounded(self.trial.fresh())
        elif not where and has_elements:
            where = say_where(tried, fault, asked, amount)
        elif where != EVERYWHERE and asked is not None:
            every = dict.fromkeys([*where.split(" and "), asked.problems])
            where = " and ".join(filter(None, every)) if asked.held else ""
        results = requested_with(like)
        if (where or not has_elements) and results:
            where = results if where in ("", EVERYWHERE) else f"{where} and {results}"
        if not where and len(tried) == 1 and asked is None and of_hidden:
            where = "hidden keys"  # one problem alone shows it, which its rule has changed
        if amount == "0" and np.mean([_is_in_part(point, where) for point in like]) > 0.5:
            amount = "0 in part"
        if fault.backward and step in AGAIN:
            where = f"{BACKWARD} {where}".rstrip()
        # Those that a slow machine tries too: the matrix must be the same on each.
        early = [p for p in tried[:LEAST] if any(p is x for x in like)] or like
        early = early if has_elements else []
        return Cause(
            say(step, where, amount),
            (),
            step,
            where,
            amount,
            passes_when=asked.condition if asked is not None else "",
            confirmed=len(tried),
            name=f"{step or 'unknown'}{where and f' where {where}'}",
            pair=None if asked is None else asked.near.pair(asked.place, where),
            reading=next(filter(None, map(_read_window, sorted(early, key=_readability))), None),
        )

    def _claims(self, fault: Fault, asked: Asked | None, evidence: Evidence) -> bool:
        """Return True if a failing problem shows the same fault, changed or not.

        Where the fault comes first, and the place holds, all that is wrong may come of it: a
        saturated row hides a wrong weight, and shows a wrong lse.
        """
        if not _own_names(evidence) <= _reach(fault.step):
            return False
        if time.process_time() > self.end:
            return _is_downstream(fault.step, evidence)
        downstream = _is_downstream(fault.step, evidence)
        shows = fault.backward or fault.step not in FORWARD or {"o", "lse"} & {*evidence.wrong}
        if (
            downstream
            and shows
            and asked is not None
            and asked.fails_on(evidence.recipe, evidence.problem)
        ):
            return True
        own = locate(evidence) if evidence.size <= SMALL else None
        sampled = evidence.outcome.sampled if evidence.outcome is not None else None
        if own is not None and own.form == fault.form == ROWS_OF_ZEROS and sampled is not None:
            is_of_contents = self._is_of_contents(Point(sampled, evidence, own))
            own = replace(own, step="p" if is_of_contents else "visible")
        if own is not None and any(_same_step(x, fault) for x in (own, own.facts.get("read", own))):
            return True
        if sampled is None or not downstream:
            return False
        recipes = {sampled, replace(sampled, distribution="normal")}
        plain = [try_recipe(self.trial, recipe) for recipe in recipes]
        return any(p and p.fault and _same_step(p.fault, fault) for p in plain)

    def _is_so_alone(self, outcome: Outcome, explains: Callable[[Evidence], bool]) -> bool:
        """Return True if the second of two calls shows what is explained without the first.

        A mistake of some shapes is right in others, which looks like state of an earlier call.
        """
        if outcome.kind != "after" or outcome.rule in self.evidence:
            return False
        alone = self._collect(replace(outcome, kind="value"))
        return alone is not None and bool(alone.wrong) and explains(alone)

    # --- evidence ---

    def _collect(self, outcome: Outcome) -> Evidence | None:
        if outcome.status == "suspect":
            return collect_suspicion(self.trial, outcome)
        return collect(self.trial, outcome)

    def _differs(self, evidence: Evidence) -> bool:
        """Return True if another call on the same problem gives other results."""
        assert evidence.outcome is not None
        # One call more: what goes wrong at every third may do so in step.
        self.trial.implementation.forward(evidence.problem, evidence.view)
        again = self._collect(evidence.outcome)
        return again is None or not again.equals(evidence)

    def _describe_rest(self, outcomes: Sequence[Outcome], alone: bool = True) -> str:
        required = [o for o in outcomes if o.level in REQUIRED] or outcomes
        known = [self.evidence[o.rule] for o in required if o.rule in self.evidence]
        names = {name for e in known for name in e.wrong}
        results = [n for n in ("o", "lse", "weights", "max_score", *GRADIENTS) if n in names]
        if not results:
            return f"no step was found: {first_line(outcomes[0].message)}"
        if not alone:
            return f"also wrong, and not explained: {', '.join(results)}"
        return f"no step was found: {', '.join(results)} out of tolerance"


def _cause_of(candidate: Candidate, confirmed: int) -> Cause:
    """Return a whole explanation as a cause, without rules."""
    return Cause(
        candidate.text,
        (),
        candidate.step,
        candidate.where,
        candidate.name,
        conventions=candidate.conventions,
        confirmed=confirmed,
        name=candidate.name,
    )


def _of_one_call(outcome: Outcome) -> bool:
    """Return True if one call alone was out of tolerance, and not the relation of several."""
    names = {c.name for c in outcome.comparisons}
    return outcome.kind == "value" and bool(names) and names <= {"o", "lse", *GRADIENTS}


def _point_of(evidence: Evidence) -> list[Point]:
    """Return a failing problem as a point, if it is small and was not changed by its rule."""
    outcome = evidence.outcome
    if outcome is None or outcome.sampled is None or "then changed" in outcome.recipe:
        return []
    if evidence.size > SMALL:
        return []
    return [Point(outcome.sampled, evidence, locate(evidence))]


def _same(one: Fault, other: Fault) -> bool:
    return _same_step(one, other) and one.axes == other.axes


def _same_step(one: Fault, other: Fault) -> bool:
    same = (one.step, one.backward) == (other.step, other.backward)
    return same and one.facts.get("of_inputs") == other.facts.get("of_inputs")


def _is_alike(one: Cause, other: Cause) -> bool:
    """Return True if two gradients are wrong by as much on the same problems: in one loop."""
    both = {one.step, other.step} <= {*GRADIENTS} and one.where and one.amount
    return bool(both) and (one.where, one.amount) == (other.where, other.amount)


def _is_in_part(point: Point, where: str) -> bool:
    """Return True if what is wrong varies along an index that a place does not name."""
    fault = point.fault
    if fault is None or fault.wrong.shape != fault.quantity.want.shape:
        return False
    wrong, unknown = fault.wrong, abs(fault.quantity.want) <= fault.quantity.tolerance
    unknown = unknown | ~fault.known
    others = (i for i, x in enumerate(fault.axes) if not re.search(rf"\b{x}\b", where))
    return any((wrong.any(i) != (wrong | unknown).all(i)).any() for i in others)


def _with_step(point: Point, step: str, other: str, form: str = "") -> Point:
    """Return a point whose fault has another step, if it has this one, and this form."""
    fault = point.fault
    if fault is None or fault.step != step or form not in ("", fault.form):
        return point
    return replace(point, fault=replace(fault, step=other))


def _as_read(point: Point) -> Point:
    """Return a point whose fault is what was read, though its errors are small."""
    return replace(point, fault=point.fault and point.fault.facts.get("read", point.fault))


def _agree(points: list[Point]) -> list[Point]:
    """Return points with one step where some of them tell it, and others cannot tell.

    Roundings are small on most problems; a few may look like a factor there.
    """
    faults = [p.fault for p in points if p.fault is not None]
    if 2 * sum(f.step == "precision" for f in faults) > len(faults):
        facts: dict[str, Any] = {"step": "precision", "backward": False, "facts": {}}
        return [replace(p, fault=p.fault and replace(p.fault, **facts)) for p in points]
    points = [_as_read(p) for p in points]
    if any(f.form == "terms" for f in faults):
        return [_with_step(p, "dp", "ds") for p in points]
    if any(map(_masks_moved, points)):  # o has the rows of another place
        return [_with_step(p, "s", "o", "moved") for p in points]
    return points


def _masks_moved(point: Point) -> bool:
    """Return True if rows of P moved together with their masks."""
    fault, problem = point.fault, point.evidence.problem
    if fault is None or (fault.step, fault.form) != ("s", "moved"):
        return False
    visible = point.evidence.trial.visible(problem).reshape(fault.quantity.want.shape)
    pairs = fault.facts["moved"].items()
    return any((visible[here] != visible[there]).any() for here, there in pairs)


def _common_fault(points: Sequence[Point]) -> Fault | None:
    """Return the fault that most points share, with the form that most have."""
    faults = [p.fault for p in points if p.fault is not None]
    if not faults:
        return None
    counts = Counter((f.step, f.backward, f.axes) for f in faults)
    # The first problem has the failure that is to be explained.
    counts[faults[0].step, faults[0].backward, faults[0].axes] += len(faults) // 8
    (best, _), *_ = counts.most_common(1)
    return next(f for f in faults if (f.step, f.backward, f.axes) == best)


def _explains(cause: Cause, asked: Asked | None, evidence: Evidence) -> bool:
    """Return True if a cause fails on a problem by its place, and reaches what is wrong there."""
    fails = asked is not None and asked.fails_on(evidence.recipe, evidence.problem)
    return bool(fails and cause.where and _own_names(evidence) <= _reach(cause.step))


def _is_downstream(step: str, evidence: Evidence) -> bool:
    """Return True if all wrong results of a problem may come of a step."""
    return step in FORWARD or set(evidence.wrong) <= _reach(step)


def _reach(step: str) -> set[str]:
    """Return the results that a wrong step makes wrong."""
    if step in FORWARD or step in ("state", "precision"):
        return {"o", "lse", "weights", "max_score", *GRADIENTS}
    return {
        "lse": {"lse", "max_score", *GRADIENTS},
        "dp": {"dq", "dk", "dbias"},
        "delta": {"dq", "dk", "dbias", "dsinks"},
        "ds": {"dq", "dk", "dbias"},
        "dq": {"dq", "dk"},
    }.get(step, {step})


def _own_names(evidence: Evidence) -> set[str]:
    """Return the results that are wrong by the rule itself, or all that are if it names none."""
    outcome = evidence.outcome
    named = {c.name for c in outcome.comparisons} if outcome is not None else set()
    return named & {*evidence.wrong} or {*evidence.wrong}


def _telling(evidence: Evidence) -> tuple[bool, bool, int, bool, bool, int, int]:
    """Return the sort key that puts first what tells most: required, plain, unchanged, small.

    Problems without a score come last: most results of them are 0.
    """
    outcome = evidence.outcome
    assert outcome is not None
    plain = outcome.sampled is not None and outcome.sampled.distribution == "normal"
    changed = outcome.sampled is None or "then changed" in outcome.recipe
    first = 0 if "o" in evidence.wrong else 1 if "lse" in evidence.wrong else 2
    options = len(options_on(outcome.sampled)) if outcome.sampled is not None else 0
    empty, level = not evidence.size, outcome.level not in REQUIRED
    return level, changed, first, empty, not plain, options, evidence.size
