"""check_module: sample calls of a module, compare every result, shrink, and name the causes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.errors import DtypeError, InternalError, OptionError
from npattn.positions.attention import Rotary
from npattn.problem.checks import check_integer
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.modules import TorchModule
from npattn.testing.comparison import Comparison
from npattn.testing.levels import REQUIRED, check_levels
from npattn.testing.modules.call import describe_forms
from npattn.testing.modules.case import FIELDS, ModuleCase
from npattn.testing.modules.causes import explain
from npattn.testing.modules.function import judge_inside
from npattn.testing.modules.judge import Judge, begin
from npattn.testing.modules.named import Named
from npattn.testing.modules.rules import INSIDE, RULES, SLOW, Rule
from npattn.testing.power import Power
from npattn.testing.reference.search import Search, Time, write_replay
from npattn.testing.report.cause import Cause
from npattn.testing.report.expected import asked_of, check_expected
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.report import Report
from npattn.testing.runner.schedule import ERRORS
from npattn.testing.settings import check_budget

DTYPES = ("float64", "float32", "float16", "bfloat16")
PLACEHOLDER = "raise SystemExit('TODO: import your module here, as m')"


def check_module(
    m: Any,
    *,
    roles: Mapping[str, str] | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    rotary: Rotary | float | None = None,
    call: Callable[..., Any] | None = None,
    dtypes: Sequence[str] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    examples: int = 30,
    budget: float = 20.0,
    seed: int = 0,
    only: str | Iterable[str] | None = None,
    require: Iterable[str] | str = REQUIRED,
    must: Iterable[str] = (),
    expect: Mapping[str, str] | None = None,
    accept: str | Iterable[str] = (),
    progress: Callable[[str, str, int, int], None] | None = None,
    spec: str | None = None,
) -> Report:
    """Judge a module with its projections inside, forward and backward.

    The reference is `npattn.MultiHeadAttention` with the very weights of the module, which are
    found by name and confirmed by changing them. A copy of the module is called, in this process.

    Parameters
    ----------
    m : torch.nn.Module, or a method of one
        Called as ``m(x)`` or ``m(query, key, value)``, (B, T, C) each, with masks by name; it
        returns the output, or (output, weights) with weights of each head or averaged.
    roles : mapping, optional
        "wq", "wk", "wv", "wo", or packed "wqkv", "wkv" → name of the parameter or layer, where the
        name does not tell: ``{"wq": "to_q"}``.
        Packed rows are said with their axes, ``{"wqkv": "qkv: 3 H D"}``; else as they fit.
    num_heads, num_kv_heads : int, optional
        Default: an attribute of `m`; else the numbers with which it fits.
    scale : float, optional
        What it means to multiply q·k by. Default: by `m.config` or an attribute, else 1/√D.
    softcap : float, optional
        Default: an attribute of `m`.
    window : (int or None, int or None), optional
        Keys that a query sees beside its own, always. Default: an attribute of `m`.
    rotary : npattn.positions.Rotary or float, optional
        Turn of queries and keys inside, or its base. Default: `m.config` or an attribute; without
        one the base is read and not checked.
    call : callable, optional
        ``call(m, x, mask)``, or ``(m, query, key, value, mask)``, which is called instead of `m`
        and passes what else it needs.
    dtypes : sequence of str, optional
        Dtypes to convert it to; default: its own.
    sizes : mapping, optional
        Sizes to sample, of B, T and S: ``{"T": (16,)}`` for a module that takes no other.
    examples : int, default 30
        Cases of each rule.
    budget : float, default 20
        Seconds of processor time. Where the first calls show that these are too few, fewer examples
        are asked, 3 at least, which the report says.
    seed : int, default 0
    only : str or iterable of str, optional
        Rule or prefix of rules; each rule chosen must pass. "compile" runs only if named here.
    require : iterable of str
        Levels that must pass.
    must : iterable of str
        Rules that have to apply, such as "mask"; if one does not, the report does not pass.
    expect : mapping, optional
        Expected failures with reasons, as of `npattn.testing.check`.
    accept : str or iterable of str
        Results that may be not judged, as "dW_k.bias": where no error of a factor 2 would be seen.
    progress : callable, optional
        Called with ``(dtype, rule, done, total)``.
    spec : str, optional
        ``module:name`` or ``path/file.py:name`` of `m`, for the script of a failure.

    Returns
    -------
    Report

    Raises
    ------
    OptionError
        If `m` is no module, has no readable projections, requires other arguments without `call`,
        cannot be called, or another argument is not legal.
    DtypeError
        If `dtypes` has another than float64, float32, float16 and bfloat16.

    Examples
    --------
    >>> import torch
    >>> from npattn.testing import check_module
    >>> m = torch.nn.MultiheadAttention(12, 3, batch_first=True)
    >>> report = check_module(m, examples=3, only="agreement")
    >>> report.passed
    True
    """
    check_integer("examples", examples)
    check_integer("seed", seed, 0)
    check_budget(budget)
    if unknown := [x for x in dtypes or () if x not in DTYPES]:
        raise DtypeError(f"dtypes has {unknown[0]!r}, must be among {', '.join(DTYPES)}")
    rules = _choose_rules(only)
    must = tuple(_choose_rules(must))
    required = (*check_levels(require), *(rules if only is not None else ()))
    fields_of_sizes = _read_sizes(sizes or {})
    length = fields_of_sizes.get("T", (None,))[0]
    named = Named(roles, num_heads, num_kv_heads, scale, softcap, window, rotary, length)
    accepted = (accept,) if isinstance(accept, str) else tuple(accept)
    outcomes: list[Outcome] = []
    causes: dict[str, Cause] = {}
    judges, start = [], time.process_time()
    fewer: dict[str, None] = {}
    for done, dtype in enumerate(dtypes or (None,)):
        module = TorchModule(m, dtype, call)
        plan = Time(examples, budget * (done + 1) / len(dtypes or (None,)), start)
        with module.computing(seed), np.errstate(**ERRORS):
            judge = begin(module, named, plan.deadline)
            judges.append(judge)
            asked = plan.afford(_measure_case(judge) * len(rules), 0.5 if INSIDE in rules else 1.0)
            failed: dict[str, tuple[Outcome, ModuleCase]] = {}
            for done, (name, rule) in enumerate(rules.items()):
                if name == INSIDE:
                    continue
                question = _Asked(judge, name, rule, spec, _call_text(named, dtype))
                outcome, case = question.search(fields_of_sizes, min(asked, rule.examples), seed)
                outcomes.append(outcome)
                if case is not None:
                    failed[name] = outcome, case
                if progress is not None:
                    progress(module.dtype, name, done + 1, len(rules))
            found = explain(judge, failed)
            if INSIDE in rules:
                inside, explained = judge_inside(judge, plan.afford, seed)
                outcomes += inside
                with_cause = {rule for cause in found for rule in cause.rules}
                others = tuple(o.id for o, _ in failed.values() if o.id not in with_cause)
                for first in explained[:1]:  # what nothing else explains has the first cause inside
                    explained[0] = replace(first, rules=(*first.rules, *others))
                found += explained
            fewer |= dict.fromkeys(plan.describe(module.dtype))
            for cause in found:
                rules_before = causes[cause.text].rules if cause.text in causes else ()
                causes[cause.text] = replace(cause, rules=(*rules_before, *cause.rules))
    applied = {o.rule for o in outcomes if o.status != "not applicable"}
    by_id = {rule: cause.name for cause in causes.values() for rule in cause.rules}
    outcomes = [replace(o, diagnosis=by_id.get(o.id)) for o in outcomes]
    unread = [
        f"not judged: {text}; accept={name!r} leaves it out"
        for judge in judges
        for name, text in list(judge.aside.items())[:1]
        if judge.aside.keys().isdisjoint(accepted)
    ]
    return Report(
        spec or judges[0].module.name,
        tuple(outcomes),
        (*_list_untested(judges, outcomes, rules), *fewer),
        {"seed": seed, "examples": examples, **_settings(judges[0])},
        require=required,
        causes=tuple(causes.values()),
        refused=tuple(dict.fromkeys(line for judge in judges for line in judge.refused)),
        expected=asked_of(check_expected(expect or {}), RULES, outcomes),
        missing=(
            *(name for name in must if name not in applied),
            *{f"agreement ({judge.unknown})": 0 for judge in judges if judge.is_unknown},
        ),
        accept=accepted,
        few=tuple(dict.fromkeys(unread)),
    )


def replay(
    m: Any,
    case: ModuleCase,
    rule: str = "agreement-output",
    *,
    dtype: str | None = None,
    call: Callable[..., Any] | None = None,
    **named: Any,
) -> tuple[Comparison, ...]:
    """Compare the results of a module for one case of a rule.

    Parameters
    ----------
    m, call
        As in `check_module`.
    case : ModuleCase
        As a report prints it.
    rule : str
    dtype : str, optional
        Default: that of the module.
    **named
        roles, num_heads, num_kv_heads, scale, softcap, window and rotary, as in `check_module`.

    Returns
    -------
    tuple of Comparison

    Raises
    ------
    OptionError
        As of `check_module`.
    ImplementationError
        If the module raises, or returns something else.
    """
    module = TorchModule(m, dtype, call)
    with module.computing(case.seed), np.errstate(**ERRORS):
        return tuple(RULES[rule].compare(begin(module, Named(**named)), case))


def _measure_case(judge: Judge) -> float:
    """Return the seconds that a case takes, with all its gradients."""
    before = time.process_time()
    with contextlib.suppress(ImplementationError):  # its rule will say so
        judge.compare(replace(judge.probe, recorded=True))
    return time.process_time() - before


# --- one rule -------------------------------------------------------------------------------------


@dataclass
class _Asked:
    """A rule that is asked: its search, and the smallest case that fails."""

    judge: Judge
    name: str
    rule: Rule
    spec: str | None
    call: str

    def search(
        self, sizes: Mapping[str, Sequence[int]], examples: int, seed: int
    ) -> tuple[Outcome, ModuleCase | None]:
        """Return the outcome, and the smallest case if it failed."""
        fields = self.rule.fields(self.judge)
        outcome = Outcome(
            self.name, self.rule.semantics, self.rule.about, self.judge.module.dtype,
            "not applicable", level=self.rule.level,
        )  # fmt: skip
        if self.judge.is_unknown and self.rule.level != "conduct":
            fields = f"not judged: {self.judge.unknown}"
        if isinstance(fields, str):
            return replace(outcome, message=fields), None
        choices = FIELDS | {"S": self.judge.lengths} | dict(fields)
        for name, values in sizes.items():
            if name != "S" or any(isinstance(x, int) for x in choices["S"]):
                choices[name] = values
        search = Search(self._compare)
        search.run(choices, lambda values: ModuleCase(**values), examples, seed)
        outcome = search.conclude(outcome, self._script)
        if search.failure is not None:
            return outcome, search.failure.case
        powers = {name: Power.union(x) for name, x in search.powers().items()}
        return (outcome.with_powers(powers) if self.rule.has_power else outcome), None

    def _compare(self, case: ModuleCase) -> Sequence[Comparison]:
        found = self.rule.compare(self.judge, case)
        # An output of a wrong shape leaves nothing else to compare.
        found = found or [c for c in self.judge.compare(case) if not c.passed]
        if not found:
            raise InternalError(f"{self.name} compares nothing for {case!r}")
        return found

    def _script(self, case: ModuleCase, message: str) -> str:
        """Return a Python file that shows the failure."""
        load = PLACEHOLDER if self.spec is None else f"m = load_callable({self.spec!r})"
        return write_replay(
            f'{self.judge.module.name} breaks "{self.name}".',
            message,
            "from npattn.testing.adapters.load import load_callable\n"
            f"from npattn.testing.modules import ModuleCase, replay\n\n{load}",
            case,
            f"m, case, {self.name!r}{self.call}",
        )


def _call_text(named: Named, dtype: str | None) -> str:
    """Return the keywords of `replay` that are not at their default."""
    keywords = {n: x for n, x in vars(named).items() if n != "notes"} | {"dtype": dtype}
    return "".join(f", {name}={x!r}" for name, x in keywords.items() if x is not None)


# --- settings and report --------------------------------------------------------------------------


def _choose_rules(only: str | Iterable[str] | None) -> dict[str, Rule]:
    """Return the rules that `only` names, or all."""
    names = (only,) if isinstance(only, str) else only
    if names is None:
        return {rule: x for rule, x in RULES.items() if rule not in SLOW}
    chosen: dict[str, Rule] = {}
    for name in names:
        named = {rule: x for rule, x in RULES.items() if rule.startswith(name)}
        if not named:
            raise OptionError(
                f"{name!r} is not a rule of modules, must be one of {', '.join(RULES)}"
            )
        chosen |= named
    return chosen


def _read_sizes(sizes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    for name, values in sizes.items():
        if name not in ("B", "T", "S"):
            raise OptionError(f"sizes has {name!r}, must have B, T or S")
        for value in values:
            check_integer(f"sizes[{name!r}]", value)
    return {name: tuple(values) for name, values in sizes.items()}


def _settings(judge: Judge) -> dict[str, Any]:
    """Return what a report says of the module: its conventions, and how it is read."""
    default = Conventions()
    conventions = {f.name: getattr(judge.plan.conventions, f.name) for f in fields(Conventions)}
    masks = describe_forms(judge.call.forms) or "no mask"
    causal = judge.plan.causal and (
        "causal where no mask is given, the mask alone where one is"
        if judge.plan.conventions.causal == "unless_masked" else "always causal"
    )  # fmt: skip
    aside = dict.fromkeys(judge.aside.values())
    parts = [*aside, *judge.notes, str(judge.reading), masks, *([causal] if causal else [])]
    return {
        "conventions": {n: x for n, x in conventions.items() if x != getattr(default, n)},
        "reads": "; ".join(parts),
    }


def _list_untested(
    judges: Sequence[Judge], outcomes: Iterable[Outcome], rules: Mapping[str, Rule]
) -> tuple[str, ...]:
    """Return the rules that do not apply or were not asked, and parameters in no projection."""
    left_out = {o.rule: o.message for o in outcomes if o.status == "not applicable"}
    return (
        *(f"{rule} ({why})" for rule, why in left_out.items()),
        *(f"{name}, which is in no projection" for name in judges[0].unread),
        *(f"{rule} (only= names it)" for rule in SLOW if rule not in rules),
    )
