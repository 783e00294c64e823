"""Errors of an implementation, and the record of its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from npattn.errors import NpattnError
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.child import format_exception_line, place_of, refusing_line

Status = Literal["error", "crashed", "timed out"]

MISTAKES = (
    IndexError,
    KeyError,
    AttributeError,
    NameError,
    ZeroDivisionError,
    FloatingPointError,
    MemoryError,
)
"""Exceptions that no one raises to refuse input."""
MISSING = (IndexError, ZeroDivisionError)
"""Mistakes by which functions refuse a rank or a size: an axis or a number is not there."""


class ImplementationError(NpattnError):
    """The implementation under test raised, or returned something that cannot be read.

    Attributes
    ----------
    problem : npattn.Problem or None
        Of the call that raised.
    cotangents : Cotangents or None
        Of the call that raised, if it was a call for gradients.
    status : {"error", "crashed", "timed out"}
        Of an outcome that it ends.
    """

    status: Status = "error"
    problem: Problem | None = None
    cotangents: Cotangents | None = None

    @property
    def is_refusal(self) -> bool:
        """True if the exception behind it may say that input is not supported."""
        behind = self.__cause__
        return isinstance(behind, Exception) and not isinstance(behind, MISTAKES)

    @property
    def place(self) -> str:
        """File and line of the exception behind it, in code of the user's own; "" if unknown."""
        behind = self.__cause__
        return "" if behind is None else getattr(behind, "place", "") or place_of(behind)

    @property
    def refuses(self) -> str:
        """The line of the user's that raised on purpose, or what a library does not implement.

        "" for an exception that came about otherwise: an error, whatever its type.
        """
        behind = self.__cause__
        if not isinstance(behind, Exception) or isinstance(behind, MISTAKES):
            return ""
        line = getattr(behind, "refuses", "") or refusing_line(behind)
        return line or (UNIMPLEMENTED if _is_unimplemented(behind) else "")

    @property
    def may_refuse_structure(self) -> bool:
        """True if it is a refusal, or an axis or a number is missing, as in a rank or size of 0."""
        return self.is_refusal or isinstance(self.__cause__, MISSING)


UNIMPLEMENTED = "not implemented"


def _is_unimplemented(err: Exception) -> bool:
    """Return True for NotImplementedError, and for an exception that says the same."""
    text = str(err).lower()
    says = any(words in text for words in ("not implemented", "not supported", "unsupported"))
    return isinstance(err, NotImplementedError) or says


class Crash(ImplementationError):
    """The implementation ended its process, or raised what no program is meant to catch."""

    status: Status = "crashed"


class TimedOut(ImplementationError):
    """The implementation did not answer in time."""

    status: Status = "timed out"


class NotAsked(ImplementationError):
    """The implementation has crashed on such problems before, and is not asked again."""


class ResultError(ImplementationError):
    """The implementation under test answered, but with something that is not a result."""


@dataclass(frozen=True)
class Results(Mapping[str, Array]):
    """Arrays that an implementation returned for one problem.

    As a mapping it gives the first array of each name. An implementation can be called in several
    ways (with and without its lse, with and without the gradient of the bias), and each returns
    its own `o` or `dq`: `pairs` has them all.
    """

    pairs: tuple[tuple[str, Array], ...]  # (name, array), in the order of the calls

    @cached_property
    def _first(self) -> dict[str, Array]:
        return dict(reversed(self.pairs))

    def __getitem__(self, name: str) -> Array:
        return self._first[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self.pairs))

    def __len__(self) -> int:
        return len(self._first)

    def __add__(self, other: Results) -> Results:
        return Results(self.pairs + other.pairs)


@contextmanager
def catch_foreign(prefix: str) -> Iterator[None]:
    """Turn whatever foreign code raises, exits included, into an `ImplementationError`.

    What is neither an exception nor an exit is a `Crash`: a panic of a runtime, say.
    """
    try:
        yield
    except (ImplementationError, KeyboardInterrupt, GeneratorExit):
        raise
    except (Exception, SystemExit) as err:
        raise ImplementationError(f"{prefix} {format_exception_line(err)}") from err
    except BaseException as err:
        raise Crash(f"{prefix} {format_exception_line(err)}") from err


@contextmanager
def note_problem(problem: Problem, cotangents: Cotangents | None = None) -> Iterator[None]:
    """Put the problem, and cotangents, on an `ImplementationError` that is raised inside."""
    try:
        yield
    except ImplementationError as err:
        err.problem, err.cotangents = problem, cotangents
        raise


def inexpressible(what: str) -> ImplementationError:
    """Return the error, a refusal, for what no parameter can hold."""
    return refuse(f"has no parameter for {what}")


def refuse(text: str) -> ImplementationError:
    """Return an error that is a refusal."""
    error = ImplementationError(text)
    error.__cause__ = NotImplementedError(text)
    return error
