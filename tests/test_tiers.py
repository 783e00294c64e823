"""Tiers of the tests: which variants they have."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FAST, MORE, SLOW, choose_variants

ROOT = Path(__file__).parents[1]


def collect(*arguments):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


class Item:
    """Stands in for an item of pytest."""

    def __init__(self, name, marks):
        self.nodeid, self.marks = name, marks

    def get_closest_marker(self, name):
        return name if name in self.marks else None


def names(tier, *marks, count=101):
    items = [Item(f"test_x[{i}]", marks) for i in range(count)]
    return {item.nodeid for item in choose_variants(items, tier)}


def test_the_first_and_the_last_variant_are_fast():
    assert names("fast") == {"test_x[0]", "test_x[100]"}
    assert len(names("fast")) == FAST
    assert names("fast", count=1) == {"test_x[0]"}


def test_tiers_share_no_variant():
    fast, thorough = names("fast"), names("thorough")
    assert fast.isdisjoint(thorough)
    assert len(fast | thorough) == MORE
    assert names("thorough", count=2) == set()


@pytest.mark.parametrize(
    ("marks", "fast", "both"),
    [
        ([], FAST, MORE),
        (["thorough"], 0, SLOW),
        (["every"], FAST, 101),
        (["thorough", "every"], 0, 101),
    ],
)
def test_marks_choose_how_many_variants_run(marks, fast, both):
    assert len(names("fast", *marks)) == fast
    assert len(names("thorough", *marks)) == both - fast


def test_a_path_runs_every_variant():
    every = collect("tests/masks")
    assert every == collect("tests/masks", "--tier", "all")
    assert every > collect("tests/masks", "--tier", "fast")
