"""The border along one size: what fails on one side of it, and passes on the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, mul

import numpy as np
from numpy.typing import NDArray

from npattn.testing.places.asking import Answer, Asking, Sample, is_size
from npattn.testing.places.atoms import Atom, Pair
from npattn.testing.places.hypotheses import Belief, sparse

Domains = Mapping[str, Sequence[int]]


@dataclass
class Line:
    """Answers along one size, all else equal, and the condition that they leave.

    Attributes
    ----------
    name : str
    problem : dict
        It fails, as far as `told` has its own size as True.
    told : dict
        Answers by number; None where it was refused.
    condition : int or None
        Number of the condition in the grammar; None if the grammar has none.
    """

    name: str
    problem: dict[str, object]
    belief: Belief
    domain: Sequence[int]
    told: dict[int, Answer] = field(default_factory=dict)

    @property
    def condition(self) -> int | None:
        return self.belief.best

    def numbers(self, answer: Answer) -> list[int]:
        """Return the numbers with this answer, increasing."""
        return sorted(n for n, got in self.told.items() if got is answer)

    @property
    def has_border(self) -> bool:
        """True if some sizes failed and others passed."""
        return {True, False} <= set(self.told.values())

    @property
    def kind(self) -> str:
        """Kind of the condition; "" if there is none."""
        return "" if self.condition is None else self.belief.grammar.kinds[self.condition]

    def sides(self) -> tuple[int, int] | None:
        """Return the last number that fails and the first that passes at a threshold, else None."""
        failed, passed = self.numbers(True), self.numbers(False)
        if self.kind not in ("above", "below") or not failed or not passed:
            return None
        up = self.kind == "above"
        return (min(failed), max(passed)) if up else (max(failed), min(passed))

    def find_taken(self) -> list[int]:
        """Return numbers that are hardly refused, as far as the answers tell."""
        likely = _estimate_taken(self, self.belief.grammar.domain)
        return [n for n, p in zip(self.belief.grammar.domain, likely, strict=True) if p > 0.95]

    def pair(self) -> Pair:
        """Return the neighbours on both sides of the border that are nearest to each other."""
        failed, passed = self.numbers(True), self.numbers(False)
        a, b = min(
            ((a, b) for a in failed for b in passed),
            key=lambda pair: (abs(pair[0] - pair[1]), pair[0]),
        )
        return Pair(self.name, {**self.problem, self.name: a}, {**self.problem, self.name: b})


def follow(
    ask: Asking, problem: Sample, name: str, domain: Sequence[int], most: int, doubt: float = 0.02
) -> Line:
    """Change one size, each time to the number that tells most, until one condition is left.

    Parameters
    ----------
    problem : mapping
        It fails.
    name : str
        The size that is changed.
    domain : sequence of int
        Numbers that it may have.
    most : int
        How many questions may be asked.
    doubt : float
        Without a border, ends if no number would be answered otherwise than expected with a
        higher probability.
    """
    others = {n for key, n in problem.items() if key != name and is_size(n)}
    start = problem[name]
    numbers = sorted({*sparse(domain), start, *(n for n in others if n in domain)})
    line = Line(name, dict(problem), Belief(numbers, others), domain)
    _learn(line, start, ask(problem))
    values = np.array(numbers)
    cost = 1 / (1 + values / 2048)
    for n in numbers:  # what is known already costs nothing
        other = {**problem, name: n}
        if n != start and ask.is_known(other):
            _learn(line, n, ask(other))
    while len(line.told) < most:
        likely = line.belief.probabilities()
        telling = np.minimum(likely, 1 - likely) * _estimate_taken(line, numbers)
        telling[[line.belief.index[n] for n in line.told]] = 0
        enough = 1e-3 if line.has_border else doubt
        if line.condition is None or telling.max() < enough:
            break
        n = numbers[int((telling * cost).argmax())]
        if n in line.told:
            break
        _learn(line, n, ask({**problem, name: n}))
    _sharpen(ask, line)
    return line


def _sharpen(ask: Asking, line: Line) -> None:
    """Bisect a threshold to neighbours of the domain."""
    while (sides := line.sides()) is not None:
        low, high = sorted(sides)
        between = [n for n in line.domain if low < n < high and n not in line.told]
        if None in line.told.values():  # the neighbours among what is taken
            taken = {*line.find_taken()}
            between = [n for n in between if n in taken]
        if not between:
            return
        n = between[len(between) // 2]
        line.told[n] = ask({**line.problem, line.name: n})


def _learn(line: Line, n: int, answer: Answer) -> None:
    line.told[n] = answer
    if answer is not None:
        line.belief.learn(n, answer)


def _estimate_taken(line: Line, numbers: Sequence[int]) -> NDArray[np.float64]:
    """Return how likely each number is to be taken: a refusal tells nothing of the border."""
    if None not in line.told.values():
        return np.ones(len(numbers))
    taken = Belief(numbers)
    for n, answer in line.told.items():
        if n in taken.index:
            taken.learn(n, answer is not None)
    return taken.probabilities()


# --- a border that follows another size -----------------------------------------------------------


def atom_of(ask: Asking, line: Line, lines: Mapping[str, Line], most: int) -> Atom | None:
    """Return the condition of a line as an atom; of two sizes if the border moves with another.

    Parameters
    ----------
    lines : mapping of str to Line
        Of all sizes from the same problem: which others fail.
    most : int
        How many questions a border may take that moves.

    Returns
    -------
    Atom or None
        None if the grammar has no condition with these answers.
    """
    number = line.condition
    if number is None or not line.has_border:
        return None
    name, belief = line.name, line.belief.grammar
    sides = line.sides()
    others = [other for other in lines.values() if other.name != name]
    for other in others:
        for i in line.belief.equals():  # x > 1 is x ≠ y where y = 1
            if belief.numbers[i] == _start(other) and (atom := _relate(ask, line, other, i)):
                return atom
    for other in others if sides else ():
        if sides and (atom := _move(ask, line, other, sides, most)):
            return atom
    number = next((i for i in line.belief.equals() if belief.kinds[i] == "equal"), number)
    text, test = belief.texts[number], belief.tests[number]
    if sides and belief.kinds[number] != "equal":  # T = 1 rather than T < 2
        c, up = sides[1], line.kind == "above"
        text, test = f"{{}} {'>' if up else '<'} {c}", (lambda x: x > c if up else x < c)
    text = text.replace("{}", name).replace("{{", "{").replace("}}", "}")
    return Atom(text, (name,), lambda p: bool(test(p[name])), line.pair())


def _start(line: Line) -> int:
    start = line.problem[line.name]
    assert isinstance(start, int)
    return start


def _relate(ask: Asking, line: Line, other: Line, condition: int) -> Atom | None:
    """Return x = y, x ≠ y, x % y = 0 or x % y ≠ 0 if that holds as well with another y."""
    c, text = (getattr(line.belief.grammar, key)[condition] for key in ("numbers", "texts"))
    x, y, start = line.name, other.name, _start(other)
    if line.belief.grammar.kinds[condition] not in ("equal", "unequal", "modulus"):
        return None
    sign = text.removeprefix("{}").replace(str(c), y)  # " = S", " % S ≠ 0"
    test = _TESTS[sign.replace(y, "y").strip()]
    failed = [n for n in other.numbers(True) if n != start]
    for n in [n for n in (*failed, 2 * start + 1, start + 3) if n in other.domain][:2]:
        numbers = [m for m in (n, c, 2 * n, c + n) if m in line.domain]
        told = {m: ask({**line.problem, y: n, x: m}) for m in numbers}
        answers = {m: answer for m, answer in told.items() if answer is not None}
        if len({*answers.values()}) == 2 and all(a == test(m, n) for m, a in answers.items()):
            return Atom(f"{x}{sign}", (x, y), _of_two(test, x, y), line.pair())
    return None


def _move(ask: Asking, line: Line, other: Line, sides: tuple[int, int], most: int) -> Atom | None:
    """Return the condition on two sizes if a threshold moves with the second, else None."""
    x, y, start = line.name, other.name, _start(other)
    borders = {start: sides}
    for up in (True, False):
        failed = [n for n in other.numbers(True) if (n > start if up else n < start)]
        goal = start * 1.5 if up else start / 1.5
        near = [n for n in (2 * start, start + 1) if up and n in other.domain] or [start]
        n = min(failed, key=lambda n: abs(n - goal), default=near[0])
        while n != start and n in other.domain:
            here = {**line.problem, y: n}
            inside, outside = (ask({**here, x: side}) for side in sides)
            if inside is not False and outside is not True:
                break  # it stays where it is
            far = (max if line.kind == "above" else min)(line.numbers(True))
            fails = [m for m in (*sides, far) if ask({**here, x: m})]
            if fails:
                moved = follow(ask, {**here, x: fails[0]}, x, line.domain, most)
                if moved.kind == line.kind and (there := moved.sides()):
                    borders[n] = there
                    break
            n = start + int((n - start) / 2)
    return _fit(line, y, borders) if len(borders) > 1 else None


def _fit(line: Line, y: str, borders: Mapping[int, tuple[int, int]]) -> Atom | None:
    """Return x > a·y + c, x + y > c or x·y > c, whichever fits the borders at several y."""
    x, up = line.name, line.kind == "above"

    def fits(test: Test) -> bool:
        return all(test(a, n) and not test(b, n) for n, (a, b) in borders.items())

    sign = 1 if up else -1
    (start, (inside, outside)), *_ = borders.items()
    for top, bottom in ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (3, 1), (1, 3), (8, 1), (1, 8)):
        # bottom·x > top·y + c, where bottom·outside ≤ top·y + c < bottom·inside if up.
        low, high = sorted((bottom * inside - top * start, bottom * outside - top * start))
        for c in sorted(range(low, high + 1), key=abs):
            test = _linear(top, bottom, c, sign)
            if fits(test):
                left, right = (f"{k}·{n}" if k > 1 else n for k, n in ((bottom, x), (top, y)))
                text = _compare(left, right, c, up)
                return Atom(text, (x, y), _of_two(test, x, y), line.pair())
    heads = {x, y} == {"K", "G"}  # their product is H, and nobody thinks of their sum
    for word, joined in (("·", mul),) if heads else (("+", add), ("·", mul)):
        ends = [sorted((joined(a, n), joined(b, n))) for n, (a, b) in borders.items()]
        low, high = max(a for a, _ in ends), min(b for _, b in ends)
        if low < high:
            c = _roundest(low if up else low + 1, high - 1 if up else high)
            test = _compare_joined(joined, c, sign)
            if fits(test):
                both = (" + " if word == "+" else word).join(n for n in line.problem if n in (x, y))
                text = f"{'H' if heads else both} {'>' if up else '<'} {c}"
                return Atom(text, (x, y), _of_two(test, x, y), line.pair())
    return None


Test = Callable[[int, int], bool]


def _of_two(test: Test, x: str, y: str) -> Callable[[Sample], bool]:
    return lambda p: bool(test(p[x], p[y]))


def _compare_joined(joined: Callable[[int, int], int], c: int, sign: int) -> Test:
    return lambda a, b: sign * joined(a, b) > sign * c


def _linear(top: int, bottom: int, c: int, sign: int) -> Test:
    return lambda a, b: sign * bottom * a > sign * (top * b + c)


def _compare(left: str, right: str, c: int, up: bool) -> str:
    if not up and c <= 0:  # S < T − 3 is T > S + 3
        left, right, c, up = right, left, -c, True
    shift = f" + {c}" if c > 0 else f" − {-c}" if c < 0 else ""
    return f"{left} {'>' if up else '<'} {right}{shift}"


def _roundest(low: int, high: int) -> int:
    """Return the multiple of the highest power of two between two numbers."""
    step = 1
    while -(-low // (2 * step)) * 2 * step <= high:
        step *= 2
    return -(-low // step) * step


_TESTS: dict[str, Test] = {
    "= y": lambda a, b: a == b,
    "≠ y": lambda a, b: a != b,
    "% y = 0": lambda a, b: a % b == 0,
    "% y ≠ 0": lambda a, b: a % b != 0,
}
