"""Atoms: conditions on one size or option, or on two sizes; clauses are conjunctions of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from npattn.testing.places.asking import Sample, Value


@dataclass(frozen=True)
class Pair:
    """Two problems one change apart, of which one fails and the other passes."""

    name: str  # the size or option in which they differ
    failing: dict[str, Value]  # the problems
    passing: dict[str, Value]

    def __str__(self) -> str:
        fails, passes = (describe_value(self.name, p[self.name]) for p in self)
        return f"fails with {fails}, passes with {passes}, all else equal"

    def __iter__(self) -> Iterator[dict[str, Value]]:
        return iter((self.failing, self.passing))


@dataclass(frozen=True)
class Atom:
    """A condition, with two problems one change apart that it separates."""

    text: str  # as "S > 256", "no causal", "T > S"
    names: tuple[str, ...]  # the sizes and options that it speaks of, one or two
    holds: Callable[[Sample], bool]  # takes a problem; returns a bool
    pair: Pair  # seen: the condition holds for the failing problem, and not for the passing one


Clause = tuple[Atom, ...]


def holds(clauses: Iterable[Clause], problem: Sample) -> bool:
    """Return True if a clause has all of its atoms hold."""
    return any(all(atom.holds(problem) for atom in clause) for clause in clauses)


def describe_clauses(clauses: Sequence[Clause]) -> str:
    """Return "causal and D % 32 ≠ 0 or T > S"; "everywhere" if a clause has no atom."""
    texts = [" and ".join(atom.text for atom in clause) or "everywhere" for clause in clauses]
    return " or ".join(dict.fromkeys(texts))


def describe_value(name: str, value: Value) -> str:
    """Return "S = 33", "causal", "no causal" or "causal = 'top_left'"."""
    if value is True:
        return name
    if value is False or value is None:
        return f"no {name}"
    return f"{name} = {value}"


def atom_of_choice(
    name: str, problem: Sample, failed: Sequence[Value], passed: Sequence[Value]
) -> Atom:
    """Return the simplest condition on an option that separates its values.

    Parameters
    ----------
    problem : mapping
        It fails.
    failed, passed : sequences
        Values with which it fails, and with which it passes, all else equal; neither is empty.
    """
    if len(passed) == 1 and not passed[0]:
        text, test = name, lambda p: bool(p[name])
    elif len(failed) == 1:
        text, test = describe_value(name, failed[0]), lambda p: bool(p[name] == failed[0])
    elif len(passed) == 1:
        text, test = f"{name} ≠ {passed[0]}", lambda p: bool(p[name] != passed[0])
    else:
        text = " or ".join(describe_value(name, value) for value in failed)
        text, test = f"({text})", lambda p: p[name] in failed
    pair = Pair(name, dict(problem), {**problem, name: passed[0]})
    return Atom(text, (name,), test, pair)


SIGNS = {"≠": "!=", "·": "*", "−": "-", "≤": "<="}


@lru_cache(maxsize=256)
def read_condition(text: str) -> Callable[[Sample], bool]:
    """Return what a condition holds for, as `describe_clauses` writes it.

    Examples
    --------
    >>> holds = read_condition("causal and T > S + 16 or D in {96, 128}")
    >>> holds({"causal": True, "T": 64, "S": 32, "D": 64})
    True
    """
    source = "True" if text == "everywhere" else text
    for sign, own in SIGNS.items():
        source = source.replace(sign, own)
    source = re.sub(r"\bno (\w+)", r"(not \1)", source)
    source = re.sub(r"(?<![<>!=])=(?!=)", "==", source)
    code = compile(source, "condition", "eval")
    return lambda problem: bool(eval(code, {"__builtins__": {}}, _Values(problem)))


class _Values(dict[str, Value]):
    """Values of a problem; another name is the name of a choice, as top_left."""

    def __missing__(self, name: str) -> Any:
        return name
