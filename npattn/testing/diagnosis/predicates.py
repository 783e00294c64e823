"""Predicates on the sizes of a problem, and the simplest that separates failing from passing ones.

A predicate is a candidate only if it is right for every problem that was tried, with several
witnesses on each side: a multiple or a threshold that two points suggest is a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from operator import eq, gt, lt, ne

from npattn.testing.cases.recipe import Recipe

WITNESSES = 3
"""Least number of different problems that must fail, and that must pass, for a predicate."""
MOST_GROUPS = 5
"""Most sizes of groups that a predicate names."""
MULTIPLES = (2, 4, 8, 16, 32, 64, 128)
LETTERS = "BHKGTSDE"
PAIRS = ("TS", "DE")
"""Sizes that a kernel tiles or vectorises alike."""

Point = tuple[Recipe, bool]
"""A recipe, and True if it fails."""


@dataclass(frozen=True)
class Predicate:
    """A condition on the sizes of a problem, in words.

    Attributes
    ----------
    text : str
    letters : str
        The sizes that it reads.
    holds : callable
    least : (int, int)
        Number of different sizes that must fail, and that must pass; "T > 1" has one that passes.
    """

    text: str
    letters: str
    holds: Callable[[Recipe], bool]
    least: tuple[int, int] = (WITNESSES, WITNESSES)

    def sizes(self, recipe: Recipe) -> tuple[int, ...]:
        """Return the sizes that it reads."""
        return tuple(size_of(recipe, letter) for letter in self.letters)


def size_of(recipe: Recipe, letter: str) -> int:
    """Return a size by its letter; B is the first leading axis, 1 if there is none; G is H/K."""
    if letter == "B":
        return recipe.lead[0] if recipe.lead else 1
    if letter == "G":
        return recipe.H // recipe.K if recipe.K else 1
    size: int = getattr(recipe, letter)
    return size


def fit(points: Sequence[Point]) -> Iterator[Predicate]:
    """Yield the predicates that hold exactly for the failing points, the simplest first.

    Those on one size or relation come first, then conjunctions of two.
    """
    failing = [recipe for recipe, fails in points if fails]
    passing = [recipe for recipe, fails in points if not fails]
    # A predicate of the failing points holds for each of them, alone or in a conjunction.
    possible = [p for p in _candidates(failing, passing) if all(map(p.holds, failing))]
    for p in possible:
        if not any(map(p.holds, passing)) and _has_witnesses(p, failing, passing):
            yield p
    for p, q in combinations(possible, 2):
        both = Predicate(f"{p.text} and {q.text}", p.letters + q.letters, _both(p, q))
        left = [[r for r in passing if not x.holds(r)] for x in (p, q)]
        if set(p.letters) & set(q.letters) or any(map(both.holds, passing)) or not all(left):
            continue
        if all(_has_witnesses(x, failing, rest) for x, rest in zip((p, q), left, strict=True)):
            yield both


def _both(p: Predicate, q: Predicate) -> Callable[[Recipe], bool]:
    return partial(_hold, (p.holds, q.holds))


def _hold(conditions: Sequence[Callable[[Recipe], bool]], recipe: Recipe) -> bool:
    return all(holds(recipe) for holds in conditions)


def _has_witnesses(p: Predicate, failing: Sequence[Recipe], passing: Sequence[Recipe]) -> bool:
    """Return True if enough different sizes fail, and enough pass."""
    return all(
        len({p.sizes(recipe) for recipe in recipes}) >= least
        for recipes, least in zip((failing, passing), p.least, strict=True)
    )


def _candidates(failing: Sequence[Recipe], passing: Sequence[Recipe]) -> Iterator[Predicate]:
    """Yield predicates worth trying, the simplest first."""
    yield from RELATIONS
    for letter in LETTERS:
        yield from _thresholds(letter, failing, passing)
    yield from _some_groups(failing, passing)
    for letters in (*"TSDE", *PAIRS):
        for m in MULTIPLES:
            if _is_exactly(m, letters, failing, passing):
                yield _no_multiple(letters, m)
            if _is_exactly(m, letters, passing, failing):
                yield _multiple(letters, m)


def _is_exactly(m: int, letters: str, odd: Sequence[Recipe], even: Sequence[Recipe]) -> bool:
    """Return True if sizes tell m from its half and its double, and each letter matters alone."""
    alone = all(
        any(all(bool(size_of(r, other) % m) == (other == letter) for other in letters) for r in odd)
        for letter in letters
    )
    half = any(size_of(r, letter) % m == m // 2 for r in odd for letter in letters)
    double = any(size_of(r, letter) % (2 * m) == m for r in even for letter in letters)
    return alone and half and double


def _thresholds(
    letter: str, failing: Sequence[Recipe], passing: Sequence[Recipe]
) -> Iterator[Predicate]:
    """Yield "S > n" and "S < n" where n itself was seen to pass."""
    sizes = [size_of(r, letter) for r in failing]
    passes = {size_of(r, letter) for r in passing}
    low, high = min(sizes, default=0), max(sizes, default=0)
    if low == high <= 1:
        yield Predicate(f"{letter} = {low}", letter, _is_within(letter, low, low), (1, WITNESSES))
    elif low - 1 in passes:
        least = (WITNESSES, min(low - 1, WITNESSES))
        yield Predicate(f"{letter} > {low - 1}", letter, _is_within(letter, low, None), least)
    if high + 1 in passes and high > 1:
        least = (min(high, WITNESSES), WITNESSES)
        text = f"{letter} < {high + 1}"
        yield Predicate(text, letter, _is_within(letter, None, high), least)


def _is_within(letter: str, least: int | None, most: int | None) -> Callable[[Recipe], bool]:
    return partial(_size_is_within, letter, least, most)


def _size_is_within(letter: str, least: int | None, most: int | None, recipe: Recipe) -> bool:
    size = size_of(recipe, letter)
    return (least is None or size >= least) and (most is None or size <= most)


def _some_groups(failing: Sequence[Recipe], passing: Sequence[Recipe]) -> Iterator[Predicate]:
    """Yield "G = 5, 6 or 7 of 11 tried", and "H = 28 and K = 4" if only these heads fail."""
    pairs = {(r.H, r.K) for r in failing}
    fails, tried = ({size_of(r, "G") for r in x} for x in (failing, [*failing, *passing]))
    if len(fails) <= MOST_GROUPS and max(fails, default=0) > 4 and fails != tried:
        *first, last = map(str, sorted(fails))
        text = f"G = {', '.join(first)}{' or ' if first else ''}{last} of {len(tried)} tried"
        yield Predicate(text, "G", lambda r: size_of(r, "G") in fails, (1, WITNESSES))
    if len(pairs) == 1:
        ((H, K),) = pairs
        yield Predicate(f"H = {H} and K = {K}", "GK", lambda r: (r.H, r.K) == (H, K), (1, 4))


def _multiple(letters: str, m: int) -> Predicate:
    one = "is even" if m == 2 else f"is a multiple of {m}"
    both = "are even" if m == 2 else f"are multiples of {m}"
    words = f"{' and '.join(letters)} {both if letters[1:] else one}"
    return Predicate(words, letters, partial(_are_multiples, m, letters))


def _no_multiple(letters: str, m: int) -> Predicate:
    text = "odd" if m == 2 else f"no multiple of {m}"
    words = f"{' or '.join(letters)} is {text}"
    return Predicate(words, letters, partial(_is_no_multiple, m, letters))


def _are_multiples(m: int, letters: str, recipe: Recipe) -> bool:
    return all(size_of(recipe, x) % m == 0 for x in letters)


def _is_no_multiple(m: int, letters: str, recipe: Recipe) -> bool:
    return not _are_multiples(m, letters, recipe)


def _relate(relation: Callable[[int, int], bool], letters: str, recipe: Recipe) -> bool:
    return relation(size_of(recipe, letters[0]), size_of(recipe, letters[1]))


def _share_several(recipe: Recipe) -> bool:
    return 1 < recipe.K < recipe.H


def _share_one(recipe: Recipe) -> bool:
    return recipe.K == 1 < recipe.H


RELATIONS = (
    Predicate("K < H", "KH", partial(_relate, lt, "KH")),
    Predicate("1 < K < H", "KH", _share_several),
    Predicate("K = 1 < H", "KH", _share_one),
    Predicate("K = H", "KH", partial(_relate, eq, "KH")),
    Predicate("T ≠ S", "TS", partial(_relate, ne, "TS")),
    Predicate("T = S", "TS", partial(_relate, eq, "TS")),
    Predicate("T < S", "TS", partial(_relate, lt, "TS")),
    Predicate("T > S", "TS", partial(_relate, gt, "TS")),
    Predicate("E ≠ D", "DE", partial(_relate, ne, "DE")),
    Predicate("E = D", "DE", partial(_relate, eq, "DE")),
    Predicate("E > D", "DE", partial(_relate, lt, "DE")),
    Predicate("E < D", "DE", partial(_relate, gt, "DE")),
)
"""Functions, not lambdas: a predicate comes back from the process that found it."""
