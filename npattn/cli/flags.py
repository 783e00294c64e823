"""Flags of the commands, made from `npattn.testing.settings`, and their help by groups."""

from collections.abc import Callable
from dataclasses import Field, replace
from typing import Any, TypeVar

import click

from npattn.cli.completion import OF_FLAGS
from npattn.errors import OptionError
from npattn.testing.settings import CommandSettings, SettingOption, describe_flag, options

F = TypeVar("F", bound=Callable[..., Any])


class GroupedCommand(click.Command):
    """Command whose help lists the flags by their groups, after the examples."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


class _Flag(click.Option):
    """Option of a group."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return nothing: the help has the default, and no range needs to be said."""
        return {}


def add_flags(*names: str, **changes: dict[str, Any]) -> Callable[[F], F]:
    """Decorate a command with the flags of these settings, of all of them without names.

    Parameters
    ----------
    **changes : dict
        By name: what is different here, fields of `SettingOption`, and `value` for another default.
    """
    available = options(CommandSettings)
    chosen = names or [name for name, (_, one) in available.items() if one.flags]

    def decorate(command: F) -> F:
        for name in reversed(chosen):
            spec, one = available[name]
            change = dict(changes.get(name, {}))
            default = change.pop("value", None)
            if default is not None:
                change.setdefault("default", str(default))
            command = _add_flag(command, name, spec, replace(one, **change), default)
        return command

    return decorate


def _add_flag(command: F, name: str, spec: Field[Any], one: SettingOption, default: Any) -> F:
    """Add a flag; without a default None says that it is not given."""
    words = describe_flag(one, spec.default if default is None else default)
    details: dict[str, Any] = {"help": words, "group": one.group}
    if spec.type == "bool":
        details["is_flag"] = True
    else:
        details |= {"metavar": one.metavar, "multiple": one.multiple, "default": default}
        if one.choices:
            details["type"] = click.Choice(one.choices)
        elif one.least is not None:
            details["type"] = click.IntRange(one.least)
        elif one.path is not None:
            details["type"] = click.Path(exists=one.path == "old", dir_okay=False)
        elif spec.type == "float | None" and one.parse is None:
            details["type"] = click.FloatRange(0, min_open=True)
    parse = one.parse or (lambda value: value)
    if name in OF_FLAGS:
        details["shell_complete"] = OF_FLAGS[name]
    details["callback"] = lambda _, __, text: None if text in (None, ()) else parse(text)
    if one.multiple:
        details["metavar"] = f"{one.metavar} …"
    return click.option(*one.flags, name, cls=_Flag, **details)(command)


def given_flags(*parameters: str) -> list[str]:
    """Return the flags on the command line, of these parameters or, without, of all."""
    context, here = click.get_current_context(), click.core.ParameterSource.COMMANDLINE
    declared = {p.name: p for p in context.command.params}
    there = [name for name in context.params if context.get_parameter_source(name) == here]
    used = [declared[name] for name in there if not parameters or name in parameters]
    return [p.opts[0] if isinstance(p, click.Option) else p.human_readable_name for p in used]


def refuse_beside_cluster(*parameters: str) -> None:
    """Raise an error if any of them is on the command line."""
    if refused := given_flags(*parameters):
        names = ", ".join(refused)
        raise OptionError(
            f"got {names} beside --cluster, whose units are judged elsewhere: leave out one of them"
        )
