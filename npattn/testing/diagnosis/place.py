"""Places as predicates: the shortest condition that holds where a quantity is wrong, only there.

A predicate is a conjunction of atoms over the indices b h t s d e, beside the sizes of their
problem, and "rows that see no key". It is learned from elements of failing problems; on which
problems it fails is asked (`npattn.testing.places`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from npattn.problem.arrays import Array

LENGTH = {"t": "T", "s": "S", "d": "D", "e": "E", "h": "H", "b": "B"}
CONFUSED = {"t": "S", "s": "T", "d": "E", "e": "D", "h": "K"}
"""Lengths that a kernel takes for that of the index; others are no place: h ≥ D says D = 0."""
TILES = (2, 3, 4, 8, 16, 17, 32, 33, 64, 65, 128)
"""Tiles, and steps from one to the next that leave out a row between them."""
MOST = 3000
"""Elements of each kind that are taken from one problem."""
MISSED = 0.04
"""Largest share of the wrong elements that an atom may leave out."""
WORTH = 0.008
"""Share of elements that one more atom of the predicate must set right."""
CONFIRMED = 0.05
"""Share of the elements on which a place that is told may be mistaken."""
EVERYWHERE = "everywhere"


@dataclass(frozen=True, eq=False)
class Sample:
    """Elements of one problem, some of them wrong."""

    # by letter: B H K T S D E G, or others of a function that is not attention
    sizes: dict[str, int]
    options: frozenset[str]  # those that are on
    axes: str  # letters of the axes of `wrong` and `known`
    wrong: Array
    known: Array
    empty: Array  # (B, H, T): rows that see no key

    def reduce(self, axes: int) -> Sample:
        """Return the sample of the first axes alone: wrong where any element is."""
        if axes == len(self.axes):
            return self
        last = tuple(range(axes, len(self.axes)))
        wrong = np.asarray((self.wrong & self.known).any(last))
        known = np.asarray(self.known.any(last))
        return replace(self, axes=self.axes[:axes], wrong=wrong, known=known)


class Atom(NamedTuple):
    """One condition: its text, how long it is to say, and its value on the elements."""

    text: str
    cost: float
    holds: Callable[..., Array]


class Where(NamedTuple):
    """A learned predicate."""

    text: str  # "everywhere" if no condition is needed
    errors: float  # share of elements on which it is mistaken, wrong ones and others weighed alike
    atoms: tuple[Atom, ...]

    def holds(self, table: Table) -> Array:
        """Return the elements of a table for which it holds."""
        holds = np.ones(len(table.y), bool)
        for atom in self.atoms:
            holds = holds & atom.holds(table)
        return holds

    def errors_on(self, samples: Sequence[Sample]) -> float:
        """Return the share of elements of other problems on which it is mistaken."""
        table = Table(samples)
        if not len(table.y):
            return 0.0
        holds = self.holds(table)
        total = float(table.weight.sum())
        return float(table.weight[holds != table.y].sum()) / total if total else 0.0


class Table:
    """Elements of several samples in columns, one for each letter and option."""

    def __init__(self, samples: Sequence[Sample], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.axes = next((s.axes for s in samples if s.wrong.any()), "")
        self.sizes = tuple(samples[0].sizes) if samples else ()
        columns: dict[str, list[Array]] = {}
        y, weight = [], []
        failing = sum(bool(s.wrong.any()) for s in samples)
        passing = len(samples) - failing
        for s in samples:
            masks = s.wrong & s.known, ~s.wrong & s.known
            kinds = [x[rng.permutation(len(x))[:MOST]] for x in map(np.argwhere, masks)]
            rows = np.concatenate(kinds)
            if not len(rows):
                continue
            bad = len(kinds[0])
            values: dict[str, Any] = {x: s.sizes[x] for x in self.sizes}
            values |= dict(zip(s.axes, rows.T, strict=True))
            values["empty"] = _is_empty(s, values)
            for name, x in values.items():
                columns.setdefault(name, []).append(np.broadcast_to(x, len(rows)))
            y += [np.arange(len(rows)) < bad]
            filled = [len(x) for x in kinds if len(x)]
            share = 1 / failing if bad else 1 / max(passing, 1) / len(filled)
            weight += [np.full(n, share / n) for n in filled]
        self.columns = {name: np.concatenate(x) for name, x in columns.items()}
        self.y = np.concatenate(y) if y else np.zeros(0, bool)
        self.weight = np.concatenate(weight) if y else np.zeros(0)

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]


def _is_empty(sample: Sample, values: dict[str, Any]) -> Array:
    """Return for each element whether its row sees no key; False where it is of no row."""
    if not set("bht") <= set(sample.axes):
        return np.zeros(1, bool)
    whole = np.broadcast_to(sample.empty, tuple(sample.sizes[x] for x in "BHT"))
    return np.asarray(whole[values["b"], values["h"], values["t"]])


def learn(samples: Sequence[Sample]) -> Where | None:
    """Return the shortest predicate that separates the wrong elements; None if nothing is wrong."""
    table = Table(samples)
    y, weight = table.y, table.weight
    if not y.any():
        return None
    atoms, values = [], []
    for atom in _atoms(table):
        x = np.broadcast_to(atom.holds(table), y.shape)
        if weight[y & ~x].sum() <= MISSED * weight[y].sum() and not x.all():
            atoms.append(atom)
            values.append(x)

    def mistakes(x: Array) -> float:
        return float(weight[x != y].sum())

    scored = sorted(
        ((mistakes(x), a.cost, i) for i, (a, x) in enumerate(zip(atoms, values, strict=True)))
    )
    pool: list[tuple[float, float, tuple[int, ...]]] = [(mistakes(y | True), 0.0, ())]
    pool += [(m, c, (i,)) for m, c, i in scored]
    keep = [i for _, _, i in sorted(scored, key=lambda x: x[0] + WORTH * x[1])[:90]]
    pairs = [
        (mistakes(values[i] & values[j]), atoms[i].cost + atoms[j].cost, (i, j))
        for i, j in combinations(keep, 2)
    ]
    pairs.sort(key=_price)
    pool += pairs[:40]
    pool += [
        (mistakes(values[i] & values[j] & values[n]), c + atoms[n].cost, (i, j, n))
        for m, c, (i, j) in pairs[:25]
        for n in keep
        if m > WORTH and n not in (i, j)
    ]
    errors, _, chosen = min(pool, key=_price)
    ordered = tuple(atoms[i] for i in _in_order(chosen, atoms))
    return Where(" and ".join(atom.text for atom in ordered) or EVERYWHERE, errors, ordered)


def _price(entry: tuple[float, float, Any]) -> float:
    return entry[0] + WORTH * entry[1]


def _in_order(chosen: Sequence[int], atoms: Sequence[Atom]) -> list[int]:
    """Order atoms: those of indices first, then rows."""
    return sorted(chosen, key=lambda i: (atoms[i].text.startswith("rows"), atoms[i].text))


# --- atoms ----------------------------------------------------------------------------------------


def _round(n: int) -> float:
    """Return what a number costs: tile sizes and 0, 1 are what people write."""
    if n in (0, 1) or (n >= 4 and n & (n - 1) == 0) or (n >= 16 and n % 16 == 0):
        return 1.0
    return 1.2 if n < 4 else 1.5


def _atoms(table: Table) -> Iterator[Atom]:
    if table["empty"].any():
        yield Atom("rows that see no key", 1.0, lambda t: t["empty"])
    for x in table.axes:
        yield from _along(table, x)
    if {"h"} <= set(table.axes) and (table["G"] > 1).any():
        yield from _heads(table)
    if {"t", "s"} <= set(table.axes):
        yield from _diagonal(table)


def _bounds(below: int, low: int) -> list[int]:
    """Return the last passing size to name: the roundest between those that pass and fail."""
    between = range(below, low)
    return sorted(between, key=lambda n: (_round(n), -n))[:2]


def _along(table: Table, x: str) -> Iterator[Atom]:
    """Yield atoms of one index: equal to a number, beyond a border, at an end, or by tiles."""
    y, column, length = table.y, table[x], LENGTH[x]
    bad, good = column[y], column[~y]
    low, high = int(bad.min()), int(bad.max())

    def beyond(text: str, cost: float, border: Callable[..., Any]) -> Atom:
        return Atom(f"{x} ≥ {text}", cost, lambda t: t[x] >= border(t))

    def before(text: str, cost: float, border: Callable[..., Any]) -> Atom:
        return Atom(f"{x} < {text}", cost, lambda t: t[x] < border(t))

    if low == high:
        yield Atom(f"{x} = {low}", 1.0, lambda t: t[x] == low)
    below = good[good < low]
    if low > 0 and len(below):
        for n in {low, *_bounds(int(below.max()) + 1, low + 1)} - {0}:
            yield beyond(f"{n}", _round(n), lambda _, n=n: n)
    above = good[good > high]
    if len(above):
        for n in {high + 1, *_bounds(high + 1, int(above.min()) + 1)}:
            yield before(f"{n}", _round(n), lambda _, n=n: n)
    if other := CONFUSED.get(x):
        yield beyond(other, 1.2, lambda t: t[other])
        yield before(other, 1.4, lambda t: t[other])
    if x in "ts":
        a, b = ("S", "T") if x == "s" else ("T", "S")
        yield beyond(f"{a} − {b}", 1.4, lambda t: t[a] - t[b])
        yield before(f"{a} − {b}", 1.3, lambda t: t[a] - t[b])
    end = table[length] - column
    near, far = int(end[y].min()), int(end[y].max())
    if far < int(end.max()):
        text = f"{x} = {length} − 1" if far == 1 else f"{x} ≥ {length} − {far}"
        yield Atom(text, 1.1 * _round(far), lambda t: t[length] - t[x] <= far)
    if near > 1:
        yield before(f"{length} − {near - 1}", 1.3 * _round(near), lambda t: t[length] - near + 1)
    for m in TILES:
        if int(column.max()) >= m or m <= 4:
            yield from _modulus(table, x, m)
        if m < 4:
            continue
        whole = f"{m} · ({length} // {m})", lambda t, m=m: m * (t[length] // m)
        last = f"{m} · (⌈{length} / {m}⌉ − 1)", lambda t, m=m: m * (-(-t[length] // m) - 1)
        for cost, (text, border) in ((1.5, whole), (1.6, last)):
            yield beyond(text, cost, border)
            yield before(text, 1.6, border)
        half = f"{m} · ⌈{length} / {2 * m}⌉"
        yield beyond(half, 1.7, lambda t, m=m: m * -(-t[length] // (2 * m)))


def _modulus(table: Table, x: str, m: int) -> Iterator[Atom]:
    values = np.unique(table[x][table.y] % m)
    if len(values) == m:
        return
    low, high = int(values.min()), int(values.max())
    if low == high:
        yield Atom(f"{x} % {m} = {low}", 1.2, lambda t: t[x] % m == low)
    elif low > 0:
        text = f"{x} % {m} ≠ 0" if low == 1 else f"{x} % {m} ≥ {low}"
        yield Atom(text, 1.3, lambda t: t[x] % m >= low)
    if low != high and high < m - 1:
        yield Atom(f"{x} % {m} < {high + 1}", 1.3, lambda t: t[x] % m <= high)


def _heads(table: Table) -> Iterator[Atom]:
    yield Atom("h % G ≠ 0", 1.2, lambda t: t["h"] % t["G"] != 0)
    yield Atom("h // G ≥ 1", 1.2, lambda t: t["h"] // t["G"] >= 1)
    yield Atom("h // G ≠ h", 1.3, lambda t: t["h"] // t["G"] != t["h"])
    yield Atom("h // G ≠ h % K", 1.4, lambda t: t["h"] // t["G"] != t["h"] % t["K"])


def _diagonal(table: Table) -> Iterator[Atom]:
    """Yield atoms that compare s with t, aligned at either end, and tiles on the diagonal."""
    aligned: dict[str, Callable[..., Array]] = {
        "t + S − T": lambda t: np.asarray(t["t"] + t["S"] - t["T"] - t["s"]),
        "t": lambda t: np.asarray(t["t"] - t["s"]),
    }
    for name, distance in aligned.items():
        d = distance(table)
        bad, good = d[table.y], d[~table.y]
        low, high = int(bad.min()), int(bad.max())
        more = 0.0 if name != "t" else 0.05
        if low == high:
            text = f"s = {_shift(name, -low)}"
            yield Atom(text, 1.2 + more, lambda t, f=distance, n=low: f(t) == n)
        if (good < low).any():
            yield Atom(f"s ≤ {_shift(name, -low)}", 1.2 + more + 0.2 * (low not in (0, 1)),
                       lambda t, f=distance, n=low: f(t) >= n)  # fmt: skip
        if (good > high).any():
            yield Atom(f"s ≥ {_shift(name, -high)}", 1.2 + more + 0.2 * (high not in (0, -1)),
                       lambda t, f=distance, n=high: f(t) <= n)  # fmt: skip
    for m in (16, 32, 64):
        yield Atom(f"s // {m} = t // {m}", 1.5, lambda t, m=m: t["s"] // m == t["t"] // m)


def _shift(name: str, n: int) -> str:
    return name if not n else f"{name} {'+' if n > 0 else '−'} {abs(n)}"
