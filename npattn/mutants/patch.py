"""Put a mistake into the place of a function, in every module that has it.

As a plugin of pytest (``-p npattn.mutants.patch``) it does so in a process that somebody else
starts: the variable `VARIABLE` names a file with the `Patch`.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from npattn.mistakes import MISTAKES
from npattn.mutants.stand_in import Spy, stand_in
from npattn.mutants.terms import Terms
from npattn.testing.adapters.load import load_callable

VARIABLE = "NPATTN_MUTANT"
RIGHT = "attention that is right"
REGISTRY = 999
"""Entries of a dict up to which it may be one of functions by name."""


@dataclass(frozen=True)
class Patch:
    """A replacement of a function: a mistake, or the function with its calls recorded."""

    spec: str  # ``module:function``
    terms: Terms | None
    # name of the mistake, or `RIGHT`; None for the function itself, whose calls are recorded
    mistake: str | None
    record: str  # file into which the `Spy` is written

    def apply(self) -> Callable[[], None]:
        """Put it in place; return a function that writes the record."""
        f, spy = load_callable(self.spec), Spy()
        if self.terms is None or self.mistake is None:
            new = f
        else:
            new = stand_in(f, self.terms, MISTAKES.get(self.mistake))
        replace_everywhere(f, spy.watch(new))
        return lambda: self._write(spy)

    def _write(self, spy: Spy) -> None:
        record = asdict(spy) | ({"modules": installed_modules()} if self.mistake is None else {})
        Path(self.record).write_text(json.dumps(record), "utf-8")


def installed_modules() -> list[str]:
    """Return the installed modules that are loaded, in order, but those that pytest rewrites."""
    files = [
        file
        for entry in entry_points(group="pytest11")
        for file in (entry.dist and entry.dist.files) or ()
    ]
    plugins = {file.parts[0].removesuffix(".py") for file in files}
    specs = [(n, getattr(module, "__spec__", None)) for n, module in list(sys.modules.items())]
    return [
        name
        for name, spec in specs
        if spec is not None
        and str(spec.origin).startswith(sys.prefix)
        and name.split(".")[0] not in plugins
    ]


def replace_everywhere(old: Any, new: Any) -> None:
    """Replace an object in each module loaded, and in its namespaces, classes and dicts."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.split(".")[0] != "npattn":
            _replace_in(module, old, new)
            for holder in list(vars(module).values()):
                kind = type(holder)  # not isinstance, which asks lazy objects for their class
                if kind is SimpleNamespace or issubclass(kind, type):
                    _replace_in(holder, old, new)
                elif kind is dict and len(holder) <= REGISTRY:
                    holder.update({n: new for n, x in holder.items() if x is old})


def _replace_in(holder: Any, old: Any, new: Any) -> None:
    for name, value in list(vars(holder).items()):
        if value is old:
            setattr(holder, name, new)
        elif type(value) is staticmethod and value.__func__ is old:  # as above
            setattr(holder, name, staticmethod(new))


def pytest_configure(config: Any) -> None:
    """Apply the patch of the environment when pytest has read its own configuration."""
    if path := os.environ.get(VARIABLE):
        patch: Patch = pickle.loads(Path(path).read_bytes())
        config.add_cleanup(patch.apply())
