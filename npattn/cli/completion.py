"""Completion of shells: targets, files, profiles and rules."""

import importlib

import click
from click.shell_completion import CompletionItem


def complete_target(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the known targets that begin so; where none does, files."""
    targets = importlib.import_module("npattn.testing.targets").TARGETS
    found = [
        CompletionItem(name, help=x.about)
        for name, x in targets.items()
        if name.startswith(incomplete)
    ]
    return found or [CompletionItem(incomplete, type="file")]


def complete_rule(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the rules that begin so."""
    rules = importlib.import_module("npattn.testing.rules").RULES
    return [
        CompletionItem(name, help=x.about)
        for name, x in rules.items()
        if name.startswith(incomplete)
    ]


def complete_profile(
    _: click.Context, __: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the profiles that begin so."""
    profiles = importlib.import_module("npattn.profiles").PROFILES
    return [CompletionItem(name) for name in profiles if name.startswith(incomplete)]


OF_FLAGS = {"only": complete_rule, "like": complete_profile}
"""Settings whose values are completed, beside those that have choices."""
