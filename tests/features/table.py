"""The table of docs/features.md: each feature, how it is spelled, and the tests that run it."""

from __future__ import annotations

from pathlib import Path

from tests.features.rows import ROWS, Row

__all__ = ["PAGE", "find_tests", "make_page"]

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "features.md"
BEGIN, END = "<!-- features -->\n", "<!-- end of features -->"
OWN = "tests/features/test_features.py::test_{}_agree_with_the_loops"


def find_tests(row: Row, kind: str) -> tuple[str, ...]:
    """Return the tests that run a row on "arrays" or on "tensors"."""
    if row.options is not None:
        return (OWN.format(kind),)
    return row.numpy if kind == "arrays" else row.tensors


def make_page() -> str:
    """Return the text of the page with the table of this day."""
    before, rest = PAGE.read_text().split(BEGIN)
    lines = ["| | feature | in npattn | arrays | tensors |", "|--:|---|---|---|---|"]
    for number, row in enumerate(ROWS, 1):
        cells = (_cell(find_tests(row, kind)) for kind in ("arrays", "tensors"))
        lines.append(f"| {number} | {row.name} | {row.spelled} | {' | '.join(cells)} |")
    return before + BEGIN + "\n".join([*lines, ""]) + END + rest.split(END)[1]


def _cell(names: tuple[str, ...]) -> str:
    """Return the files of tests, without their folder."""
    files = dict.fromkeys(name.split("::")[0].removeprefix("tests/") for name in names)
    return ", ".join(f"`{file}`" for file in files)
