"""Judgement of the derivatives of a function: `check_gradients`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from npattn.errors import OptionError
from npattn.problem.arrays import Array
from npattn.problem.checks import check_integer
from npattn.testing.comparison import short
from npattn.testing.gradients.buffers import find_changes
from npattn.testing.gradients.case import Case
from npattn.testing.gradients.claims import ROUNDINGS, Claims, JvpClaims, VjpClaims
from npattn.testing.gradients.directions import element
from npattn.testing.gradients.explain import explain_shape, explain_values
from npattn.testing.gradients.function import Function, Leaf, SecondOrder, keep_random_state
from npattn.testing.gradients.judge import (
    KINKS,
    Findings,
    ask_line,
    is_steep,
    judge_line,
    judge_part,
    numeric_gradient,
)
from npattn.testing.gradients.report import GradientReport, Judgement
from npattn.testing.gradients.slopes import FIRST
from npattn.testing.power import Power

EXPLAINED = 512
"""Elements of a wrong gradient up to which all are differentiated, to name the mistake."""


def check_gradients(
    f: Callable[..., Any],
    args: tuple[Any, ...] | list[Any],
    vjp: Callable[..., Any] | None = None,
    jvp: Callable[..., Any] | None = None,
    *,
    framework: str = "auto",
    second_order: bool = False,
    seed: int = 0,
    accept: Sequence[str] = (),
) -> GradientReport:
    """Judge the derivatives of any function by differences of its values.

    There is no step and no tolerance to choose: each difference has an estimate of its own error,
    and a gradient is wrong only if it differs by more at every step that is small enough to tell.

    Parameters
    ----------
    f : callable
        Function of arrays: of NumPy with a `vjp` or `jvp` by hand, of torch or JAX, a module, or a
        subclass of ``torch.autograd.Function``. It returns an array, or a dict, list or tuple.
    args : tuple
        Its arguments, at which it is judged: arrays of any floating or complex dtype, or dicts,
        lists and tuples of them. Anything else is handed on as it is.
    vjp : callable, optional
        ``vjp(dout, *args)`` returns one gradient for each argument, with its structure, or None for
        0; `dout` has the structure of the result. For complex numbers
        ``Σ conj(dx) δx`` is the change of the loss, as in torch. Default: the autodiff of torch or
        JAX, if `jvp` is not given either.
    jvp : callable, optional
        ``jvp(dargs, *args)`` returns the change of the results along `dargs`: a tuple of one
        tangent for each argument, or the tangent itself if there is one argument. With a `vjp` too,
        both must also agree with each other.
    framework : {"auto", "numpy", "torch", "jax"}
        Arrays that `f` takes. "auto": by the arguments, else by the package that defines `f`.
    second_order : bool
        Judge also the gradients of the gradients, by torch or JAX.
    seed : int, default 0
        Seed of the directions and cotangents.
    accept : sequence of str
        Gradients ("dx") that need no verdict: they may be undecided or not judged.

    Returns
    -------
    GradientReport
        ``report.passed``, ``report.failures``; ``str(report)`` has a line for each argument. A
        gradient that is undecided or not judged leaves ``report.verdict`` "no verdict".

    Raises
    ------
    OptionError
        If `vjp` and `jvp` are missing for a NumPy function, or return another structure.
    DtypeError
        If no argument, or no result, is a floating array.
    ShapeError
        If `jvp` returns another shape than `f`.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.testing import check_gradients
    >>> x = np.random.default_rng(0).standard_normal((3, 5))
    >>> report = check_gradients(np.tanh, (x,), vjp=lambda dy, x: dy * (1 - np.tanh(x)))
    >>> report.passed
    False
    >>> check_gradients(np.tanh, (x,), vjp=lambda dy, x: dy * (1 - np.tanh(x) ** 2)).passed
    True
    """
    check_integer("seed", seed, 0)
    if not isinstance(args, tuple | list):
        raise OptionError(f"args is a {type(args).__name__}; pass a tuple: (x,) for one argument")
    with keep_random_state(), warnings.catch_warnings():
        function = Function(f, tuple(args), vjp, jvp, framework)
        if second_order and not (vjp is None and function.differentiates):
            raise OptionError("second_order needs the autodiff of torch or JAX; got vjp= or jvp=")
        warnings.simplefilter("ignore")  # of values outside of the domain of f
        with function.framework.one_thread():  # small problems are slow on many
            judgements, notes = _judge_function(function, seed)
            if second_order:
                more, also = _judge_second_order(function, seed)
                judgements += more
                notes += [note for note in also if note not in notes]
    return GradientReport(function.name, tuple(judgements), tuple(notes), seed, tuple(accept))


def _judge_function(function: Function, seed: int) -> tuple[list[Judgement], list[str]]:
    """Return judgements of vjp, jvp and their agreement, and notes on what limits them."""
    case = Case(function, seed)
    judgements: list[Judgement] = []
    notes = list(_describe(case))
    vjp = VjpClaims.ask(case) if function.differentiates else None
    jvp = JvpClaims(case) if function.hand_jvp is not None else None
    kinks: list[str] = []
    for source, claims in (("vjp", vjp), ("jvp", jvp)):
        if claims is not None:
            judgements += _judge_claims(case, claims, source, kinks)
    if vjp is not None and not isinstance(function, SecondOrder):
        notes += [f"the vjp returns a gradient for {n}, which has none" for n in function.surplus]
        # Of a random function, nothing is the same twice.
        if not case.noise and (text := find_changes(function, case.cotangents[0])):
            names = ", ".join(f"d{leaf.name}" for leaf in function.inputs)
            judgements.append(Judgement(names, function.order, "wrong", explanation=text))
    if vjp is not None and jvp is not None:
        judgements.append(_compare(case, vjp, jvp))
    if kinks:
        names = ", ".join(dict.fromkeys(kinks))
        notes.append(
            f"{function.name} has a kink at these arguments, in {names}: there any slope between "
            "those on both sides may be claimed"
        )
    return judgements, notes


def _judge_second_order(function: Function, seed: int) -> tuple[list[Judgement], list[str]]:
    """Judge the gradients of the gradients; not where a backward has none by its own word."""
    try:
        return _judge_function(SecondOrder(function, np.random.default_rng(seed)), seed)
    except NotImplementedError as err:
        names = ", ".join(f"d{leaf.name}" for leaf in function.inputs)
        return [Judgement(names, SecondOrder.order, "not judged", message=f"{err}")], []


def _describe(case: Case) -> Iterator[str]:
    """Yield notes on a case: noise, numbers that are not finite, arguments without a derivative."""
    function = case.function
    if case.noise:
        yield (
            f"{function.name} is not deterministic: two calls with the same arguments differ by "
            f"{short(case.noise)} of the largest result; errors below that cannot be seen. Take "
            "random numbers as an argument, or from the global generator of NumPy or torch"
        )
    for leaf in function.inputs:
        if lost := int((~np.isfinite(case.x[leaf.part])).sum()):
            name = leaf.name
            yield f"d{name} is not judged at {lost} elements, where {name} is not finite"
    if not case.finite.all():
        yield f"{(~case.finite).sum()} results are not finite, and are not judged"
    if function.untraced:
        yield f"jax.jit cannot trace {function.name} ({function.untraced}): its calls are slow"
    if function.constants:
        yield f"without a derivative: {', '.join(function.constants)}"


def _judge_claims(case: Case, claims: Claims, source: str, kinks: list[str]) -> Iterator[Judgement]:
    """Judge the claims for each argument alone, and for all of them together."""
    label = case.function.order if source == "vjp" else source
    excluded = ~np.isfinite(case.x)  # nothing can be compared there
    judged: list[Leaf] = []
    wrong = False
    for leaf in case.function.inputs:
        text = ""
        if isinstance(claims, VjpClaims):
            text = _explain_form(case, claims, leaf, excluded)
        if text:
            wrong = True
            yield Judgement(f"d{leaf.name}", label, "wrong", explanation=text)
        if text or leaf.part.start == leaf.part.stop:
            continue
        findings = judge_part(case, claims, [leaf.part], excluded)
        judged.append(leaf)
        wrong |= bool(findings.wrong)
        kinks += [leaf.name] if findings.kinks else []
        yield _conclude(case, claims, leaf, findings, label)
    if len(judged) > 1 and not wrong:
        findings = judge_part(case, claims, [leaf.part for leaf in judged], excluded)
        if findings.wrong:
            names = ", ".join(f"d{leaf.name}" for leaf in judged)
            text = "right alone, but not if equal numbers of several arguments move together"
            message = _compare_slopes(case, claims, findings)
            yield Judgement(names, label, "wrong", explanation=text, message=message)


def _explain_form(case: Case, claims: VjpClaims, leaf: Leaf, excluded: Array) -> str:
    """Explain a wrong shape, or numbers that are not finite where f has a slope; exclude these."""
    name, f = f"d{leaf.name}", case.function.name
    if leaf.name in claims.shapes:
        excluded[leaf.part] = True
        return explain_shape(name, claims.shapes[leaf.name], leaf.shape)
    raw = claims.raw[:, leaf.part].sum(0)
    bad = np.flatnonzero(~np.isfinite(raw) & ~excluded[leaf.part])
    excluded[leaf.part.start + bad] = True
    for i in bad[:KINKS]:
        if not is_steep(case, leaf, leaf.part.start + int(i)):
            index = _find_index(leaf, int(i))
            count = f"{len(bad)} of {len(raw)} elements"
            return f"{name} is {raw[i]} at {count}, but {f} has a slope at {index}"
    return ""


def _conclude(case: Case, claims: Claims, leaf: Leaf, findings: Findings, label: str) -> Judgement:
    """Return the judgement on one argument: wrong, not judged, undecided or passed, and why."""
    name, f, power = f"d{leaf.name}", case.function.name, findings.power
    if findings.wrong:
        explanation = ""
        if isinstance(claims, VjpClaims) and leaf.name in claims.missing:
            explanation = (
                f"no {name} was returned, but {f} depends on {leaf.name}; if its "
                "gradient is not wanted, leave it out of args: functools.partial binds it"
            )
        elif findings.outside is not None:
            explanation = _explain_kink(case, leaf, findings.outside)
        elif isinstance(claims, VjpClaims):
            row = findings.wrong[0][1]
            explanation = _explain_ties(case, claims, leaf, row) or _explain(
                case, claims, leaf, row
            )
        message = _compare_slopes(case, claims, findings)
        return Judgement(name, label, "wrong", power, explanation, message)
    lost = not case.finite.all() and not power.nonzero
    if lost or not findings.seen:
        where = f"the results of {f} are" if findings.seen else f"{leaf.name} is"
        message = f"there is nothing to compare with: {where} not finite"
        return Judgement(name, label, "not judged", power, message=message)
    if unseen := findings.find_unseen():
        message = f"a defect of npattn, please report it: {', '.join(unseen)} is not found here"
        return Judgement(name, label, "undecided", power, message=message)
    if power.judged:
        return Judgement(name, label, "passed", power)
    reason = f"; near it: {case.raised}" if case.raised else ""
    return Judgement(
        name, label, "undecided", power,
        message=f"no difference is precise enough: {f} is not smooth, too noisy "
        f"or not defined near {leaf.name}{reason}",
    )  # fmt: skip


def _explain_kink(case: Case, leaf: Leaf, outside: tuple[int, float, float, float]) -> str:
    i, claim, left_slope, right_slope = outside
    index = _find_index(leaf, i - leaf.part.start)
    return (
        f"d{leaf.name} is {short(claim)} at {index}, where {case.function.name} has a kink: beside "
        f"it, slopes are {short(left_slope)} and {short(right_slope)}"
    )


def _explain_ties(case: Case, claims: VjpClaims, leaf: Leaf, row: int) -> str:
    """Explain claims that are right for each of some equal numbers, but not for their sum."""
    x = case.x[leaf.part]
    values, counts = np.unique(x, return_counts=True)
    for value in values[counts > 1][:KINKS] if leaf.dtype.kind != "c" else ():
        places = np.flatnonzero(x == value)
        u = np.zeros_like(case.x)
        u[leaf.part] = (x == value) * (abs(value) or 1.0)
        judged = ask_line(case, claims, u)
        verdict = judge_line(*judged)
        if verdict.kink or not verdict.wrong[row]:
            continue
        one = element(case.x, leaf.part, leaf.part.start + int(places[0]))
        if not judge_line(*ask_line(case, claims, one)).kink:
            continue
        claim, slope = judged[1][row], judged[0].slope(FIRST).value[row]
        shown = ", ".join(str(_find_index(leaf, int(i))) for i in places[:3])
        shown += ", …" if len(places) > 3 else ""
        factor = f"{short(claim / slope)} times its slope" if slope else "not 0"
        return (
            f"d{leaf.name} at ties: the sum at equal numbers, {shown}, is {factor}; share one "
            "slope among them, or give it to one"
        )
    return ""


def _find_index(leaf: Leaf, place: int) -> list[int]:
    """Return the index in an array of a place in its part of the vector."""
    parts = 2 if leaf.dtype.kind == "c" else 1
    return [int(n) for n in np.unravel_index(place // parts, leaf.shape)]


def _compare_slopes(case: Case, claims: Claims, findings: Findings) -> str:
    """Say claimed and measured slope in the first direction that is wrong."""
    u, row, order = findings.wrong[0]
    line = case.line(u, claims.slopes(u)[2])
    with np.errstate(all="ignore"):
        errors = [float(line.error(i, i)[row]) for i in range(line.count) if line.slope(i)]
        i = int(np.argmin(np.nan_to_num(errors, nan=np.inf)))
    claim, value = float(claims.slopes(u)[0][row]), float(line.slope(i).value[row])
    return (
        f"slope {value:.12g} ± {short(errors[i])}, claimed {claim:.12g}; order of the Taylor "
        f"remainder {order:.2f} (1 if wrong, 3 if right)"
    )


def _explain(case: Case, claims: VjpClaims, leaf: Leaf, row: int) -> str:
    """Name the mistake in the gradient of an array by differences of its elements."""
    size = leaf.part.stop - leaf.part.start
    if size > EXPLAINED or leaf.dtype.kind == "c":
        return ""

    want, error = numeric_gradient(case, leaf, row)
    got = claims.gradient[row, leaf.part].reshape(leaf.shape)
    spread = abs(claims.spread[:, row, leaf.part]).max(0).reshape(leaf.shape)
    others = {
        one.name: numeric_gradient(case, one, row)[0]
        for one in case.function.inputs
        if one.name != leaf.name and one.shape == leaf.shape and one.dtype.kind != "c"
    }
    rounding = spread + ROUNDINGS * claims.units[leaf.part].reshape(leaf.shape) * abs(got)
    return explain_values(f"d{leaf.name}", got, want, error, others, rounding)


def _compare(case: Case, vjp: VjpClaims, jvp: JvpClaims) -> Judgement:
    """Compare both claims by ⟨w, J u⟩ = ⟨Jᵀ w, u⟩, which no difference blurs."""
    u = np.zeros_like(case.x)
    for leaf in case.function.inputs:
        if leaf.name not in vjp.missing and leaf.name not in vjp.shapes:
            size = leaf.part.stop - leaf.part.start
            u[leaf.part] = case.rng.standard_normal(size).astype(np.float32)
    (a, rounding, sizes), (b, other, _) = vjp.slopes(u), jvp.slopes(u)
    allowed = rounding + other
    with np.errstate(all="ignore"):
        i = int(np.argmax(np.where(a == b, 0, abs(a - b) / allowed)))
    if a[i] == b[i] or abs(a[i] - b[i]) <= allowed[i]:
        return Judgement("⟨w, J u⟩", "vjp and jvp", "passed", Power.of(sizes, allowed))
    message = f"jvp gives {b[i]:.12g}, vjp {a[i]:.12g}; roundings allow {short(allowed[i])}"
    return Judgement("⟨w, J u⟩", "vjp and jvp", "wrong", message=message)
