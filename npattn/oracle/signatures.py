"""Signatures of functions that are made of others: without a library, or without all but out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from npattn.problem.foreign import reject_unknown_options

P = ParamSpec("P")
R = TypeVar("R")


def bind(library: Any, function: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
    """Return a function without its first argument, which is the library."""

    @wraps(function)
    def bound(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(library, *args, **kwargs)

    signature = inspect.signature(function)
    public: Any = bound
    sign(public, signature.replace(parameters=list(signature.parameters.values())[1:]))
    public.library, public.of_library = library, function
    del public.__wrapped__
    return bound


def sign(function: Any, signature: inspect.Signature) -> None:
    """Give a function a signature, and the annotations of it."""
    function.__signature__ = signature
    annotations = {name: p.annotation for name, p in signature.parameters.items()}
    function.__annotations__ = annotations | {"return": signature.return_annotation}


def only_out(
    name: str, forward: Callable[P, Any], kind: type[R], summary: str, returns: str
) -> Callable[P, R]:
    """Return the function of this name whose result is `.out` of `forward`, documented as that."""
    home: Any = forward
    body = getattr(forward, "of_library", forward)

    def function(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs).out

    public: Any = function
    public.__name__ = public.__qualname__ = name
    public.__module__ = home.__module__
    returned = "Array" if kind is np.ndarray else kind.__name__
    sign(public, inspect.signature(body).replace(return_annotation=returned))
    doc = re.sub(r"(?s)( Returns\n +-+\n).*?(\n\n +Raises\n)", rf"\1    {returns}\2", home.__doc__)
    public.__doc__ = summary + "\n" + doc.partition("\n")[2]
    return reject_unknown_options(function if body is forward else bind(home.library, function))
