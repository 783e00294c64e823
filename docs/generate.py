"""Generated parts of the pages: the map of modules, packages, options, settings, rules, branches.

The map (docs/modules.md) is made from the first lines of docstrings, its order from
tests/test_layers.py. ``python docs/generate.py`` prints the parts, ``--write`` puts them between
their markers in the pages.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Mapping
from functools import cache
from itertools import islice
from math import prod
from pathlib import Path

from npattn.cli.lists import count_all
from npattn.problem.options import OPTIONS
from npattn.testing.cases.model_sizes import MODEL_HEADS, model_recipes
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import POOLS, Space
from npattn.testing.cases.strategies import Pools
from npattn.testing.rules import ON_REQUEST, RULES
from npattn.testing.runner.rounds import ABOUT_STRUCTURE
from npattn.testing.settings import GROUPS, CommandSettings, Settings
from npattn.testing.settings import options as options_of

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "npattn"


def layers_and_packages() -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Return the rank of each part ("dense", "testing/cases"), lowest first, and CONFINED."""
    tree = ast.parse((ROOT / "tests" / "test_layers.py").read_text())
    lists = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    ranks = {}
    for name, folder in (("LAYERS", ""), ("TESTING_LAYERS", "testing/")):
        for rank, parts in enumerate(ast.literal_eval(lists[name])):
            ranks |= {folder + part: rank for part in parts}
    return ranks, ast.literal_eval(lists["CONFINED"])


def summary(path: Path) -> str:
    """First line of the docstring of a module, without its period; "" if there is none."""
    source = path.read_text() if path.exists() else ""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return docstring.partition("\n")[0].removesuffix(".")


def entries(folder: Path, ranks: dict[str, int], depth: int = 0) -> list[str]:
    """List the modules and rooms of a folder by layer, then by name, each with its summary."""

    def place(path: Path) -> tuple[int, str]:
        name = path.relative_to(ROOT).as_posix().removeprefix("npattn/").removesuffix(".py")
        return ranks.get(name, len(ranks)), name

    parts = [path for path in folder.iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))]
    text = []
    for path in sorted(parts, key=place):
        if path.is_dir():
            text.append(f"{'  ' * depth}- **`{path.name}/`** {summary(path / '__init__.py')}")
            text += entries(path, ranks, depth + 1)
        elif depth == 0 or path.name != "__init__.py":
            text.append(f"{'  ' * depth}- `{path.name}` {summary(path)}")
    return text


def module_map() -> str:
    ranks = layers_and_packages()[0]
    text = []
    for folder in (PACKAGE, ROOT / "benchmarks"):
        text += [f"## `{folder.name}/`", "", *entries(folder, ranks), ""]
    return "\n".join(text)


def counts() -> str:
    return f"{count_all()} (`npattn list`).\n"


def packages() -> str:
    rows = [
        f"| {name} | {', '.join(f'`{place}`' for place in places)} |"
        for name, places in layers_and_packages()[1].items()
    ]
    return "\n".join(["| package | imported only in |", "|---|---|", *rows, ""])


def options() -> str:
    rows = [
        f"| `{option.name}` | {option.kind} | `{option.default}` | {option.doc} |"
        for option in OPTIONS.values()
    ]
    head = ["| option | kind | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def rules() -> str:
    structure = "[`structure`](rules/structure.md)"
    rows = [f"| {structure}, `option-NAME` | 12, 14 | {ABOUT_STRUCTURE} |"]
    for name, rule in RULES.items():
        asked = "" if name not in ON_REQUEST else f" Only with `--only {name}`."
        rows.append(f"| [`{name}`](rules/{name}.md) | {rule.section} | {rule.about}{asked} |")
    notes = "Notes on wrong input, without a verdict; only with `--only robustness`."
    head = ["| rule | semantics | |", "|---|---|---|"]
    return "\n".join([*head, *rows, f"| [`robustness`](rules/robustness.md) | | {notes} |", ""])


# --- the problems on either side of each branch ---------------------------------------------------

EXAMPLES = 200  # of a default check
WIDTHS = {"T": (16, 32, 64, 128, 256, 512, 1024), "D": (8, 16, 32, 64, 128, 256)}
WIDTHS |= {"S": WIDTHS["T"], "E": WIDTHS["D"][:-1]}
PROCESSORS = (108, 132, 148)
NOBODY = "none"
"""Cell of a side that no problem of a default check is on."""
Side = Callable[[Recipe], bool]


@cache
def default_recipes() -> tuple[tuple[str, Recipe], ...]:
    """Return the problems that a check with the defaults compares with the oracle, and the rule."""
    agreement = islice(Pools(Space()).cases(0, EXAMPLES), EXAMPLES)
    recipes = [("agreement", r) for r in agreement]
    return (*recipes, *(("model-sizes", r) for r in model_recipes(Space(), 0, EXAMPLES)))


def samples(r: Recipe) -> int:
    return prod(r.lead or ())


def smallest(side: Side) -> str:
    """Describe the problem with fewest scores that is on a side of a branch."""
    found = [
        (samples(r) * r.H * r.T * r.S, n) for n, (_, r) in enumerate(default_recipes()) if side(r)
    ]
    if not found:
        return NOBODY
    rule, r = default_recipes()[min(found)[1]]
    sizes = f"B {samples(r)}, H {r.H}, K {r.K}, T {r.T}, S {r.S}, D {r.D}, E {r.E}"
    return f"{sizes}{'' if rule == 'agreement' else '; ' + rule}"


def table_of(
    columns: Mapping[str, Callable[..., bool]], rows: Mapping[str, tuple[object, ...]]
) -> str:
    """Return a table with the smallest problem for each row and column."""
    head = [f"| | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]

    def cell(side: Callable[..., bool], values: tuple[object, ...]) -> str:
        return smallest(lambda r: min(samples(r), r.H, r.T, r.S, r.D, r.E) > 0 and side(r, *values))

    cells = {row: [cell(side, values) for side in columns.values()] for row, values in rows.items()}
    return "\n".join([*head, *(f"| {row} | {' | '.join(x)} |" for row, x in cells.items()), ""])


def tiles() -> str:
    """Return lengths and widths against tiles of each width, S and D with more than one tile."""
    rows = {f"{n}, tile {w}": (n, w) for n in "TSDE" for w in WIDTHS[n]}
    columns: dict[str, Callable[..., bool]] = {
        "less": lambda r, n, w: getattr(r, n) < w,
        "one tile": lambda r, n, w: getattr(r, n) == w,
        "a tile and a rest": lambda r, n, w: getattr(r, n) > w and getattr(r, n) % w > 0,
    }
    return table_of(columns, rows)


def heads() -> str:
    """Return groups, numbers of key/value heads, and both as models have them."""
    groups = {f"G = {n}": (lambda r, n=n: n * r.K == r.H,) for n in POOLS["G"]}
    shared = {f"K = {n}": (lambda r, n=n: n == r.K,) for n in POOLS["K"]}
    models = {
        f"{name}, {H} / {K}": (lambda r, H=H, K=K: (r.H, r.K) == (H, K),)
        for name, (H, K) in MODEL_HEADS.items()
    }
    of_models: dict[str, Callable[..., bool]] = {
        "T = 1": lambda r, side: side(r) and r.T == 1,
        "T > 1": lambda r, side: side(r) and r.T > 1,
    }
    every = table_of({"smallest problem": lambda r, side: side(r)}, groups | shared)
    return f"{every}\n{table_of(of_models, models)}"


def both_sides() -> str:
    """Return other conditions, and the problems for which they hold and do not."""

    def grid(r: Recipe, width: int) -> int:
        return samples(r) * r.H * -(-r.T // width)

    conditions: dict[str, Side] = {
        **{f"B·H·⌈T/64⌉ > {n}": lambda r, n=n: grid(r, 64) > n for n in PROCESSORS},
        **{
            f"B·K·⌈S/64⌉ > {n}": lambda r, n=n: samples(r) * r.K * -(-r.S // 64) > n
            for n in PROCESSORS
        },
        "twice as many as 148": lambda r: grid(r, 128) > 296,
        "B·H·T·D > 2¹⁶": lambda r: samples(r) * r.H * r.T * r.D > 2**16,
        "B·K·S·D > 2¹⁶": lambda r: samples(r) * r.K * r.S * r.D > 2**16,
        "B·K·S·E > 2¹⁶": lambda r: samples(r) * r.K * r.S * r.E > 2**16,
        "B·H·T·S > 2¹⁶": lambda r: samples(r) * r.H * r.T * r.S > 2**16,
        "T = S": lambda r: r.T == r.S,
        "T > S": lambda r: r.T > r.S,
        "E = D": lambda r: r.E == r.D,
        "T = 1": lambda r: r.T == 1,
        "S = 1": lambda r: r.S == 1,
        "one query, 16 and more tiles of 128 keys": lambda r: r.T == 1 and r.S > 15 * 128,
        "one query, window, S > 64": lambda r: r.T == 1 and r.window is not None and r.S > 64,
        "one query, window and causal, S > 64": lambda r: (
            r.T == 1 and bool(r.window) and r.causal and r.S > 64
        ),
        **{
            f"window of {a} to {b} keys to the left, and whole tiles before": lambda r, a=a, b=b: (
                r.window is not None and a <= (r.window[0] or 0) <= b and r.S > 256
            )
            for a, b in ((0, 15), (16, 63), (64, 127), (128, 255))
        },
        "causal, T > 64": lambda r: r.causal and r.T > 64,
    }
    columns: dict[str, Callable[..., bool]] = {
        "holds": lambda r, side: side(r),
        "does not": lambda r, side: not side(r),
    }
    return table_of(columns, {name: (side,) for name, side in conditions.items()})


def sizes_of_zero() -> str:
    rows = [f"| {n} = 0 | {smallest(lambda r, n=n: getattr(r, n) == 0)} |" for n in "HTSDE"]
    rows.insert(0, f"| B = 0 | {smallest(lambda r: 0 in (r.lead or ()))} |")
    return "\n".join(["| | |", "|---|---|", *rows, ""])


def values_of_options() -> str:
    def has(r: Recipe, name: str, value: object) -> bool:
        return bool(getattr(r, name.removesuffix("_rate")) == value)

    values = [(n, x) for n in ("scale", "softcap", "window") for x in OPTIONS[n].examples]
    values += [("dropout_rate", x) for x in OPTIONS["dropout_rate"].examples if x]
    return table_of({"": has}, {f"{name} = {x}": (name, x) for name, x in values})


def arguments() -> str:
    """Return the settings of a check by their groups: in Python, on the command line, meaning."""
    text = []
    for group in GROUPS:
        text += [f"**{group}**", "", "| in Python | on the command line | |", "|---|---|---|"]
        for name, (own, one) in options_of(CommandSettings).items():
            argument = f"`{name}=`" if name in Settings.__dataclass_fields__ else ""
            value = f" {one.metavar or '|'.join(one.choices)}{' …' * one.multiple}".rstrip()
            flags = ", ".join(f"`{flag}{value}`".replace("|", "\\|") for flag in one.flags)
            value = "on" if own.default is True else own.default
            there = value not in (None, ()) and value is not False
            value = one.default or (f"{value}" if there else "")
            words = [one.help, one.more, f"Default: {value}." if value else ""]
            if one.group == group:
                sentence = " ".join(word for word in words if word).replace("``", "`")
                text.append(f"| {argument} | {flags} | {sentence} |")
        text.append("")
    return "\n".join(text)


def findings() -> str:
    """Return the findings by the rules that they break, for `npattn explain`."""
    by_rule: dict[str, list[dict[str, str]]] = {}
    title = ""
    for line in (ROOT / "docs" / "findings.md").read_text().splitlines():
        title = line.removeprefix("### ") if line.startswith("### ") else title
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[0] in ("bug", "limit"):
            kind, system, broken, _, report = cells
            link = report.partition("(reports/")[2].partition(".md")[0]
            entry = {"kind": kind, "system": system, "title": title, "report": link}
            for rule in broken.replace("`", "").split(", "):
                by_rule.setdefault(rule, []).append(entry)
    rows = []
    for rule, found in sorted(by_rule.items()):
        bugs_first = sorted(found, key=lambda one: one["kind"])
        entries = [json.dumps(one, ensure_ascii=False) for one in bugs_first]
        rows.append(f"{json.dumps(rule)}: [\n" + ",\n".join(entries) + "\n]")
    return "{\n" + ",\n".join(rows) + "\n}\n"


PAGES = {
    "README.md": {"counts": counts},
    "docs/modules.md": {"packages": packages, "module map": module_map},
    "docs/semantics.md": {"options": options},
    "docs/options.md": {"arguments": arguments},
    "docs/rules.md": {"rules": rules},
    "docs/branches.md": {
        "tiles": tiles,
        "heads": heads,
        "conditions": both_sides,
        "sizes of 0": sizes_of_zero,
        "values": values_of_options,
    },
}
"""Page → the parts that are generated in it, by their markers."""


FINDINGS = "npattn/testing/rules/findings.json"


def update(page: str) -> str:
    """Return the text of a page with the present parts between their markers."""
    if page == FINDINGS:
        return findings()
    text = (ROOT / page).read_text()
    for name, part in PAGES[page].items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + part() + end + rest.split(end)[1]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="rewrite the pages")
    write = parser.parse_args().write
    for page, parts in {**PAGES, FINDINGS: {"findings": findings}}.items():
        if write:
            (ROOT / page).write_text(update(page))
        else:
            print(*(part() for part in parts.values()), sep="\n")


if __name__ == "__main__":
    main()
