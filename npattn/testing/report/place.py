"""File and line of the function that was judged, read from its file without importing it."""

from __future__ import annotations

import ast
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """File and line of the function that was judged."""

    file: str  # path relative to the current folder, with "/"
    line: int  # line of its ``def``, from 1 on


def find_place(target: str | None) -> Place | None:
    """Return the file and line of ``path/file.py:function`` or ``module:function``.

    Nothing is imported. None for a known target, a package's module, or a name that no statement of
    the file defines.
    """
    file, colon, name = (target or "").rpartition(":")
    if not colon:
        return None
    path = Path(file)
    if path.suffix != ".py":
        folders = [str(Path.cwd()), *sys.path]
        found = None if "." in file else PathFinder.find_spec(file, folders)
        path = Path(found.origin) if found is not None and found.origin else path
    if path.suffix != ".py" or not path.is_file():
        return None
    try:
        body: list[ast.stmt] = ast.parse(path.read_bytes()).body
    except SyntaxError:  # it is reported where it is imported
        return None
    line = 1
    for part in name.split("."):
        statements = [x for x in body if part in _defined_names(x)]
        if not statements:
            return None
        line, body = statements[-1].lineno, getattr(statements[-1], "body", [])
    here = Path.cwd()
    absolute = path.absolute()
    shown = absolute.relative_to(here) if absolute.is_relative_to(here) else absolute
    return Place(shown.as_posix(), line)


def _defined_names(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [x.id for x in targets if isinstance(x, ast.Name)]
