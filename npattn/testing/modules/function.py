"""The inside of a module, judged as a function of q, k and v."""

from __future__ import annotations

from dataclasses import dataclass, replace

from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.judging import check
from npattn.testing.modules.call import Form
from npattn.testing.modules.judge import Judge
from npattn.testing.modules.rules import INSIDE
from npattn.testing.report.cause import Cause
from npattn.testing.report.outcome import Outcome
from npattn.testing.rules import PROPERTIES

LEFT_OUT = ("non-finite", "degenerate", "reproducible", "conduct")
"""Levels that are not asked: a NaN key enters the query of its token, and the arrays that a module
gets are made by the function around it."""
RULES_OF_FUNCTIONS = tuple(n for n, p in PROPERTIES.items() if p.level not in LEFT_OUT)
OF_EMPTY_ROWS = ("empty-row", "unseen-keys")
"""Left out where such a row is NaN, which its gradient spreads; the module's own rule asks it."""


@dataclass(frozen=True)
class InsideReport:
    """Outcomes and causes of the function inside."""

    outcomes: list[Outcome]
    causes: list[Cause]


def judge_inside(judge: Judge, examples: int, seed: int) -> tuple[InsideReport | None, str]:
    """Return the report on the function inside; or None, and why there is none."""
    plan, reading = judge.plan, judge.reading
    if judge.changes or judge.dropout_stays or not judge.repeats:
        return None, "the cause is known" if judge.changes else "two calls differ"
    if judge.is_unknown:
        return None, judge.unknown
    if plan.window or plan.softcap or judge.appends:
        return None, "a window, a cap or keys of its own hold always: the other rules judge them"
    inside = judge.inside(reading, plan)
    chosen, exact = inside.exact_selection()
    if chosen is None:
        return None, "its widths are too small for selections"
    dtype = judge.module.dtype if exact else "float16"
    if not exact and judge.module.dtype not in ("float32", "float64"):
        return None, "judged in float32 (dtypes=) where a turn or a scale is undone"
    form = max((f for f in judge.call.forms if " T " in f" {f.shape} "), key=_freedom, default=None)
    alone = plan.conventions.causal == "unless_masked"
    causal = ("unless_masked" if alone else "always") if plan.causal else "never"
    f, options = inside.function(chosen, form, causal)
    sizes = {"H": [chosen.groups * inside.group], "K": [chosen.groups],
             "D": [len(chosen.features)], "E": [chosen.values]}  # fmt: skip
    conventions = replace(plan.conventions, causal="top_left")
    left_out = OF_EMPTY_ROWS if conventions.empty_row == "nan" else ()
    rules = [n for n in RULES_OF_FUNCTIONS if n not in left_out]
    try:
        with judge.restoring(reading):
            inside.select(chosen)
            implementation = Implementation(
                f, framework="torch", features=options, name=judge.module.name
            )
            report = check(
                implementation, only=rules, sizes=sizes, examples=examples,
                dtypes=(dtype,), conventions=conventions, seed=seed, progress=False,
            )  # fmt: skip
    except ImplementationError as err:
        return None, f"a probe raised: {err}"
    names = {o.id: f"{INSIDE}-{o.rule}[{judge.module.dtype}]" for o in report.outcomes}
    outcomes = []
    for o in report.outcomes:
        if o.status != "not applicable" and o.rule != "structure":
            o = replace(o, rule=f"{INSIDE}-{o.rule}", dtype=judge.module.dtype)
            outcomes.append(replace(o, status="not applicable") if o.status == "not judged" else o)
    # What few features leave without power is not passed here; the module's own results are judged.
    causes = [replace(c, rules=tuple(names[r] for r in c.rules)) for c in report.causes]
    return InsideReport(outcomes, causes), ""


def _freedom(form: Form) -> int:
    """Return how freely a form shows keys: by sample, by head, by query."""
    return ("B" in form.shape) + 2 * ("H" in form.shape)
