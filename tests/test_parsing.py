"""Values of the command line."""

import os

import click
import pytest

from npattn.parsing import parse_processes


def test_auto_is_a_process_for_each_core_that_may_be_used(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5}, raising=False)
    assert parse_processes("auto") == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert parse_processes("auto") == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert parse_processes("auto") == 1


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_other_numbers_of_processes_are_wrong_usage(text):
    with pytest.raises(click.BadParameter, match="must be a number from 1 on, or auto"):
        parse_processes(text)


def test_a_number_of_processes_is_taken_as_it_is():
    assert parse_processes("13") == 13
