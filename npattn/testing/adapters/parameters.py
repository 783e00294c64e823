"""Parameters of a callable: of functions, modules, and built-ins with a documented signature."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["STARRED", "parameters", "qualified_name"]

STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters(f: Callable[..., Any] | None) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable; empty if `f` is None or they cannot be read.

    Those of a torch module are the ones of its `forward`: its `__call__` names none.
    """
    if f is None:
        return {}
    try:
        named = inspect.signature(f).parameters
    except (ValueError, TypeError):
        return _documented_parameters(f)
    forward = getattr(f, "forward", None)
    if callable(forward) and all(p.kind in STARRED for p in named.values()):
        return parameters(forward)
    return named


def _documented_parameters(f: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters that the docstring of a built-in opens with, ``name(a, b=None)``."""
    name, text = getattr(f, "__name__", None), getattr(f, "__doc__", None) or ""
    line = re.match(r"\s*(\w+)(\([^()]*\))", text)
    if not inspect.isbuiltin(f) or line is None or line[1] != name:
        return {}
    try:
        (function,) = ast.parse(f"def f{line[2]}: pass").body
    except SyntaxError:
        return {}
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    names = [argument.arg for argument in arguments.args]
    empty, kind = inspect.Parameter.empty, inspect.Parameter.POSITIONAL_OR_KEYWORD
    defaults = [empty] * (len(names) - len(arguments.defaults)) + arguments.defaults
    found = [inspect.Parameter(n, kind, default=x) for n, x in zip(names, defaults, strict=True)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    for argument, default in keywords:
        value = empty if default is None else default
        found.append(inspect.Parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default=value))
    return {parameter.name: parameter for parameter in found}


def qualified_name(f: Callable[..., Any]) -> str:
    """Return the qualified name of a callable, or of its class."""
    return getattr(f, "__qualname__", None) or type(f).__qualname__
