"""Write a standalone Python file that shows a failure, by the template script.jinja."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.problem.options import OPTIONS
from npattn.profiles import PROFILES
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.cases.options import SCORE_MODS
from npattn.testing.report.markup import render
from npattn.testing.targets import TARGETS
from npattn.testing.trial import Suspicion, Trial, Violation

PLACEHOLDER = "raise SystemExit('TODO: import your implementation here, as `f` (and `f_backward`)')"
LOAD = "from npattn.testing.targets import load"


def script(trial: Trial, rule: str, problem: Problem, error: Exception | None) -> str:
    """Return the text of the file.

    Parameters
    ----------
    problem : Problem
        The smallest failing one.
    error : Exception or None
        Exception raised for it; a `Violation` knows the cotangents and how to show it.
    """
    f = trial.implementation
    has_cotangents = isinstance(error, (Violation, ImplementationError))
    cotangents = error.cotangents if has_cotangents else None  # type: ignore[union-attr]
    kind = error.kind if isinstance(error, Violation) else "raise"
    view = getattr(error, "view", "contiguous")
    restriction: dict[str, Any] = {}
    if f.storage is not None:  # the sizes that it was judged with
        pages = {"P": (f.storage.page_size,)} if f.storage.keys == "pages" else {}
        restriction = dict(f.storage.only) | pages
    return _write(
        trial,
        rule,
        "\n".join(str(error or "").splitlines()),
        kind="aggregate" if isinstance(error, Suspicion) else kind,
        problem=problem,
        cotangents=cotangents,
        gradients=cotangents is not None and f.has_gradients,
        view="" if view == "contiguous" and kind != "after" else f", {view!r}",
        before=getattr(error, "before", None),
        limits=getattr(error, "limits", None),
        restriction=repr(restriction) if f.storage is not None else "",
        dtype=repr(trial.space.dtype),
        sizes=dict(trial.space.sizes),
        write=_arguments,
        literal=_literal,
    )


def sampling_script(trial: Trial, rule: str, message: str, arguments: str) -> str:
    """Return the text of a file that samples a problem anew, which is too large to write out.

    `arguments` are those of `npattn.testing.device.sweep.show_problem`, after the implementation.
    """
    return _write(trial, rule, message, kind="sampled", arguments=arguments)


def _write(trial: Trial, rule: str, message: str, **values: Any) -> str:
    """Return a script that imports the implementation and shows that it breaks the rule."""
    f = trial.implementation
    imports = [LOAD, f"f, f_backward = load({f.spec!r})"]
    if f.spec not in TARGETS:
        imports = write_import(f.f, "f", f.spec)
        if f.backward is not None:
            imports += write_import(f.backward, "f_backward", f.backward_spec)
    rounding = repr(trial.rounding).replace("Integers(", "npattn.testing.Integers(")
    return render(
        "script.jinja",
        docstring=write_docstring(f'{f.name} breaks "{rule}".\n\n{message}'),
        rule=repr(rule),
        imports=imports,
        conventions=write_conventions(trial.conventions),
        rounding=f"npattn.testing.{rounding}",
        implementation=_implementation(f),
        **values,
    )


def write_docstring(text: str) -> str:
    """Return a docstring; names and messages are of the code under test, and may not end it."""
    safe = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    shown = (c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in safe)
    return '"""' + "".join(shown) + '\n"""'


def write_conventions(conventions: Conventions) -> str:
    """Return the call that makes the conventions: ``npattn.Conventions(causal='top_left')``."""
    default = Conventions()
    changed = {n: x for n, x in vars(conventions).items() if x != getattr(default, n)}
    return f"npattn.Conventions({_keywords(changed)})"


def _keywords(values: dict[str, Any]) -> str:
    """Format keyword arguments; a float by its text, since inf is no name."""
    texts = {
        n: f"float({str(x)!r})" if isinstance(x, float) else repr(x) for n, x in values.items()
    }
    return ", ".join(f"{name}={text}" for name, text in texts.items())


def write_import(function: Any, name: str, spec: str | None) -> list[str]:
    """Import the function by its spec, or by its module and qualified name."""
    home = getattr(function, "__module__", None) or ""
    module = sys.modules.get(home)
    # The dotted name of this very object in the module: a bound method has none.
    value: Any = module
    qualname = getattr(function, "__qualname__", "")
    for part in qualname.split("."):
        value = getattr(value, part, None)
    if value is None or value != function:
        qualname = next((n for n, x in vars(module or object).items() if x == function), None)
    if spec is None and (module is None or qualname is None):
        description = " ".join(repr(function).split())
        return [f"# {description} cannot be imported by name.", PLACEHOLDER]
    if spec is None and home == "__main__":
        path = getattr(module, "__file__", None)
        if path is None:
            return [PLACEHOLDER]
        spec = f"{path}:{qualname}"
    if spec is not None:
        return [LOAD, f"{name}, _ = load({spec!r})"]
    return [f"from {home} import {qualname.split('.')[0]}", f"{name} = {qualname}"]


def _implementation(f: Implementation) -> str:
    """Format the arguments of `Implementation`."""
    words: dict[str, Any] = {"rename": f.rename} if f.rename else {}
    words |= {"features": sorted(f.features | set(f.returns)), "framework": f.framework.name}
    if f.quantized is not None:
        words["quantized"] = f.quantized.dtype
        words |= {"rows": dict(f.quantized.rows)} if f.quantized.rows else {}
    if f.layout != (f.profile.layout if f.profile else "BHTD"):
        words["layout"] = f.layout
    like = ""
    if f.profile is not None and PROFILES.get(f.profile.name) is f.profile:
        like = f"like={f.profile.name!r}, "
    elif f.profile is not None:
        fields = ("name", "version", "about", "layout", "quantized")
        profile = {n: getattr(f.profile, n) for n in fields}
        profile["signature"] = dict(f.profile.signature)
        like = f"like=npattn.profiles.Profile({_keywords(profile)}), "
    backward = "" if f.backward is None else "backward=f_backward, "
    return f"f, {backward}{like}{_keywords(words)}"


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


def _literal(array: Array | None) -> str:
    """Format an array as text that gives back every bit of every number (NaN payloads aside)."""
    if array is None:
        return "None"
    dtype = repr(array.dtype.name)
    if array.size == 0:
        return f"np.zeros({array.shape}, {dtype})"
    numbers = (array if array.dtype == bool else array.astype(np.float64)).tolist()
    # repr gives back every bit, and takes a tenth of the time of np.array2string.
    text = str(numbers).replace("nan", "np.nan").replace("inf", "np.inf").replace("], [", "],\n[")
    text = re.sub("(.{56,}?,) ", r"\1\n", text).replace("\n", "\n    ")
    return f"np.array({text}).astype({dtype})"
