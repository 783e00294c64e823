"""Find the place of a fault: clauses from the borders around failing problems, then an attack."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

from npattn.testing.places.asking import Answer, Asking, Sample, Spent, Value, is_size
from npattn.testing.places.atoms import Atom, Clause, Pair, atom_of_choice, describe_clauses, holds
from npattn.testing.places.border import Domains, Line, atom_of, follow
from npattn.testing.places.hypotheses import DOMAIN

FEW = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 128, 129, 257)
"""Sizes of the problems of an attack, where a domain has them."""


ROUNDS = 6
"""Problems of each kind that an attack must have asked, if its budget ends it."""


def _spread(domain: Sequence[int]) -> list[int]:
    """Return numbers of a domain for random problems, its largest among them."""
    few = [n for n in FEW if n in domain]
    if len(few) < 6:
        few = [*domain[:: max(1, len(domain) // 12)]]
    return [*few[:3], *few, domain[-1]]


@dataclass(frozen=True)
class Place:
    """The problems on which a function fails, as far as it was asked."""

    # it fails where all atoms of a clause hold. A clause without atoms holds everywhere.
    clauses: tuple[Clause, ...]
    # True if all problems agree, those known before and those of the attack, of which some of each
    # kind were asked. Otherwise the clauses must not be said; the pairs stay true.
    held: bool
    # neighbours one change apart, of which one fails and the other passes; nearest first
    pairs: tuple[Pair, ...]
    attacked: int  # how many problems the attack asked that were not refused
    questions: int  # how many problems were asked in all

    @property
    def text(self) -> str:
        """The clauses in words: "causal and D % 32 ≠ 0 or T > S", "everywhere"."""
        return describe_clauses(self.clauses)

    @property
    def pair(self) -> Pair | None:
        """The nearest pair; None if nothing passes beside the failing problems."""
        return self.pairs[0] if self.pairs else None

    def holds(self, problem: Sample) -> bool:
        """Return True if the clauses say that it fails on a problem."""
        return holds(self.clauses, problem)


def find_place(
    fails: Callable[[dict[str, Value]], Answer],
    failing: Sample,
    *,
    domains: Domains | None = None,
    choices: Mapping[str, Sequence[Value]] | None = None,
    known: Iterable[tuple[Sample, Answer]] = (),
    again: Callable[[dict[str, Value]], Answer] | None = None,
    questions: int = 300,
    seconds: float = 3.0,
    seed: int = 0,
    most: int = 3,
) -> Place:
    """Find on which problems a function fails.

    From a failing problem each size and option is changed alone, until the border between what
    fails and what passes is exact. The conjunction of the borders is then attacked: problems that
    it holds for must fail, others must pass, above all those that break one atom alone. A problem
    that does not agree starts another clause, or shows an atom that lacks.

    Parameters
    ----------
    fails : callable
        Takes a problem as a dict; returns True (it fails), False (it passes) or None (refused, or
        not told).
    failing : mapping
        A problem that fails: sizes as ints, options as bools or other values, under any names.
    domains : mapping of str to sequence of int, optional
        Numbers that a size may have; 1 to 136 and multiples of 8 up to 512 by default.
    choices : mapping of str to sequence, optional
        Values of an option; (False, True) by default where its value is a bool. Other options
        keep their value.
    known : iterable of (mapping, Answer)
        Problems whose answer is known; the place must agree with them.
    again : callable, optional
        As `fails`, with other numbers: asked where a problem passes against what was found, as a
        fault may not show with some numbers.
    questions, seconds
        The budget. Where each question is dear, fewer are asked on each border.
    seed : int
        Of the random problems of the attack.
    most : int
        How many clauses.

    Returns
    -------
    Place
    """
    ask = Asking(fails, questions, seconds, [*known, (failing, True)], again)
    search = _Search(ask, dict(failing), domains or {}, choices or {}, seed)
    clauses: list[Clause] = []
    try:
        clauses.append(search.clause(dict(failing), []))
        held = search.defend(clauses, most)
    except Spent:
        held = search.is_enough
        search.keep_neighbours(dict(failing))
    pairs = sorted(search.pairs.values(), key=_distance)
    return Place(tuple(clauses), held, tuple(pairs), search.attacked, ask.count)


def find_clause(
    fails: Callable[[dict[str, Value]], Answer],
    failing: Sample,
    *,
    domains: Domains | None = None,
    choices: Mapping[str, Sequence[Value]] | None = None,
    questions: int = 150,
    seconds: float = 3.0,
) -> Clause:
    """Return the borders around one failing problem, not attacked; see `find_place`."""
    ask = Asking(fails, questions, seconds, [(failing, True)])
    search = _Search(ask, dict(failing), domains or {}, choices or {}, 0)
    try:
        return search.clause(dict(failing), [])
    except Spent:
        return ()


def _distance(pair: Pair) -> tuple[float, float]:
    a, b = (p[pair.name] for p in pair)
    size = sum(n for n in pair.failing.values() if is_size(n))
    return (abs(a - b) if is_size(a) else 0.5, size)


class _Search:
    """The questions around problems of one family, and what they told."""

    def __init__(
        self,
        ask: Asking,
        start: dict[str, Value],
        domains: Domains,
        choices: Mapping[str, Sequence[Value]],
        seed: int,
    ) -> None:
        self.ask, self.start = ask, start
        self.sizes = {x: domains.get(x, DOMAIN) for x, n in start.items() if is_size(n)}
        self.options = {
            x: tuple(choices.get(x, (False, True) if isinstance(value, bool) else (value,)))
            for x, value in start.items()
            if x not in self.sizes
        }
        self.few: dict[str, Sequence[Value]] = {**self.options}
        self.few.update((x, _spread(domain)) for x, domain in self.sizes.items())
        self.decks: dict[str, list[Value]] = {}
        self.random = random.Random(seed)
        self.pairs: dict[tuple[str, int], Pair] = {}
        self.attacked = 0
        self.is_enough = False  # whether the attack asked some problems of each kind

    # --- borders -----------------------------------------------------------------------------

    def clause(self, failing: dict[str, Value], others: Sequence[Clause]) -> Clause:
        """Return the atoms around a failing problem, as far as other clauses do not hold there."""
        atoms: list[Atom] = []
        for name, values in self.options.items():
            told = {value: self._ask(failing, name, value, others) for value in values}
            passed = [value for value, answer in told.items() if answer is False]
            failed = [value for value, answer in told.items() if answer is True]
            if passed:
                atoms.append(atom_of_choice(name, failing, failed, passed))
                self._keep(atoms[-1].pair)
        outside = self.ask.outside(lambda p: holds(others, p))
        most = max(6, min(30, self.ask.left // (len(self.sizes) // 2 + 1)))
        doubt = 0.02 if self.ask.left > 20 * len(self.sizes) else 0.1
        lines: dict[str, Line] = {}
        for name, domain in self.sizes.items():
            lines[name] = follow(outside, failing, name, domain, most, doubt)
            if lines[name].has_border:
                self._keep(lines[name].pair())
        for line in lines.values():
            atom = atom_of(outside, line, lines, most) if line.has_border else None
            if atom and not any(self._same(atom, other) for other in atoms):
                atoms.append(atom)
        for line in lines.values():
            if None in line.told.values():  # the attack asks what is taken
                answered = [n for n, answer in line.told.items() if answer is not None]
                self.few[line.name] = [*dict.fromkeys([*line.find_taken(), *answered])]
        return self._drop_redundant(atoms, others)

    def _drop_redundant(self, atoms: list[Atom], others: Sequence[Clause]) -> Clause:
        """Drop atoms without which all answers are told as well: S < 192, where T > S says it."""
        told = self.ask.list_answers()
        answers = [(p, a) for p, a in told if a is not None and not holds(others, p)]
        for atom in [*atoms]:
            rest = [other for other in atoms if other is not atom]
            if all(a or not holds([tuple(rest)], p) for p, a in answers):
                atoms = rest
        return tuple(atoms)

    def _ask(self, problem: Sample, name: str, value: Value, others: Sequence[Clause]) -> Answer:
        changed = {**problem, name: value}
        if value != problem[name] and holds(others, changed):
            return None
        return self.ask(changed)

    def _keep(self, pair: Pair) -> None:
        self.pairs.setdefault((pair.name, len(self.pairs)), pair)

    def keep_neighbours(self, failing: dict[str, Value]) -> None:
        """Keep the problems that passed one change apart from a failing one, as far as asked."""
        for problem, answer in self.ask.list_answers():
            changed = [name for name, value in failing.items() if problem[name] != value]
            if answer is False and len(changed) == 1:
                self._keep(Pair(changed[0], failing, problem))

    def _same(self, atom: Atom, other: Atom) -> bool:
        """Return True if two atoms hold for the same problems, as T > S and S < T do."""
        if {*atom.names} != {*other.names}:
            return False
        samples = [self.draw() for _ in range(100)]
        return all(atom.holds(p) == other.holds(p) for p in samples)

    # --- attack ------------------------------------------------------------------------------

    def draw(self, near: Sample | None = None, names: Collection[str] = ()) -> dict[str, Value]:
        """Return a random problem; of `near` the options and half of the sizes in `names` stay."""
        problem = dict(self.start)
        for name in problem:
            stays = name in self.options or self.random.random() < 0.5
            if near is not None and name in names and stays:
                problem[name] = near[name]
            else:
                deck = self.decks.get(name)
                if not deck:  # each value in turn: a few problems have all of them
                    deck = self.decks[name] = [*self.few[name]]
                    self.random.shuffle(deck)
                problem[name] = deck.pop()
        for name, domain in self.sizes.items():  # equal sizes are a case of their own
            other = problem[self.random.choice([*self.sizes])]
            if self.random.random() < 0.1 and other in domain:
                problem[name] = other
        return problem

    def samples(self, clauses: Sequence[Clause]) -> Iterator[tuple[dict[str, Value], ...]]:
        """Yield problems in turn: any, those in which a clause holds, and all of it but an atom."""
        kinds = [[self.draw() for _ in range(20)]]
        for clause in clauses:
            near = clause[0].pair.failing if clause else self.start
            names = {name for atom in clause for name in atom.names}
            drawn = (self.draw(near, names) for _ in range(400))
            inside = [*islice((p for p in drawn if all(atom.holds(p) for atom in clause)), 24)]
            kinds.append(inside)
            kinds += [self._break(atom, clause, [near, *inside], clauses) for atom in clause]
        for batch in zip_longest(*kinds):
            yield tuple(p for p in batch if p is not None)

    def _break(
        self, atom: Atom, clause: Clause, inside: Sequence[Sample], clauses: Sequence[Clause]
    ) -> list[dict[str, Value]]:
        """Return problems in which one atom of a clause is broken and all others hold."""
        found: list[dict[str, Value]] = []
        for sample in inside:
            name = self.random.choice(atom.names)
            values = self.few[name]
            near = [p[name] for p in atom.pair]
            for value in self.random.sample([*near, *values], len(values) + 2):
                p = {**sample, name: value}
                if not atom.holds(p) and not holds(clauses, p):
                    rest = (other.holds(p) for other in clause if other is not atom)
                    if all(rest):
                        found.append(p)
                        break
            if len(found) == 6:
                break
        return found

    def disagreement(self, clauses: Sequence[Clause]) -> tuple[dict[str, Value], bool] | None:
        """Return a problem and whether it fails, for which the clauses say otherwise."""
        for problem, answer in self.ask.list_answers():
            if self._disagrees(problem, answer, clauses):
                return problem, bool(answer)
        self.is_enough = False
        for n, batch in enumerate(self.samples(clauses)):
            for problem in batch:
                answer = self.ask(problem)
                self.attacked += answer is not None
                if self._disagrees(problem, answer, clauses):
                    self.is_enough = False
                    return problem, bool(answer)
            self.is_enough = n + 1 >= ROUNDS
        return None

    def _disagrees(self, problem: Sample, answer: Answer, clauses: Sequence[Clause]) -> bool:
        if answer is None or holds(clauses, problem) == answer:
            return False
        return answer or not self.ask.fails_again(problem)

    def defend(self, clauses: list[Clause], most: int) -> bool:
        """Mend clauses in place until an attack finds nothing; False if they cannot be mended."""
        for _ in range(3 * most):
            found = self.disagreement(clauses)
            if found is None:
                return True
            problem, fails = found
            if fails:
                clauses.append(self.clause(self._simplify(problem, clauses), clauses))
            else:
                wrong = next(c for c in clauses if holds([c], problem))
                rest = [c for c in clauses if c is not wrong]
                failing = self._walk(problem, wrong[0].pair.failing if wrong else self.start)
                clauses[:] = [*rest, self.clause(failing, rest)]
                if holds(clauses, problem):
                    return False
            rest = [*clauses]
            clauses[:] = [c for c in rest if not any(_implies(c, d) for d in rest if d is not c)]
            if len(clauses) > most:
                return False
        return False

    def _simplify(self, problem: dict[str, Value], others: Sequence[Clause]) -> dict[str, Value]:
        """Return a failing problem with no more options than it needs, and else as the first.

        Of two options each of which fails alone, neither passes without the other.
        """
        simple = dict(problem)
        for name, values in self.options.items():
            if self._ask(simple, name, values[0], others):
                simple[name] = values[0]
        for name in self.sizes:
            if self._ask(simple, name, self.start[name], others):
                simple[name] = self.start[name]
        return simple

    def _walk(self, passing: dict[str, Value], failing: Sample) -> dict[str, Value]:
        """Return the first problem that fails on the way from one that passes to one that does."""
        problem = dict(passing)
        names = [name for name in problem if problem[name] != failing[name]]
        self.random.shuffle(names)
        for name in names:
            problem[name] = failing[name]
            if self.ask(problem):
                return problem
        return dict(failing)


def _implies(clause: Clause, other: Clause) -> bool:
    """Return True if a clause has all atoms of another, which says it already."""
    texts = {atom.text for atom in clause}
    return {atom.text for atom in other} < texts
