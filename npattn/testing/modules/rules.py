"""Rules of a module: cases to sample, and what is compared in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from npattn.testing.adapters.modules import Returned
from npattn.testing.comparison import Comparison
from npattn.testing.levels import Level
from npattn.testing.modules.case import FIELDS, ModuleCase
from npattn.testing.modules.judge import Judge

Fields = Mapping[str, Sequence[Any]]


class Rule(NamedTuple):
    """A rule of modules."""

    about: str  # the rule in a line
    semantics: str  # its numbers in docs/semantics.md
    level: Level  # one of `npattn.testing.levels.LEVELS`
    # judge → values of fields of a case, the simplest first; or why the rule does not apply
    fields: Callable[[Judge], Fields | str]
    compare: Callable[[Judge, ModuleCase], Sequence[Comparison]]  # judge and case → comparisons
    examples: int = 1000  # cases at most

    @property
    def has_power(self) -> bool:
        """True if its results must be judged so sharply that twice the result would be seen."""
        return self.about.startswith(("the output", "returned weights", "gradients"))


# --- agreement ------------------------------------------------------------------------------------


def _compare_of(kind: str) -> Callable[[Judge, ModuleCase], list[Comparison]]:
    """Return a comparison of "out", of "weights", or of gradients of "inputs" or "parameters"."""

    def compare(judge: Judge, case: ModuleCase) -> list[Comparison]:
        kinds = {"out": "out", "weights": "weights"}
        kinds |= {f"d{name}": "inputs" for name in judge.call.inputs}
        return [c for c in judge.compare(case) if kinds.get(c.name, "parameters") == kind]

    return compare


def _ask(**more: Sequence[Any]) -> Callable[[Judge], Fields]:
    """Return the fields of cases that ask for weights in every way, and others."""
    return lambda judge: {"ask": judge.call.asks, **more}


def _ask_weights(judge: Judge) -> Fields | str:
    if not judge.returns_weights:
        return "it returns no weights"
    return {"ask": [x for x in judge.call.asks if x != "none"]}


def _cross(judge: Judge) -> Fields | str:
    if not judge.key_lengths:
        return "it takes no keys of their own"
    return {"ask": judge.call.asks, "S": judge.key_lengths}


def _with_mask(kind: str, rows: bool) -> Callable[[Judge], Fields | str]:
    """Return the fields of cases with a mask; `rows` needs one that differs between queries."""

    def fields(judge: Judge) -> Fields | str:
        """Return the fields of cases with such a mask, or the reason why there are none."""
        if judge.plan.causal and kind == "causal":
            return {"T": FIELDS["T"][2:]}  # without being told
        forms = [
            i for i, form in enumerate(judge.call.forms)
            if form.has_queries or not rows
        ]  # fmt: skip
        if kind == "padding":
            forms = [i for i in forms if judge.call.forms[i].shape.startswith("B")]
        if not forms:
            return "it takes no such mask"
        lengths = judge.lengths
        if kind != "causal":
            every = all(judge.call.forms[i] in judge.cross_forms for i in forms)
            lengths += judge.key_lengths[-2:] if every else ()
        return {"mask": (kind,), "form": forms, "S": lengths, "ask": judge.call.asks}

    return fields


def _empty_row(judge: Judge) -> Fields | str:
    replaced = judge.plan.conventions.causal == "unless_masked"
    if (judge.plan.causal and not replaced) or not judge.call.forms:
        return "it takes no mask" if not judge.call.forms else "it is always causal"
    return {"mask": ("empty",), "form": range(len(judge.call.forms)), "recorded": (False,)}


# --- conduct --------------------------------------------------------------------------------------


def _differ(what: str, one: Returned, other: Returned) -> list[Comparison]:
    """Compare bits: a failure names the first element that differs."""
    found = []
    for name in ("out", "weights"):
        x, y = getattr(one, name), getattr(other, name)
        if x is None or np.array_equal(x, y, equal_nan=True):
            found.append(Comparison(name, 0.0, (), 0.0, 0.0, 0.0, 0, 0))
            continue
        at = tuple(np.argwhere(x != y)[0].tolist())
        wrong = int((x != y).sum())
        note = (
            f"{what}: {name}{list(at)} is {float(x[at]):.9g}, then {float(y[at]):.9g}; {wrong} of "
            f"{x.size} elements differ"
        )
        found.append(Comparison(name, float("inf"), at, 0.0, 0.0, 0.0, wrong, x.size, note))
    return found


def _in_float32(judge: Judge) -> Fields | str:
    if judge.module.dtype != "float32":
        return f"it is a module of {judge.module.dtype}"
    return {"recorded": (False,)}


INSIDE = "inside"
"""The rules of functions, of the module as one: ``inside-agreement-o``."""
RULES: dict[str, Rule] = {
    "agreement-output": Rule(
        "the output is that of the exact module with its weights", "1, 8, 10", "values",
        _ask(), _compare_of("out")),
    "agreement-weights": Rule(
        "returned weights are those of each head, or their mean", "8", "values",
        _ask_weights, _compare_of("weights")),
    "mask": Rule(
        "a mask of any form hides keys, with all gradients", "5", "values",
        _with_mask("random", False), Judge.compare),
    "causal": Rule(
        "a causal mask hides later keys, with all gradients", "6", "values",
        _with_mask("causal", True), Judge.compare),
    "padding": Rule(
        "a mask of padded keys, of each example its own", "5", "values",
        _with_mask("padding", False), Judge.compare),
    "cross-attention": Rule(
        "keys and values of their own, with all gradients", "1, 13", "values",
        _cross, Judge.compare),
    "agreement-inputs": Rule(
        "gradients of the inputs", "13", "values",
        _ask(recorded=(True,)), _compare_of("inputs")),
    "agreement-parameters": Rule(
        "gradients of every parameter", "13", "values",
        _ask(recorded=(True,)), _compare_of("parameters")),
    "empty-row": Rule(
        "a query that sees nothing gives what is known of it, and the others their own", "8",
        "edges", _empty_row, Judge.compare),
    "eval-mode": Rule(
        "after .eval() two calls give the same bits", "15", "conduct",
        lambda judge: {"recorded": (False,), "T": FIELDS["T"][2:]},
        lambda judge, case: _differ(
            "two calls differ after .eval()", judge.ask(case), judge.ask(case)), 5),
    "train-mode": Rule(
        "after .train() dropout takes weights away and rescales the others", "9", "values",
        lambda judge: judge.training_reason or {"recorded": (False,)},
        Judge.compare_training, 10),
    "autocast": Rule(
        "under torch.autocast results are those of bfloat16 products", "1, 8, 10", "values",
        _in_float32, Judge.compare_mixed, 10),
    "state-dict": Rule(
        "a module that loads its state dict is the same function", "15", "conduct",
        lambda judge: {"recorded": (False,)},
        lambda judge, case: _differ(
            "after a round trip of its state dict", *judge.ask_restored(case)), 5),
    INSIDE: Rule(
        "with projections that select channels it is attention of q, k and v, by every rule of "
        "functions", "1-13", "values", lambda judge: {}, Judge.compare),
    "compile": Rule(
        "what torch.compile makes of the module has its results and gradients", "1, 13", "values",
        lambda judge: {"B": (2,), "T": (5,)}, Judge.compare_compiled, 4),
}  # fmt: skip
"""Every rule by its id, in the order in which they are asked."""
SLOW = ("compile",)
"""Rules that run only if `only` names them."""
