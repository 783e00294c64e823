"""Rules about the arrays that several calls, results or threads share [15].

Each is an experiment on one problem: `show` repeats it, for scripts.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.problem import Cotangents, Problem
from npattn.testing.adapters.base import ImplementationError, Results
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.adapters.views import pack, unpack
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.shapes import PLAIN_SHAPE
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools
from npattn.testing.levels import Level
from npattn.testing.rules.register import Check, Condition, keeps_nothing, rule
from npattn.testing.trial import GRADIENTS, Trial, Violation

Experiment = Callable[[Trial, Problem, Cotangents], "float | None"]
EXPERIMENTS: dict[str, Experiment] = {}
"""Experiments, by rule."""
SIZES = {"T": (5, 1, 8, 16, 19), "S": (7, 8, 13, 16, 17)}
"""Small: nothing is shrunk, and each is called often."""
THREADED = 6
"""Calls of each of two threads."""


def _few(
    count: int, square: bool, lengths: Mapping[str, tuple[int, ...]]
) -> Callable[[Trial, int, int], list[Recipe]]:
    """Return a sampling of a few small recipes: plain ones with K = H, and mixed ones, in turn."""

    def recipes(trial: Trial, seed: int, examples: int) -> list[Recipe]:
        """Return at most `count` recipes, with K = H and with any heads in turn; none of size 0."""
        space = trial.space
        sizes = lengths
        if space.few_shapes:  # those of one shape: that of other rules, if none are named
            sizes = {"T": (PLAIN_SHAPE.T,), "S": (PLAIN_SHAPE.S,)} if square else {}
            if lengths is not SIZES:
                sizes = {name: values[:1] for name, values in lengths.items()}
        force: dict[str, Any] = {"broadcast": False, "square": square, "same size": square}
        force |= {n: x for n, x in sizes.items() if n not in space.sizes and n != "S" * square}
        heads = tuple(pair for pair in space.heads if pair[0] <= 4) or tuple(space.heads)
        equal = tuple((H, K) for H, K in heads if H == K > 1) or heads
        plain, mixed = (
            Pools(space, force=force | {"heads": pairs}, nonempty=True, shapes=1)
            for pairs in (equal, heads)
        )
        if not all(mixed.lists.values()):
            return []  # sizes of 0 only
        seeds = np.random.default_rng([seed, 29]).integers(
            2**31, size=min(count, max(2, examples // 10))
        )
        turns = enumerate(seeds.tolist())
        return [mixed.recipe(2 * n) if turn % 2 else plain.recipe(2 * n + 1) for turn, n in turns]

    return recipes


def experiment(
    name: str,
    count: int,
    unless: Condition = lambda trial: None,
    *,
    square: bool = False,
    level: Level = "conduct",
    sizes: Mapping[str, tuple[int, ...]] = SIZES,
    recipes: Callable[[Trial, int, int], list[Recipe]] | None = None,
) -> Callable[[Experiment], Check]:
    """Register an experiment as a rule that is asked on `count` problems.

    They are small, of these sizes where the user leaves a choice, `square` ones with T = S and D =
    E; or those that `recipes` returns for (trial, seed, examples).
    """

    def register(run: Experiment) -> Check:
        EXPERIMENTS[name] = run

        def check(trial: Trial, recipe: Recipe) -> float | None:
            problem = trial.problem(recipe)
            return run(trial, problem, trial.cotangents(recipe, problem))

        check.__doc__, check.__module__ = run.__doc__, run.__module__
        drawn = recipes or _few(count, square, sizes)
        return rule(name, "15", level=level, unless=unless, recipes=drawn)(check)

    return register


def judge_call(
    trial: Trial, results: Results, problem: Problem, cotangents: Cotangents, when: str
) -> float | None:
    """Return the worst ratio; raise Violation if it is wrong that a call of its own gets right."""
    comparisons = trial.compare(results, problem, cotangents)
    wrong = [c for c in comparisons.values() if not c.passed]
    if not wrong:
        return max((c.ratio for c in comparisons.values()), default=0.0)
    alone = trial.against_oracle(problem, cotangents)
    if not all(alone[c.name].passed for c in wrong):
        return None  # other rules report it
    text = "\n".join([f"results are wrong {when}:", *(str(c) for c in wrong)])
    ratio = max(c.ratio for c in wrong)
    raise Violation(text, problem, cotangents, "calls", ratio)


def results_with(
    trial: Trial, problem: Problem, cotangents: Cotangents, inputs: dict[str, Any]
) -> Results:
    """Return results and gradients of a call with these arrays."""
    f = trial.implementation
    results = f.forward(problem, inputs=inputs)
    if trial.gradients:
        results += f.gradients(problem, cotangents, inputs=inputs)
    return results


def largest(ratios: list[float | None]) -> float | None:
    """Return the largest ratio, None if there is none."""
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def roll_contents(f: Implementation, problem: Problem, number: int) -> Problem:
    """Return a problem of the same shapes and options, whose q, k, v are shifted."""
    shifted = {n: np.roll(getattr(problem, n), number) for n in "qkv"}
    return f.fit(problem.replace(**shifted))


# --- one buffer for several inputs ---


def _packed_inputs(f: Implementation, problem: Problem, by_head: bool) -> dict[str, Any]:
    inputs = f.inputs(problem)
    swap = f.layout == "BTHD" and problem.q.ndim == 4
    with f.framework.allowing(problem.q.dtype):
        packed = f.framework.give(pack(*f.raw_inputs(problem), by_head))
        return inputs | dict(zip("qkv", unpack(packed, problem, by_head, swap), strict=True))


def _refuses_packed(trial: Trial) -> str | None:
    """Return the reason why slices of one buffer cannot be passed; None if they can."""
    if reason := keeps_nothing(trial):
        return reason
    if trial.implementation.packing is not None:
        return "takes one packed array as it is"
    if trial.implementation.storage is not None:
        return "k and v are stored otherwise than q"
    if trial.implementation.latent is not None:
        return "its inputs are parts of q and k"
    quantized = trial.implementation.quantized
    if quantized is not None and 0 < len(quantized.per) < 3:
        return "q, k and v are of several dtypes"
    if not {"transposed", "stepped"} & trial.space.structure:
        return "refuses every view that is not contiguous"
    base = trial.space.base()
    if (base.T, base.D) != (base.S, base.E):
        return "sizes allow no T = S with D = E"
    problem = trial.problem(base)
    try:
        trial.implementation.forward(
            problem, inputs=_packed_inputs(trial.implementation, problem, False)
        )
    except ImplementationError as err:
        return f"refuses slices of one buffer ({err})"
    return None


@experiment("packed-inputs", 8, _refuses_packed, square=True)
def packed_inputs(trial: Trial, problem: Problem, cotangents: Cotangents) -> float | None:
    """q, k, v may be slices of one packed buffer, and results of other operations.

    A fused projection gives (B, T, H + 2K, D), [Q | K | V] or [q|k|v] head by head; frameworks that
    differentiate get slices that are no leaves. Broken by kernels that take the strides of q for
    those of k and v, that read a base buffer in one order only, or that cut a graph of autograd.
    """
    if (problem.T, problem.D) != (problem.S, problem.E):
        return None
    orders = (False, True) if problem.H == problem.K and not problem.headless else (False,)
    f, ratios = trial.implementation, []
    for by_head in orders:
        results = f.forward(problem, inputs=_packed_inputs(f, problem, by_head))
        if trial.gradients:
            no_leaves = f if f.backward is not None else f.without_leaves()
            inputs = _packed_inputs(f, problem, by_head)
            results += no_leaves.gradients(problem, cotangents, inputs=inputs)
        when = f"as slices of one buffer, {'head by head' if by_head else 'side by side'}"
        ratios.append(judge_call(trial, results, problem, cotangents, when))
    return largest(ratios)


ALIASES = {"v is k": ("k", "v"), "q is k": ("k", "q")}
"""Pairs of inputs that may be one object: the first stands for the second too."""


def _refuses_aliases(trial: Trial) -> str | None:
    f = trial.implementation
    if f.packing is not None:
        return "takes k and v in one array"
    if f.storage is not None and f.storage.appends:
        return "writes new keys and values into its cache"
    return keeps_nothing(trial)


@experiment("aliased-inputs", 8, _refuses_aliases, square=True)
def aliased_inputs(trial: Trial, problem: Problem, cotangents: Cotangents) -> float | None:
    """k and v may be one object, and so may q and k.

    Shared projections and latent attention pass one array twice. Broken by buffers and gradients
    that are kept by the address or the identity of an input, and by work in place.
    """
    ratios, f = [], trial.implementation
    for when, (name, other) in ALIASES.items():
        one, apart = getattr(problem, name), "q" in (name, other) and f.storage is not None
        apart |= f.quantized is not None and not f.quantized.alike(name, other)
        apart |= f.latent is not None
        if one.shape != getattr(problem, other).shape or apart:
            continue
        same = problem.replace(**{other: one})
        inputs = f.inputs(same)
        inputs[other] = inputs[name]
        results = results_with(trial, same, cotangents, inputs)
        ratios.append(judge_call(trial, results, same, cotangents, f"where {when}"))
    return largest(ratios)


# --- two threads ---


def _no_threads(trial: Trial) -> str | None:
    if not trial.implementation.takes_threads:
        return "its worker answers one request after the other"
    if variable := trial.implementation.interpreter:
        return f"with {variable} kernels run one at a time"
    name = trial.implementation.framework.name
    return None if name in ("numpy", "torch") else f"functions of {name} arrays are not asked"


@experiment("two-threads", 3, _no_threads)
def two_threads(trial: Trial, problem: Problem, cotangents: Cotangents) -> float | None:
    """Two threads may call it at once, each with its own arrays.

    Servers and data loaders do. Broken by work buffers, plans and statistics that all calls of a
    process share.
    """
    problems = (problem, roll_contents(trial.implementation, problem, 1))
    barrier = threading.Barrier(len(problems))

    def work(problem_of_thread: Problem) -> list[Results]:
        barrier.wait()
        return [trial.results(problem_of_thread, cotangents) for _ in range(THREADED)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # few calls show what they share
    try:
        with ThreadPoolExecutor(len(problems)) as pool:
            results = list(pool.map(work, problems))
    finally:
        sys.setswitchinterval(before)
    return largest(
        [
            judge_call(trial, result, problem_of_thread, cotangents, "in one of two threads")
            for problem_of_thread, several in zip(problems, results, strict=True)
            # One of those that have the same bits.
            for result in {tuple(x.tobytes() for _, x in r.pairs): r for r in several}.values()
        ]
    )


def show(
    name: str,
    f: Implementation,
    problem: Problem,
    cotangents: Cotangents | None,
    conventions: Conventions,
    rounding: Rounding,
) -> None:
    """Repeat the experiment of a rule on one problem, and print what it finds.

    Without cotangents no gradients are asked.
    """
    space = Space(features=f.features, dtype=str(problem.q.dtype))
    gradients = frozenset(GRADIENTS if cotangents is not None else ())
    trial = Trial(f, conventions, rounding, space, gradients)
    cotangents = cotangents or Cotangents(np.zeros((1, 1)), None)  # without gradients none is read
    try:
        ratio = EXPERIMENTS[name](trial, problem, cotangents)
    except Violation as err:
        print("WRONG", err)
    else:
        print("ok   ", "nothing to show" if ratio is None else f"{ratio:.3g} × tolerance")
