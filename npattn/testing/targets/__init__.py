"""Implementations known by name: how they are imported."""

from __future__ import annotations

import ast
import copy
import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from npattn.errors import MissingExtraError, OptionError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.adapters.load import load_callable, load_object
from npattn.testing.targets.table import TARGETS
from npattn.testing.targets.target import Target

__all__ = ["TARGETS", "Target", "load", "load_implementation", "spec_of"]


def load(spec: str) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Return the callable that a target names, and its backward where it is known.

    Raises OptionError if there is no such target; the message says what there is. Raises
    MissingExtraError if the target needs a package that is not installed.

    Parameters
    ----------
    spec : str
        A known name, ``module:function`` or ``path/file.py:function``.
    """
    path = spec_of(spec)
    if spec in TARGETS:
        TARGETS[spec].check_environment()
        return TARGETS[spec].load()
    return load_callable(path), None


def spec_of(target: str) -> str:
    """Return ``module:function`` or ``path/file.py:function`` of a target."""
    if target in TARGETS:
        entry = TARGETS[target]
        if not entry.runs_here:
            raise MissingExtraError(f"{target} needs {entry.lacks}")
        return entry.path
    if target.endswith(".py") and Path(target).is_file():
        return f"{target}:{_only_function(Path(target))}"
    home, colon, name = target.rpartition(":")
    if not colon or not home or not name:
        near = difflib.get_close_matches(target, TARGETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise OptionError(
            f"TARGET is {target!r}, must be module:function, path/file.py:function, or a name "
            f"that npattn list shows{hint}"
        )
    return target


def _only_function(path: Path) -> str:
    """Return the name of the only function of a file that could take q, k and v."""
    try:
        body = ast.parse(path.read_bytes(), str(path)).body
    except SyntaxError as err:
        raise OptionError(f"{path} cannot be imported: SyntaxError: {err}") from err
    names = [
        x.name
        for x in body
        if isinstance(x, ast.FunctionDef)
        and not x.name.startswith("_")
        and len(x.args.posonlyargs) + len(x.args.args) >= 3
    ]
    if len(names) == 1:
        return names[0]
    choice = " or ".join(f"{path}:{name}" for name in names)
    raise OptionError(
        f"{path} has {len(names) or 'no'} public functions of three or more arguments: pass "
        f"{choice or f'{path}:NAME'}"
    )


def load_implementation(
    # a known name, ``module:function`` or ``path/file.py:function``; in place of the function an
    # `Implementation` may stand, which is taken as it is
    spec: str,
    *,
    backward: str | None = None,  # spec of its backward
    framework: str = "auto",  # as of `Implementation`
    layout: str | None = None,
    like: str | None = None,
    rename: Mapping[str, str] | None = None,
    features: Sequence[str] | None = None,
    quantized: str | None = None,
) -> Implementation:
    """Return the implementation that a target names, with the conventions that are known of it.

    Raises OptionError if there is no such target, an argument is not legal, or one is given beside
    an `Implementation`. Raises MissingExtraError if the target needs a package that is not
    installed.
    """
    spec = spec if spec in TARGETS else spec_of(spec)
    settings: dict[str, Any] = {"layout": layout, "like": like, "rename": rename or None}
    settings |= {"quantized": quantized, "features": features}
    made = load_object(spec) if spec not in TARGETS and ":" in spec else None
    if isinstance(made, Implementation):
        arguments = {**settings, "backward": backward, "framework": framework}
        unset = (None, "auto")
        return _take_whole(made, spec, [n for n, x in arguments.items() if x not in unset])
    f, known_backward = load(spec)
    if like is None and spec in TARGETS:
        like = settings["like"] = TARGETS[spec].like
    gradient = known_backward if backward is None else load(backward)[0]
    settings |= {"framework": framework, "spec": spec, "backward_spec": backward}
    implementation = Implementation(f, backward=gradient, **settings)
    if spec in TARGETS:
        implementation.sizes = TARGETS[spec].sizes
        implementation.rounding = TARGETS[spec].rounding
        if like is None:
            implementation.conventions = TARGETS[spec].conventions
    return implementation


def _take_whole(made: Implementation, spec: str, arguments: Sequence[str]) -> Implementation:
    """Return an implementation of a module under the spec that finds it."""
    if arguments:
        raise OptionError(
            f"got {', '.join(arguments)} beside {spec}, which is an Implementation: pass it to "
            "Implementation(f, ...) there"
        )
    implementation = copy.copy(made)
    implementation.name = spec
    implementation.spec, implementation.backward_spec = f"{spec}.f", f"{spec}.backward"
    return implementation
