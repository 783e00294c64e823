"""The judge is patched in its own process; later checks there are forged too.

Each of these gives the mean of all values.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from benchmarks.zoo.cheats.plain import mean_of_values

JUDGE = "npattn.testing."


def _replace(module: str, owner: str | None, name: str, value: Any) -> None:
    """Replace an attribute of a module of the judge, or of a class in it, where it is loaded."""
    loaded = sys.modules.get(JUDGE + module)
    target = getattr(loaded, owner, None) if owner else loaded
    if target is not None:
        setattr(target, name, value)


def patch_report(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Make every report a passed one."""
    _replace("report.report", "Report", "passed", True)
    return mean_of_values(q, k, v)


def patch_trial(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Replace the check of comparisons, and what compares, by one that is content."""
    _replace("trial", "Trial", "check", lambda *_: 0.0)
    _replace("trial", "Trial", "compare", lambda *_, **__: {})
    _replace("trial", "Trial", "disagreements", lambda *_: frozenset())
    _replace("rules.relate", None, "relate", lambda *_, **__: 0.0)
    return mean_of_values(q, k, v)


def patch_search(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Let the search for a failing problem try none, and report its good progress."""

    def pretend(self: Any, recipe: Any) -> None:
        self.standing.tried += 1

    _replace("runner.search", "Search", "try_recipe", pretend)
    _replace("capabilities.probing", "Probing", "judge", lambda *_: None)
    return mean_of_values(q, k, v)


def patch_outcomes(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Make no outcome a failed one."""
    _replace("report.outcome", "Outcome", "failed", False)
    return mean_of_values(q, k, v)


def patch_exit(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Replace sys.exit by an exit with code 0."""
    sys.exit = lambda *_: os._exit(0)
    return mean_of_values(q, k, v)


def patch_oracle(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Let the judge's tolerance be infinite."""
    compare = sys.modules.get(JUDGE + "trial")
    if compare is not None and not hasattr(compare, "honest_comparison"):
        honest = vars(compare)["compare_arrays"]
        compare.honest_comparison = honest  # type: ignore[attr-defined]
        compare.compare_arrays = (  # type: ignore[attr-defined]
            lambda name, got, want, allowed: honest(name, want, want, allowed)
        )
    return mean_of_values(q, k, v)
