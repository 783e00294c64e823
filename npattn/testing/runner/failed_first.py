"""The problems that failed last: kept in a file of the user, and asked again before all others."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.report.outcome import Outcome
from npattn.testing.rules import RULES
from npattn.testing.runner.journal import plain_recipe, recipe_of
from npattn.testing.runner.search import RuleSearch
from npattn.testing.trial import Trial, Violation


class FailedProblem(NamedTuple):
    """A rule that failed, the dtype, and the smallest problem that showed it."""

    rule: str
    dtype: str
    recipe: Recipe

    @property
    def id(self) -> str:
        """Name as that of an outcome."""
        return f"{self.rule}[{self.dtype}]"


def list_failed(outcomes: Iterable[Outcome]) -> list[FailedProblem]:
    """Return the problems of the outcomes that failed and can be asked again."""
    return [
        FailedProblem(o.rule, o.dtype, o.sampled)
        for o in outcomes
        if o.failed and o.rule in RULES and o.sampled is not None
    ]


def ask_again(
    implementation: Implementation,
    failed: Sequence[FailedProblem],
    rounding: Rounding | str | None = None,
) -> Iterator[tuple[FailedProblem, str]]:
    """Ask each problem once more, and yield it with what is wrong now; "" if it passes."""
    rounding = implementation.rounding if rounding is None else rounding
    for one in failed:
        space = Space(
            features=implementation.features,
            dtype=one.dtype,
            few_shapes=implementation.framework.compiles,
        )
        model = Rounding.choose(rounding, one.dtype, implementation.weights_storage)
        trial = Trial(implementation, implementation.conventions, model, space)
        search = RuleSearch(RULES[one.rule], trial, 1, shrinks=False)
        with suppress(Violation, ImplementationError):  # it is in search.failure
            search.try_recipe(one.recipe)
        yield one, "" if search.failure is None else str(search.failure.error)


# --- the file -------------------------------------------------------------------------------------


def find_file(target: str) -> Path:
    """Return the file that has the failures of a target in the current folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    folder = Path(home) if home else Path.home() / ".cache"
    key = hashlib.sha256(f"{Path.cwd()}\n{target}".encode()).hexdigest()[:24]
    return folder / "npattn" / "failed" / f"{key}.json"


def read_failed(path: Path) -> list[FailedProblem]:
    """Return the failures in a file; none if it does not exist, or another version wrote it."""
    try:
        entries = json.loads(path.read_text("utf-8"))
        problems = [(e["rule"], e["dtype"], recipe_of(e)) for e in entries]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [FailedProblem(r, d, x) for r, d, x in problems if r in RULES and x is not None]


def write_failed(path: Path, failed: Sequence[FailedProblem]) -> None:
    """Write the failures of a check, in place of those before."""
    entries = [{"rule": r, "dtype": d, "recipe": plain_recipe(x)} for r, d, x in failed]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}.part")
    new.write_text(json.dumps(entries), "utf-8")
    new.replace(path)
