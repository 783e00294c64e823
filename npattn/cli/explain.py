"""Command npattn explain: what a rule demands, why, and which real bug broke it."""

import json
import re
import shutil
import textwrap
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import click

from npattn.cli.completion import complete_rule
from npattn.errors import OptionError
from npattn.testing.diagnosis.sentences import STATE as CAUSES
from npattn.testing.judging import choose_rules
from npattn.testing.levels import LEVELS, REQUIRED
from npattn.testing.modules.rules import RULES as MODULE_RULES
from npattn.testing.report.green import read_limits
from npattn.testing.rules import ON_REQUEST, PROPERTIES, RULES
from npattn.testing.runner.rounds import ABOUT_STRUCTURE

WITHOUT_RULE = {
    "structure": f"{ABOUT_STRUCTURE}\n\nKernels accept sizes that they were never run with. "
    "It is asked first, always, and what is refused with an exception is not sampled again. "
    "Broken by empty results of another shape, by NaN where a size is 0.",
    "robustness": "Notes on wrong input, without a verdict.\n\nWhat is wrong may be refused, or "
    "read as something else; the semantics do not say. Broken by nothing.",
    "sweep": "Problems of every length up to 4096, sampled and judged on the device, are right."
    "\n\nSmall problems meet few of the tiles, splits and grids of a GPU. "
    "Broken by edges of tiles that only long sequences have.",
    "long": "Sequences of 65 536 keys give right rows and gradients.\n\nOffsets and sums grow "
    "with the length. Broken by offsets of 32 bits, by sums in a narrow format.",
}
"""Docstrings of what ``--only`` takes beside the rules: demand, reason and bugs."""
OF_CAUSES = "a cause: report.causes"
MOST = 6
"""Findings that are printed for a rule."""


class Explanation(NamedTuple):
    """A rule, why it is asked, and who broke it: issues on GitHub, entries of docs/findings.md."""

    name: str
    where: str
    demand: str
    why: str
    bugs: str
    issues: tuple[str, ...]
    findings: tuple[dict[str, str], ...]


def explain(rule: str) -> list[Explanation]:
    """Return what is known of the rules with this name, or that begin with it.

    A level of rules, a rule of modules and a cause have one sentence alone.
    """
    if rule in CAUSES:
        return [_explanation(rule, OF_CAUSES, CAUSES[rule])]
    names = [*WITHOUT_RULE, *dict(LEVELS), *MODULE_RULES, *RULES, *CAUSES]
    if not any(name.startswith(rule) for name in names):
        near = ", ".join(get_close_matches(rule, names, 3, 0.0))
        raise OptionError(
            f"{rule!r} is no rule and no cause; the nearest names are {near} (npattn list rules)"
        )
    found = []
    if rule in WITHOUT_RULE:
        found.append(_explanation(rule, f"npattn check TARGET --only {rule}", WITHOUT_RULE[rule]))
    if rule in LEVELS:
        where = "a level of rules: npattn list rules"
        found.append(_explanation(rule, where, dict(LEVELS)[rule]))
    if rule in MODULE_RULES:
        module_rule = MODULE_RULES[rule]
        where = f"of modules: npattn check TARGET --module; semantics {module_rule.semantics}; "
        where += f"level {module_rule.level}"
        found.append(_explanation(rule, where, module_rule.about))
    if found and not any(name.startswith(rule) for name in PROPERTIES):
        return found
    for one in choose_rules([rule]):
        asked = f"only with --only {one.rule}" if one.rule in ON_REQUEST else f"level {one.level}"
        required = "required" if one.level in REQUIRED else "shown, not required"
        about = f"semantics {one.section}; {asked}, {required}"
        found.append(_explanation(one.rule, about, one.check.__doc__ or ""))
    return found


def _explanation(name: str, where: str, docstring: str) -> Explanation:
    """Part a docstring, which has the demand, the reason and the bugs, in this order."""
    demand, _, text = docstring.strip().partition("\n\n")
    why, _, bugs = " ".join(text.split()).partition("Broken by ")
    issues = tuple(re.findall(r"[\w.-]+/[\w.-]+#\d+", bugs))
    findings = tuple(_findings().get(name, ()))
    return Explanation(name, where, " ".join(demand.split()), why, bugs, issues, findings)


@click.command("explain")
@click.argument("rule", shell_complete=complete_rule)
def explain_command(rule: str) -> None:
    """Say what RULE demands, why, and which real bug broke it.

    RULE is a name from npattn list rules, or how several begin; a level of rules; a rule of
    npattn check TARGET --module; or the name of a cause, as report.causes has it. npattn explain
    green: what a report that passed does not say.
    """
    if rule == "green":
        for name, reach, wider in read_limits():
            _print_rows(name, [("", reach), ("wider", wider)])
        return
    for one in explain(rule):
        _print(one)


def _print(one: Explanation) -> None:
    """Print what one demand or cause means, why it matters, and the real bugs known of it."""
    bugs = [f"{issue} on GitHub" for issue in one.issues]
    bugs += [_describe(finding) for finding in one.findings]
    rows = [
        ("means" if one.where == OF_CAUSES else "demands", one.demand),
        ("why", one.why),
        ("broken by", one.bugs),
    ]
    rows += [("real bugs" if n == 0 else "", bug) for n, bug in enumerate(bugs[:MOST])]
    more = f"and {len(bugs) - MOST} more in docs/findings.md"
    rows += [("", more)] * (len(bugs) > MOST)
    if one.why and not bugs:
        rows.append(("real bugs", "none known in the wild"))
    _print_rows(f"{one.name}  ({one.where})", rows)
    click.echo()


def _print_rows(head: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print a head, and below it titles with their sentences."""
    width = min(max(shutil.get_terminal_size().columns, 40), 100)
    click.echo(head)
    for title, words in rows:
        indent = f"  {title:<11}"
        if words:
            text, rest = " ".join(words.split()), " " * len(indent)
            click.echo(textwrap.fill(
                text, width, initial_indent=indent, subsequent_indent=rest, break_on_hyphens=False
            ))  # fmt: skip


def _describe(finding: dict[str, str]) -> str:
    """Return a finding in a line, with its page."""
    page = f"docs/reports/{finding['report']}.md" if finding["report"] else "docs/findings.md"
    kind = {"bug": "", "limit": ", a limit that it keeps to"}[finding["kind"]]
    return f"{finding['system']}: {finding['title']}{kind} ({page})"


@cache
def _findings() -> dict[str, Any]:
    """Return the findings of docs/findings.md that broke a rule, by rule."""
    text = files("npattn.testing.rules").joinpath("findings.json").read_text("utf-8")
    return json.loads(text)  # type: ignore[no-any-return]
