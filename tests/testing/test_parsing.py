"""Values of the command line."""

import os

import pytest

from npattn.errors import OptionError
from npattn.testing import parsing


def test_auto_is_a_process_for_each_core_that_may_be_used(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5}, raising=False)
    assert parsing.parse_processes("auto") == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert parsing.parse_processes("auto") == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert parsing.parse_processes("auto") == 1


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("processes", "13", 13),
        ("seed", "3", 3),
        ("seconds", "60s", 60.0),
        ("seconds", "10", 10.0),
        ("seconds", "10M", 600.0),
        ("memory", "500m", 500 << 20),
        ("memory", "4G", 4 << 30),
        ("names", "mask, causal,", ("mask", "causal")),
        ("names", "", ()),
        ("sizes", ("D=64,128", "T=7"), {"D": (64, 128), "T": (7,)}),
    ],
)
def test_values_are_parsed(name, text, value):
    assert getattr(parsing, f"parse_{name}")(text) == value


@pytest.mark.parametrize(
    ("name", "texts", "message"),
    [
        ("processes", ["0", "-1", "two", "1.5", ""], "must be a number from 1 on, or auto"),
        ("seed", ["-1", "two", "1.5", ""], "must be a number, or random"),
        ("seconds", ["0", "0s", "s", "", "-3m"], "must look like 60s, 10m or 2h"),
        ("memory", ["4", "0G", "G", "", "1.5G"], "must look like 500M or 4G"),
        ("sizes", [["D"], ["D=x"], ["D="]], "must look like D=64,128"),
    ],
)
def test_other_values_are_wrong_usage(name, texts, message):
    for text in texts:
        with pytest.raises(OptionError, match=message):
            getattr(parsing, f"parse_{name}")(text)


def test_pairs_are_parsed():
    pairs = parsing.parse_pairs(("cap=softcap", "k=a=b"), "--rename", "THEIRS=OURS")
    assert pairs == {"cap": "softcap", "k": "a=b"}


@pytest.mark.parametrize("text", ["cap", "=x", "x="])
def test_halves_of_pairs_are_wrong_usage(text):
    with pytest.raises(OptionError, match=f"--rename is '{text}', must look like THEIRS=OURS"):
        parsing.parse_pairs(("k=x", text), "--rename", "THEIRS=OURS")
