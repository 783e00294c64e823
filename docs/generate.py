"""Generated parts of the pages: the map of modules, confined packages, options, rules.

The map is made from first lines of docstrings, its order from tests/test_layers.py. ``python
docs/generate.py`` prints the parts, ``--write`` puts them between their markers in the pages.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from npattn.options import OPTIONS
from npattn.testing.rules import ON_REQUEST, RULES
from npattn.testing.runner.rounds import ABOUT_STRUCTURE

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "npattn"
COLUMN = 26


def layers_and_packages() -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Return the rank of each part ("dense", "testing/cases"), lowest first, and CONFINED."""
    tree = ast.parse((ROOT / "tests" / "test_layers.py").read_text())
    lists = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    ranks = {}
    for name, folder in (("LAYERS", ""), ("TESTING_LAYERS", "testing/")):
        for rank, parts in enumerate(ast.literal_eval(lists[name])):
            ranks |= {folder + part: rank for part in parts}
    return ranks, ast.literal_eval(lists["CONFINED"])


def summary(path: Path) -> str:
    """First line of the docstring of a module, without its period."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n")[0].removesuffix(".")


def lines(folder: Path, ranks: dict[str, int], depth: int = 0) -> list[str]:
    """Lines of a folder: its modules and folders by layer, then by name."""
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
    return "\n".join(["```text", *lines(PACKAGE, layers_and_packages()[0]), "```", ""])


def packages() -> str:
    rows = [
        f"| {name} | {', '.join(f'`{place}`' for place in places)} |"
        for name, places in layers_and_packages()[1].items()
    ]
    return "\n".join(["| package | imported only in |", "|---|---|", *rows, ""])


def options() -> str:
    rows = [
        f"| `{option.name}` | {option.kind} | `{option.default}` | {option.doc} |"
        for option in OPTIONS.values()
    ]
    head = ["| option | kind | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def rules() -> str:
    rows = [f"| `structure`, `option-NAME` | 12, 14 | {ABOUT_STRUCTURE} |"]
    for name, rule in RULES.items():
        asked = "" if name not in ON_REQUEST else f" Only with `--only {name}`."
        rows.append(f"| `{name}` | {rule.section} | {rule.about}{asked} |")
    notes = "Notes on wrong input, without a verdict; only with `--only robustness`."
    return "\n".join(
        ["| rule | semantics | |", "|---|---|---|", *rows, f"| `robustness` | | {notes} |", ""]
    )


PAGES = {
    "CONTRIBUTING.md": {"packages": packages, "module map": module_map},
    "docs/semantics.md": {"options": options},
    "docs/checking.md": {"rules": rules},
}
"""Page → the parts that are generated in it, by their markers."""


def update(page: str) -> str:
    """Return the text of a page with the present parts between their markers."""
    text = (ROOT / page).read_text()
    for name, part in PAGES[page].items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + part() + end + rest.split(end)[1]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="rewrite the pages")
    write = parser.parse_args().write
    for page, parts in PAGES.items():
        if write:
            (ROOT / page).write_text(update(page))
        else:
            print(*(part() for part in parts.values()), sep="\n")


if __name__ == "__main__":
    main()
