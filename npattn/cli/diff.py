"""Command npattn diff: compare two profiles, or two implementations."""

import json
import sys
from typing import Any

import click

from npattn.cli.completion import complete_target
from npattn.cli.flags import GroupedCommand, add_flags, given_flags
from npattn.cli.target import report_import_errors
from npattn.errors import OptionError
from npattn.testing.adapters.load import load_callable, load_object
from npattn.testing.difference.diff import DTYPES, EXAMPLES, INCOMPARABLE, choose_kind, diff
from npattn.testing.targets import load_implementation


@click.command("diff", cls=GroupedCommand)
@click.argument("a", shell_complete=complete_target)
@click.argument("b", shell_complete=complete_target)
@click.option("--module", is_flag=True, help="Compare torch modules; two modules are seen to be.")
@click.option("--profiles", is_flag=True, help="Compare the profiles of both; nothing is run.")
@add_flags(
    *("dtypes", "sizes", "seed", "examples", "in_process", "timeout", "accept", "json"),
    dtypes={"value": "float32", "choices": DTYPES, "multiple": False},
    seed={"value": "0"},
    examples={"value": EXAMPLES, "help": "Number of problems."},
    in_process={"help": "Call A and B in this process, without workers."},
    json={"help": "Write all of it to this file."},
)
def diff_command(
    a: str, b: str, module: bool, profiles: bool, dtypes: str,
    sizes: dict[str, tuple[int, ...]] | None, in_process: bool, timeout: float | None,
    **options: Any,
) -> None:  # fmt: skip
    """Say how A and B differ: two profiles, or two implementations of the same function.

    Each is a known name, module:function or path/file.py:function; or a torch module, whose inside
    is compared. A name that is both a profile
    and a target is run if both can run here, unless --profiles asks for profiles.
    Exit code 0: alike (the same conventions, results within a tolerance of each other); 1:
    different; 2: no verdict, or wrong usage; 130: interrupted.
    """
    sides: list[Any] = [a, b]
    if in_process and timeout is not None:
        raise OptionError("--timeout needs a worker, and --in-process calls A and B here")
    if module and (refused := given_flags("profiles", "sizes", "timeout", "accept")):
        raise OptionError(f"got {', '.join(refused)} beside --module, which has no such setting")
    if in_process and choose_kind(a, b, profiles)[0] == "implementations":
        with report_import_errors():
            sides = [load_implementation(name) for name in sides]
    sizes, json_file = sizes or {}, options.pop("json")
    accept = options.pop("accept") or ()
    try:
        if not module:
            settings: dict[str, Any] = {"profiles": profiles, "dtype": dtypes, "sizes": sizes}
            settings |= {"timeout": timeout}
            difference = diff(sides[0], sides[1], **settings, accept=accept, **options)
            module = difference.answer[0] == INCOMPARABLE and all(map(_is_module, (a, b)))
    except OptionError:
        module = all(map(_is_module, (a, b)))
        if not module:
            raise
    if module:
        from npattn.testing.modules.pair import diff_modules  # slow to load, and seldom needed

        with report_import_errors():
            modules = [load_callable(name) for name in (a, b)]
        difference = diff_modules((a, b), modules, dtype=dtypes, **options)
    if json_file is not None:
        text = json.dumps(difference.as_dict(), allow_nan=False, indent=1)
        json_file.write_text(text + "\n", "utf-8")
    click.echo(str(difference))
    sys.exit(difference.exit_code)


def _is_module(name: str) -> bool:
    """Return True if a name stands for a torch module."""
    made = load_object(name) if ":" in name else None
    torch = sys.modules.get("torch")  # which that has loaded
    return torch is not None and isinstance(made, torch.nn.Module)
