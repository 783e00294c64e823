"""How tight the bounds are: the largest and the median error / allowed error of what is right.

    python benchmarks/tolerance.py --problems 500 --dtype bfloat16 --dtype float32

Draws problems with every option, runs the correct low-precision kernels of tests/test_tolerance.py
on each, and judges them by the rounding model that they keep and, with ``--undeclared``, by what is
allowed to whoever declares nothing. A largest ratio above 1 is a wrong bound (exit code 1); a small
one is what the bound gives away. The median is over problems, of the largest ratio in a tensor.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.console import Console
from rich.table import Table

from npattn.testing.recipe import Recipe
from npattn.testing.rounding import Rounding
from npattn.testing.strategies import Space, recipes

DTYPES = ("bfloat16", "float16", "float32", "float64")
TENSORS = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")
Key = tuple[str, str, str, str]  # kernel, judged by, dtype, tensor


def emulations() -> Any:
    """tests/test_tolerance.py, which holds the kernels."""
    path = Path(__file__).parents[1] / "tests" / "test_tolerance.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def draw(count: int, dtype: str, number: int, sizes: dict[str, tuple[int, ...]]) -> list[Recipe]:
    drawn: list[Recipe] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes(Space(dtype=dtype, sizes=sizes)))
    def collect(recipe: Recipe) -> None:
        drawn.append(recipe)

    collect()
    return drawn


def judge(
    tests: Any, recipe: Recipe, undeclared: bool, found: dict[Key, list[tuple[float, Recipe]]]
) -> None:
    """Run every kernel on one problem, and note the largest ratio of each tensor."""
    problem = recipe.problem()
    dout, dlse = recipe.cotangents(problem)
    assert dlse is not None
    want = tests.oracle(problem, dout, dlse)
    cotangents = {"dout": dout.astype(float), "dlse": dlse.astype(float)}
    allowed: dict[Rounding, dict[str, np.ndarray[Any, Any]]] = {}
    for name, kernel in tests.KERNELS.items():
        if name.startswith("undeclared") and recipe.dtype in ("float32", "float64"):
            continue  # there, undeclared is eager
        models = {tests.declared(name, recipe.dtype)}
        models |= {Rounding.undeclared(recipe.dtype)} if undeclared else set()
        got = kernel(problem, dout, dlse)
        for model in models:
            if model not in allowed:
                allowed[model] = tests.bounds(problem, recipe.dtype, model, **cotangents)
            label = model.name if model.exp_error is None else "undeclared"
            for tensor, array in got.items():
                seen = tests.compare_arrays(tensor, array, want[tensor], allowed[model][tensor])
                found[name, label, recipe.dtype, tensor].append((seen.ratio, recipe))


def table(found: dict[Key, list[tuple[float, Recipe]]], title: str) -> Table:
    shown = Table(title=title)
    for head in ("implementation", "judged by", "dtype"):
        shown.add_column(head)
    for tensor in TENSORS:
        shown.add_column(tensor, justify="right")
    for row in sorted({key[:3] for key in found}, key=lambda r: (r[2], r[0], r[1])):
        cells = []
        for tensor in TENSORS:
            ratios = [ratio for ratio, _ in found.get((*row, tensor), [])]
            cells.append(f"{max(ratios):.2g} ({np.median(ratios):.1g})" if ratios else "—")
        shown.add_row(*row, *cells)
    return shown


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--problems", default=100, show_default=True, help="Drawn for each dtype.")
@click.option("--dtype", "dtypes", multiple=True, default=DTYPES[:3], type=click.Choice(DTYPES))
@click.option("--seed", "number", default=0, show_default=True)
@click.option("--undeclared", is_flag=True, help="Judge by the undeclared model too.")
def main(problems: int, dtypes: tuple[str, ...], number: int, undeclared: bool) -> None:
    tests, start = emulations(), time.perf_counter()
    found: dict[Key, list[tuple[float, Recipe]]] = defaultdict(list)
    for dtype in dtypes:
        for recipe in draw(problems, dtype, number, tests.SIZES):
            judge(tests, recipe, undeclared, found)
    seconds = time.perf_counter() - start
    console = Console(width=None if sys.stdout.isatty() else 160)
    title = f"largest (median) error / allowed error, {problems} problems, seed {number}"
    console.print(table(found, f"{title}, {seconds:.0f} s"))
    wrong = {key: max(x, key=lambda pair: pair[0]) for key, x in found.items()}
    wrong = {key: pair for key, pair in wrong.items() if pair[0] > 1}
    for key, (ratio, recipe) in wrong.items():
        console.print(f"{', '.join(key)}: {ratio:.3g} of the allowed on {recipe}", style="red")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
