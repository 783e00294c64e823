"""Find a callable by ``module:function`` or ``path/file.py:function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from npattn.errors import NpattnError, OptionError

__all__ = ["Spec", "by_spec", "load_callable"]


def load_callable(spec: str) -> Callable[..., Any]:
    """Import the callable that a spec names.

    Parameters
    ----------
    spec : str
        ``module:function`` or ``path/file.py:function``; the function may be a dotted attribute.

    Raises
    ------
    OptionError
        If `spec` has another form, or there is no such module, file or callable.
    """
    home, colon, name = spec.rpartition(":")
    if not colon or not home or not name:
        raise OptionError(f"{spec!r} must be module:function or path/file.py:function")
    module = _import_module(home)
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        public = [n for n, x in vars(module).items() if callable(x) and n[0] != "_"]
        raise OptionError(f"{home} has no callable {name!r}, it has {', '.join(public[:20])}")
    function: Callable[..., Any] = value
    return function


def _import_module(home: str) -> ModuleType:
    """Import a module by name or path; exceptions that it raises itself pass through."""
    if home.endswith(".py"):
        path = Path(home).resolve()
        if not path.is_file():
            raise OptionError(f"TARGET has file {home!r}, which does not exist [in {Path.cwd()}]")
        loaded = sys.modules.get(path.stem)
        if loaded is not None and getattr(loaded, "__file__", None) == str(path):
            return loaded
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
        return module
    if str(Path.cwd()) not in sys.path:  # as python -m does
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as err:
        if err.name is None or not home.startswith(err.name):
            raise
        raise OptionError(
            f"TARGET has module {home!r}, which cannot be found [in {Path.cwd()} and sys.path]"
        ) from err


class Spec(NamedTuple):
    """Spec of a function that `load_callable` finds."""

    spec: str


def by_spec(function: Any, spec: str | None) -> Any:
    """Return the spec if it finds just this function, else the function itself."""
    try:
        if spec is not None and function is not None and load_callable(spec) is function:
            return Spec(spec)
    except (NpattnError, ImportError):
        pass  # a spec that is only a name
    return function
