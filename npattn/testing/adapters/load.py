"""Find a callable by ``module:function`` or ``path/file.py:function``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from npattn.errors import NpattnError, OptionError

__all__ = ["Spec", "by_spec", "hash_files", "load_callable", "load_object", "refuse_class"]


INSTANCE = "give an instance a name in the module, and pass that name"
AUTOGRAD = "torch.autograd.function.Function"
"""Class whose subclasses are called by their `apply`."""
ENDS_ITSELF = (
    "ends itself when it is imported (SystemExit: {}): keep what parses arguments or runs "
    'something below if __name__ == "__main__"'
)


def load_callable(spec: str) -> Callable[..., Any]:
    """Import the callable that a spec names.

    Parameters
    ----------
    spec : str
        ``module:function`` or ``path/file.py:function``; the function may be a dotted attribute.

    Raises
    ------
    OptionError
        If `spec` has another form, there is no such module, file or callable, it is a class or a
        method of one, or the module ends itself.
    """
    value = load_object(spec)
    if not callable(value):
        home, _, name = spec.rpartition(":")
        public = [n for n, x in vars(_import_module(home)).items() if callable(x) and n[0] != "_"]
        raise OptionError(f"{home} has no callable {name!r}, it has {', '.join(public[:20])}")
    holder = load_object(spec.rpartition(".")[0]) if "." in spec.rpartition(":")[2] else None
    if isinstance(value, type):
        refuse_class(value, spec)
    if isinstance(holder, type) and _takes_self(value):
        raise OptionError(f"{spec} is a method of a class, must be a function: {INSTANCE}")
    function: Callable[..., Any] = value
    return function


def refuse_class(value: type, name: str, instance: str = INSTANCE) -> NoReturn:
    """Raise the error that says what to pass in place of a class.

    Raises
    ------
    OptionError
        Always.
    """
    if any(f"{k.__module__}.{k.__name__}" == AUTOGRAD for k in value.__mro__):
        raise OptionError(
            f"{name} is a torch.autograd.Function, must be a function: pass {name}.apply"
        )
    raise OptionError(f"{name} is a class, must be a function: {instance}")


def _takes_self(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_varnames[:1] == ("self",)


def load_object(spec: str) -> Any:
    """Import the object that a spec names; None if its module or file has no such object."""
    home, colon, name = spec.rpartition(":")
    if not colon or not home or not name:
        raise OptionError(f"{spec!r} must be module:function or path/file.py:function")
    try:
        value: Any = _import_module(home)
    except SystemExit as err:
        raise OptionError(f"{home} {ENDS_ITSELF.format(err)}") from err
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def hash_files(*functions: Any) -> str:
    """Return a hash of the files that define functions or objects; "" if there are none."""
    modules = [getattr(f, "__module__", None) or type(f).__module__ for f in functions if f]
    found = [getattr(sys.modules.get(name), "__file__", None) for name in modules]
    files = [Path(path) for path in found if path and Path(path).is_file()]
    whole = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(whole).hexdigest() if files else ""


def _import_module(home: str) -> ModuleType:
    """Import a module by name or path; exceptions that it raises itself pass through."""
    if home.endswith(".py"):
        return _import_file(home)
    if str(Path.cwd()) not in sys.path:  # as python -m does
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as err:
        if err.name is None or not home.startswith(err.name):
            raise
        raise OptionError(f"there is no module {home!r} [in {Path.cwd()} and sys.path]") from err


def _import_file(home: str) -> ModuleType:
    """Import a file under a name that no other module has, with its neighbours on the path."""
    path = Path(home).resolve()
    if not path.is_file():
        raise OptionError(f"there is no file {home!r} [in {Path.cwd()}]")
    for name, loaded in list(sys.modules.items()):
        file = vars(loaded).get("__file__") if isinstance(loaded, ModuleType) else None
        if file == str(path) and name != "__main__":
            return loaded
    taken = path.stem in sys.modules or _is_installed(path.stem, path.parent)
    name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    _add_to_path(path.parent)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with ExitStack() as unless_loaded:
        unless_loaded.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        unless_loaded.pop_all()
    return module


def _add_to_path(folder: Path) -> None:
    """Let files of a folder be imported: first, or last if one has an installed module's name."""
    if str(folder) in sys.path:
        return
    shadows = any(_is_installed(path.stem, folder) for path in folder.glob("*.py"))
    sys.path.insert(len(sys.path) if shadows else 0, str(folder))


def _is_installed(name: str, folder: Path) -> bool:
    """Return True if a module of this name is found outside `folder`."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    found = importlib.machinery.PathFinder.find_spec(name, elsewhere)
    return name in sys.stdlib_module_names or (found is not None and found.origin is not None)


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
