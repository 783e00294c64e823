"""Time until a wrong implementation is red, and of a whole check of one that is right.

    python benchmarks/first_red.py
    python benchmarks/first_red.py --every 6 --whole

Processor seconds of one thread, so that other programs count little. A mutant is red with the
first failure at any level, `check(fail_fast=True)`, the probe included and shrinking left out. A
mutant that only the rule aggregate suspects is not red. The whole check is that of `numpy.flash`;
its share is the time in the function and its gradient.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from npattn.testing import Implementation, check
from npattn.testing.targets.numpy import flash, flash_backward
from npattn.zoo.mutants import MUTANTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th mutant only")
    parser.add_argument("--whole", action="store_true", help="the whole check too")
    options = parser.parse_args()
    seconds: dict[str, float] = {}
    for name in list(MUTANTS)[:: options.every]:
        seconds[name], rules = time_to_red(name)
        print(f"{seconds[name]:6.2f} s  {name}: {', '.join(rules) or 'not red'}", flush=True)
        if not rules:
            del seconds[name]
    worst = max(seconds, key=lambda name: seconds[name])
    print(
        f"{len(seconds)} mutants: median {statistics.median(seconds.values()):.2f} s, "
        f"worst {seconds[worst]:.2f} s ({worst})"
    )
    if options.whole:
        whole, own = time_whole_check()
        print(f"whole check of numpy.flash: {whole:.1f} s, {own / whole:.0%} of it its own")


def time_to_red(name: str) -> tuple[float, list[str]]:
    """Return the seconds until a mutant is red, and the rules that are."""
    mutant = MUTANTS[name]
    start = time.process_time()
    report = check(
        mutant.forward,
        backward=mutant.backward,
        dtypes=mutant.dtypes,
        rounding=mutant.rounding,
        require="all",
        fail_fast=True,
        shrink=False,
        diagnosis=False,
    )
    return time.process_time() - start, [o.rule for o in report.outcomes if o.failed]


def time_whole_check() -> tuple[float, float]:
    """Return the seconds of a default check, and those in the function and its gradient."""
    spent = [0.0]

    def count_time(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return f(*args, **kwargs)
            finally:
                spent[0] += time.process_time() - start

        call.__wrapped__ = f  # type: ignore[attr-defined]  # whose signature is read
        return call

    implementation = Implementation(
        count_time(flash), backward=count_time(flash_backward), framework="numpy"
    )
    start = time.process_time()
    check(implementation)
    return time.process_time() - start, spent[0]


if __name__ == "__main__":
    main()
