"""False alarms: correct implementations must pass all problems, adversarial inputs included.

    python -m benchmarks.power.alarms --problems 50000 --aggregate 5 --climb 100000 -j 2 --seed 1

``--problems``: each problem, sampled from the whole option space, goes to three kernels of
`benchmarks.zoo.correct` in turn; a fortieth as many, from their own spaces, go to implementations
that are called as a user's are (the oracles, and frameworks if they are installed), but for those
on which docs/findings.md proves them wrong. Each is judged under the models that it must pass, by
the hard and by the sharp verdict. ``--aggregate``: plain problems of this many seeds, and the
aggregate verdict. ``--climb``: a search by mutation and selection for inputs on which a kernel
comes closest to the hard bound. Any violation makes the exit code 1.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.power.detection import suspicions
from benchmarks.power.tables import markdown, put
from benchmarks.zoo.correct import CORRECT, Correct, Kernel
from benchmarks.zoo.correct.arithmetic import store_as
from npattn.conventions import Conventions
from npattn.oracle.api import backward, evaluate
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array, finfo
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.bounds.allowed import BoundTask, bounds, deviations
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.bounds.ulp import excess
from npattn.testing.bounds.variance import DEVIATIONS
from npattn.testing.capabilities import probe
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools
from npattn.testing.comparison import compare_arrays
from npattn.testing.rules import PROPERTIES
from npattn.testing.rules.systematic_error import ErrorSample, chi_square, fits, plain_recipes
from npattn.testing.trial import Evaluation, Trial

DTYPES = ("bfloat16", "float16", "float32", "float64")
BATCH = 100  # problems per job
EACH = 3  # kernels per problem
SHARE = {"jax": 4000}  # it gets one problem in 4000: each new shape is compiled
LARGE = 2**11  # a problem of n > LARGE numbers is kept with probability LARGE / n


# --- records -------------------------------------------------------------------------------


@dataclass
class Worst:
    """Largest value of a number, and its place."""

    value: float = 0.0
    where: str = ""

    def update(self, value: float, where: str) -> None:
        if value > self.value or not self.where:
            self.value, self.where = value, where


@dataclass
class Tally:
    """Counts of one implementation, under one model in one dtype, for one tensor."""

    results: int = 0
    alarms: int = 0
    hard: Worst = field(default_factory=Worst)  # error / worst case
    sharp: Worst = field(default_factory=Worst)  # error / tolerance
    z: Worst = field(default_factory=Worst)  # error / σ, for roundings that behave as random

    def add(self, other: Tally) -> None:
        self.results += other.results
        self.alarms += other.alarms
        for name in ("hard", "sharp", "z"):
            worst = getattr(other, name)
            getattr(self, name).update(worst.value, worst.where)


Key = tuple[str, str, str, str]  # implementation, model, dtype, tensor
Tallies = dict[Key, Tally]


def merge(parts: Iterable[Tallies]) -> Tallies:
    total: Tallies = {}
    for part in parts:
        for key, tally in part.items():
            total.setdefault(key, Tally()).add(tally)
    return total


# --- one result against its limits ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Limits:
    """Limits by tensor: the worst case, and eight deviations if they apply."""

    hard: dict[str, Array]
    sharp: dict[str, Array]

    @classmethod
    def of(
        cls, problem: Problem, model: Rounding, cotangents: Cotangents, conventions: Conventions
    ) -> Limits:
        dout, dlse, dweights = (
            None if x is None else x.astype(float)
            for x in (cotangents.dout, cotangents.dlse, cotangents.dweights)
        )
        task = BoundTask(problem, problem.q.dtype, model, dout, dlse, dweights, conventions)
        return cls(
            task.add_oracle_error(task.worst_case()), task.add_oracle_error(task.deviations())
        )

    def judge(self, name: str, got: Array, reference: Array, gap: Array, where: str) -> Tally:
        """Judge one result; `gap` is its excess."""
        hard, sharp = self.hard[name], self.sharp[name]
        if np.isfinite(gap).all():
            with np.errstate(all="ignore"):
                worst, z = (float(np.nanmax(gap / t, initial=0)) for t in (hard, sharp))
            values = (worst, max(worst, z), z)  # 0 / 0: no error, and none allowed
        else:  # an overflow, right or wrong
            limits = (hard, np.minimum(hard, sharp), sharp)
            values = tuple(compare_arrays(name, got, reference, t).ratio for t in limits)
        worst, ruling, z = values
        return Tally(
            1,
            int(not ruling <= 1),
            Worst(worst, where),
            Worst(ruling, where),
            Worst(DEVIATIONS * z, where),
        )


def exact(
    problem: Problem, cotangents: Cotangents, conventions: Conventions, gradients: bool = True
) -> dict[str, Array]:
    fwd = evaluate(problem, conventions)
    reference = {"o": fwd.out, "lse": fwd.lse, "weights": fwd.weights}
    if not gradients:
        return reference
    grads = vars(backward(fwd, *map(as_float64, vars(cotangents).values()))).items()
    return reference | {f"d{n}": x for n, x in grads if x is not None}


def as_float64(x: Array | None) -> Any:
    return None if x is None else x.astype(float)


def models_of(implementation: Correct, dtype: str) -> dict[str, Rounding]:
    """Return the rounding models under which it must pass, by name."""
    return {
        "undeclared" if m is None else m.name: m or Rounding.undeclared(dtype)
        for m in implementation.models
    }


# --- kernels: one problem for all of them ---------------------------------------------------------


def kernel_of(implementation: Correct) -> Kernel | None:
    """Return the kernel of an implementation, if it is one."""
    owner = getattr(implementation.forward, "__self__", None)
    return owner if isinstance(owner, Kernel) else None


def on_problem(recipe: Recipe, names: tuple[str, ...]) -> Tallies:
    """Judge kernels on one problem; those with the same model share its limits."""
    problem = recipe.problem()
    cotangents = recipe.cotangents(problem, weights=recipe.seed % 4 == 0)
    reference = exact(problem, cotangents, Conventions())
    limits: dict[Rounding, Limits] = {}
    tallies, where = Tallies(), repr(recipe)
    for name in names:
        kernel = kernel_of(CORRECT[name])
        assert kernel is not None
        try:
            got = kernel(problem, *vars(cotangents).values())
        except Exception as err:
            err.add_note(f"{name} on {where}")
            raise
        gaps = {n: excess(x, reference[n]) for n, x in got.items()}
        for label, model in models_of(CORRECT[name], recipe.dtype).items():
            if model not in limits:
                limits[model] = Limits.of(problem, model, cotangents, Conventions())
            for tensor, array in got.items():
                tallies[name, label, recipe.dtype, tensor] = limits[model].judge(
                    tensor, array, reference[tensor], gaps[tensor], where
                )
    return tallies


def judge_kernels(dtype: str, number: int, seed: int) -> Tallies:
    """Judge a batch of problems, three kernels each."""
    names = [n for n, c in CORRECT.items() if kernel_of(c) and dtype in c.dtypes]
    turn = itertools.cycle(np.random.default_rng(seed).permutation(names).tolist())
    return merge(
        on_problem(recipe, tuple(itertools.islice(turn, EACH)))
        for recipe in sample_recipes(Space(dtype=dtype), number, seed)
    )


def sample_recipes(space: Space, number: int, seed: int) -> Iterator[Recipe]:
    """Yield `number` recipes of the space; large ones are rare."""
    rng = np.random.default_rng([seed, number])
    cases = Pools(space).cases(seed, number)
    small = (r for r in cases if rng.random() * size(r) <= LARGE)
    return itertools.islice(small, number)


def size(recipe: Recipe) -> int:
    """Count the numbers in a problem."""
    length = recipe.T * recipe.S + (recipe.T + recipe.S) * (recipe.D + recipe.E)
    return math.prod(recipe.lead or ()) * recipe.H * length


# --- the others: called as a user's implementation is ---------------------------------------------


@cache
def trial_of(name: str, dtype: str) -> Trial:
    """Return a trial with the space that the implementation accepts."""
    implementation = CORRECT[name].implementation()
    space = Space(implementation.features, dtype=dtype, sizes=CORRECT[name].sizes)
    model = Rounding.undeclared(dtype)
    return probe(Trial(implementation, CORRECT[name].conventions, model, space)).trial


def judge_others(name: str, dtype: str, number: int, seed: int) -> Tallies:
    trial = trial_of(name, dtype)
    recipes = sample_recipes(trial.space, number, seed)
    with trial.implementation.framework.one_thread():
        return merge(judge_call(name, trial, r) for r in recipes if not CORRECT[name].errs_on(r))


def judge_call(name: str, trial: Trial, recipe: Recipe) -> Tallies:
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    dtype, tallies, where = trial.space.dtype, Tallies(), repr(recipe)
    try:
        got = trial.results(problem, cotangents, recipe.view).pairs
    except ImplementationError as err:
        failed = Worst(math.inf, f"{where}: {err}")
        return {(name, "undeclared", dtype, "raised"): Tally(1, 1, failed, failed)}
    reference = exact(problem, cotangents, trial.conventions, bool(trial.gradients))
    for label, model in models_of(CORRECT[name], dtype).items():
        limits = Limits.of(problem, model, cotangents, trial.conventions)
        parts = [
            {
                (name, label, dtype, n): limits.judge(
                    n, x, reference[n], excess(x, reference[n]), where
                )
            }
            for n, x in got
            if n in reference and not np.isnan(reference[n]).any()
        ]
        tallies = merge([tallies, *parts])
    return tallies


# --- many errors together -------------------------------------------------------------------------


@dataclass
class Suspects:
    """Aggregate verdict on one implementation under its declared model."""

    samples: int = 0
    alarms: int = 0
    square: Worst = field(default_factory=Worst)  # χ² of a tensor
    head: Worst = field(default_factory=Worst)  # χ² of one head of o, dq, dk, dv
    fit: Worst = field(default_factory=Worst)  # size of a fitted mistake / threshold
    lines: list[str] = field(default_factory=list)


def aggregate(name: str, dtype: str, seed: int) -> dict[tuple[str, str], Suspects]:
    suspects, kernel = Suspects(), kernel_of(CORRECT[name])
    assert kernel is not None
    model = CORRECT[name].rounding or Rounding.undeclared(dtype)
    trial = replace(trial_of(name, dtype), rounding=model)
    if PROPERTIES["aggregate"].unless(trial):
        return {}
    for recipe in plain_recipes(Space(dtype=dtype), 100 * seed):
        problem = recipe.problem()
        cotangents = recipe.cotangents(problem)
        reference = exact(problem, cotangents, Conventions())
        dout, dlse = as_float64(cotangents.dout), as_float64(cotangents.dlse)
        sigma = deviations(problem, dtype, model, dout=dout, dlse=dlse)
        got = kernel(problem, cotangents.dout, cotangents.dlse)
        sample = ErrorSample(Evaluation(problem, cotangents, got, reference, dict), sigma)
        suspects.samples += 1
        lines = suspicions(sample, trial)
        suspects.alarms += bool(lines)
        suspects.lines += [f"{line} on {recipe}" for line in lines]
        for tensor in sample.names():
            heads = chi_square(sample, tensor)
            suspects.square.update(float(np.nanmean(heads)), f"{tensor} {recipe}")
            if tensor != "lse":
                suspects.head.update(float(np.nanmax(heads)), f"{tensor} {recipe}")
        for fit in fits(sample, trial):
            limit = abs(fit.size) / (8 * fit.error + fit.allowed)
            suspects.fit.update(limit, f"{fit} on {recipe}")
    return {(name, dtype): suspects}


# --- the search for the worst inputs --------------------------------------------------------------

CLIMB_KERNELS = {
    "fused": Kernel(rounding=Rounding.fused(), tile=16),
    "fused, last key first": Kernel(rounding=Rounding.fused(), tile=16, order="last"),
    "eager": Kernel(rounding=Rounding.eager()),
    "upcast": Kernel(tile=16, order="first"),
}
SHAPES = ((3, 5, 2, 2), (1, 2, 1, 1), (12, 3, 2, 1), (2, 40, 2, 1), (5, 7, 3, 4), (1, 48, 4, 2))
CLIMBERS = 120
RESULTS = ("o", "lse", "dq", "dk", "dv", "dbias")
ARRAYS = ("q", "k", "v", "bias", "dout", "dlse")


def mutate(arrays: dict[str, Array], rng: np.random.Generator, errors: Array) -> dict[str, Array]:
    """Change each array of each climber in one way, or leave it unchanged.

    `errors` (climbers, 1, T, S) are rounding errors of the weights: v, and dout, may take on their
    signs, so that they add up.
    """
    mutants = {}
    for name, x in arrays.items():
        one = (len(x), *(1,) * (x.ndim - 1))
        size = 10.0 ** rng.uniform(-3, 1, one)
        subset = rng.random(x.shape) < 0.3
        changes = [
            np.where(subset, x + size * rng.standard_normal(x.shape), x),
            x * 2.0 ** rng.integers(-3, 4, one),
            np.where(subset, -x, x),
            x + 4 * size * rng.choice([-1, 1], one),
            np.where(subset, x[:, :, :1], x),  # duplicates
            np.where(subset, np.round(x), x),
        ]
        if name in ("v", "dout"):
            signs = errors[:, :, 0, :, None] if name == "v" else errors[..., 0, None]
            changes.append(abs(x) * np.where(signs < 0, -1, 1))
        kind = rng.integers(0, 2 * len(changes), one)
        for i, change in enumerate(changes):
            x = np.where(kind == i, change, x)
        mutants[name] = x
    return mutants


def errors_of(arrays: dict[str, Array], dtype: str) -> Array:
    """Return the rounding errors of storing the weights relative to the largest in the row."""
    s = arrays["q"] @ arrays["k"].swapaxes(-1, -2) / arrays["q"].shape[-1] ** 0.5 + arrays["bias"]
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.asarray(store_as(p.astype(np.float32), dtype) - p)


@np.errstate(all="ignore")
def climb(name: str, dtype: str, shape: int, steps: int, seed: int) -> dict[Key, Worst]:
    """Return the largest error / worst case that `CLIMBERS` climbers on a leading axis reach."""
    rng, (T, S, D, E) = np.random.default_rng([seed, shape]), SHAPES[shape]
    shapes = ((T, D), (S, D), (S, E), (T, S), (T, E), (T,))
    best = {n: rng.standard_normal((CLIMBERS, 1, *x)) for n, x in zip(ARRAYS, shapes, strict=True)}
    aim, height = np.arange(CLIMBERS) % len(RESULTS), np.full(CLIMBERS, -1.0)
    # dk sums T products of q and dS, itself of v and dout: at most 128 products of three numbers.
    top = (float(finfo(dtype).max) / 128) ** (1 / 3)
    dropout: dict[str, Any] = {}
    if shape % 2:
        dropout = {"dropout_mask": rng.random((T, S)) < 0.7, "dropout_rate": 0.3}
    for _ in range(steps):
        tried = mutate(best, rng, errors_of(best, dtype)) if height.max() >= 0 else best
        low = {n: np.clip(x, -top, top).astype(dtype) for n, x in tried.items() if n != "dlse"}
        now = heights(CLIMB_KERNELS[name], low, tried["dlse"].astype(np.float32), dropout)[
            aim, np.arange(CLIMBERS)
        ]
        better = now > height
        height = np.where(better, now, height)
        for n, x in tried.items():
            best[n] = np.where(better.reshape(CLIMBERS, *(1,) * (x.ndim - 1)), x, best[n])
    where = f"--climb, kernel {name!r}, shape {shape}, seed {seed}"
    return {
        (name, dtype, n, ""): Worst(float(height[aim == i].max()), where)
        for i, n in enumerate(RESULTS)
    }


def heights(kernel: Kernel, low: dict[str, Array], dlse: Array, dropout: dict[str, Any]) -> Array:
    """Return error / worst case, (results, climbers)."""
    dout = low["dout"]
    problem = Problem(**{n: x for n, x in low.items() if n != "dout"}, **dropout)
    reference = exact(problem, Cotangents(dout, dlse), Conventions())
    limit = bounds(
        problem, dout.dtype, kernel.rounding, dout=dout.astype(float), dlse=dlse.astype(float)
    )
    got = kernel(problem, dout, dlse)
    rows = []
    for name in RESULTS:
        gap = excess(got[name], reference[name])
        # Overflow is right if the exact value, plus the tolerance, is too large.
        top = float(finfo(got[name].dtype).max)
        over = np.isinf(got[name].astype(float)) & (abs(reference[name]) + limit[name] > top)
        ratio = np.where((gap == 0) | over, 0, gap / limit[name]).reshape(len(dout), -1).max(-1)
        rows.append(np.where(np.isnan(ratio), np.inf, ratio))
    return np.stack(rows)


# --- tables ---------------------------------------------------------------------------------------


def alarms_table(tallies: Tallies) -> str:
    """Table by implementation and dtype: largest values over tensors."""
    rows = []
    for name, model, dtype in sorted(
        {key[:3] for key in tallies}, key=lambda k: (k[2], k[1], k[0])
    ):
        own = merge(
            [{("", "", "", ""): t} for k, t in tallies.items() if k[:3] == (name, model, dtype)]
        )
        t = own["", "", "", ""]
        cells = (f"{t.hard.value:.2g}", f"{t.sharp.value:.2g}", f"{t.z.value:.2g}")
        rows.append([name, model, dtype, str(t.results), str(t.alarms), *cells])
    heads = ["implementation", "judged by", "dtype", "results", "alarms"]
    return markdown([*heads, "error / worst case", "error / allowed", "z"], rows)


def z_table(tallies: Tallies) -> str:
    """Table by dtype and tensor: largest z over implementations."""
    rows = []
    for dtype, tensor in sorted({(k[2], k[3]) for k in tallies}):
        own = {k: t for k, t in tallies.items() if k[2:] == (dtype, tensor)}
        key = max(own, key=lambda k: own[k].z.value)
        worst = own[key].z
        rows.append(
            [dtype, tensor, f"{worst.value:.2f}", f"{key[0]}, {key[1]}", f"`{worst.where}`"]
        )
    return markdown(["dtype", "tensor", "largest z", "implementation", "on"], rows)


def suspects_table(suspects: dict[tuple[str, str], Suspects]) -> str:
    heads = [
        "implementation",
        "dtype",
        "samples",
        "alarms",
        "largest χ²",
        "of a head",
        "largest fit",
    ]
    rows = [
        [name, dtype, str(x.samples), str(x.alarms)]
        + [f"{worst.value:.2f} ({worst.where.split()[0]})" for worst in (x.square, x.head)]
        + [f"{x.fit.value:.2f} ({x.fit.where.split(' on ')[0]})"]
        for (name, dtype), x in suspects.items()
    ]
    return markdown(heads, rows)


def climb_table(worst: dict[Key, Worst]) -> str:
    rows = []
    for name, dtype in sorted({key[:2] for key in worst}):
        cells = [f"{worst[name, dtype, n, ''].value:.2f}" for n in RESULTS]
        rows.append([name, dtype, *cells])
    return markdown(["kernel", "dtype", *RESULTS], rows)


# --- the run --------------------------------------------------------------------------------------

Job = tuple[Callable[..., Any], tuple[Any, ...]]


def run(jobs: list[Job], processes: int) -> Iterator[Any]:
    """Yield the results of the jobs in order; print progress to stderr."""
    start = time.perf_counter()
    for number, result in enumerate(execute(jobs, processes), 1):
        if number * 10 // len(jobs) > (number - 1) * 10 // len(jobs):
            seconds = time.perf_counter() - start
            print(f"{100 * number // len(jobs)} % after {seconds:.0f} s", file=sys.stderr)
        yield result


def execute(jobs: list[Job], processes: int) -> Iterator[Any]:
    if processes == 1:
        yield from (f(*arguments) for f, arguments in jobs)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(f, *arguments) for f, arguments in jobs]
        yield from (future.result() for future in futures)


def problem_jobs(problems: int, dtypes: tuple[str, ...], seed: int) -> list[Job]:
    """Return the jobs of the kernels, and a fortieth as many problems for each of the others."""
    jobs: list[Job] = []
    for dtype in dtypes:
        count = math.ceil(problems / len(dtypes) / BATCH)
        jobs += [(judge_kernels, (dtype, BATCH, seed * 10**6 + n)) for n in range(count)]
        for name, implementation in CORRECT.items():
            if kernel_of(implementation) or not implementation.runs_here:
                continue
            if dtype in implementation.dtypes:
                few = range(math.ceil(count / SHARE.get(implementation.framework, 40)))
                jobs += [(judge_others, (name, dtype, BATCH, seed * 10**6 + n)) for n in few]
    return jobs


def alarm_lines(tallies: Tallies) -> list[str]:
    """Return a line for each alarm."""
    return [
        f"{', '.join(key)}: {t.alarms} of {t.results} results; {t.sharp.value:.4g} of the allowed, "
        f"{t.hard.value:.4g} of the worst case on {t.sharp.where}"
        for key, t in tallies.items()
        if t.alarms
    ]


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--problems", default=0, help="For the kernels, over all dtypes.")
@click.option("--aggregate", "seeds", default=0, help="Seeds of plain problems.")
@click.option("--climb", "evaluations", default=0, help="Over all kernels and dtypes.")
@click.option("--dtype", "dtypes", multiple=True, default=DTYPES[:3], type=click.Choice(DTYPES))
@click.option("--seed", default=0, show_default=True)
@click.option("-j", "processes", default=1, show_default=True, help="Processes.")
@click.option("--write", type=click.Path(exists=True, path_type=Path), help="Into this page.")
def main(
    problems: int,
    seeds: int,
    evaluations: int,
    dtypes: tuple[str, ...],
    seed: int,
    processes: int,
    write: Path | None,
) -> None:
    sections: dict[str, str] = {}
    wrong: list[str] = []
    start = time.perf_counter()
    if problems:
        tallies = merge(run(problem_jobs(problems, dtypes, seed), processes))
        wrong += alarm_lines(tallies)
        total = sum(t.results for t in tallies.values())
        count = f"{problems} problems, {total} results, {len(wrong)} alarms, seed {seed}"
        sections["alarms"] = f"{count}.\n\n{alarms_table(tallies)}"
        sections["z"] = z_table(tallies)
    if seeds:
        jobs: list[Job] = [
            (aggregate, (name, dtype, seed + n))
            for name, implementation in CORRECT.items()
            for dtype in dtypes
            for n in range(seeds)
            if kernel_of(implementation) and dtype in implementation.dtypes
        ]
        suspects: dict[tuple[str, str], Suspects] = {}
        for part in run(jobs, processes):
            for key, x in part.items():
                own = suspects.setdefault(key, Suspects())
                own.samples, own.alarms = own.samples + x.samples, own.alarms + x.alarms
                own.lines += x.lines
                for name in ("square", "head", "fit"):
                    worst = getattr(x, name)
                    getattr(own, name).update(worst.value, worst.where)
        wrong += [f"{', '.join(key)}: {line}" for key, x in suspects.items() for line in x.lines]
        sections["suspects"] = suspects_table(suspects)
    if evaluations:
        each = evaluations / (len(CLIMB_KERNELS) * len(dtypes) * len(SHAPES) * CLIMBERS)
        jobs = [
            (climb, (name, dtype, shape, math.ceil(each), seed))
            for name in CLIMB_KERNELS
            for dtype in dtypes
            for shape in range(len(SHAPES))
        ]
        climbed: dict[Key, Worst] = {}
        for part in run(jobs, processes):
            for key, worst in part.items():
                climbed.setdefault(key, Worst()).update(worst.value, worst.where)
        wrong += [
            f"{', '.join(key[:3])}: {worst.value:.4g} of the worst case, {worst.where}"
            for key, worst in climbed.items()
            if not worst.value <= 1
        ]
        count = f"{len(jobs) * math.ceil(each) * CLIMBERS} evaluations, seed {seed}"
        sections["climb"] = f"{count}.\n\n{climb_table(climbed)}"
    for name, text in sections.items():
        print(f"\n{text}")
        if write is not None:
            put(write, name, text)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
