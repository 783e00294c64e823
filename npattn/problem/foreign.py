"""Parameters as other libraries name them, and errors that say how npattn spells them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

from npattn.errors import OptionError, UnknownOptionError
from npattn.problem.meanings import NAMES
from npattn.problem.options import Alignment

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class ForeignName:
    """A parameter as other libraries name it."""

    hint: str  # how npattn spells it, for errors
    meaning: str = ""  # one of `MEANINGS`; without one, a parameter of this name keeps its default
    # "bottom_right" or "top_left": alignment that the systems with this name have in common
    causal: Alignment | None = None


FOREIGN = {
    "alibi_slopes": ForeignName("pass bias=npattn.biases.alibi(slopes)"),
    "alignment": ForeignName('pass causal="bottom_right" or causal="top_left", or conventions='),
    "block_mask": ForeignName("pass mask=npattn.masks.custom(mask_mod)"),
    "return_lse": ForeignName("call npattn.forward, whose result has .lse"),
    "return_max_score": ForeignName("call npattn.forward, whose result has .max_score"),
    "return_weights": ForeignName("call npattn.forward, whose result has .weights"),
    **{
        name: ForeignName(
            row.hint.replace("{name}", name), meaning, "top_left" if name == "is_causal" else None
        )
        for meaning, row in NAMES.items()
        for name in row.names
    },
}
"""Parameters as other libraries name them → how npattn spells them, and what they mean."""


def reject_unknown_options(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function` to answer a keyword that it lacks with the one that was meant.

    The signature stays that of `function`, for `inspect.signature` and for type checkers.
    """
    parameters = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    needed = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    options = [n for n, p in parameters.items() if n in needed or p.default is not p.empty]
    name = function.__name__
    if name == "__init__":  # of a class
        name = function.__qualname__.split(".")[0]

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        for keyword in kwargs:
            if keyword not in parameters and not open_ended:
                raise unknown_option(name, keyword, options)
        for keyword in needed:
            if keyword not in kwargs:
                raise OptionError(f"{name} needs {keyword}, which has no default: pass {keyword}=")
        return function(*args, **kwargs)

    return wrapper


def reject_options(function: str, names: Iterable[str], options: Sequence[str]) -> None:
    """Raise UnknownOptionError at the first given option that is not one of these."""
    for name in names:
        if name not in options:
            raise unknown_option(function, name, options)


def unknown_option(function: str, name: str, options: Sequence[str]) -> UnknownOptionError:
    """Return the error that answers an unknown option with the one that was meant."""
    near = get_close_matches(name, options, 1)
    foreign = FOREIGN.get(name) if "causal" in options else None  # they are words of attention
    answer = foreign.hint if foreign else f"did you mean {near[0]}?" if near else ""
    return UnknownOptionError(
        f"{function} has no option {name}{answer and ': '}{answer} [options: {', '.join(options)}]"
    )
