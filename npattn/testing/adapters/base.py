"""Whose arrays an implementation takes, and how they go in, come out and are differentiated."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from npattn.arrays import Array
from npattn.errors import NpattnError, OptionError
from npattn.problem import Cotangents
from npattn.testing.adapters.signature import parameters

__all__ = [
    "FRAMEWORKS",
    "Framework",
    "ImplementationError",
    "NumPy",
    "ResultError",
    "framework_of",
    "told",
]

FRAMEWORKS = ("numpy", "torch", "jax")

# Words of annotations.
WORDS = {
    "torch": r"\btorch\b",
    "jax": r"\b(jax|jnp)\b",
    "numpy": r"\b(numpy|np|npt)\b",
}


class ImplementationError(NpattnError):
    """The implementation under test raised, or returned what cannot be read.

    Attributes
    ----------
    cotangents : Cotangents or None
        Where it was its gradient that was asked for.
    """

    cotangents: Cotangents | None = None


class ResultError(ImplementationError):
    """The implementation under test answered, but with something that is not a result."""


class Framework(Protocol):
    """How arrays go into an implementation, come out of it, and are differentiated."""

    name: str
    differentiates: bool

    def one_thread(self) -> AbstractContextManager[None]:
        """Small problems are slow on many threads, which wait for each other."""

    def finish(self) -> None:
        """Wait until what was begun is done, so that what it raises is raised here."""

    def allowing(self, dtype: Any) -> AbstractContextManager[None]:
        """Where arrays of a dtype can be made and computed with."""

    def give(self, array: Array) -> Any:
        """A writable array of the framework with the values and the strides of `array`."""

    def take(self, value: Any) -> Array:
        """A result as a NumPy array, in the dtype delivered."""

    def gradients(
        self,
        call: Callable[..., dict[str, Any]],
        inputs: Mapping[str, Any],
        cotangents: Mapping[str, Any],
        asked: Iterable[str],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Results of ``call(**inputs)``, and the gradients asked, through the cotangents."""


class NumPy:
    """Plain NumPy arrays; gradients come from an explicit backward."""

    name = "numpy"
    differentiates = False

    def __init__(self, device: str | None = None) -> None:
        if device is not None:
            raise OptionError(f"device is {device!r}, must be None for NumPy arrays")

    def one_thread(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        pass

    def allowing(self, dtype: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def give(self, array: Array) -> Array:
        return array

    def take(self, value: Any) -> Array:
        if not isinstance(value, (np.ndarray, np.generic)):
            raise ResultError(
                f"returned {type(value).__module__}.{type(value).__qualname__}, "
                "must be a NumPy array (or name framework=)"
            )
        if value.dtype.hasobject or value.dtype.kind in "SUMm":
            raise ResultError(f"returned an array of dtype {value.dtype}, must hold numbers")
        return np.array(value)

    def gradients(self, *_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        raise ImplementationError("a NumPy function is differentiated by its backward=")


def framework_of(
    f: Callable[..., Any], name: str, framework: str = "auto", device: str | None = None
) -> Framework:
    """The framework that is named, or else the one whose arrays `f` takes.

    Raises
    ------
    OptionError
        If there is no such framework, or nothing says which it is.
    """
    if framework not in ("auto", *FRAMEWORKS):
        legal = ", ".join(("auto", *FRAMEWORKS[:-1]))
        raise OptionError(f"framework is {framework!r}, must be {legal} or {FRAMEWORKS[-1]}")
    if framework != "auto":
        return _made(framework, device)
    return _named(f) or _tried(f, name)


def _made(framework: str, device: str | None = None) -> Framework:
    if framework == "numpy":
        return NumPy(device)
    if framework == "jax":
        from npattn.testing.targets.jax import JAX  # JAX is optional

        return JAX(device)
    from npattn.testing.targets.torch import Torch  # torch is optional

    return Torch(device)


def _named(f: Callable[..., Any]) -> Framework | None:
    """By the home module, or the annotations."""
    home = (getattr(f, "__module__", None) or "").split(".")[0]
    if home in FRAMEWORKS:
        return _made(home)
    annotations = " ".join(str(p.annotation) for p in parameters(f).values())
    return next((_made(n) for n, word in WORDS.items() if re.search(word, annotations)), None)


def _tried(f: Callable[..., Any], name: str) -> Framework:
    """By one tiny call each, NumPy first: a NumPy function may well accept other arrays."""
    said = []
    for candidate in (n for n in FRAMEWORKS if n == "numpy" or n in sys.modules):
        framework = _made(candidate)
        arrays = [framework.give(np.ones((1, 1, 2, 2), np.float32)) for _ in range(3)]
        try:
            framework.take(f(*arrays))
        except (Exception, SystemExit) as err:  # noqa: BLE001  it only asks whether it can be called
            said.append(f"{candidate}: {told(err)}")
        else:
            return framework
    # It may take other sizes only: then by what its module has imported.
    around = [x for x in getattr(f, "__globals__", {}).values() if isinstance(x, ModuleType)]
    modules = {module.__name__.split(".")[0] for module in around}
    for candidate in WORDS:
        if candidate in modules:
            return _made(candidate)
    raise OptionError(
        f"{name} could not be called on a tiny problem ({'; '.join(said)}); say which "
        f"arrays it takes with framework={' or framework='.join(map(repr, FRAMEWORKS))}"
    )


def told(err: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(err).split())
    return f"{type(err).__name__}: {text[:200]}" if text else type(err).__name__
