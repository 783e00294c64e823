"""No test is lost between the tiers, and none is in both."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def collect(*arguments):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.thorough
def test_tiers_together_are_all_tests_of_a_path():
    fast, thorough, every = (
        collect("tests/masks", *tier)
        for tier in (("--tier", "fast"), ("--tier", "thorough"), ())  # a path: all
    )
    assert fast.isdisjoint(thorough)
    assert fast | thorough == every
    variants = {}
    for item in fast:
        variants.setdefault(item.partition("[")[0], []).append(item)
    assert max(map(len, variants.values())) == 2
    assert {item.partition("[")[0] for item in every} > set(variants)  # some are thorough


def test_fast_tier_has_no_test_that_is_marked_thorough():
    items = collect("tests/test_tiers.py", "--tier", "fast")
    assert [item.rpartition("::")[2] for item in items] == [
        "test_fast_tier_has_no_test_that_is_marked_thorough"
    ]
