"""Choose the framework whose arrays an implementation takes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from npattn.errors import OptionError
from npattn.testing.adapters.base import Framework, format_exception_line
from npattn.testing.adapters.numpy import NumPy
from npattn.testing.adapters.parameters import parameters

__all__ = ["FRAMEWORKS", "choose_framework"]

FRAMEWORKS = ("numpy", "torch", "jax")

WORDS = {
    "torch": r"\btorch\b",
    "jax": r"\b(jax|jnp)\b",
    "numpy": r"\b(numpy|np|npt)\b",
}
"""Patterns that name a framework in an annotation."""


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
    if framework not in ("auto", *FRAMEWORKS):
        legal = ", ".join(("auto", *FRAMEWORKS[:-1]))
        raise OptionError(f"framework is {framework!r}, must be {legal} or {FRAMEWORKS[-1]}")
    if framework != "auto":
        return _make(framework, device)
    return _from_names(f) or _from_call(f, name)


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


def _from_call(f: Callable[..., Any], name: str) -> Framework:
    """Choose by one tiny call each, NumPy first: a NumPy function may well accept other arrays."""
    errors = []
    for candidate in (n for n in FRAMEWORKS if n == "numpy" or n in sys.modules):
        framework = _make(candidate)
        arrays = [framework.give(np.ones((1, 1, 2, 2), np.float32)) for _ in range(3)]
        try:
            framework.take(f(*arrays))
        except (Exception, SystemExit) as err:  # noqa: BLE001  it only asks whether it can be called
            errors.append(f"{candidate}: {format_exception_line(err)}")
        else:
            return framework
    # It may take other sizes only: choose by the imports of its module.
    around = [x for x in getattr(f, "__globals__", {}).values() if isinstance(x, ModuleType)]
    modules = {module.__name__.split(".")[0] for module in around}
    for candidate in WORDS:
        if candidate in modules:
            return _make(candidate)
    raise OptionError(
        f"{name} could not be called on a tiny problem ({'; '.join(errors)}); say which "
        f"arrays it takes with framework={' or framework='.join(map(repr, FRAMEWORKS))}"
    )
