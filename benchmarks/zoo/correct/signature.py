"""Signatures with every option of attention, taken from the one table."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from npattn.problem.options import OPTIONS

Function = TypeVar("Function", bound=Callable[..., Any])


def with_every_option(*without: str) -> Callable[[Function], Function]:
    """Return the function with the options of `npattn.problem` in place of ``**options``."""

    def sign(f: Function) -> Function:
        own = inspect.signature(f).parameters
        positional = [p for p in own.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = [p for p in own.values() if p.kind is p.KEYWORD_ONLY]
        options = [
            inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default)
            for option in OPTIONS.values()
            if option.name not in (*own, *without)
        ]

        @functools.wraps(f)
        def signed(*args: Any, **kwargs: Any) -> Any:
            return f(*args, **kwargs)

        signature = inspect.Signature([*positional, *options, *keywords])
        signed.__signature__ = signature  # type: ignore[attr-defined]
        return signed  # type: ignore[return-value]

    return sign
