"""Cost of judging beside the function under test: processor time of `check` by stage.

    python -m benchmarks.speed.scripts.overhead [target] [dtype ...]

Prints milliseconds of process time a problem, median and mean: in the function under test, in the
oracle, in the tolerances, and in the rest, the overhead, which is split once more. Time between two
problems, for sampling say, counts for the later one.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import npattn.oracle.api
from npattn.problem import Problem
from npattn.testing import Implementation, check
from npattn.testing.bounds.allowed import bounds, deviations, tolerance
from npattn.testing.bounds.ulp import excess, half_ulp
from npattn.testing.comparison import compare_arrays
from npattn.testing.runner.search import RuleSearch
from npattn.testing.targets import load
from npattn.testing.trial import Trial

WHOLE = ("function", "oracle", "allowed")
OVERHEAD = ("drawing", "problems", "handing over", "comparing", "rules")


class Clock:
    """Time by stage, each second counted once: for the innermost stage."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.within = ["rules"]
        self.since = time.process_time()

    def turn(self) -> None:
        now = time.process_time()
        self.spent[self.within[-1]] += now - self.since  # type: ignore[assignment]
        self.since = now

    def time(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            # Calls from the oracle or the bound are a part of them.
            inner = self.within[-1] if self.within[-1] in WHOLE else name
            self.turn()
            self.within.append(inner)
            try:
                return function(*args, **options)
            finally:
                self.turn()
                self.within.pop()

        return wrapper

    def time_sampling(self, recipes: Iterator[Any]) -> Iterator[Any]:
        next_recipe = self.time("drawing", lambda: next(recipes, None))
        while (recipe := next_recipe()) is not None:
            yield recipe


def time_everywhere(clock: Clock, name: str, function: Callable[..., Any]) -> None:
    """Time a function under every name by which a module of npattn knows it."""
    wrapper = clock.time(name, function)
    for module in [m for n, m in sys.modules.items() if n.startswith("npattn")]:
        for key in [key for key, value in vars(module).items() if value is function]:
            setattr(module, key, wrapper)


def time_problems(clock: Clock) -> list[Counter[str]]:
    """Time the calls of `check`; return a list that fills with the times of each problem."""
    for function in (npattn.oracle.api.evaluate, npattn.oracle.api.backward):
        time_everywhere(clock, "oracle", function)
    for function in (tolerance, bounds, deviations):
        time_everywhere(clock, "allowed", function)
    for function in (compare_arrays, excess, half_ulp):
        time_everywhere(clock, "comparing", function)
    methods = [
        (Problem, "__post_init__", "problems"),
        (Trial, "problem", "problems"),
        (Trial, "cotangents", "problems"),
        *((Implementation, n, "handing over") for n in ("forward", "gradients")),
        (RuleSearch, "run", "rules"),
    ]
    for owner, method, name in methods:
        setattr(owner, method, clock.time(name, getattr(owner, method)))
    cases, try_recipe = Trial.cases, RuleSearch.try_recipe
    Trial.cases = lambda *args: clock.time_sampling(cases(*args))  # type: ignore[method-assign]
    each: list[Counter[str]] = []
    before = Counter(clock.spent)

    def time_recipe(search: RuleSearch, recipe: Any) -> None:
        tried = search.tried
        try:
            try_recipe(search, recipe)
        finally:
            clock.turn()
            if search.tried > tried:
                each.append(Counter({n: t - before[n] for n, t in clock.spent.items()}))
                before.update(each[-1])

    RuleSearch.try_recipe = time_recipe  # type: ignore[method-assign]
    return each


def main(target: str = "numpy.flash", *dtypes: str) -> None:
    clock = Clock()
    each = time_problems(clock)
    f, backward = load(target)
    backward = None if backward is None else clock.time("function", backward)
    implementation = Implementation(clock.time("function", f), backward=backward)
    for dtype in dtypes or ("float32",):
        each.clear()
        start = time.process_time()
        check(implementation, dtypes=(dtype,))
        seconds = time.process_time() - start
        print(f"{target} {dtype}: {len(each)} problems, {seconds:.1f} s; ms a problem")
        rows = {name: [spent[name] for spent in each] for name in (*WHOLE, *OVERHEAD)}
        rows["overhead"] = [sum(spent[n] for n in OVERHEAD) for spent in each]
        for name, times in rows.items():
            indent = "  " if name in OVERHEAD else ""
            median, mean = 1e3 * statistics.median(times), 1e3 * statistics.fmean(times)
            print(f"  {indent + name:15s} median {median:7.3f}   mean {mean:7.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
