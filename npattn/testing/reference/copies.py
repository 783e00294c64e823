"""Modules that a function holds: copies in another dtype, so that it can be asked in each.

A reference that calls ``nn.Linear`` has float32 weights: evaluated in float64 it raises, or rounds
inside. Modules are looked for where a function keeps what it uses: itself, its closure, its
defaults, its object, and the globals that it names.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from npattn.testing.adapters.frameworks import copy_module


def convert_modules(f: Callable[..., Any], *dtypes: str) -> Callable[..., Any]:
    """Return a callable with copies of its modules, cast to one dtype after the other.

    For "bfloat16", "float64" weights are rounded to the first, and computed with in the last. It is
    `f` itself if that holds no module.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return f
    memo: dict[int, Any] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            if id(value) not in memo:
                copy = copy_module(value)
                for name in dtypes:
                    copy = copy.to(getattr(torch, name))
                memo[id(value)] = copy
            return memo[id(value)]
        return value

    def rebuild(g: Any) -> Any:
        if isinstance(g, torch.nn.Module):
            return convert(g)
        if isinstance(g, types.MethodType):
            return (
                g if (copied := convert(g.__self__)) is g.__self__ else getattr(copied, g.__name__)
            )
        if isinstance(g, functools.partial):
            args = [convert(x) for x in g.args]
            words = {n: convert(x) for n, x in g.keywords.items()}
            return functools.partial(rebuild(g.func), *args, **words)
        return _rebuild_function(g, convert) if isinstance(g, types.FunctionType) else g

    made = rebuild(f)
    return made if memo else f


def _rebuild_function(g: types.FunctionType, convert: Callable[[Any], Any]) -> types.FunctionType:
    """Return a function with the same code, whose closure, defaults and globals are converted."""
    cells = []
    for cell in g.__closure__ or ():
        try:
            cells.append(types.CellType(convert(cell.cell_contents)))
        except ValueError:  # the cell is still empty
            cells.append(cell)
    globals_used = {name: convert(g.__globals__[name]) for name in g.__code__.co_names
           if name in g.__globals__}  # fmt: skip
    defaults = tuple(map(convert, g.__defaults__ or ())) or None
    made = types.FunctionType(g.__code__, {**g.__globals__, **globals_used}, g.__name__, defaults,
                              tuple(cells) or None)  # fmt: skip
    words = g.__kwdefaults__
    made.__kwdefaults__ = None if words is None else {n: convert(x) for n, x in words.items()}
    functools.update_wrapper(made, g)
    return made
