"""Find a callable by ``module:function`` or ``path/file.py:function``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from npattn.errors import NpattnError, OptionError
from npattn.testing.adapters import child
from npattn.testing.adapters.frameworks import translate_errors

ENDS_ITSELF = (
    "ends itself when it is imported (SystemExit: {}): keep what parses arguments or runs "
    'something below if __name__ == "__main__"'
)


@contextmanager
def _importing(spec: str) -> Iterator[None]:
    """Put the current folder on the path, as python -m does; translate errors."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with translate_errors():
            yield
    except SystemExit as err:
        raise OptionError(f"{spec.rpartition(':')[0]} {ENDS_ITSELF.format(err)}") from err


def load_callable(spec: str) -> Callable[..., Any]:
    """Import the callable that ``module:function`` or ``path/file.py:function`` names.

    The function may be a dotted attribute. Raises OptionError if `spec` has another form, there is
    no such module, file or callable, it is a class or a method of one, or the module ends itself.
    """
    with _importing(spec):
        function: Callable[..., Any] = child.load(spec)
        return function


def load_object(spec: str) -> Any:
    """Import the object that a spec names; None if its module or file has no such object."""
    with _importing(spec):
        return child.find(spec)[-1]


def hash_files(*functions: Any) -> str:
    """Return a hash of the files that define functions or objects; "" if there are none."""
    modules = [getattr(f, "__module__", None) or type(f).__module__ for f in functions if f]
    return child.hash_files(*(f"{module}:" for module in modules))


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
