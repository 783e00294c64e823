"""Read the signature of a callable: its options, and the parameters that npattn does not know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from npattn.errors import OptionError
from npattn.options import FEATURES

__all__ = ["RETURNS", "Signature", "parameters", "qualified_name", "read_signature"]

RETURNS = ("return_lse", "return_weights")


@dataclass(frozen=True)
class Signature:
    """Options of a callable.

    Attributes
    ----------
    features : frozenset of str
        Options among `FEATURES`, by npattn's names.
    returns : tuple of str
        Those of `RETURNS` that it has.
    untested : tuple of str
        Parameters that keep their default.
    """

    features: frozenset[str]
    returns: tuple[str, ...]
    untested: tuple[str, ...]


def parameters(f: Callable[..., Any] | None) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable; empty if `f` is None or they cannot be read."""
    if f is None:
        return {}
    try:
        return inspect.signature(f).parameters
    except (ValueError, TypeError):
        return {}


def qualified_name(f: Callable[..., Any]) -> str:
    """Return the qualified name of a callable, or of its class."""
    return getattr(f, "__qualname__", None) or type(f).__qualname__


def read_signature(
    f: Callable[..., Any],
    name: str,
    rename: Mapping[str, str],
    features: Iterable[str] | None,
) -> Signature:
    """Read the options that a callable has.

    Parameters
    ----------
    f : callable
    name : str
        Its name in error messages.
    rename : mapping
        Its parameter names → npattn's.
    features : iterable of str, optional
        Its options, if the signature cannot be read or names too many.

    Raises
    ------
    OptionError
        If it cannot be called with q, k, v alone, if its signature cannot be read and `features`
        is None, or if `rename` or `features` has a name that does not exist.
    """
    named = parameters(f)
    _check_names(f, named, rename, features)
    if not named and features is None:
        raise OptionError(
            f"{name} has no readable signature, must be given with features= "
            "(the options it has; () for none)"
        )
    has, untested = _options(name, named, rename) if named else (set(), [])
    if features is not None:
        untested = [n for n in untested if n != _STARS] + sorted(has - set(features))
        has = set(features)
    returns = tuple(n for n in RETURNS if n in has)
    return Signature(frozenset(has) & frozenset(FEATURES), returns, tuple(untested))


_STARS = "*args or **kwargs (say which options there are: features=)"


def _check_names(
    f: Callable[..., Any],
    named: Mapping[str, inspect.Parameter],
    rename: Mapping[str, str],
    features: Iterable[str] | None,
) -> None:
    """Check that `rename` and `features` name existing parameters and options."""
    starred = any(p.kind is p.VAR_KEYWORD for p in named.values())
    absent = [theirs for theirs in rename if theirs not in named]
    if named and absent and not starred:
        raise OptionError(
            f"rename has {', '.join(absent)}, must be parameters of {qualified_name(f)} "
            f"({', '.join(named)}): rename={{theirs: ours}}"
        )
    known = (*FEATURES, *RETURNS)
    for ours in (*rename.values(), *(features or ())):
        if ours not in known:
            raise OptionError(f"{ours} is not a feature, must be one of {', '.join(known)}")


def _options(
    name: str, named: Mapping[str, inspect.Parameter], rename: Mapping[str, str]
) -> tuple[set[str], list[str]]:
    """Return npattn's names of the options, and the parameters that npattn does not know."""
    kinds = {p.kind for p in named.values()}
    positional = [
        n for n, p in named.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(positional) < 3 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise OptionError(
            f"{name} has {len(positional)} positional parameters, must have three: q, k, v"
        )
    stars = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    rest = [n for n, p in named.items() if n not in positional[:3] and p.kind not in stars]
    known = {n: rename.get(n, n) for n in rest if rename.get(n, n) in (*FEATURES, *RETURNS)}
    unknown = [n for n in rest if n not in known]
    needed = [n for n in unknown if named[n].default is inspect.Parameter.empty]
    if needed:
        raise OptionError(
            f"{name} needs {', '.join(needed)}, which the judge does not know: give it a "
            "default, wrap it, or say what it is with Implementation(f, rename={theirs: ours})"
        )
    return set(known.values()), unknown + ([_STARS] if kinds & stars else [])
