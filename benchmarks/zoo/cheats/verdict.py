"""Judge one target by the default check and say no more than an exit code, as ``npattn check``.

    python -m benchmarks.zoo.cheats.verdict TARGET [--backward TARGET] [--examples N] [--seed N]

The first failure of a required level ends it, none is shrunk and no cause is searched: none of
these changes the verdict.
"""

from __future__ import annotations

import argparse
import sys

from npattn.testing.adapters.implementation import Implementation
from npattn.testing.adapters.load import load_callable
from npattn.testing.judging import check


def main(arguments: list[str] | None = None) -> int:
    """Judge what the arguments name; return the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.zoo.cheats.verdict")
    parser.add_argument("target")
    parser.add_argument("--backward")
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    backward = chosen.backward and load_callable(chosen.backward)
    f = Implementation(load_callable(chosen.target), backward=backward, framework="numpy")
    report = check(
        f,
        examples=chosen.examples,
        seed=chosen.seed,
        fail_fast=True,
        shrink=False,
        diagnosis=False,
        progress=False,
    )
    for outcome in report.outcomes:
        if outcome.failed and outcome.level in report.require:
            lines = outcome.message.splitlines()[:1]
            print(f"{outcome.rule}:", *lines)
    if not report.tested:
        return 2
    return 0 if report.passed else 1


if __name__ == "__main__":
    code = main()
    sys.exit(code)  # looked up now, as `npattn check` does: a cheat may have replaced it
