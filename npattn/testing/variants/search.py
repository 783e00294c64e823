"""Sample cases with Hypothesis, and shrink the first that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from npattn.errors import optional_import

with optional_import("npattn.testing needs", "hypothesis, rich and click", "check"):
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st


class _Failed(Exception):
    pass


def search(
    choices: Mapping[str, Sequence[Any]],
    fails: Callable[[dict[str, Any]], bool],
    examples: int,
    start: int,
) -> None:
    """Call `fails` with fields sampled from `choices` until one fails, then with smaller ones.

    The last call that returned True had the smallest fields.
    """

    @seed(start)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(st.fixed_dictionaries({n: st.sampled_from(list(x)) for n, x in choices.items()}))
    def attempt(fields: dict[str, Any]) -> None:
        if fails(fields):
            raise _Failed

    with suppress(_Failed):
        attempt()
