"""A standalone Python file that shows a failure with numpy, npattn and the implementation only."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.conventions import Conventions
from npattn.problem import Problem
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.targets import TARGETS
from npattn.testing.trial import Suspicion, Trial, Violation

__all__ = ["redraw", "script"]

PLACEHOLDER = "raise SystemExit('TODO: import your implementation here, as `f` (and `f_backward`)')"


def script(trial: Trial, rule: str, problem: Problem, error: Exception | None) -> str:
    """The text of the file.

    Parameters
    ----------
    trial : Trial
    rule : str
    problem : Problem
        The smallest failing one.
    error : Exception or None
        What was raised for it: a `Violation` knows the cotangents and what must be done.

    Returns
    -------
    str
    """
    f = trial.implementation
    known = isinstance(error, (Violation, ImplementationError))
    cotangents = error.cotangents if known else None  # type: ignore[union-attr]
    view = getattr(error, "view", "contiguous")
    kind = error.kind if isinstance(error, Violation) else "raise"
    told = "\n".join(str(error or "").splitlines()).replace('"""', "'''").replace("\\", "/")
    head = [
        f'"""{f.name} breaks "{rule}".\n\n{told}\n"""',
        "",
        "import numpy as np",
        "",
        "import npattn",
    ]
    head += ["from npattn.testing import Implementation, compare", ""]
    body = [*_import_lines(f), ""]
    body += [
        f"problem = npattn.Problem({_arguments(problem)})",
        _conventions_line(trial.conventions),
    ]
    body += [f"f = Implementation({_implementation(f)})"]
    with_gradients = cotangents is not None and f.has_gradients
    if cotangents is not None and with_gradients:
        body += [f"dout = {_literal(cotangents.dout)}"]
        dlse = "None" if cotangents.dlse is None else _literal(cotangents.dlse)
        dw = "None" if cotangents.dweights is None else _literal(cotangents.dweights)
        body += [f"dlse = {dlse}", f"dweights = {dw}"]
        body += ["from npattn.testing import Cotangents", ""]
    body += [f"rounding = npattn.testing.{trial.rounding!r}"]
    if isinstance(error, Violation) and error.before is not None:
        body += [f"before = npattn.Problem({_arguments(error.before)})"]
    if isinstance(error, Violation) and error.limits is not None:
        low, high = error.limits
        body += [f"low = {_literal(low)}", f"high = {_literal(high)}"]
    body += _show(kind, view, with_gradients)
    if isinstance(error, Suspicion):  # of thousands of numbers: they are drawn anew
        body = [*_import_lines(f), "", _conventions_line(trial.conventions)]
        body += [f"f = Implementation({_implementation(f)})", *_together(trial)]
    return "\n".join([*head, *body, ""])


def redraw(trial: Trial, rule: str, told: str, words: str) -> str:
    """The text of a file that draws a problem anew on its device, where its numbers are too many
    to be written out. `words` are what `npattn.testing.device.sweep.shown` is told of it."""
    f = trial.implementation
    told = told.replace('"""', "'''").replace("\\", "/")
    lines = [
        f'"""{f.name} breaks "{rule}".\n\n{told}\n"""',
        "",
        "import npattn",
        "from npattn.testing import Implementation, Recipe",
        "from npattn.testing.device.sweep import shown",
        "",
        *_import_lines(f),
        "",
        _conventions_line(trial.conventions),
        f"rounding = npattn.testing.{trial.rounding!r}",
        f"f = Implementation({_implementation(f)})",
        f"shown(f, {words}, conventions=conventions, rounding=rounding)",
        "",
    ]
    return "\n".join(lines)


def _together(trial: Trial) -> list[str]:
    words = f'only=["aggregate"], dtypes=({trial.space.dtype!r},), conventions=conventions'
    words += f", rounding=npattn.testing.{trial.rounding!r}"
    if trial.space.sizes:
        words += f", sizes={dict(trial.space.sizes)!r}"
    return [f"print(npattn.testing.check(f, {words}))"]


def _show(kind: str, view: str, with_gradients: bool) -> list[str]:
    """What the script does once everything is made."""
    if kind == "change":
        lines = [
            "inputs = f.inputs(problem)",
            "before = {n: f.framework.take(x) for n, x in inputs.items()}",
        ]
        lines += ["f.forward(problem, inputs=inputs)"]
        if with_gradients:
            lines += ["f.gradients(problem, Cotangents(dout, dlse, dweights), inputs=inputs)"]
        return [
            *lines,
            "for name, old in before.items():",
            "    new = f.framework.take(inputs[name])",
            '    print(name, "unchanged" if old.tobytes() == new.tobytes() else "WAS WRITTEN TO")',
        ]
    laid = "" if view == "contiguous" else f", {view!r}"
    gather = ["def results(problem=problem):", f"    found = dict(f.forward(problem{laid}))"]
    if with_gradients:
        gather += [f"    found |= f.gradients(problem, Cotangents(dout, dlse, dweights){laid})"]
    gather += ["    return found", "", ""]
    if kind == "bits":
        return [
            *gather,
            "first, second = results(), results()",
            "for name in first:",
            "    same = first[name].tobytes() == second[name].tobytes()",
            '    print(name, "has the same bits" if same else "DIFFERS BETWEEN TWO CALLS")',
        ]
    if kind == "moves":
        return [
            *gather,
            "# k and v differ only where they are hidden from every row whose dout is not 0.",
            "first, second = results(before), results(problem)",
            "for name in first:",
            "    gap = abs(first[name].astype(float) - second[name].astype(float))",
            "    if gap.max(initial=0) > 0:",
            '        print("WRONG", name, "moves by", gap.max())',
        ]
    if kind == "range":
        return [
            *gather,
            "o = results()['o'].astype(float)",
            "inside = (low <= o) & (o <= high)",
            'print("ok    o" if inside.all() else "WRONG o is beyond what is seen", o[~inside])',
        ]
    words = ", dout=dout.astype(float), dlse=None if dlse is None else dlse.astype(float)"
    words += ", dweights=None if dweights is None else dweights.astype(float)"
    words = (words if with_gradients else "") + ", conventions=conventions, rounding=rounding"
    judge = [
        "for name, array in got.items():",
        "    print(name, array.dtype, array.shape)",
        f"for comparison in compare(got, problem{words}):",
        '    print("ok   " if comparison.passed else "WRONG", comparison)',
    ]
    if kind == "after":
        return [*_in_turn(view, with_gradients), *judge, *SAME_BITS]
    return [*gather, "got = results()", *judge]


def _in_turn(view: str, with_gradients: bool) -> list[str]:
    """Two calls, twice: a plan may be made by the first of its shape, or by the last."""
    lines = ["def results(problem, view):", "    found = dict(f.forward(problem, view))"]
    if with_gradients:
        lines += [
            "    dtype = problem.q.dtype",
            "    wide = np.promote_types(dtype, np.float32)",
            "    more = (None if x is None else x.astype(wide) for x in (dlse, dweights))",
            "    found |= f.gradients(problem, Cotangents(dout.astype(dtype), *more), view)",
        ]
    lines += ["    return found", "", ""]
    return [
        *lines,
        f"other, got = results(before, {view!r}), results(problem, 'contiguous')",
        f"again, second = results(before, {view!r}), results(problem, 'contiguous')",
    ]


SAME_BITS = [
    "for name in got:",
    "    for first, later in ((other, again), (got, second)):",
    "        if first[name].tobytes() != later[name].tobytes():",
    '            print("WRONG", name, "has other bits the second time")',
]


def _import_lines(f: Implementation) -> list[str]:
    if f.spec in TARGETS:
        return ["from npattn.testing.targets import load", f"f, f_backward = load({f.spec!r})"]
    lines = _import_object(f.f, "f", f.spec)
    if f.backward is not None:
        lines += _import_object(f.backward, "f_backward", f.backward_spec)
    return lines


def _import_object(function: Any, name: str, spec: str | None) -> list[str]:
    """How to get the function by name: as it was named, or where it says that it lives."""
    if spec is not None:
        return ["from npattn.testing.targets import load", f"{name}, _ = load({spec!r})"]
    home = getattr(function, "__module__", None) or ""
    module = sys.modules.get(home)
    qualname = _name_in(module, function)
    if module is None or qualname is None:
        told = " ".join(repr(function).split())
        return [f"# {told} cannot be imported by name.", PLACEHOLDER]
    path = getattr(module, "__file__", None)
    if home == "__main__" and path is None:
        return [PLACEHOLDER]
    if home == "__main__":
        return ["from npattn.testing.targets import load", f"{name}, _ = load('{path}:{qualname}')"]
    return [f"from {home} import {qualname.split('.')[0]}", f"{name} = {qualname}"]


def _name_in(module: Any, function: Any) -> str | None:
    """The dotted name by which a module gives just this object (a bound method has none)."""
    found: Any = module
    qualname = getattr(function, "__qualname__", "")
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not None and found == function:
        return str(qualname)
    return next((n for n, x in vars(module or object).items() if x == function), None)


def _implementation(f: Implementation) -> str:
    words = ["f"]
    if f.backward is not None:
        words.append("backward=f_backward")
    if f.rename:
        words.append(f"rename={ {theirs: ours for ours, theirs in f.rename.items()}!r}")
    words.append(f"features={sorted(f.features | set(f.returns))!r}")
    words.append(f"framework={f.framework.name!r}")
    if f.layout != "BHTD":
        words.append(f"layout={f.layout!r}")
    return ", ".join(words)


def _conventions_line(conventions: Conventions) -> str:
    default = Conventions()
    words = [
        f"{name}={_number(value)}"
        for name, value in vars(conventions).items()
        if value != getattr(default, name)
    ]
    return f"conventions = npattn.Conventions({', '.join(words)})"


def _number(value: Any) -> str:
    return f"float({str(value)!r})" if isinstance(value, float) else repr(value)


def _arguments(problem: Problem) -> str:
    problem = problem.materialise()
    words = [f"\n    {_literal(getattr(problem, n))}" for n in ("q", "k", "v")]
    for name in ("mask", "bias", "sinks", "dropout_mask"):
        array = getattr(problem, name)
        if array is not None:
            words.append(f"\n    {name}={_literal(array)}")
    plain = {
        "causal": problem.causal,
        "window": problem.window,
        "scale": problem.scale,
        "softcap": problem.softcap,
        "dropout_rate": problem.dropout_rate,
        "alignment": problem.alignment,
    }
    words += [
        f"\n    {n}={x!r}"
        for n, x in plain.items()
        if (x not in (None, False) and x != 0.0) or n == "scale"
    ]
    if problem.score_mod is not None:
        from npattn.testing.cases.distributions import SCORE_MODS

        name = next(n for n, mod in SCORE_MODS.items() if mod is problem.score_mod)
        words.append(f"\n    score_mod=npattn.testing.cases.recipe.SCORE_MODS[{name!r}]")
    return ",".join(words) + ",\n"


def _literal(array: Array) -> str:
    """An array as text that gives back every bit of every number (NaN payloads aside)."""
    dtype = repr(array.dtype.name)
    if array.size == 0:
        return f"np.zeros({array.shape}, {dtype})"
    numbers = (array if array.dtype == bool else array.astype(np.float64)).tolist()
    # repr gives back every bit, and takes a tenth of the time of np.array2string.
    text = str(numbers).replace("nan", "np.nan").replace("inf", "np.inf").replace("], [", "],\n[")
    text = re.sub("(.{56,}?,) ", r"\1\n", text).replace("\n", "\n    ")
    return f"np.array({text}).astype({dtype})"
