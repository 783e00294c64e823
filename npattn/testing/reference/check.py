"""Check a function against a reference: ask, shrink, say where they differ, report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np

from npattn.errors import OptionError
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.child import qualified_name
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.search import shrink
from npattn.testing.comparison import Comparison
from npattn.testing.diagnosis.place import EVERYWHERE
from npattn.testing.power import Power, describe_unjudged, keep_judged
from npattn.testing.reference.amount import describe_amount
from npattn.testing.reference.intermediates import Watched
from npattn.testing.reference.letters import Case, LetterSpace, read_inputs
from npattn.testing.reference.pairs import AttentionPair, Function, FunctionPair, Pair, reason
from npattn.testing.reference.search import FEW, NO_TIME, SHRINK_SECONDS, Time
from npattn.testing.reference.sides import Sides, open_sides
from npattn.testing.reference.spread import ALARM, Judgement, judge
from npattn.testing.report.cause import Cause
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.report import Report

PLACE_SECONDS = 6.0
"""Processor time for the cases that say where they differ."""
ENOUGH = 5
"""Failing cases after which no more are asked."""
EXAMPLES = 100
"""Cases of a dtype, where fewer are not asked for: each is evaluated several times."""
BUDGET = 60.0
"""Seconds for all dtypes, where no budget is given; a few cases of each are asked anyway."""
LEVELS = (11, 33, math.inf)
"""Largest size of the cases of a level: the first level holds half of them."""
AFFORDED = 20
"""Cases of a level for which there must be time, or its sizes are left out."""
FIRST = 12
"""Plain cases with which the framework of a function is looked for."""
TRIES = 4
"""Cases that are sampled for each that is asked, where some are refused."""


def check_reference(
    f: Callable[..., Any] | Implementation,
    reference: Any,
    *,
    dtypes: Sequence[str] = ("float32",),
    examples: int = EXAMPLES,
    budget: float | None = None,
    seed: int = 0,
    shrink: bool = True,
    diagnosis: bool = True,
    **options: Any,
) -> Report:
    """Judge a function by another one; arguments as of `npattn.testing.check`.

    `options` are those of `make_pairs`. Seconds of a budget are of processor time with `inputs`, 60
    by default. The first calls plan for them: where they are too few, large sizes and then further
    cases are left out, which the report says.
    """
    make = make_pairs(f, reference, **options)
    g, _ = _read_reference(reference)
    name, reference_name = (
        x.name if isinstance(x, Implementation) else qualified_name(x) for x in (f, g)
    )
    outcomes: list[Outcome] = []
    causes: list[Cause] = []
    refused: list[str] = []
    untested: dict[str, None] = {}
    seconds = (BUDGET if budget is None else budget) / len(dtypes)
    # Other work on the machine must cost no power; what a worker does, the wall clock alone tells.
    clock = time.process_time if options.get("inputs") else time.monotonic
    start = clock()
    for i, dtype in enumerate(dtypes, 1):
        pair = make(dtype)
        if isinstance(pair, tuple):
            refused += [f"{dtype}: {line}" for line in pair]
            continue
        found = Found(pair, dtype, ALARM / len(dtypes) / examples)
        plan = Time(examples, i * seconds, start, clock=clock)
        found.ask(pair.cases(seed, TRIES * examples), plan)
        of_results, cause = found.outcomes(reference_name, shrink, diagnosis)
        outcomes += of_results
        causes += [cause] if cause else []
        refused += [f"{dtype}: {line}" for line in found.refusal_lines]
        untested |= dict.fromkeys(found.name_untested(reference_name))
        untested |= dict.fromkeys((*found.left_out, *plan.describe(dtype)))
    said = {"seed": seed, "examples": examples, "reference": reference_name}
    return Report(
        name, tuple(outcomes), tuple(untested), said, causes=tuple(causes), refused=tuple(refused)
    )


def replay(
    f: Any, reference: Any, case: Case | Recipe, *, dtype: str = "float32", **arguments: Any
) -> tuple[Comparison, ...]:
    """Compare a function and its reference on one case, as a report prints it.

    Parameters
    ----------
    f, reference
        As of `check_reference`.
    case : Case or Recipe
    dtype : str
    **arguments
        As of `make_pairs`.

    Returns
    -------
    tuple of Comparison
        One for each result and gradient.

    Raises
    ------
    ImplementationError
        If one of them raises, or returns something else.
    """
    made = make_pairs(f, reference, **arguments)(dtype)
    if isinstance(made, tuple):
        raise ImplementationError("; ".join(made))
    return judge(made.call(case), dtype, case.seed, ALARM).comparisons


def _read_reference(reference: Any) -> tuple[Any, Any]:
    """Return the function that is right, and its backward if there is one."""
    return reference if isinstance(reference, tuple) else (reference, None)


def make_pairs(
    f: Any,
    reference: Any,
    *,
    inputs: Mapping[str, str] | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    backward: Any = None,
    framework: str = "auto",
    reference_framework: str = "auto",
    device: str | None = None,
) -> Callable[[str], Pair | tuple[str, ...]]:
    """Return what makes the pair of a dtype, or why one of them answers nothing there.

    Raises OptionError if an argument is not legal, or f and reference accept no problem in common.

    Parameters
    ----------
    f : callable or Implementation
    reference : callable, (callable, backward), or Implementation
        A right function of the same arguments; `backward` is that of a NumPy function.
    inputs : mapping of str to str, optional
        Axes of each array by letters; default: f and reference are attention of q, k, v.
    options : mapping of str to sequence, optional
        Values of each option, the plainest first.
    sizes, backward, framework, reference_framework, device
        As of `npattn.testing.check`; letters in `sizes` are those of `inputs`.
    """
    g, g_backward = _read_reference(reference)
    if inputs is None:
        if options is not None:
            raise OptionError("got options without inputs: attention has those of its signature")
        frameworks = framework, reference_framework
        return _attention(f, g, backward, g_backward, frameworks, device, sizes or {})
    if isinstance(f, Implementation) or isinstance(g, Implementation):
        raise OptionError("got inputs beside an Implementation, which has q, k, v: pass a function")
    pools = {x: (n,) if isinstance(n, int) else tuple(n) for x, n in (sizes or {}).items()}
    space = LetterSpace(read_inputs(inputs), dict(options or {}), pools)
    for name, values in space.options.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise OptionError(f"options[{name!r}] is {values!r}, must be a sequence of values")
    if unknown := [x for x in space.sizes if x not in space.letters]:
        raise OptionError(
            f"sizes has {unknown[0]!r}, which no array has: {', '.join(space.letters)}"
        )
    firsts = [space.first(i) for i in range(FIRST)]
    tiny = [(case.arrays(space.inputs, "float32"), case.options) for case in firsts]
    one = Function(f, backward, framework, device, tiny)
    other = Function(g, g_backward, reference_framework, device, tiny, "reference_framework")
    return lambda dtype: FunctionPair(
        one.convert(dtype), other.convert(dtype, "float64"), space, dtype
    )


def _attention(
    f: Any,
    g: Any,
    backward: Any,
    g_backward: Any,
    frameworks: tuple[str, str],
    device: str | None,
    sizes: Mapping[str, Sequence[int]],
) -> Callable[[str], Pair | tuple[str, ...]]:
    """Return what makes the pair of a dtype, of q, k, v; or why one answers nothing."""
    if not isinstance(f, Implementation):
        f = Implementation(f, backward=backward, framework=frameworks[0])
    elif backward is not None:
        raise OptionError("got backward beside an Implementation: pass it to Implementation(f, …)")
    if not isinstance(g, Implementation):
        plain = Implementation(g, backward=g_backward, framework=frameworks[1])
        watched = Watched(g, plain.framework.name)
        watched_backward = None if g_backward is None else watched.watch(g_backward)
        g = Implementation(watched, backward=watched_backward, framework=plain.framework)
    else:
        watched = Watched(g.f, "")  # it may live elsewhere: its operations are not seen
    for one in (f, g):
        if device is not None:
            one.on(device)

    def make(dtype: str) -> Pair | tuple[str, ...]:
        sides = open_sides(g, f, dtype, sizes)
        return AttentionPair(sides, watched) if isinstance(sides, Sides) else sides

    return make


# --- one dtype ------------------------------------------------------------------------------------


@dataclass
class Found:
    """Findings in one dtype."""

    pair: Pair
    dtype: str
    alarm: float
    # largest error / tolerance of each result, of cases that passed
    worst: dict[str, float] = field(default_factory=dict)
    # the first case on which each result fails; after shrinking, the smallest
    failed: dict[str, tuple[Any, Comparison]] = field(default_factory=dict)
    # cases on which f raised what is no refusal
    errors: list[tuple[Any, ImplementationError]] = field(default_factory=list)
    # errors of cases that one of them does not take, with their numbers
    refusals: dict[str, int] = field(default_factory=dict)
    tried: int = 0  # number of cases that both took
    wrong: int = 0  # number of those that fail
    base: Any = None  # the smallest failing case
    # power of each result, in cases in which it passed
    powers: dict[str, list[Power]] = field(default_factory=dict)
    crossed: dict[str, int] = field(default_factory=dict)
    # cases that both took, with True for those that fail
    asked: list[tuple[Any, bool]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # sizes for which there was no time
    refused: Any = None
    extra: dict[str, None] = field(default_factory=dict)
    narrowed: set[str] = field(default_factory=set)
    narrow: bool = False
    checked: Judgement | None = None  # of the first case that passed
    wrong_one: Judgement | None = None  # of the case with most elements out of tolerance

    def ask(self, cases: Iterator[Any], plan: Time) -> None:
        """Judge cases, all results of each, until so many were taken as there is time for.

        A few of small sizes come first, then larger ones: sizes of which few could be asked are
        left out, and the others take the time that is left.
        """
        pool = list(islice(cases, plan.examples))
        rest, below, cost = set[Any](), 0.0, 0.0
        for level in LEVELS:
            begun, before, slow = plan.clock(), self.tried, False
            band = iter([x for x in pool if below < self.pair.largest(x) <= level])
            affordable = (plan.deadline - begun) / AFFORDED
            for case in band:
                self._ask(case)
                asked = self.tried - before
                slow = plan.clock() - begun > affordable * max(asked, 1)
                if self.is_settled or slow or asked == FEW:
                    break
            if not slow or not before:
                remaining = list(band)
                cost += len(remaining) * (plan.clock() - begun) / max(self.tried - before, 1)
                rest, below, before = rest.union(remaining), level, self.tried
            if slow and below < math.inf:
                few = f"all but {self.tried - before} problems with " if self.tried > before else ""
                self.left_out = [f"{few}sizes beyond {below:g} in {self.dtype}, {NO_TIME}"]
            if slow:
                break
        pool = [x for x in pool if x in rest]  # in the order in which they were sampled
        count = self.tried + plan.afford(cost / max(len(rest), 1))
        late = False
        for case in chain(pool, (x for x in cases if self.pair.largest(x) <= below)):
            if self.is_settled or self.tried >= plan.examples:
                break
            if late := self.tried >= FEW and (self.tried >= count or plan.is_over):
                break
            self._ask(case)
        plan.least = self.tried if late else plan.examples

    @property
    def is_settled(self) -> bool:
        """True if more cases would tell nothing more."""
        return self.wrong == ENOUGH or len(self.errors) == ENOUGH

    def _ask(self, case: Any) -> None:
        found = self._judge(case)
        if found is not None:
            self._note(case, found)

    def _note(self, case: Any, found: Judgement) -> None:
        """Count a judged case; keep the worst ratio, the powers and the first failure."""
        self.tried += 1
        self.wrong += not found.passed
        self.asked.append((case, not found.passed))
        self.extra |= dict.fromkeys(x for x in found.results if x not in found.spread.exact)
        self.narrowed |= found.spread.call.watched.narrowed
        self.narrow |= found.spread.narrow
        if found.passed and self.checked is None:
            self.checked = found
        if not found.passed:
            previous = self.wrong_one
            if previous is None or _count_wrong(found) > _count_wrong(previous):
                self.wrong_one = found
        for c in found.comparisons:
            if c.passed:
                self.worst[c.name] = max(self.worst.get(c.name, 0.0), c.ratio)
                if c.power is not None:
                    self.powers.setdefault(c.name, []).append(c.power)
                self.crossed[c.name] = self.crossed.get(c.name, 0) + found.crossed.get(c.name, 0)
            elif c.name not in self.failed:
                self.failed[c.name] = case, c

    def _judge(self, case: Any, *, quick: bool = False) -> Judgement | None:
        """Judge a case; None if one of them does not take it."""
        try:
            with np.errstate(all="ignore"):
                return judge(self.pair.call(case), self.dtype, case.seed, self.alarm, quick=quick)
        except ImplementationError as err:
            if not quick:
                self._note_error(case, err)
            return None

    def _note_error(self, case: Any, err: ImplementationError) -> None:
        if not err.may_refuse_structure:
            self.errors.append((case, err))
            return
        text = reason(err)
        self.refusals[text] = self.refusals.get(text, 0) + 1
        if self.refused is None:
            self.refused = case

    @property
    def refusal_lines(self) -> list[str]:
        lines = [f"{count} cases: {text}" for text, count in self.refusals.items()]
        condition = "" if self.refused is None or not self.tried else self.pair.takes(self.refused)
        return [f"refused where {condition}"] * bool(condition) + lines

    def name_untested(self, reference: str) -> Iterator[str]:
        """Yield what was not judged, and why."""
        names = (*self.worst, *self.failed)
        if self.tried and not any(name.startswith("d") for name in names):
            yield "gradients, which one of them has not: pass backward=, or (reference, backward)"
        for name in self.extra:
            yield f"{name}, which {reference} does not return"
        if self.narrow:
            about = f"{reference} in float64, which it does not take"
            yield f"{about}: its results in {self.dtype} stand for exact ones"
        for name in sorted(self.narrowed):
            yield f"a cast to {name} in {reference}, which was computed without it"
        passed = {name: x for name, x in self.powers.items() if name not in self.failed}
        yield from (f"{self.dtype}: {line}" for line in describe_unjudged(passed))
        for name, power in self.union().items():
            at_kinks = self.crossed.get(name, 0)
            why = "rounding crosses a kink there" if at_kinks else f"{reference} is NaN there"
            if power.without and name not in self.failed:
                yield f"{self.dtype}: {power.describe_gaps(name, why)}"

    def union(self) -> dict[str, Power]:
        """Return the power of each result over the cases that passed.

        In 16 bits the sums of large cases tell little, and these have most elements: cases that do
        not judge a result are left out, and said, if half of all do.
        """
        return {name: Power.union(keep_judged(powers)) for name, powers in self.powers.items()}

    def outcomes(
        self, reference: str, shrink: bool, diagnosis: bool
    ) -> tuple[list[Outcome], Cause | None]:
        """Return an outcome for each result, and the place of those that failed."""
        names = [*dict.fromkeys((*self.worst, *self.failed))]
        if shrink and self.failed:
            self.shrink()
        outcomes = [self._outcome(name, reference) for name in names]
        if self.errors:
            case, err = self.errors[0]
            about = "It raises nothing on what the reference takes."
            outcomes.append(
                Outcome("reference-raises", "", about, self.dtype, "error", 0.0, 1, str(err),
                        recipe=repr(case))
            )  # fmt: skip
        unseen = [] if self.checked is None else self.checked.find_unseen()
        outcomes = [_note_defect(o, unseen) for o in outcomes]
        bad = tuple(o.id for o in outcomes if o.status == "failed")
        if not bad or not diagnosis:
            return outcomes, None
        what = self.describe_amounts()
        place, count = self.find_place()
        sentences = [x for x in (*what, f"it {place}" if place else "") if x]
        if not sentences:
            return outcomes, None
        text = f"It differs from {reference}: {'; '.join(sentences)}"
        where = place.removeprefix("fails only where ")
        return outcomes, Cause(text, bad, where=where, passes_when=place, confirmed=count)

    def describe_amounts(self) -> list[str]:
        """Return what the wrong results of the first large failing case are, a sentence each."""
        found = self.wrong_one
        if found is None:
            return []
        texts = (
            describe_amount(c.name, found.results[c.name], found.spread.exact[c.name],
                            found.allowed[c.name])
            for c in found.comparisons if not c.passed
        )  # fmt: skip
        return [text for text in texts if text]

    def _outcome(self, name: str, reference: str) -> Outcome:
        """Return the outcome of one result: its first failure, or its worst ratio and its power."""
        about = f"{name} agrees with that of {reference}, element by element."
        rule, tried = f"reference-{name}", self.tried
        if name not in self.failed:
            passed = Outcome(rule, "", about, self.dtype, "passed", self.worst[name], tried)
            of_result = self.powers.get(name)
            powers = {name: Power.union(keep_judged(of_result))} if of_result else {}
            return passed.with_powers(powers) if powers else passed
        case, c = self.failed[name]
        return Outcome(
            rule, "", about, self.dtype, "failed", c.ratio, tried, str(c), recipe=repr(case),
            comparisons=(c,),
        )  # fmt: skip

    def shrink(self) -> None:
        """Find a smaller failing case, and use it for each result that fails on it."""
        first = next(iter(self.failed.values()))[0]
        case = shrink(first, self.pair.smaller, lambda x: self._fails(x) is True, SHRINK_SECONDS)
        found = self._judge(case)
        if found is None or found.passed:  # the quick look was mistaken
            case, found = first, self._judge(first)
        if found is not None:
            self.failed |= {c.name: (case, c) for c in found.comparisons if not c.passed}
        self.base = case

    def _fails(self, case: Any) -> bool | None:
        """Return True if the function fails on a case; None if one of them does not take it."""
        found = self._judge(case, quick=True)
        return None if found is None else not found.passed

    def find_place(self) -> tuple[str, int]:
        """Return "fails only where …", and the number of cases that say so."""
        base = self.base if self.base is not None else next(iter(self.failed.values()))[0]
        text, count = self.pair.place(base, self._fails, self.asked, PLACE_SECONDS)
        if text in ("", EVERYWHERE):
            return "", 0
        return f"fails only where {text}", count


def _note_defect(outcome: Outcome, unseen: Sequence[str]) -> Outcome:
    """Return the outcome without a verdict, if changes of its result would have passed."""
    undetected = [x for x in unseen if f"reference-{x.partition(':')[0]}" == outcome.rule]
    return outcome.with_defects(undetected) if outcome.status == "passed" else outcome


def _count_wrong(found: Judgement) -> int:
    return sum(c.wrong for c in found.comparisons)
