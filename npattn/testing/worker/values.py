"""Values of a request and of its answer: arguments, arrays, results that are kept, exceptions."""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from npattn.testing.adapters.base import Crash, ImplementationError, ResultError, catch_foreign
from npattn.testing.adapters.child import LARGEST, Tensor, as_json
from npattn.testing.adapters.frameworks import array_of


@dataclass(frozen=True, eq=False)
class Held:
    """Results that the worker keeps until nobody here refers to them, of at most `most` bytes."""

    key: str
    generation: int
    most: int


@dataclass(frozen=True, eq=False)
class HeldItem:
    """One of the results of a `Held`."""

    held: Held
    item: int | str


@dataclass(frozen=True)
class NoArray:
    """A result that is no array, or could not be read."""

    error: BaseException


# --- what comes back ------------------------------------------------------------------------------

WORDS = 200
"""Characters that are kept of a name, and a tenth of those of a message."""
GARBAGE = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Exceptions with which reading an answer ends, if it has not the form that it must have."""


@contextmanager
def find_garbage() -> Iterator[None]:
    """Raise `Crash` where an answer has not the form that it must have."""
    try:
        yield
    except GARBAGE as err:
        text = f"crashed: its process answered with garbage ({type(err).__name__}: {err})"
        raise Crash(text) from None


OF_ALL = 1 << 26
"""Bytes of an answer to a request without arrays, and more than any array's own."""


def answer_bytes(shapes: Mapping[str, tuple[int, ...]], calls: int) -> int:
    """Bound the bytes of an answer to calls with arrays of these shapes, whatever it returns.

    Results have an element for each query and each number of a value, for each query and key, or
    for each element of an input; of 16 bytes at most. Twice as many may be wrong in shape without
    a loss of the message that says so.
    """
    sizes = {name: math.prod(max(n, 1) for n in shape) for name, shape in shapes.items()}
    q, k, v = (shapes.get(name, ()) for name in "qkv")
    widest = max((1, *k, *v))
    if len(q) == len(k) == len(v):  # along an axis of 1 it broadcasts
        widest *= math.prod(max(x, y, 1) for n, x, y in zip(q, k, v, strict=True) if n == 1)
    else:
        widest *= sizes.get("k", 1)
    rows = sizes.get("q", 1) // max((1, *q[-1:]))
    elements = sum(sizes.values()) + 2 * rows * widest
    return min(LARGEST, OF_ALL + 2 * 16 * max(calls, 1) * elements)


def places(structure: Any, held: Held) -> Any:
    if structure is None:
        return HeldItem(held, 0)
    if "tuple" in structure:
        return tuple(HeldItem(held, n) for n in range(len(structure["tuple"])))
    return {name: HeldItem(held, name) for name in structure["mapping"]}


def value_of(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return an array, or a tuple or mapping of arrays."""
    if structure is None:
        return None
    if "tuple" in structure:
        return tuple(value_of(x, tensors) for x in structure["tuple"])
    if "mapping" in structure:
        return {str(name): value_of(x, tensors) for name, x in structure["mapping"].items()}
    if "tensor" in structure:
        return array_of(tensors[structure["tensor"]])
    error = read_error(structure)
    if error is None:
        raise ValueError(f"a value of {structure}")
    return NoArray(error)


def read_error(answer: Mapping[str, Any]) -> BaseException | None:
    """Return an exception like the one that an answer describes; None if it describes none."""
    if "usage" in answer:  # a call is no place for it: it would end the check
        return Crash("crashed: its process answered with garbage (usage, in answer to a call)")
    if "no result" in answer:
        return ResultError(str(answer["no result"]))
    if "unreadable" in answer:
        return ImplementationError(str(answer["unreadable"]))
    with find_garbage():
        return foreign_exception(answer["raised"]) if "raised" in answer else None


def raise_errors(answer: Mapping[str, Any], prefixes: Mapping[str, str]) -> None:
    """Raise what the worker says that the implementation raised."""
    error = read_error(answer)
    if error is None:
        return
    with find_garbage():
        during = str(answer["raised"].get("during", "")) if "raised" in answer else ""
    prefix = prefixes.get(during, prefixes.get("", "")) if "raised" in answer else ""
    if not prefix:
        raise error
    with catch_foreign(prefix):
        raise error


@lru_cache(maxsize=256)
def _foreign_class(name: str, module: str, bases: tuple[str, ...]) -> type[BaseException]:
    """Return a class like one of the worker: of its name, derived from its built-in base."""
    kinds = (getattr(builtins, base, None) for base in bases if not base.endswith("Group"))
    exceptions = (k for k in kinds if isinstance(k, type) and issubclass(k, BaseException))
    base = next(exceptions, Exception)
    base = Exception if base in (KeyboardInterrupt, GeneratorExit) else base
    made: type[BaseException] = type(
        name, (base,), {"__module__": module, "__str__": lambda self: self.message}
    )
    return made


def foreign_exception(raised: Mapping[str, Any]) -> BaseException:
    """Return an exception like one that was raised in the worker."""
    kind = _foreign_class(
        str(raised["type"])[:WORDS],
        str(raised.get("module", "builtins"))[:WORDS],
        tuple(map(str, raised.get("bases", ())))[:WORDS],
    )
    error = kind.__new__(kind)
    text = str(raised.get("message", ""))[: 10 * WORDS].encode("utf-8", "backslashreplace").decode()
    error.message = text  # type: ignore[attr-defined]
    error.place = str(raised.get("place", ""))[:WORDS]  # type: ignore[attr-defined]
    error.refuses = str(raised.get("refuses", ""))[:WORDS]  # type: ignore[attr-defined]
    return error


def plain(value: Any) -> Any:
    """Return a number, text or truth value as JSON has it."""
    return as_json(value.item() if isinstance(value, np.generic) else value)
