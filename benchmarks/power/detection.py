"""Detection of mistakes by each verdict (hard, sharp, aggregate), beside tolerances in use.

    python -m benchmarks.power.detection --write docs/detection.md

Forty-eight mistakes in a flash-like kernel (flawed.py) in three dtypes, on normal inputs and on
inputs with outlier channels; and the smallest size at which each of twelve mistakes of any size is
found. Everything is judged as `Rounding.fused`. Beside the three verdicts:

    ac×  torch.testing.assert_close with its default tolerances, times the least factor without a
         false alarm on the right kernel (× 1.2)
    FA   flash-attention's rule: max|x − exact| ≤ 2 max|eager in the same dtype − exact| + 1e-5
    at×  a plain atol, calibrated as ac× is
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.power.flawed import CONTINUOUS, DISCRETE, Flash, KernelInputs, Mistake
from benchmarks.power.tables import markdown, put
from benchmarks.zoo.correct import Kernel
from npattn.conventions import Conventions
from npattn.oracle.api import backward, evaluate
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.allowed import bounds, deviations, tolerance
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.bounds.ulp import excess
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.rules.systematic_error import ErrorSample, excessive, fits
from npattn.testing.trial import Evaluation, Trial

DTYPES = ("bfloat16", "float16", "float32")
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
INPUTS = ("normal", "outliers")
VERDICTS = ("hard", "sharp", "aggregate")
BASELINES = ("assert_close", "flash-attention", "atol")
# The defaults of torch.testing.assert_close, by dtype; its atol is 1e-5 for all of them.
RTOL = {"bfloat16": 1.6e-2, "float16": 1e-3, "float32": 1.3e-6}
ATOL = 1e-5
SPARE = 1.2  # on top of the least factor without a false alarm
SIZES = [10 ** (-n / 2) for n in range(1, 17)]
DIRECTIONS = {False: ("o",), True: ("dq", "dk", "dv")}


# --- the problems ---------------------------------------------------------------------------------


def _alibi(problem: Problem) -> Array:
    """Return the ALiBi bias with slopes 2⁻² to 2⁻⁸, exact in 8 bits."""
    distance = abs(np.arange(problem.T)[:, None] + problem.S - problem.T - np.arange(problem.S))
    slopes = 2.0 ** (-8 * np.arange(1, problem.H + 1) / problem.H)
    return (-slopes[:, None, None] * distance).astype(problem.q.dtype)


def _dropout(rate: float) -> Callable[[Problem, np.random.Generator], dict[str, Any]]:
    def options(problem: Problem, rng: np.random.Generator) -> dict[str, Any]:
        keep = rng.random((problem.H, problem.T, problem.S)) >= rate
        return {"dropout_mask": keep, "dropout_rate": rate}

    return options


CAUSAL: dict[str, Any] = {"causal": "bottom_right"}
Options = Callable[[Problem, np.random.Generator], dict[str, Any]]
PROBLEMS: dict[str, tuple[tuple[int, int, int, int], Options]] = {
    "plain": ((4, 2, 64, 256), lambda problem, rng: {}),
    "long": ((4, 2, 32, 4096), lambda problem, rng: {}),
    "causal": ((4, 2, 64, 256), lambda problem, rng: CAUSAL),
    "window": ((4, 2, 64, 256), lambda problem, rng: CAUSAL | {"window": (63, 0)}),
    "ALiBi": ((4, 2, 64, 256), lambda problem, rng: {"bias": _alibi(problem)}),
    "dropout .1": ((4, 2, 64, 256), _dropout(0.1)),
    "dropout .001": ((4, 2, 64, 256), _dropout(0.001)),
    "group of 8": ((8, 1, 64, 256), lambda problem, rng: {}),
}
"""(H, K, T, S) and the options, by name; D = E = 64."""


def make_problem(name: str, inputs: str, dtype: str, seed: int) -> tuple[Problem, Array]:
    """Return a problem, and dout."""
    (H, K, T, S), options = PROBLEMS[name]
    recipe = Recipe(lead=(), H=H, K=K, T=T, S=S, D=64, E=64, dtype=dtype, seed=seed)
    problem = recipe.problem()
    dout = recipe.cotangents(problem).dout
    rng = np.random.default_rng([seed, len(name)])
    problem = problem.replace(**options(problem, rng))
    return (problem if inputs == "normal" else _with_outliers(problem)), dout


def _with_outliers(problem: Problem) -> Problem:
    """Multiply one channel of q and k by 8 and one of v by 64: scores of about 8."""
    q, k, v = problem.q.copy(), problem.k.copy(), problem.v.copy()
    q[..., 0] *= 8
    k[..., 0] *= 8
    v[..., -1] *= 64
    return problem.replace(q=q, k=k, v=v)


@dataclass(frozen=True, eq=False)
class Setup:
    """A problem with its exact results, limits and baselines."""

    problem: Problem
    dout: Array

    @classmethod
    def of(cls, name: str, inputs: str, dtype: str, seed: int) -> Setup:
        return cls(*make_problem(name, inputs, dtype, seed))

    @property
    def dtype(self) -> str:
        return str(self.problem.q.dtype)

    @cached_property
    def trial(self) -> Trial:
        """Trial for the aggregate verdict, which needs the conventions and the model."""
        implementation = Implementation(lambda q, k, v: q, framework="numpy", name="a mistake")
        return Trial(implementation, Conventions(), Rounding.fused(), Space(dtype=self.dtype))

    @cached_property
    def kernel_inputs(self) -> KernelInputs:
        return KernelInputs.of(self.problem)

    @cached_property
    def reference(self) -> dict[str, Array]:
        fwd = evaluate(self.problem)
        grads = backward(fwd, self.dout.astype(float))
        gradients = {f"d{n}": x for n, x in vars(grads).items() if x is not None}
        return {"o": fwd.out, "lse": fwd.lse} | gradients

    @cached_property
    def limits(self) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
        """Limits of the hard and the sharp verdict, and the standard deviations."""
        hard, sharp, sigma = (
            limit(self.problem, self.dtype, Rounding.fused(), dout=self.dout.astype(float))
            for limit in (bounds, tolerance, deviations)
        )
        return hard, sharp, sigma

    @cached_property
    def right(self) -> dict[str, Array]:
        """Results of the kernel without a mistake."""
        out, lse = Flash().forward(self.kernel_inputs)
        return {"o": out, "lse": lse} | Flash().backward(self.kernel_inputs, out, lse, self.dout)

    @cached_property
    def eager(self) -> dict[str, float]:
        """Largest error of a kernel that stores every intermediate in the dtype, by tensor."""
        results = Kernel(rounding=Rounding.eager())(self.problem, self.dout)
        return {n: largest_error(results[n], self.reference[n]) for n in ("o", "dq", "dk", "dv")}

    def wrong(self, mistake: Mistake) -> dict[str, Array]:
        right = self.right
        return mistake.results(self.kernel_inputs, right["o"], right["lse"], self.dout)

    # --- the verdicts ---

    def beyond(self, results: dict[str, Array], limits: dict[str, Array]) -> bool:
        return any(
            bool((excess(x, self.reference[n]) > limits[n]).any()) for n, x in results.items()
        )

    def suspect(self, results: dict[str, Array]) -> bool:
        """Return True if the rule "aggregate" suspects a mistake."""
        sigma = self.limits[2]
        evaluation = Evaluation(
            self.problem, Cotangents(self.dout, None), results, self.reference, dict
        )
        sample = ErrorSample(evaluation, sigma)
        return bool(suspicions(sample, self.trial))

    def scores(self, results: dict[str, Array]) -> dict[str, float]:
        """Return the score of each baseline, which finds a mistake if it exceeds its threshold."""
        reference, rtol = self.reference, RTOL[self.dtype]
        scores = {"atol": max(largest_error(x, reference[n]) for n, x in results.items())}
        relative = []
        for name, x in results.items():
            exact = reference[name].astype(self.dtype).astype(float)
            relative.append((abs(x.astype(float) - exact) / (ATOL + rtol * abs(exact))).max())
        scores["assert_close"] = max(relative)
        ratios = [
            largest_error(x, reference[n]) / (2 * self.eager[n] + 1e-5) for n, x in results.items()
        ]
        return scores | {"flash-attention": max(ratios)}


def suspicions(sample: ErrorSample, trial: Trial) -> list[str]:
    """Return the suspicions of the rule "aggregate"."""
    squares = {n: excessive(sample, n) for n in sample.names()}
    lines = [f"χ² of {n} {x:.3g}" for n, x in squares.items() if x is not None]
    return lines + [str(fit) for fit in fits(sample, trial) if fit.significant]


def largest_error(x: Array, reference: Array) -> float:
    return float(abs(x.astype(float) - reference).max())


# --- detection --------------------------------------------------------------------------------


@dataclass
class Bench:
    """Problems of one dtype and one kind of inputs, with the baselines calibrated on them."""

    dtype: str
    inputs: str
    seeds: int
    problems: tuple[str, ...]

    def __post_init__(self) -> None:
        self.setups = {
            name: [Setup.of(name, self.inputs, self.dtype, seed) for seed in range(self.seeds)]
            for name in self.problems
        }

    @cached_property
    def thresholds(self) -> dict[bool, dict[str, float]]:
        """Thresholds by direction (True: backward) and baseline."""
        thresholds: dict[bool, dict[str, float]] = {}
        for direction, names in DIRECTIONS.items():
            clean = [
                setup.scores({n: setup.right[n] for n in names})
                for setups in self.setups.values()
                for setup in setups
            ]
            worst = {rule: SPARE * max(x[rule] for x in clean) for rule in BASELINES}
            thresholds[direction] = worst | {"flash-attention": 1.0}
        return thresholds

    def alarms(self) -> Counter[str]:
        """Count alarms on the kernel without a mistake, by rule, and `runs`."""
        counts: Counter[str] = Counter()
        for setups, (direction, names) in product(self.setups.values(), DIRECTIONS.items()):
            for setup in setups:
                results = {n: setup.right[n] for n in names}
                counts.update(rule for rule, hit in self.judge(setup, results, direction) if hit)
                counts["assert_close default"] += setup.scores(results)["assert_close"] > 1
                counts["runs"] += 1
        return counts

    def judge(
        self, setup: Setup, results: dict[str, Array], direction: bool
    ) -> Iterator[tuple[str, bool]]:
        hard, sharp, _ = setup.limits
        outputs = {n: x for n, x in results.items() if n != "lse"}
        yield "hard", setup.beyond(outputs, hard)
        yield "sharp", setup.beyond(outputs, sharp)
        yield "aggregate", setup.suspect(outputs)
        scores, thresholds = setup.scores(outputs), self.thresholds[direction]
        for rule in BASELINES:
            yield rule, scores[rule] > thresholds[rule]
        yield "lse", "lse" in results and setup.beyond({"lse": results["lse"]}, sharp)

    def count_hits(self, mistake: Mistake) -> dict[str, int]:
        """Count the draws in which each rule finds the mistake."""
        hits = chain.from_iterable(self.draws(mistake))
        return Counter(rule for rule, hit in hits if hit)

    def draws(self, mistake: Mistake) -> Iterator[list[tuple[str, bool]]]:
        for setup in self.setups[mistake.problem]:
            yield list(self.judge(setup, setup.wrong(mistake), mistake.backward))

    def smallest(self, sized: Callable[[float], Mistake]) -> dict[str, list[float]]:
        """Return, per rule and draw, the smallest size down to which it finds every size tried."""
        least = {rule: [np.inf] * self.seeds for rule in VERDICTS + BASELINES}
        still = set(product(least, range(self.seeds)))
        for size in SIZES:
            draws = [dict(hits) for hits in self.draws(sized(size))]
            still = {(rule, draw) for rule, draw in still if draws[draw][rule]}
            for rule, draw in still:
                least[rule][draw] = size
            if not still:
                break
        return {rule: sorted(sizes) for rule, sizes in least.items()}


# --- tables ---------------------------------------------------------------------------------------

Hits = dict[str, int]
Cells = dict[str, dict[tuple[str, str], Hits | None]]  # mistake → (inputs, dtype) → draws
Sizes = dict[str, dict[str, dict[str, list[float]]]]  # mistake → dtype → rule → smallest size


def letter(hits: int, seeds: int) -> str:
    return "n" if hits == 0 else "Y" if hits == seeds else "y"


def cell(hits: Hits | None, seeds: int) -> str:
    if hits is None:
        return "—"
    ours, theirs = (
        "".join(letter(hits[x], seeds) for x in rules) for rules in (VERDICTS, BASELINES)
    )
    return f"{ours}{'+' * (ours == 'nnn' and hits['lse'] == seeds)} {theirs}"


def discrete_table(cells: Cells, columns: list[tuple[str, str]], seeds: int) -> str:
    heads = ["mistake", *(f"{SHORT[dtype]} {inputs}" for inputs, dtype in columns)]
    rows = [[name, *(cell(row[c], seeds) for c in columns)] for name, row in cells.items()]
    return markdown(heads, rows)


def counts_table(cells: Cells, columns: list[tuple[str, str]], seeds: int) -> str:
    """Count the mistakes that each rule finds in all draws, and in some."""
    any_of = {"any of them": VERDICTS, "or in lse": (*VERDICTS, "lse")}
    rules = {x: (x,) for x in VERDICTS} | any_of | {x: (x,) for x in BASELINES}
    rows = []
    for at in columns:
        real = {name: row[at] for name, row in cells.items() if row[at] is not None}
        row = [at[0], SHORT[at[1]], str(len(real))]
        for names in rules.values():
            best = [max(hits[x] for x in names) for hits in real.values() if hits is not None]
            always, ever = sum(n == seeds for n in best), sum(n > 0 for n in best)
            row.append(str(always) if always == ever else f"{always} to {ever}")
        rows.append(row)
    return markdown(["inputs", "dtype", "mistakes", *rules], rows)


def format_median(sizes: list[float]) -> str:
    """Format the median of the draws."""
    middle = sizes[len(sizes) // 2]
    return "—" if middle == np.inf else f"{middle:.0e}".replace("e-0", "e-")


def sized_table(least: Sizes, dtypes: Iterable[str]) -> str:
    rows = []
    for name, by_dtype in least.items():
        row = [name]
        for dtype in dtypes:
            ours, theirs = (
                " / ".join(format_median(by_dtype[dtype][x]) for x in rules)
                for rules in (VERDICTS, BASELINES)
            )
            row.append(f"{ours} · {theirs}")
        rows.append(row)
    return markdown(["mistake", *(SHORT[d] for d in dtypes)], rows)


def alarms_table(alarms: dict[tuple[str, str], Counter[str]]) -> str:
    rules = (*VERDICTS, "assert_close default", "flash-attention")
    heads = ["inputs", "dtype", "runs", *rules]
    rows = [
        [inputs, SHORT[dtype], *(str(counts[x]) for x in ("runs", *rules))]
        for (inputs, dtype), counts in alarms.items()
    ]
    return markdown(heads, rows)


# --- the run --------------------------------------------------------------------------------------


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--seeds", default=5, show_default=True, help="Draws of every problem.")
@click.option("--dtype", "dtypes", multiple=True, default=DTYPES, type=click.Choice(DTYPES))
@click.option("--inputs", multiple=True, default=INPUTS, type=click.Choice(INPUTS))
@click.option("--only", default="", help="Mistakes whose name has this in it.")
@click.option("--quick", is_flag=True, help="bfloat16, normal inputs, one draw, no long rows.")
@click.option("--write", type=click.Path(exists=True, path_type=Path), help="Into this page.")
def main(
    seeds: int,
    dtypes: tuple[str, ...],
    inputs: tuple[str, ...],
    only: str,
    quick: bool,
    write: Path | None,
) -> None:
    if write is not None and (quick or only or dtypes != DTYPES or inputs != INPUTS):
        raise click.UsageError("--write needs the whole table")
    if quick:
        seeds, dtypes, inputs = 1, DTYPES[:1], INPUTS[:1]
    start, columns = time.perf_counter(), list(product(inputs, dtypes))
    selected = [m for m in DISCRETE if only in m.name and not (quick and m.problem == "long")]
    sized = {n: m for n, m in CONTINUOUS.items() if only in n and not quick}
    cells: Cells = {m.name: {} for m in selected}
    least: Sizes = {n: {} for n in sized}
    alarms: dict[tuple[str, str], Counter[str]] = {}
    for at in columns:
        names = tuple(n for n in PROBLEMS if not (quick and n == "long"))
        bench = Bench(at[1], at[0], seeds, names)
        for m in selected:
            idle = m.narrow and at[1] == "float32"
            cells[m.name][at] = None if idle else bench.count_hits(m)
        alarms[at] = bench.alarms()
        for name, make in sized.items() if at[0] == "normal" else ():
            least[name][at[1]] = bench.smallest(make)
        print(f"{' '.join(at)}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    sections = {
        "alarms of the right kernel": alarms_table(alarms),
        "detection": discrete_table(cells, columns, seeds),
        "counts": counts_table(cells, columns, seeds),
        "smallest": sized_table(least, dtypes if "normal" in inputs else ()),
    }
    for name, text in sections.items():
        print(f"\n{text}")
        if write is not None:
            put(write, name, text)


if __name__ == "__main__":
    main()
