"""Tightness, size and cost of the bounds.

    python -m benchmarks.power.tolerance --problems 300 --write docs/detection.md

Tightness: the largest and the median error / worst case of the kernels of `benchmarks.zoo.correct`,
each by the model that it declares and, with ``--undeclared``, by the undeclared model. A ratio
above 1 is a wrong bound (exit code 1); a small one is a loose bound. The median is over problems,
of the largest ratio in a tensor. Size: the worst case and eight standard
deviations beside the results themselves. Cost: processor time beside the oracle's.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.power.alarms import exact, kernel_of, models_of, sample_recipes
from benchmarks.power.tables import markdown, put
from benchmarks.zoo.correct import CORRECT, Kernel
from npattn.conventions import Conventions
from npattn.oracle.api import backward, evaluate
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.testing.bounds.allowed import bounds, deviations
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.bounds.ulp import half_ulp
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.comparison import compare_arrays

DTYPES = ("bfloat16", "float16", "float32", "float64")
TENSORS = ("o", "lse", "weights", "dq", "dk", "dv", "dbias", "dsinks")
SIZED = ("o", "dq", "dk", "dv")
SHOWN = (
    "rows",
    "first to last",
    "tiles of 13",
    "split keys, sink last",
    "fused",
    "fused, D from weights",
    "eager, scale on q",
    "eager, parts of dS",
    "heads rounded",
    "undeclared",
    "tf32",
    "low row sums",
)
Ratios = dict[tuple[str, str, str, str], list[tuple[float, Recipe]]]  # kernel, model, dtype, tensor


# --- tightness ------------------------------------------------------------------------------------


def measure_kernels(recipe: Recipe, undeclared: bool, ratios: Ratios) -> None:
    """Run every kernel on one problem, and record the largest ratio of each tensor."""
    problem = recipe.problem()
    cotangents = recipe.cotangents(problem)
    reference = exact(problem, cotangents, Conventions())
    dout, dlse = cotangents.dout.astype(float), cotangents.dlse.astype(float)
    limits: dict[Rounding, dict[str, Array]] = {}
    for name in SHOWN:
        kernel = kernel_of(CORRECT[name])
        assert kernel is not None
        models = models_of(CORRECT[name], recipe.dtype)
        if recipe.dtype not in CORRECT[name].dtypes:
            continue
        got = kernel(problem, cotangents.dout, cotangents.dlse)
        for label, model in models.items():
            if label == "undeclared" and len(models) > 1 and not undeclared:
                continue
            if model not in limits:
                limits[model] = bounds(problem, recipe.dtype, model, dout=dout, dlse=dlse)
            for tensor, array in got.items():
                comparison = compare_arrays(tensor, array, reference[tensor], limits[model][tensor])
                ratios[name, label, recipe.dtype, tensor].append((comparison.ratio, recipe))


def tightness(ratios: Ratios) -> str:
    rows = []
    for row in sorted({key[:3] for key in ratios}, key=lambda r: (r[2], r[0], r[1])):
        cells = []
        for tensor in TENSORS:
            column = [ratio for ratio, _ in ratios.get((*row, tensor), [])]
            cells.append(f"{max(column):.2g} ({np.median(column):.1g})" if column else "—")
        rows.append([*row, *cells])
    return markdown(["kernel", "judged by", "dtype", *TENSORS], rows)


# --- size -----------------------------------------------------------------------------------------


def normal_problem(
    dtype: str, T: int, S: int, D: int, H: int = 4, seed: int = 0
) -> tuple[Problem, Array]:
    """Return a problem with normal inputs, and dout."""
    recipe = Recipe(lead=(), H=H, K=max(H // 2, 1), T=T, S=S, D=D, E=D, dtype=dtype, seed=seed)
    problem = recipe.problem()
    return problem, recipe.cotangents(problem).dout


def rms(x: Array) -> float:
    return float(np.sqrt((x.astype(float) ** 2).mean()))


def sizes(dtypes: tuple[str, ...], lengths: tuple[int, ...]) -> str:
    """Tabulate the median worst case, 8σ and half ulp relative to the results, model fused."""
    rows, model = [], Rounding.fused()
    for dtype in dtypes:
        for T, S in ((64 if S <= 256 else 32, S) for S in lengths):
            problem, dout = normal_problem(dtype, T, S, 64)
            kwargs: dict[str, Any] = {"dout": dout.astype(float)}
            worst = bounds(problem, dtype, model, **kwargs)
            sigma = deviations(problem, dtype, model, **kwargs)
            got = Kernel(rounding=model, tile=64)(problem, dout)
            fwd = evaluate(problem)
            reference = {"o": fwd.out} | {f"d{n}": x for n, x in vars(backward(fwd, dout)).items()}
            cells = []
            for name in SIZED:
                size, error = (rms(reference[name]), rms(got[name].astype(float) - reference[name]))
                numbers = [np.median(worst[name]), 8 * np.median(sigma[name])]
                numbers += [np.median(half_ulp(got[name])), error]
                cells.append(" / ".join(f"{x / size:.1e}" for x in numbers))
            rows.append([dtype, f"{T} × {S}", *cells])
    return markdown(["dtype", "T × S", *(f"{n}: t / 8σ / half ulp / error" for n in SIZED)], rows)


# --- cost -----------------------------------------------------------------------------------------

SHAPES = ((256, 1024, 64, 4), (256, 1024, 128, 4), (64, 4096, 128, 2), (1024, 1024, 64, 2))
JUDGED = (("float32", "upcast"), ("bfloat16", "fused"), ("bfloat16", "eager"))


def seconds(f: Callable[[], Any], repeats: int) -> float:
    """Return the least processor time of several calls."""
    best = np.inf
    for _ in range(repeats):
        start = time.process_time()
        f()
        best = min(best, time.process_time() - start)
    return float(best)


def cost(shapes: tuple[tuple[int, int, int, int], ...], repeats: int) -> str:
    """Tabulate the cost of the worst case."""
    heads = ["T × S × D, H", "dtype, model", "oracle", "bounds / oracle"]
    return markdown(heads, (cost_of(shape, *by, repeats) for shape in shapes for by in JUDGED))


def cost_of(shape: tuple[int, int, int, int], dtype: str, name: str, repeats: int) -> list[str]:
    T, S, D, H = shape
    problem, dout = normal_problem(dtype, T, S, D, H)
    kwargs: dict[str, Any] = {"rounding": Rounding.from_name(name), "dout": dout.astype(float)}
    times = [
        seconds(lambda: backward(evaluate(problem), kwargs["dout"]), repeats),
        seconds(lambda: bounds(problem, dtype, **kwargs), repeats),
    ]
    times_text = [f"{1e3 * times[0]:.0f} ms", *(f"{x / times[0]:.1f}" for x in times[1:])]
    return [f"{T} × {S} × {D}, {H}", f"{dtype}, {name}", *times_text]


# --- the run --------------------------------------------------------------------------------------


def tables(
    problems: int, dtypes: tuple[str, ...], seed: int, undeclared: bool, quick: bool
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the name and text of each table, and its violations."""
    ratios: Ratios = defaultdict(list)
    for dtype in dtypes:
        for recipe in sample_recipes(Space(dtype=dtype), problems, seed):
            measure_kernels(recipe, undeclared, ratios)
    worst = {key: max(pairs, key=lambda pair: pair[0]) for key, pairs in ratios.items()}
    wrong = [
        f"{', '.join(key)}: {ratio:.3g} of the worst case on {recipe}"
        for key, (ratio, recipe) in worst.items()
        if not ratio <= 1
    ]
    yield "tightness", f"{problems} problems a dtype, seed {seed}.\n\n{tightness(ratios)}", wrong
    yield "sizes", sizes(dtypes[:3], (256,) if quick else (256, 4096)), []
    yield "cost", cost(SHAPES[:1] if quick else SHAPES, 1 if quick else 5), []


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--problems", default=100, show_default=True, help="Drawn for each dtype.")
@click.option("--dtype", "dtypes", multiple=True, default=DTYPES[:3], type=click.Choice(DTYPES))
@click.option("--seed", default=0, show_default=True)
@click.option("--undeclared", is_flag=True, help="Judge by the undeclared model too.")
@click.option("--quick", is_flag=True, help="Five problems, short rows, one shape.")
@click.option("--write", type=click.Path(exists=True, path_type=Path), help="Into this page.")
def main(
    problems: int,
    dtypes: tuple[str, ...],
    seed: int,
    undeclared: bool,
    quick: bool,
    write: Path | None,
) -> None:
    every = []
    for name, text, wrong in tables(5 if quick else problems, dtypes, seed, undeclared, quick):
        print(f"\n{text}", flush=True)
        every += wrong
        if write is not None:
            put(write, name, text)
    for line in every:
        print(line, file=sys.stderr)
    sys.exit(bool(every))


if __name__ == "__main__":
    main()
