"""Map of the modules in CONTRIBUTING.md, from the first lines of their docstrings.

``python docs/module_map.py`` prints it, ``--write`` puts it in its place.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "npattn"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- module map: python docs/module_map.py --write -->\n", "<!-- end of module map -->"
COLUMN = 26


def layers() -> dict[str, int]:
    """Rank of each part of npattn ("dense") and of testing ("testing/cases"), lowest layer first."""
    tree = ast.parse((ROOT / "tests" / "test_layers.py").read_text())
    ranks = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id in ("LAYERS", "TESTING_LAYERS"):
            folder = "testing/" if node.targets[0].id == "TESTING_LAYERS" else ""
            for rank, names in enumerate(ast.literal_eval(node.value)):
                ranks |= {folder + name: rank for name in names}
    return ranks


def summary(path: Path) -> str:
    """First line of the docstring of a module, without its period."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n")[0].removesuffix(".")


def lines(folder: Path, ranks: dict[str, int], depth: int = 0) -> list[str]:
    """Lines of a folder: modules and sub-folders in the order of the layers, then of the alphabet."""
    parts = [p for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    parts = [p for p in parts if depth == 0 or p.name != "__init__.py"]

    def place(path: Path) -> tuple[int, str]:
        name = path.relative_to(PACKAGE).as_posix().removesuffix(".py")
        return ranks.get(name, len(ranks)), name

    text = []
    for path in sorted(parts, key=place):
        name = "  " * depth + path.name + ("/" if path.is_dir() else "")
        source = path / "__init__.py" if path.is_dir() else path
        text.append(f"{name:<{COLUMN}} {summary(source)}")
        if path.is_dir():
            text += lines(path, ranks, depth + 1)
    return text


def module_map() -> str:
    """Return the map as a block of Markdown."""
    return "\n".join(["```text", *lines(PACKAGE, layers()), "```", ""])


def page_with_map(page: str) -> str:
    """Return the text of CONTRIBUTING.md with the present map between its markers."""
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    return before + BEGIN + module_map() + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="rewrite CONTRIBUTING.md")
    if parser.parse_args().write:
        PAGE.write_text(page_with_map(PAGE.read_text()))
    else:
        print(module_map(), end="")


if __name__ == "__main__":
    main()
