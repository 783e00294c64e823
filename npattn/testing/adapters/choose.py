"""Choose the framework whose arrays an implementation takes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from npattn.arrays import Array
from npattn.errors import OptionError
from npattn.testing.adapters.base import Framework, ImplementationError, format_exception_line
from npattn.testing.adapters.numpy import NumPy
from npattn.testing.adapters.parameters import parameters

__all__ = ["FRAMEWORKS", "TINY", "choose_framework", "find_framework", "try_frameworks"]

F = TypeVar("F")

FRAMEWORKS = ("numpy", "torch", "jax")

WORDS = {
    "torch": r"\btorch\b",
    "jax": r"\b(jax|jnp)\b",
    "numpy": r"\b(numpy|np|npt)\b",
}
"""Patterns that name a framework in an annotation."""
TINY = {
    "q": np.array([[[[1.0, -0.5], [0.25, 0.75]]]], np.float32),
    "k": np.array([[[[0.5, 1.0], [-1.0, 0.25]]]], np.float32),
    "v": np.array([[[[2.0, -1.0], [0.5, 1.5]]]], np.float32),
}
"""Arrays of the call that finds out a framework; those of the worker are the same."""


def choose_framework(
    f: Callable[..., Any], name: str, framework: str = "auto", device: str | None = None
) -> Framework:
    """Return the framework named, or for "auto" the one whose arrays `f` takes.

    Raises
    ------
    OptionError
        If `framework` is unknown, or for "auto" if neither the home module of `f`, nor its
        annotations, nor a tiny call tell.
    """
    return find_framework(f, name, framework, device)[0]


def find_framework(
    f: Callable[..., Any],
    name: str,
    framework: str = "auto",
    device: str | None = None,
    call: Callable[[Framework], Framework] | None = None,
) -> tuple[Framework, Array | None]:
    """Return the framework, and the result of `f` for `TINY` if a call found it out.

    `call` calls it with arrays of a framework and with what it needs besides q, k and v, and
    returns the framework; it is asked where nothing else tells.

    Raises
    ------
    OptionError
        As of `choose_framework`.
    """
    if framework not in ("auto", *FRAMEWORKS):
        legal = ", ".join(("auto", *FRAMEWORKS[:-1]))
        raise OptionError(f"framework is {framework!r}, must be {legal} or {FRAMEWORKS[-1]}")
    if framework != "auto":
        return _make(framework, device), None
    named = _from_names(f)
    return (named, None) if named is not None else _from_call(f, name, call)


def _make(framework: str, device: str | None = None) -> Framework:
    if framework == "numpy":
        return NumPy(device)
    if framework == "jax":
        from npattn.testing.adapters.jax import JAX  # JAX is optional

        return JAX(device)
    from npattn.testing.adapters.torch import Torch  # torch is optional

    return Torch(device)


def _from_names(f: Callable[..., Any]) -> Framework | None:
    """Choose by the home module or the annotations of `f`."""
    home = (getattr(f, "__module__", None) or "").split(".")[0]
    if home in FRAMEWORKS:
        return _make(home)
    annotations = " ".join(str(p.annotation) for p in parameters(f).values())
    return next((_make(n) for n, word in WORDS.items() if re.search(word, annotations)), None)


def _from_call(
    f: Callable[..., Any], name: str, call: Callable[[Framework], Framework] | None
) -> tuple[Framework, Array | None]:
    """Choose by one tiny call each, NumPy first: a NumPy function may well accept other arrays."""
    errors = {}
    for candidate in (n for n in FRAMEWORKS if n == "numpy" or n in sys.modules):
        framework = _make(candidate)
        try:
            result = framework.take(f(*(framework.give(array.copy()) for array in TINY.values())))
        except (Exception, SystemExit) as err:  # noqa: BLE001  it only asks whether it can be called
            errors[candidate] = format_exception_line(err)
        else:
            return framework, result
    # It may take other sizes only: choose by the imports of its module.
    around = [x for x in getattr(f, "__globals__", {}).values() if isinstance(x, ModuleType)]
    modules = {module.__name__.split(".")[0] for module in around}
    for candidate in WORDS:
        if candidate in modules:
            return _make(candidate), None

    def try_candidate(candidate: str) -> Framework:
        assert call is not None
        return call(_make(candidate))

    return try_frameworks(name, errors, None if call is None else try_candidate), None


def try_frameworks(name: str, errors: Mapping[str, str], call: Callable[[str], F] | None) -> F:
    """Return the result of a call with the arrays of the first framework that it takes.

    Parameters
    ----------
    name : str
        Name of the implementation, for the error.
    errors : mapping
        The frameworks to try → what a call with q, k and v alone raised.
    call : callable or None
        Calls it with what it needs besides, by the name of a framework; None if that is nothing.

    Raises
    ------
    OptionError
        If it takes none.
    """
    raised = dict(errors)
    for candidate in errors:
        if call is None:
            break
        try:
            return call(candidate)
        except ImplementationError as err:
            raised[candidate] = str(err)
    lines = "; ".join(f"{candidate}: {text}" for candidate, text in raised.items())
    raise OptionError(
        f"{name} could not be called on a tiny problem ({lines}); say which "
        f"arrays it takes with framework={' or framework='.join(map(repr, FRAMEWORKS))}"
    )
