"""Protocol of a framework, errors of an implementation, and the record of its results."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from npattn.arrays import Array
from npattn.errors import NpattnError
from npattn.problem import Cotangents, Problem

__all__ = [
    "Crash",
    "Framework",
    "ImplementationError",
    "NotAsked",
    "ResultError",
    "Results",
    "TimedOut",
    "catch_foreign",
    "format_exception_line",
    "inexpressible",
    "note_problem",
    "refuse",
]


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
LIBRARIES = (
    *(sysconfig.get_paths()[n] for n in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(path for path in sys.path if path.endswith("-packages")),
)


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
    def may_refuse_structure(self) -> bool:
        """True if it is a refusal, or an axis or a number is missing, as in a rank or size of 0."""
        return self.is_refusal or isinstance(self.__cause__, MISSING)


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

    Attributes
    ----------
    pairs : tuple of (name, array)
        In the order of the calls.
    """

    pairs: tuple[tuple[str, Array], ...]

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


class Framework(Protocol):
    """Conversion of arrays to and from a framework, and its way to gradients."""

    name: str
    differentiates: bool
    compiles: bool  # for every shape, so that few shapes save time
    immutable: bool  # its arrays cannot be written to

    def one_thread(self) -> AbstractContextManager[None]:
        """Compute with one thread: small problems are slow on many."""

    def threads(self, count: int) -> AbstractContextManager[None] | None:
        """Compute with a number of threads, or return None if it is fixed."""

    def finish(self) -> None:
        """Wait for pending work, so that its errors are raised here."""

    def device_works(self) -> bool:
        """Return True if the device still computes; an access out of bounds ends that."""

    def allowing(self, dtype: Any) -> AbstractContextManager[None]:
        """Enable arrays of a dtype, where the framework needs to be told."""

    def give(self, array: Array) -> Any:
        """Return a writable array of the framework with the values and strides of `array`."""

    def take(self, value: Any) -> Array:
        """Return a result as a NumPy array, in the dtype delivered."""

    def memory(self, value: Any) -> Array | None:
        """Return a NumPy array on the memory of a result, or None where NumPy cannot read it."""

    def add_mask(self, mask: Any, q: Any) -> Any:
        """Return 0 where the mask is True, and the least finite number of q's dtype elsewhere."""

    def hide(self, bias: Any, mask: Any) -> Any:
        """Return the bias with −inf where the mask is False, differentiable in the bias."""

    def gradients(
        self,
        call: Callable[..., dict[str, Any]],
        inputs: Mapping[str, Any],
        cotangents: Mapping[str, Any],
        names: Iterable[str],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the results of ``call(**inputs)`` and the gradients of the inputs named."""

    def gradients_twice(
        self,
        call: Callable[..., dict[str, Any]],
        inputs: Mapping[str, Any],
        cotangents: Mapping[str, Any],
        second: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the gradients of Σ second · gradients, in those inputs and in the cotangents."""


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


def format_exception_line(err: BaseException) -> str:
    """Format an exception as one line of at most 200 characters of message, and its place."""
    try:
        text = " ".join(str(err).split())
    except Exception as second:  # noqa: BLE001  foreign exceptions may raise when they are read
        text = f"(its message raised {type(second).__name__})"
    line = f"{type(err).__name__}: {text[:200]}" if text else type(err).__name__
    # Who refuses says why; of anything else one wants to know where.
    place = getattr(err, "place", "") or place_of(err)
    return f"{line} ({place})" if place and not isinstance(err, NotImplementedError) else line


def place_of(err: BaseException) -> str:
    """Return file:line of the last call in code of the user's own; "" if there is none.

    The worker has a function like it: it cannot import this one.
    """
    place, trace = "", err.__traceback__
    while trace is not None:
        file, module = trace.tb_frame.f_code.co_filename, trace.tb_frame.f_globals.get("__name__")
        if not file.startswith(("<", *LIBRARIES)) and str(module).partition(".")[0] != "npattn":
            place = f"{Path(file).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def inexpressible(what: str) -> ImplementationError:
    """Return the error, a refusal, for what no parameter can hold."""
    return refuse(f"has no parameter for {what}")


def refuse(text: str) -> ImplementationError:
    """Return an error that is a refusal."""
    error = ImplementationError(text)
    error.__cause__ = NotImplementedError(text)
    return error
