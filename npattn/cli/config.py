"""Defaults of npattn check in a project: the table [tool.npattn] of its pyproject.toml."""

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from npattn.errors import OptionError

FILE = "pyproject.toml"
NOT_IN_A_FILE = ("no_config", "help", "seed", "resume", "journal", "fail_fast", "watch", "ff")
"""Parameters of the command that belong to one run."""


def read_config(command: click.Command, folder: Path) -> dict[str, Any]:
    """Return the defaults that a folder's pyproject.toml sets, by parameter of ``npattn check``."""
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise OptionError(f"{path} is no TOML: {err}; --no-config leaves it out") from err
    table = content.get("tool", {}).get("npattn", {})
    legal = {_key(p): p for p in command.params if p.name not in NOT_IN_A_FILE}
    defaults: dict[str, Any] = {}
    for key, value in table.items():
        parameter = legal.get(key.replace("_", "-"))
        if parameter is None or parameter.name is None:
            near = get_close_matches(key, legal, 1)
            hint = f"; did you mean {near[0]}?" if near else f", must be one of {', '.join(legal)}"
            raise OptionError(f"[tool.npattn] in {path} has {key!r}{hint}")
        if parameter.name == "target":
            defaults["target"] = [value] if isinstance(value, str) else [str(x) for x in value]
        else:
            defaults[parameter.name] = _read_value(path, key, parameter, value)
    return defaults


def _key(parameter: click.Parameter) -> str:
    """Return the name of a parameter in the table: that of its long flag."""
    return max(parameter.opts, key=len).lstrip("-")


def _read_value(path: Path, key: str, parameter: click.Parameter, value: Any) -> Any:
    """Return a value as the flag would have it: texts, or True."""
    if isinstance(parameter, click.Option) and parameter.is_flag:
        if not isinstance(value, bool):
            raise OptionError(f"{key} in {path} is {value!r}, must be true or false")
        return value
    if isinstance(value, Mapping):
        value = [f"{name}={_join(x)}" for name, x in value.items()]
    several = isinstance(value, list)
    if parameter.multiple:
        return [str(x) for x in value] if several else [str(value)]
    return _join(value)


def _join(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
