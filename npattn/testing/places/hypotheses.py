"""Conditions on one number, and which of them are left after some answers.

A bisection finds a threshold in eight questions, but what a kernel does with a size may be a
threshold, a modulus, a set of sizes, or nothing. So all conditions of a small grammar are held
against the answers at once, each with a weight (256 is a likelier threshold than 241), and the next
number to ask is one about which those that are left disagree most: a bisection of the grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from itertools import combinations
from operator import eq, ge, gt, le, lt, ne
from typing import Any

import numpy as np
from numpy.typing import NDArray

Test = Callable[[Any], Any]
"""Takes a number, or an array of numbers; returns a bool, or an array of bools."""

DOMAIN = range(1, 521)
"""Sizes that are asked where the caller names none."""
MODULI = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 80, 96, 128)
HEADS = (8, 16, 32, 40, 48, 64, 80, 96, 128, 192, 256, 512)
"""Sizes of a head for which kernels are compiled."""


class Grammar:
    """All conditions on a number of a domain.

    Attributes
    ----------
    domain : tuple of int
    texts : list of str
        Conditions with {} for the letter, as "{} % 16 ≠ 0"; the first is "", which always holds.
    tests : list of callable
    table : float32 array (conditions, numbers of the domain)
        1 where a condition holds, else 0.
    weights : float64 array (conditions,)
    sums : float64 array (numbers of the domain,)
        weights @ table.
    kinds : list of str
        "always", "above", "below", "modulus", "equal", "unequal" or "more", by condition.
    numbers : list of int
        The threshold, modulus or number; 0 if there are several.
    """

    def __init__(self, domain: tuple[int, ...]) -> None:
        self.domain = domain
        self.texts: list[str] = []
        self.tests: list[Test] = []
        self.kinds: list[str] = []
        self.numbers: list[int] = []
        weights: list[float] = []
        values = np.array(domain)
        rows: list[NDArray[np.bool_]] = []

        def add(kind: str, weight: float, number: int, text: str, test: Test) -> None:
            row = np.broadcast_to(np.asarray(test(values), bool), values.shape)
            if kind != "always" and (row.all() or not row.any()):
                return
            self.texts.append(text)
            self.tests.append(test)
            self.kinds.append(kind)
            self.numbers.append(number)
            weights.append(weight)
            rows.append(row)

        add("always", 200, 0, "", lambda x: x > 0)
        for c in domain:
            likely = 1.0 if _is_round(c) else 0.4 if _is_round(c + 1) or _is_round(c - 1) else 0.05
            likely = 8.0 if c == domain[0] else likely
            add("above", likely, c, f"{{}} > {c}", _than(gt, c))
            add("below", likely, c, f"{{}} < {c}", _than(lt, c))
            add("equal", likely / 2, c, f"{{}} = {c}", _than(eq, c))
            add("unequal", likely / 4, c, f"{{}} ≠ {c}", _than(ne, c))
        for m in MODULI:
            likely = 4.0 if m & (m - 1) == 0 else 0.4
            add("modulus", likely, m, f"{{}} % {m} ≠ 0", _modulo(ne, m, 0))
            add("modulus", likely, m, f"{{}} % {m} = 0", _modulo(eq, m, 0))
            for r in range(1, m) if m > 2 else ():  # an odd number is one with x % 2 ≠ 0
                rare = likely * (0.02 if r in (1, m - 1, m // 2) else 0.004)
                add("more", rare, 0, f"{{}} % {m} = {r}", _modulo(eq, m, r))
                add("more", rare, 0, f"{{}} % {m} ≠ {r}", _modulo(ne, m, r))
                add("more", rare, 0, f"{{}} % {m} > {r}", _modulo(gt, m, r))
                below = _both(_modulo(lt, m, r), _modulo(gt, m, 0))
                add("more", rare, 0, f"0 < {{}} % {m} < {r}", below)
        rounds = [n for n in domain if _is_round(n)]
        for m in (m for m in MODULI if m & (m - 1) == 0):
            for c in (n for n in rounds if n <= 256):
                for sign, op in (("≠", ne), ("=", eq)):
                    text = f"{{}} > {c} and {{}} % {m} {sign} 0"
                    add("more", 0.02, 0, text, _both(_than(gt, c), _modulo(op, m, 0)))
        for a, b in combinations(rounds, 2):
            add("more", 0.01, 0, f"{a} < {{}} ≤ {b}", _both(_than(gt, a), _than(le, b)))
            add("more", 0.01, 0, f"{a} ≤ {{}} ≤ {b}", _both(_than(ge, a), _than(le, b)))
        heads = [n for n in HEADS if n in domain]
        for some in (some for count in (2, 3, 4, 5) for some in combinations(heads, count)):
            text = f"{{}} in {{{{{', '.join(map(str, some))}}}}}"
            add("more", 0.01, 0, text, partial(np.isin, test_elements=some))
        self.weights = np.array(weights)
        self.table = np.array(rows, np.float32)
        self.sums = self.weights @ self.table


def sparse(domain: Sequence[int]) -> list[int]:
    """Return the numbers of a domain that are in a grammar: of a long range the round ones."""
    if not isinstance(domain, range) or len(domain) <= len(DOMAIN):
        return [*domain]
    high = domain[len(DOMAIN) - 1]
    powers = {2**i + j for i in range(1, 40) for j in (-1, 0, 1)}
    steps = {64 * i for i in range(1, 65)} | {1024 * i for i in range(1, 65)}
    rounds = [n for n in sorted(powers | steps) if n > high and n in domain]
    return [*domain[: len(DOMAIN)], *rounds]


def _is_round(n: int) -> bool:
    return n <= 4 or n & (n - 1) == 0 or n % 32 == 0


def _than(compare: Callable[[Any, int], Any], c: int) -> Test:
    return lambda x: compare(x, c)


def _modulo(compare: Callable[[Any, int], Any], m: int, r: int) -> Test:
    return lambda x: compare(x % m, r)


def _both(first: Test, second: Test) -> Test:
    return lambda x: first(x) & second(x)


@lru_cache(maxsize=16)
def grammar(domain: tuple[int, ...]) -> Grammar:
    """Return the conditions on numbers of a domain, made once."""
    return Grammar(domain)


class Belief:
    """What is left of a grammar after some answers.

    Parameters
    ----------
    domain : sequence of int
        Increasing.
    others : collection of int
        Numbers that other sizes have: a border there is likely.
    """

    def __init__(self, domain: Sequence[int], others: Collection[int] = ()) -> None:
        self.grammar = grammar(tuple(domain))
        self.index = {n: i for i, n in enumerate(self.grammar.domain)}
        beside = {c for n in others for c in (n - 1, n, n + 1) if c}
        least = 2.0 * np.isin(self.grammar.numbers, [*beside])
        least += 4.0 * np.isin(self.grammar.numbers, [*others])
        weights = np.maximum(self.grammar.weights, least)
        raised = np.flatnonzero(least > self.grammar.weights)
        extra = weights[raised] - self.grammar.weights[raised]
        self._sums = self.grammar.sums + extra @ self.grammar.table[raised]
        self._weights, self._left = weights, np.ones(len(weights), bool)

    def learn(self, value: int, answer: bool) -> None:
        """Drop the conditions that an answer refutes."""
        table = self.grammar.table
        refuted = np.flatnonzero(self._left & (table[:, self.index[value]] != answer))
        self._left[refuted] = False
        left = np.flatnonzero(self._left)
        if len(left) < len(refuted):
            self._sums = self._weights[left] @ table[left]
        else:
            self._sums = self._sums - self._weights[refuted] @ table[refuted]

    def probabilities(self) -> NDArray[np.float64]:
        """Return how likely each number of the domain is to be answered True."""
        total = self._weights[self._left].sum()
        if not total:
            return np.full(len(self.index), 0.5)
        result: NDArray[np.float64] = np.clip(self._sums / total, 0, 1)
        return result

    @property
    def best(self) -> int | None:
        """The likeliest condition that is left, by its number; None if none is."""
        return int((self._weights * self._left).argmax()) if self._left.any() else None

    def equals(self) -> list[int]:
        """Return the conditions that hold for the same numbers as the best, that one last."""
        best = self.best
        if best is None:
            return []
        left = np.flatnonzero(self._left)
        same = left[(self.grammar.table[left] == self.grammar.table[best]).all(1)]
        return [*(int(i) for i in same if i != best), best]
