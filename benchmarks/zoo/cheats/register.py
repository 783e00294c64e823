"""Register of the cheats and of the honest implementations, read from their source."""

from __future__ import annotations

import ast
import re

from benchmarks.zoo.cheats.cheat import FOLDER, Cheat

FIELD = re.compile(r"^(Source|Declared): (.+)$", re.MULTILINE)
SUFFIX = "_backward"


def _read(family: str) -> list[Cheat]:
    """Read the public functions of a file, each with its docstring."""
    tree = ast.parse((FOLDER / "targets" / f"{family}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = {node.name for node in functions}
    return [
        _describe(node, family, node.name + SUFFIX if node.name + SUFFIX in names else "")
        for node in functions
        if not node.name.startswith("_") and not node.name.endswith(SUFFIX)
    ]


def _describe(node: ast.FunctionDef, family: str, backward: str) -> Cheat:
    text = ast.get_docstring(node)
    if not text:
        raise KeyError(f"{family}.py: {node.name} has no docstring, which says what it does")
    fields = dict(FIELD.findall(text))
    return Cheat(
        name=node.name,
        family=family,
        sentence=text.splitlines()[0],
        source=fields.get("Source", ""),
        declared=fields.get("Declared", ""),
        backward=backward,
    )


def _read_all() -> dict[str, Cheat]:
    families = sorted(path.stem for path in (FOLDER / "targets").glob("[a-z]*.py"))
    every = [one for family in families for one in _read(family)]
    found = {one.name: one for one in every}
    if len(found) < len(every):
        raise KeyError("two cheats have one name")
    return found


CHEATS = {name: one for name, one in _read_all().items() if not one.is_honest}
"""Cheats by name, family by family."""
HONEST = {name: one for name, one in _read_all().items() if one.is_honest}
"""Honest implementations by name."""
