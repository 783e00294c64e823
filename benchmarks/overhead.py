"""What judging costs beside the function that is judged: `check`, split by what it spends time in.

    python benchmarks/overhead.py [target] [dtype ...]

Prints milliseconds of process time a problem, median and mean: in the function under test, in the
oracle, in what is allowed, and in the rest, the overhead, which is split once more. What is spent
between two problems, on drawing say, is the later one's.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import npattn.api
from npattn.problem import Problem
from npattn.testing import Implementation, check
from npattn.testing.bounds.allowed import bounds, deviations, tolerance
from npattn.testing.bounds.ulp import excess, half_ulp
from npattn.testing.compare import compare_arrays
from npattn.testing.runner.search import Search
from npattn.testing.targets import load
from npattn.testing.trial import Trial

WHOLE = ("function", "oracle", "allowed")
OVERHEAD = ("drawing", "problems", "handing over", "comparing", "rules")


class Clock:
    """Time by what it is spent in, each second once: what is called takes it from its caller."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.within = ["rules"]
        self.since = time.process_time()

    def turn(self) -> None:
        now = time.process_time()
        self.spent[self.within[-1]] += now - self.since  # type: ignore[assignment]
        self.since = now

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(*args: Any, **options: Any) -> Any:
            # What the oracle or the bound needs is a part of them.
            inner = self.within[-1] if self.within[-1] in WHOLE else name
            self.turn()
            self.within.append(inner)
            try:
                return function(*args, **options)
            finally:
                self.turn()
                self.within.pop()

        return wrapped

    def drawn(self, recipes: Iterator[Any]) -> Iterator[Any]:
        following = self.timed("drawing", lambda: next(recipes, None))
        while (recipe := following()) is not None:
            yield recipe


def replaced(clock: Clock, name: str, function: Callable[..., Any]) -> None:
    """Time a function under every name by which a module of npattn knows it."""
    timed = clock.timed(name, function)
    for module in [m for n, m in sys.modules.items() if n.startswith("npattn")]:
        for key in [key for key, value in vars(module).items() if value is function]:
            setattr(module, key, timed)


def watched(clock: Clock) -> list[Counter[str]]:
    """Time what `check` calls; what is returned fills with what each problem took."""
    for function in (npattn.api.evaluate, npattn.api.backward):
        replaced(clock, "oracle", function)
    for function in (tolerance, bounds, deviations):
        replaced(clock, "allowed", function)
    for function in (compare_arrays, excess, half_ulp):
        replaced(clock, "comparing", function)
    methods = [
        (Problem, "__post_init__", "problems"),
        (Trial, "problem", "problems"),
        (Trial, "cotangents", "problems"),
        *((Implementation, n, "handing over") for n in ("forward", "gradients")),
        (Search, "run", "rules"),
    ]
    for owner, method, name in methods:
        setattr(owner, method, clock.timed(name, getattr(owner, method)))
    planned, one = Trial.planned, Search.one
    Trial.planned = lambda *args: clock.drawn(planned(*args))  # type: ignore[method-assign]
    each: list[Counter[str]] = []
    before = Counter(clock.spent)

    def watching(search: Search, recipe: Any) -> None:
        tried = search.tried
        try:
            one(search, recipe)
        finally:
            clock.turn()
            if search.tried > tried:
                each.append(Counter({n: t - before[n] for n, t in clock.spent.items()}))
                before.update(each[-1])

    Search.one = watching  # type: ignore[method-assign]
    return each


def main(target: str = "numpy.flash", *dtypes: str) -> None:
    clock = Clock()
    each = watched(clock)
    f, backward = load(target)
    given = None if backward is None else clock.timed("function", backward)
    timed = Implementation(clock.timed("function", f), backward=given)
    for dtype in dtypes or ("float32",):
        each.clear()
        start = time.process_time()
        check(timed, dtypes=(dtype,))
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
