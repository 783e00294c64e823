"""Conditions as text, from which what they hold for is read: they go to other processes so."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from npattn.testing.places.asking import Sample, Value

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
