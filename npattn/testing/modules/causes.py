"""Causes of what failed: a step of the module that is replaced, read from the module itself.

A cause is confirmed where it is tried: with it, the reference gives what the module gave, in cases
that failed and in those that passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from npattn.multihead import MultiHeadAttention
from npattn.problem.arrays import Array
from npattn.testing.modules.case import ModuleCase
from npattn.testing.modules.judge import EMPTY_ROWS, Judge, compare_forward
from npattn.testing.modules.plan import Change, Plan
from npattn.testing.modules.rules import RULES
from npattn.testing.report.cause import STEPS, Cause
from npattn.testing.report.outcome import Outcome

Failed = Mapping[str, tuple[Outcome, ModuleCase]]
"""Rules that failed, each with its outcome and the smallest case."""
TRIED = 40
"""Cases of which a cause is tried on."""
DROPOUT = (
    "dropout is active although .eval() was called (F.dropout without training=self.training, or "
    "a layer whose mode does not change)"
)
INPUT_STEPS = ("dq", "dk", "dv")


def explain(judge: Judge, failed: Failed) -> list[Cause]:
    """Return the causes of failures, each rule in one of them at most."""
    unexplained = dict(failed)
    causes = []
    for find in (_find_dropout, _find_changes, _find_keys, _find_gradients, _find_others):
        cause = find(judge, unexplained) if unexplained else None
        if cause is not None:
            causes.append(cause)
            unexplained = {rule: x for rule, x in unexplained.items() if x[0].id not in cause.rules}
    return causes


def _find_dropout(judge: Judge, failed: Failed) -> Cause | None:
    """Return dropout as the cause of what passes without it."""
    if not judge.dropout_stays:
        return None
    with judge.module.watching_dropout(drops=False), judge.forgetting():
        right = [
            outcome.id
            for rule, (outcome, case) in failed.items()
            if all(c.passed for c in RULES[rule].compare(judge, case))
        ]
    if not right:
        return None
    return Cause(DROPOUT, tuple(right), "p", "everywhere", "by chance", confirmed=len(right),
                 name="dropout")  # fmt: skip


def _find_changes(judge: Judge, failed: Failed) -> Cause | None:
    """Return the steps that are replaced as the cause of what they reproduce."""
    if not judge.changes:
        return None
    tried = list(dict.fromkeys([case for _, case in failed.values()] + list(judge.seen)))[:TRIED]
    # What an empty row gives was tried on rows, and a softmax over queries has other empty ones.
    plans = [replace(judge.own_plan, conventions=c) for c in (judge.plan.conventions, *EMPTY_ROWS)]
    best: dict[ModuleCase, bool] = {}
    for plan in plans:
        reproduced = {case: _reproduces(judge, plan, case) for case in tried if case in judge.seen}
        best = reproduced if sum(reproduced.values()) > sum(best.values()) else best
        if all(best.values()):
            break
    rules = tuple(
        outcome.id
        for rule, (outcome, case) in failed.items()
        if outcome.status != "error" and best.get(case, rule not in ("eval-mode", "state-dict"))
    )
    if not rules:
        return None
    first = min(judge.changes, key=lambda change: STEPS.index(change.step))
    return Cause(
        "; and ".join(say(change, judge.plan.mha, judge.reading.name) for change in judge.changes),
        rules,
        first.step,
        first.where,
        first.amount,
        confirmed=sum(best.values()),
        name="; ".join(change.kind for change in judge.changes),
    )


def _reproduces(judge: Judge, plan: Plan, case: ModuleCase) -> bool:
    """Return True if a plan gives what the module gave."""
    got, _ = judge.seen[case]
    exact = plan.results(judge.inputs(case), judge.module.array_dtype)
    return all(c.passed for c in compare_forward(got, exact, judge.module.array_dtype))


def say(change: Change, mha: MultiHeadAttention, name: Callable[[str], str] = str) -> str:
    """Return the words of a change, with the sizes of the module, and `name` of its weights."""
    sizes = {"H": mha.num_heads, "D": mha.head_size, "W": mha.num_heads * mha.head_size}
    names = {role: name(role) for role in ("wq", "wk", "wv", "wo")}
    return change.text.format(**sizes, **names)


def _find_keys(judge: Judge, failed: Failed) -> Cause | None:
    """Return another use of keys of their own as the cause of what fails with them."""
    rules = tuple(o.id for o, case in failed.values() if case.S is not None)
    if not judge.wrong_keys or not rules:
        return None
    return Cause(judge.wrong_keys, rules, "s", "everywhere", confirmed=1, name="wrong keys")


def _find_others(judge: Judge, failed: Failed) -> Cause | None:
    """Return parameters that no projection has as a cause that is possible, and no more."""
    unread = [n for n in judge.unread if n not in judge.aside]
    if judge.is_known or not unread:
        return None
    names = ", ".join(unread)
    text = f"the module has {names}, in no projection: the reference knows nothing of it (roles=)"
    return Cause(text, tuple(outcome.id for outcome, _ in failed.values()), name="other parameters")


# --- the backward alone ---------------------------------------------------------------------------


def _find_gradients(judge: Judge, failed: Failed) -> Cause | None:
    """Return a gradient that is 0, or a multiple of what it should be, with a right forward."""
    for rule in failed:
        outcome, case = failed[rule]
        wrong = {c.name for c in outcome.comparisons if not c.passed}
        if case not in judge.seen or not wrong or wrong & {"out", "weights"}:
            continue
        pairs = judge.gradient_pairs(*judge.seen[case])
        texts = {name: _relate(name, *pairs[name]) for name in sorted(wrong)}
        if not all(texts.values()):
            continue
        cases = tuple(
            o.id for o, _ in failed.values()
            if {c.name for c in o.comparisons if not c.passed} and not
            {c.name for c in o.comparisons if not c.passed} & {"out", "weights"}
        )  # fmt: skip
        step = _step_of(judge, next(iter(wrong)))
        return Cause("; ".join(texts.values()), cases, step, "backward: everywhere", confirmed=1,
                     name="gradient")  # fmt: skip
    return None


def _relate(name: str, got: Array, want: Array, allowed: Array) -> str:
    """Return how a gradient relates to the exact one; "" if nothing simple does."""
    if not got.any():
        return f"no gradient reaches {name[1:]}: it is detached, or not used"
    size = float((want * want).sum())
    factor = float((got * want).sum()) / size if size else 0.0
    if (abs(got - factor * want) <= max(1.0, abs(factor)) * allowed).all():
        return f"the gradient of {name[1:]} is {factor:.6g} × what it should be"
    return ""


def _step_of(judge: Judge, name: str) -> str:
    """Return the step of a gradient, by the name of an input or a parameter."""
    if name[1:] in judge.call.inputs:
        return INPUT_STEPS[judge.call.inputs.index(name[1:])]
    letters = [n for n in "qkv" for x in "wb" if judge.reading.name(x + n) == name[1:]]
    return f"d{letters[0]}" if letters else "o"
