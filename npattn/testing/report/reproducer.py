"""Write a standalone Python file that shows a failure."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.conventions import Conventions
from npattn.options import OPTIONS
from npattn.problem import Problem
from npattn.profiles import PROFILES, Profile
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.options import SCORE_MODS
from npattn.testing.targets import TARGETS
from npattn.testing.trial import Suspicion, Trial, Violation

__all__ = ["sampling_script", "script"]

PLACEHOLDER = "raise SystemExit('TODO: import your implementation here, as `f` (and `f_backward`)')"


def script(trial: Trial, rule: str, problem: Problem, error: Exception | None) -> str:
    """Return the text of the file.

    Parameters
    ----------
    trial : Trial
    rule : str
    problem : Problem
        The smallest failing one.
    error : Exception or None
        Exception raised for it; a `Violation` knows the cotangents and how to show it.

    Returns
    -------
    str
    """
    f = trial.implementation
    known = isinstance(error, (Violation, ImplementationError))
    cotangents = error.cotangents if known else None  # type: ignore[union-attr]
    view = getattr(error, "view", "contiguous")
    kind = error.kind if isinstance(error, Violation) else "raise"
    message = "\n".join(str(error or "").splitlines())
    head = [
        _docstring(f'{f.name} breaks "{rule}".\n\n{message}'),
        "",
        "import numpy as np",
        "",
        "import npattn",
    ]
    head += ["from npattn.testing import Implementation, compare"]
    if problem.score_mod is not None:
        head += ["from npattn.testing.cases.options import SCORE_MODS"]
    head += [""]
    body = [*_import_lines(f), ""]
    body += [
        f"problem = npattn.Problem({_arguments(problem)})",
        _conventions_line(trial.conventions),
    ]
    body += [f"f = Implementation({_implementation(f)})", *_storage_lines(f)]
    with_gradients = cotangents is not None and f.has_gradients
    if cotangents is not None and (with_gradients or kind == "moves"):
        body += [f"dout = {_literal(cotangents.dout)}"]
        dlse = "None" if cotangents.dlse is None else _literal(cotangents.dlse)
        dw = "None" if cotangents.dweights is None else _literal(cotangents.dweights)
        body += [f"dlse = {dlse}", f"dweights = {dw}"]
        body += ["from npattn.testing import Cotangents", ""]
    body += [f"rounding = {_rounding(trial.rounding)}"]
    if isinstance(error, Violation) and error.before is not None:
        body += [f"before = npattn.Problem({_arguments(error.before)})"]
    if isinstance(error, Violation) and error.limits is not None:
        low, high = error.limits
        body += [f"low = {_literal(low)}", f"high = {_literal(high)}"]
    calls = _show_calls(rule, with_gradients)
    body += calls if kind == "calls" else _show(kind, view, with_gradients)
    if isinstance(error, Suspicion):  # about thousands of numbers: they are sampled anew
        body = [*_import_lines(f), "", _conventions_line(trial.conventions)]
        body += [f"f = Implementation({_implementation(f)})", *_storage_lines(f)]
        body += _check_aggregate(trial)
    return "\n".join([*head, *body, ""])


def _rounding(rounding: Rounding) -> str:
    text = repr(rounding).replace("Integers(", "npattn.testing.Integers(")
    return f"npattn.testing.{text}"


def sampling_script(trial: Trial, rule: str, message: str, arguments: str) -> str:
    """Return the text of a file that samples a problem anew, which is too large to write out.

    `arguments` are those of `npattn.testing.device.sweep.show_problem`, after the implementation.
    """
    f = trial.implementation
    lines = [
        _docstring(f'{f.name} breaks "{rule}".\n\n{message}'),
        "",
        "import npattn",
        "from npattn.testing import Implementation, Recipe",
        "from npattn.testing.device.sweep import show_problem",
        "",
        *_import_lines(f),
        "",
        _conventions_line(trial.conventions),
        f"rounding = {_rounding(trial.rounding)}",
        f"f = Implementation({_implementation(f)})",
        f"show_problem(f, {arguments}, conventions=conventions, rounding=rounding)",
        "",
    ]
    return "\n".join(lines)


def _docstring(text: str) -> str:
    """Return a docstring of any text: names and messages come from the code under test."""
    safe = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    shown = (c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in safe)
    return f'"""{"".join(shown)}\n"""'


def _check_aggregate(trial: Trial) -> list[str]:
    kwargs = f'only=["aggregate"], dtypes=({trial.space.dtype!r},), conventions=conventions'
    kwargs += f", rounding={_rounding(trial.rounding)}"
    if trial.space.sizes:
        kwargs += f", sizes={dict(trial.space.sizes)!r}"
    return [f"print(npattn.testing.check(f, {kwargs}))"]


def _show(kind: str, view: str, with_gradients: bool) -> list[str]:
    """Return the lines that run the implementation and print the result."""
    if kind == "change":
        return _show_change(with_gradients)
    laid_out = "" if view == "contiguous" else f", {view!r}"
    gather = ["def results(problem=problem):", f"    found = dict(f.forward(problem{laid_out}))"]
    if with_gradients:
        call = f"f.gradients(problem, Cotangents(dout, dlse, dweights){laid_out})"
        gather += [f"    found |= {call}"]
    gather += ["    return found", "", ""]
    if kind in SHOW:
        return [*gather, *SHOW[kind]]
    kwargs = ", dout=dout.astype(float), dlse=None if dlse is None else dlse.astype(float)"
    kwargs += ", dweights=None if dweights is None else dweights.astype(float)"
    kwargs = (kwargs if with_gradients else "") + ", conventions=conventions, rounding=rounding"
    judge = [
        "for name, array in got.items():",
        "    print(name, array.dtype, array.shape)",
        f"for comparison in compare(got, problem{kwargs}):",
        '    print("ok   " if comparison.passed else "WRONG", comparison)',
    ]
    if kind == "after":
        return [*_two_calls(view, with_gradients), *judge, *SAME_BITS]
    return [*gather, "got = results()", *judge]


def _show_change(with_gradients: bool) -> list[str]:
    gradients = "f.gradients(problem, Cotangents(dout, dlse, dweights), inputs=inputs)"
    return [
        "inputs = f.inputs(problem)",
        "before = {n: f.framework.take(x) for n, x in inputs.items()}",
        "f.forward(problem, inputs=inputs)",
        *([gradients] if with_gradients else []),
        "after = f.inputs_after(problem)  # of a cache that new keys come with",
        "for name, old in before.items():",
        "    same = after.get(name, old).tobytes() == f.framework.take(inputs[name]).tobytes()",
        "    wrong = 'DOES NOT HOLD THE NEW KEYS' if name in after else 'WAS WRITTEN TO'",
        "    print(name, ('as it must be' if name in after else 'unchanged') if same else wrong)",
    ]


def _show_calls(rule: str, with_gradients: bool) -> list[str]:
    cotangents = "Cotangents(dout, dlse, dweights)" if with_gradients else "None"
    return [
        "from npattn.testing.rules.calls import show",
        f"show({rule!r}, f, problem, {cotangents}, conventions, rounding)",
    ]


SHOW = {
    "bits": [
        "first, second = results(), results()",
        "for name in first:",
        "    same = first[name].tobytes() == second[name].tobytes()",
        '    print(name, "has the same bits" if same else "DIFFERS BETWEEN TWO CALLS")',
    ],
    "moves": [
        "# k and v differ only at keys that are hidden from every row whose dout is not 0.",
        "rows = (dout != 0).any(-1)",
        "first, second = results(before), results(problem)",
        "for name in first:",
        "    old, new = first[name].astype(float), second[name].astype(float)",
        "    if not name.startswith('d') and old.shape[: rows.ndim] == rows.shape:",
        "        old, new = old[rows], new[rows]",
        "    if (np.isnan(new) & ~np.isnan(old)).any():",
        '        print("WRONG", name, "becomes NaN")',
        "    elif not np.array_equal(old, new, equal_nan=True):",
        '        print("WRONG", name, "moves by", np.nanmax(abs(old - new)))',
    ],
    "range": [
        "o = results()['o'].astype(float)",
        "inside = (low <= o) & (o <= high)",
        'print("ok    o" if inside.all() else "WRONG o is beyond what is seen", o[~inside])',
    ],
}
"""Lines that show a violation, by its kind, after a function `results`."""


def _two_calls(view: str, with_gradients: bool) -> list[str]:
    """Make two calls twice: a plan may be made by the first of its shape, or by the last."""
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
    """Import the function by its spec, or by its module and qualified name."""
    if spec is not None:
        return ["from npattn.testing.targets import load", f"{name}, _ = load({spec!r})"]
    home = getattr(function, "__module__", None) or ""
    module = sys.modules.get(home)
    qualname = _name_in(module, function)
    if module is None or qualname is None:
        description = " ".join(repr(function).split())
        return [f"# {description} cannot be imported by name.", PLACEHOLDER]
    path = getattr(module, "__file__", None)
    if home == "__main__" and path is None:
        return [PLACEHOLDER]
    if home == "__main__":
        return [
            "from npattn.testing.targets import load",
            f"{name}, _ = load({f'{path}:{qualname}'!r})",
        ]
    return [f"from {home} import {qualname.split('.')[0]}", f"{name} = {qualname}"]


def _name_in(module: Any, function: Any) -> str | None:
    """Return the dotted name of this very object in a module (a bound method has none)."""
    value: Any = module
    qualname = getattr(function, "__qualname__", "")
    for part in qualname.split("."):
        value = getattr(value, part, None)
    if value is not None and value == function:
        return str(qualname)
    return next((n for n, x in vars(module or object).items() if x == function), None)


def _implementation(f: Implementation) -> str:
    kwargs = ["f"]
    if f.backward is not None:
        kwargs.append("backward=f_backward")
    if f.profile is not None:
        kwargs.append(f"like={_like(f.profile)}")
    if f.rename:
        kwargs.append(f"rename={f.rename!r}")
    kwargs.append(f"features={sorted(f.features | set(f.returns))!r}")
    kwargs.append(f"framework={f.framework.name!r}")
    if f.quantized is not None:
        kwargs.append(f"quantized={f.quantized.dtype!r}")
        kwargs += [f"rows={dict(f.quantized.rows)!r}"] if f.quantized.rows else []
    if f.layout != (f.profile.layout if f.profile else "BHTD"):
        kwargs.append(f"layout={f.layout!r}")
    return ", ".join(kwargs)


def _storage_lines(f: Implementation) -> list[str]:
    """Return the lines that give its storage the sizes that it was judged with."""
    if f.storage is None:
        return []
    pages = {"P": (f.storage.page_size,)} if f.storage.keys == "pages" else {}
    return [f"f.restrict({dict(f.storage.only) | pages!r})"]


def _like(profile: Profile) -> str:
    """Return the name of a known profile, or what makes the calls of another."""
    if PROFILES.get(profile.name) is profile:
        return repr(profile.name)
    fields = ("name", "version", "about", "layout", "quantized")
    words = ", ".join(f"{n}={getattr(profile, n)!r}" for n in fields)
    return f"npattn.profiles.Profile({words}, signature={dict(profile.signature)!r})"


def _conventions_line(conventions: Conventions) -> str:
    default = Conventions()
    kwargs = [
        f"{name}={_number(value)}"
        for name, value in vars(conventions).items()
        if value != getattr(default, name)
    ]
    return f"conventions = npattn.Conventions({', '.join(kwargs)})"


def _number(value: Any) -> str:
    return f"float({str(value)!r})" if isinstance(value, float) else repr(value)


def _arguments(problem: Problem) -> str:
    """Format the arguments of `npattn.Problem`."""
    problem = problem.materialise()
    arguments = [f"\n    {_literal(getattr(problem, n))}" for n in ("q", "k", "v")]
    for option in OPTIONS.values():
        value = getattr(problem, option.name)
        if isinstance(value, np.ndarray):
            arguments.append(f"\n    {option.name}={_literal(value)}")
        elif option.kind == "callable" and value is not None:
            name = next(n for n, mod in SCORE_MODS.items() if mod is value)
            arguments.append(f"\n    {option.name}=SCORE_MODS[{name!r}]")
        elif value != option.default:
            arguments.append(f"\n    {option.name}={value!r}")
    arguments.append(f"\n    alignment={problem.alignment!r}")
    return ",".join(arguments) + ",\n"


def _literal(array: Array) -> str:
    """Format an array as text that gives back every bit of every number (NaN payloads aside)."""
    dtype = repr(array.dtype.name)
    if array.size == 0:
        return f"np.zeros({array.shape}, {dtype})"
    numbers = (array if array.dtype == bool else array.astype(np.float64)).tolist()
    # repr gives back every bit, and takes a tenth of the time of np.array2string.
    text = str(numbers).replace("nan", "np.nan").replace("inf", "np.inf").replace("], [", "],\n[")
    text = re.sub("(.{56,}?,) ", r"\1\n", text).replace("\n", "\n    ")
    return f"np.array({text}).astype({dtype})"
