"""Completion of shells: targets, files, profiles and rules."""

import importlib
from collections.abc import Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem


def complete_target(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the known targets that begin so; where none does, files."""
    targets = importlib.import_module("npattn.testing.targets").TARGETS
    return _begin_so(targets, incomplete) or [CompletionItem(incomplete, type="file")]


def complete_rule(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the rules that begin so."""
    return _begin_so(importlib.import_module("npattn.testing.rules").RULES, incomplete)


def complete_profile(
    _: click.Context, __: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the profiles that begin so."""
    return _begin_so(importlib.import_module("npattn.profiles").PROFILES, incomplete)


def _begin_so(entries: Mapping[str, Any], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(n, help=x.about) for n, x in entries.items() if n.startswith(incomplete)]


OF_FLAGS = {"only": complete_rule, "like": complete_profile}
"""Settings whose values are completed, beside those that have choices."""
