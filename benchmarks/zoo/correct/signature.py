"""Signatures with options of attention, taken from the one table."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from npattn.problem.options import OPTIONS

Function = TypeVar("Function", bound=Callable[..., Any])


def with_options(*names: str) -> Callable[[Function], Function]:
    """Return the function with options of `npattn.problem`, or flags, in place of ``**options``."""

    def sign(f: Function) -> Function:
        own = inspect.signature(f).parameters
        positional = [p for p in own.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = [p for p in own.values() if p.kind is p.KEYWORD_ONLY]
        defaults = {n: OPTIONS[n].default if n in OPTIONS else False for n in names if n not in own}
        options = [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=x)
            for n, x in defaults.items()
        ]

        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> Any:
            return f(*args, **kwargs)

        signature = inspect.Signature([*positional, *options, *keywords])
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return sign


def with_every_option(*without: str) -> Callable[[Function], Function]:
    return with_options(*(name for name in OPTIONS if name not in without))


def import_on_call(module: str, name: str, *options: str) -> Callable[..., Any]:
    """Return a function of a module, imported on the first call, with these options alone."""

    @with_options(*options)
    def call(q: Any, k: Any, v: Any, mask: Any = None, **given: Any) -> Any:
        return getattr(importlib.import_module(module), name)(q, k, v, mask, **given)

    return call
