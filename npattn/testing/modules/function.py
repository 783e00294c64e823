"""The inside of a module, judged as a function of q, k and v."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from npattn.conventions import Conventions
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.judging import check
from npattn.testing.modules.call import Form
from npattn.testing.modules.judge import Judge
from npattn.testing.modules.rules import INSIDE, RULES
from npattn.testing.reference.search import FEW
from npattn.testing.report.cause import Cause
from npattn.testing.report.outcome import Outcome
from npattn.testing.rules import PROPERTIES

LEFT_OUT = ("non-finite", "degenerate", "reproducible", "conduct")
"""Levels that are not asked: a NaN key enters the query of its token, and the arrays that a module
gets are made by the function around it."""
RULES_OF_FUNCTIONS = tuple(n for n, p in PROPERTIES.items() if p.level not in LEFT_OUT)
OF_EMPTY_ROWS = ("empty-row", "unseen-keys")
"""Left out where such a row is NaN, which its gradient spreads; the module's own rule asks it."""


class InsideFunction(NamedTuple):
    """Function inside of a module, and the sizes, dtype and conventions that it is judged with."""

    implementation: Implementation
    sizes: dict[str, list[int]]
    dtype: str
    conventions: Conventions


@contextmanager
def open_inside(judge: Judge) -> Iterator[InsideFunction | str]:
    """Give the function inside of a module, whose weights are changed for a while, or why none."""
    plan, reading = judge.plan, judge.reading
    if judge.changes or judge.dropout_stays or not judge.repeats:
        yield "the cause is known" if judge.changes else "two calls differ"
        return
    if judge.is_unknown:
        yield judge.unknown
        return
    if plan.window or plan.softcap or judge.appends:
        yield "a window, a cap or keys of its own hold always: the other rules judge them"
        return
    inside = judge.inside(reading, plan)
    chosen, exact = inside.exact_selection()
    if chosen is None:
        yield "its widths are too small for selections"
        return
    dtype = judge.module.dtype if exact else "float16"
    if not exact and judge.module.dtype not in ("float32", "float64"):
        yield "judged in float32 (dtypes=) where a turn or a scale is undone"
        return
    form = max((f for f in judge.call.forms if f.has_queries), key=rate_freedom, default=None)
    alone = plan.conventions.causal == "unless_masked"
    causal = ("unless_masked" if alone else "always") if plan.causal else "never"
    f, options = inside.function(chosen, form, causal)
    sizes = {"H": [chosen.groups * inside.group], "K": [chosen.groups],
             "D": [inside.count(chosen)], "E": [chosen.values]}  # fmt: skip
    sizes |= {"T": [judge.length], "S": [judge.length]} if judge.length else {}
    conventions = replace(plan.conventions, causal="top_left")
    with judge.restoring(reading):
        inside.select(chosen)
        implementation = Implementation(
            f, framework="torch", features=options, name=judge.module.name
        )
        yield InsideFunction(implementation, sizes, dtype, conventions)


def judge_inside(
    judge: Judge, afford: Callable[[float], int], seed: int
) -> tuple[list[Outcome], list[Cause]]:
    """Return outcomes and causes of the function inside; one outcome that says why if not judged.

    `afford` returns how many examples are asked, for the seconds that one takes; 0 seconds are not
    measured yet. What a few pass, more are asked.
    """

    def leave_out(why: str) -> tuple[list[Outcome], list[Cause]]:
        rule = RULES[INSIDE]
        outcome = Outcome(INSIDE, rule.semantics, rule.about, judge.module.dtype,
                          "not applicable", message=why, level=rule.level)  # fmt: skip
        return [outcome], []

    try:
        with open_inside(judge) as found:
            if isinstance(found, str):
                return leave_out(found)
            f, sizes, dtype, conventions = found
            left_out = OF_EMPTY_ROWS if conventions.empty_row == "nan" else ()
            rules = [n for n in RULES_OF_FUNCTIONS if n not in left_out]
            asked, more = 0, min(FEW, afford(0.0))
            while more > asked:
                started, asked = time.process_time(), more
                report = check(
                    f, only=rules, sizes=sizes, examples=asked,
                    dtypes=(dtype,), conventions=conventions, seed=seed, progress=False,
                )  # fmt: skip
                more = afford((time.process_time() - started) / asked)
                more = 0 if report.verdict == "failed" or more < 2 * FEW else more
    except ImplementationError as err:
        return leave_out(f"a probe raised: {err}")
    names = {o.id: f"{INSIDE}-{o.rule}[{judge.module.dtype}]" for o in report.outcomes}
    outcomes = []
    for o in report.outcomes:
        if o.status != "not applicable" and o.rule != "structure":
            o = replace(o, rule=f"{INSIDE}-{o.rule}", dtype=judge.module.dtype)
            outcomes.append(replace(o, status="not applicable") if o.status == "not judged" else o)
    # What few features leave without power is not passed here; the module's own results are judged.
    causes = [replace(c, rules=tuple(names[r] for r in c.rules)) for c in report.causes]
    return outcomes, causes


def rate_freedom(form: Form) -> int:
    """Return how freely a form shows keys: by sample, by head, by query."""
    return ("B" in form.shape) + 2 * ("H" in form.shape)
