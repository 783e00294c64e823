"""The amount of a fault: by what factor, from which other place, how many times.

A number is named (√D, ln 2, 1 − rate) if the name fits it on every problem that was tried.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.testing.bounds.rounding import unit_roundoff
from npattn.testing.cases.pairwise import options_on
from npattn.testing.diagnosis.explore import Point, tame
from npattn.testing.diagnosis.locate import ROUNDINGS, Fault
from npattn.testing.diagnosis.sources import head_source, mask_source, source_of

NEAR = 2e-3
"""Relative difference within which a number is a named one."""
CASES = 12
"""Problems on which the source of a mask is looked for."""
MOST = 400
"""Elements of which it is found out where they come from."""
AGREED = 0.9
"""Share of the problems that must have the form of the first, for it to be told."""

Numbers = tuple[float | Array, Problem]
"""Numbers of one problem."""
Name = Callable[[Problem], float]
SIZES: dict[str, Name] = {
    "√D": lambda p: math.sqrt(p.D),
    "D": lambda p: float(p.D),
    "√H": lambda p: math.sqrt(p.H),
    "G": lambda p: p.H / (p.K or 1),
    "H": lambda p: float(p.H),
    "B": lambda p: float(math.prod(p.lead)),
    "S": lambda p: float(p.S),
    "T": lambda p: float(p.T),
    "(1 − rate)": lambda p: 1 - p.dropout_rate,
}


def _inverse(f: Name) -> Name:
    return lambda p: 1 / (f(p) or 1)


NUMBERS: dict[str, Name] = {
    "0": lambda p: 0.0,
    "−1": lambda p: -1.0,
    "2": lambda p: 2.0,
    "1/2": lambda p: 0.5,
    "ln 2": lambda p: math.log(2),
    "log₂ e": lambda p: 1 / math.log(2),
    "the scale": lambda p: p.scale or 0.0,
    "1/scale": lambda p: 1 / (p.scale or math.nan),
    **{name.strip("()"): f for name, f in SIZES.items()},
    **{f"1/{name}": _inverse(f) for name, f in SIZES.items()},
    "1/(√D · scale), the default scale in place of the one given": lambda p: (
        1 / (math.sqrt(p.D or 1) * (p.scale or math.nan))
    ),
    "√(D/E)": lambda p: math.sqrt(p.D / (p.E or 1)),
    "√(D/H)": lambda p: math.sqrt(p.D / (p.H or 1)),
    "√(D / D padded to 8)": lambda p: math.sqrt(p.D / (-(-p.D // 8) * 8 or 1)),
    "√(D / D padded to 16)": lambda p: math.sqrt(p.D / (-(-p.D // 16) * 16 or 1)),
}
"""Numbers with a name, by what they are on a problem."""
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
POWERS = {f"2{str(n).translate(RAISED)}": 2.0**n for n in (*range(-24, -2), *range(3, 25))}
POWERS |= {f"e{str(n).translate(RAISED)}": math.exp(n) for n in range(-60, 61) if n}
"""Powers that are named too: constants of formats and of clamps."""


def recognise(values: Sequence[Numbers]) -> str:
    """Return the name of the one number that fits all problems; "" if there is none, or it is 1."""
    known = [(x, p) for x, p in values if np.isfinite(x).any()]
    if not known:
        return ""
    numbers, counts = _finite(known), [np.isfinite(x).sum() for x, _ in known]
    small = {name: value for name, value in POWERS.items() if value < NEAR**2}  # they are not 0
    for name, f in (*small.items(), *NUMBERS.items(), *POWERS.items()):
        wanted = np.repeat([f if isinstance(f, float) else f(p) for _, p in known], counts)
        least = 0 if isinstance(f, float) else NEAR
        near = abs(numbers - wanted) <= NEAR * np.maximum(abs(wanted), least)
        if (near & np.isfinite(wanted) & (abs(wanted - 1) >= NEAR)).all():
            return name
    low, high = numbers.min(), numbers.max()
    is_one = high - low <= NEAR * max(abs(high), abs(low)) and f"{np.median(numbers):.4g}" != "1"
    return f"{np.median(numbers):.4g}" if is_one else ""


def _finite(values: Iterable[Numbers]) -> Array:
    """Return the finite numbers of all problems together."""
    numbers = np.concatenate([np.zeros(0), *(np.ravel(x) for x, _ in values)])
    return np.asarray(numbers[np.isfinite(numbers)])


def _factor(values: Sequence[Numbers], what: str = "") -> str:
    """Return "× 2", or "q·k × 2", if one number fits all problems; "" if none does."""
    text = recognise(values)
    return f"{what} × {text}".strip() if text else ""


def describe(points: Sequence[Point]) -> str:
    """Return the amount of a fault that points share, in words; "" if not all have it."""
    found = [(p.fault, p.evidence.problem) for p in points if p.fault is not None]
    fault = found[0][0]
    if fault.step == "state":
        return "depends on earlier calls"
    if fault.step == "precision":
        return ""  # errors of roundings have no factor and no source
    faults = [(f, p) for f, p in found if f.form == fault.form]
    told = (OF_SCORES if fault.step in ("s", "p") else OF_RESULTS).get(fault.form)
    if len(faults) < AGREED * len(found):
        faults = [(replace(f, form="several"), p) for f, p in found]
    elif told is not None:
        return told if isinstance(told, str) else told(faults)
    if fault.step == "visible":
        return _visible(points)
    if fault.step == "delta":
        return _delta(points)
    by_step = {"p": _weights, "s": lambda _: "", "lse": _lse, "ds": _factors, "dp": _factors}
    return {**by_step, "nan": _nan}.get(fault.step, _result)(faults)


Faults = Sequence[tuple[Fault, Problem]]
Moved = dict[tuple[int, ...], tuple[int, ...]]
"""Place of a wrong element → the place whose value it has."""


def _list_ratios(faults: Faults) -> list[Numbers]:
    """Return the factors of wrong weights, or of wrong rows."""
    return [(np.exp(f.facts["log"][f.wrong][:MOST]), p) for f, p in faults]


def _weights(faults: Faults) -> str:
    """Return how many times weights are counted, or their factor."""
    if faults[0][0].form != "factor":
        return ""
    ratios = _list_ratios(faults)
    values = _finite(ratios)
    if not len(values):
        return ""
    whole = np.round(values)
    if (abs(values - whole) <= 0.02 * whole).all() and whole.min() >= 2:
        counts = sorted({int(n) for n in whole})
        return f"counted {', '.join(map(str, counts[:4]))}{' …' if len(counts) > 4 else ''} times"
    return _factor(ratios)


def _say_dropped(faults: Faults) -> str:
    q = faults[0][0].quantity
    lost = (abs(q.got) <= q.tolerance) & (q.want > q.tolerance)
    return "other weights are dropped" if lost.any() else "dropped weights are not 0"


def _row_sums(faults: Faults) -> str:
    """Say what rows sum to, how often a sink counts in them, or their factor."""
    sums, counts, ratios = [], [], _list_ratios(faults)
    for fault, problem in faults:
        got, want = (x.sum(-1)[fault.wrong] for x in (fault.quantity.got, fault.quantity.want))
        sums.append((got[:MOST], problem))
        ratio = np.exp(fault.facts["log"][fault.wrong])
        share = 1 - want  # of the sink, if there is one and nothing is dropped
        counts_sink = problem.sinks is not None and problem.dropout_mask is None
        if counts_sink and share.max(initial=0) > 0.2:
            clear = int(share.argmax())  # the row that tells best
            counts += [(float(1 + (1 / ratio[clear] - 1) / share[clear]), problem)]
    total, sink, factor = (recognise(x) for x in (sums, counts, ratios))
    if total:
        more = all(f.quantity.got.sum(-1)[f.wrong].min() > 0 for f, _ in faults)
        less = total.startswith("e⁻") and more
        return f"rows sum to {total}" + (", must be less" if less else "")
    if len(counts) * 2 > len(faults) and sink:
        return "the sink is left out of the sum" if sink == "0" else f"the sink counts {sink} times"
    if factor:
        return f"rows are × {factor}"
    must = "they must" if any(p.sinks is not None for _, p in faults) else "1"
    sizes = _finite(ratios)
    if len(sizes) and sizes.max() < 1:
        return f"rows sum to less than {must}"
    return f"rows sum to more than {must}" if len(sizes) and sizes.min() > 1 else ""


def _fake_rows(faults: Faults) -> str:
    for f, p in faults:
        rows = f.quantity.got[f.wrong]
        if rows.size and (abs(rows - 1 / p.S) <= 1e-2 / p.S).all():
            return "the mean of all values, must be 0"
    return "weights are not 0"


def _share(name: str, what: str, faults: Faults) -> str:
    """Return what a term of the scores is multiplied by, or that it is left out."""
    shares = [(1 + f.facts[name], p) for f, p in faults]
    left_out = all(abs(x) < NEAR for x, _ in shares)
    return f"{what} is left out" if left_out else _factor(shares, what)


def _softcap(faults: Faults) -> str:
    left_out = abs(faults[0][0].facts["softcap"] - 1) < 0.01
    return "the softcap is left out" if left_out else "softcap"


def _biases(faults: Faults) -> str:
    fits = [f.facts["sources"] for f, _ in faults]
    return next((x for x in fits[0] if all(x in own for own in fits)), OTHER_BIAS)


OTHER_BIAS = "the bias of another sample or head"


def _heads(faults: Faults) -> str:
    """Name the key head or the sample from which keys or values are taken."""
    what = "keys" if faults[0][0].step == "s" else "values"
    pairs = [(*places, p) for f, p in faults for places in f.facts["moved"].items()]
    if not pairs:
        return f"{what} of another sample or head"
    samples = [(here[0], there[0]) for here, there, _ in pairs]
    if all(b != c for b, c in samples):
        here, there = (np.array([places[i] for places in samples]) for i in (0, 1))
        sizes = np.array([math.prod(p.lead) for *_, p in pairs])
        source = source_of("b", here, there, sizes)
        return f"{what} of another sample" + (f": {source}" if "another" not in source else "")
    columns = [(h, k, p.K, p.H // max(p.K, 1)) for (b, h), (c, k), p in pairs if b == c]
    heads, read, K, G = (np.array(x) for x in zip(*columns, strict=True))
    source = head_source(heads, read, K, G)
    if source:
        return f"query head h takes {what} of key head {source}, must be h // G"
    first = min((h, k, h // max(g, 1)) for h, k, _, g in columns)
    return f"query head {first[0]} takes {what} of key head {first[1]}, must be {first[2]}"


def _describe_source(moves: Iterable[tuple[Fault, Problem, Moved]], letters: str) -> str:
    """Say from which place elements come that have the values of another; "" if from none."""
    pairs = [
        (a, b, fault.quantity.want.shape) for fault, _, moved in moves for a, b in moved.items()
    ]
    if not pairs:
        return ""
    here, there, size = (np.array([x[i][: len(letters)] for x in pairs]) for i in range(3))
    columns = (source_of(x, here[:, i], there[:, i], size[:, i]) for i, x in enumerate(letters))
    parts = [part for part in columns if part]
    return "of " + ", ".join(parts) if parts else ""


def _rows_of_others(faults: Faults) -> str:
    return _describe_source([(f, p, f.facts["moved"]) for f, p in faults], "bht")


def _visible(points: Sequence[Point]) -> str:
    source = _mask_of(points)
    if source:
        return source
    own = [p.fault for p in points if p.fault is not None]
    kinds = {kind for f in own for kind in f.facts.get("kinds", ())}
    both, extra, none, zeros = SEEN
    if len(kinds) > 1:
        return both
    if "extra" in kinds:
        return extra
    return none if all(f.form == "rows of zeros" for f in own) else zeros


SEEN = (
    "hidden keys take weight, and visible keys have none",
    "hidden keys take weight",
    "no key is seen",
    "visible keys have weight 0",
)
"""Amounts of a wrong mask that follows no other mask."""


def _mask_of(points: Sequence[Point]) -> str:
    """Say which other mask it is that the weights of the wrong rows follow, if there is one."""
    cases = []
    kinds: Counter[tuple[str, ...]] = Counter()
    for point in points:
        fault, problem = point.fault, point.evidence.problem
        if fault is None or fault.axes != "bhts" or fault.quantity.got.shape != fault.wrong.shape:
            continue
        if tame(point.recipe) != point.recipe:  # a weight that underflows is of no mask
            continue
        q = fault.quantity
        known = q.known.all(-1, keepdims=True) & np.isfinite(q.got)
        rows = np.broadcast_to(q.wrong.any(-1, keepdims=True), q.got.shape)
        kind = tuple(options_on(point.recipe))
        kinds[kind] += 1
        case = (point.evidence.trial, problem, abs(q.got) > q.tolerance, known, rows)
        sizes = math.prod(problem.lead), problem.H, problem.T * problem.S
        cases.append(((kinds[kind], *(-n for n in sizes)), case))
    # Some of each option, of many samples and heads, and of long ones: others fit several sources.
    taken = (sorted(cases, key=lambda x: x[0][n])[: CASES // 4] for n in (1, 2, 3, 0))
    return mask_source([case for some in taken for _, case in some])


def _lse(faults: Faults) -> str:
    """Say what lse is: −∞, a number where it must be −∞, too much by a number, or a multiple."""
    got, want = _wrong_numbers(faults)
    if np.isneginf(got).all():
        return "−∞"
    if np.isneginf(want).all():
        return "finite, must be −∞" if np.isfinite(got).all() else "must be −∞"
    shift = recognise(_numbers(faults, np.subtract))
    return f"off by {shift}" if shift else _factor(_numbers(faults, _ratio)) or _origins(faults)


def _wrong_numbers(faults: Faults) -> tuple[Array, Array]:
    """Return the wrong numbers of all problems, and the exact ones."""
    got, want = ([getattr(f.quantity, x)[f.wrong] for f, _ in faults] for x in ("got", "want"))
    return np.concatenate(got), np.concatenate(want)


def _numbers(faults: Faults, of: Callable[[Array, Array], Array]) -> list[Numbers]:
    """Return what a function gives of wrong results and the exact ones."""
    return [(of(f.quantity.got[f.wrong], f.quantity.want[f.wrong])[:MOST], p) for f, p in faults]


def _ratio(got: Array, want: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(np.where(abs(want) > 1e-6, got / want, np.nan))


def _delta(points: Sequence[Point]) -> str:
    """Say what is taken for δ, from the error in each row."""
    shares, told = [], []
    largest = 0.0  # error, in units of the largest that δ has if o is rounded to bfloat16
    for point in points:
        fault, problem, evidence = point.fault, point.evidence.problem, point.evidence
        if fault is None or "shift" not in fault.facts:
            continue
        shift, bad = fault.facts["shift"], fault.facts["bad"]
        terms = np.asarray(evidence.cotangents.dout, np.float64) * evidence.exact["o"]
        delta, size = (x.sum(-1).reshape(shift.shape) for x in (terms, abs(terms)))
        unit = unit_roundoff("bfloat16") * size[bad]
        largest = max(largest, float((abs(shift[bad]) / unit).max(initial=0)))
        own = delta - shift
        shares.append((_ratio(own[bad], delta[bad])[:MOST], problem))
        told.append((fault, problem, _origin(own, delta, bad, 1e-3 * abs(own))))
    values = _finite(shares)
    if len(values) and abs(values).max() < 1e-2:
        return "δ is 0"
    source = _describe_source([x for x in told if x[2]], "bht")
    if source:
        return f"δ {source}"
    return _factor(shares, "δ") or ("by roundings to 16 bits" if largest <= ROUNDINGS else "")


def _factors(faults: Faults) -> str:
    fault, _ = faults[0]
    if fault.form == "zeros":
        return "0"
    if fault.form == "extra":
        return "hidden keys have a gradient"
    told = [(f, f.facts["f"], p) for f, p in faults if "f" in f.facts]
    return _factor([(x[f.wrong & np.isfinite(x)][:MOST], p) for f, x, p in told])


def _nan(faults: Faults) -> str:
    """Describe NaN; which gradients have it depends on the problem."""
    fault, _ = faults[0]
    name = fault.quantity.name
    if not fault.form:
        return f"{name} is finite where it must be NaN"
    beyond = " where no such input reaches it" if fault.facts["of_inputs"] else ""
    return f"{'a gradient' if fault.backward else name} is NaN or infinite{beyond}"


def _result(faults: Faults) -> str:
    """Describe a result that is wrong by itself: 0, a factor, values of another place."""
    fault, _ = faults[0]
    if fault.form == "factor" and "value" in fault.facts:
        return _factor([(f.facts["value"], p) for f, p in faults])
    if fault.step == "o" and fault.form == "rows":
        return _factor(_list_ratios(faults))
    got, _ = _wrong_numbers(faults)
    text = "0" if not np.any(got) else _factor(_numbers(faults, _ratio)) or _origins(faults)
    if text and fault.step in ("dk", "dv") and any(_is_of_some_rows(f) for f, _ in faults):
        return f"the terms of some queries are {text}"
    return text or ("0 in part" if float(np.mean(got == 0)) > 0.5 else "")


def _shape(faults: Faults) -> str:
    facts = faults[0][0].facts
    unsummed = "not summed over the axes that were broadcast, " if facts["unsummed"] else ""
    return "{}shape {}, must be {}".format(unsummed, *facts["shapes"])


def _is_of_some_rows(fault: Fault) -> bool:
    """Return True if some rows of P or dS are right in heads where others are wrong."""
    if fault.axes != "bhts":
        return False
    could_be = fault.known & (fault.quantity.want != 0)
    wrong, tells = (np.asarray(x.any(-1)) for x in (fault.wrong, could_be))
    tells &= wrong.any(-1, keepdims=True)
    return bool(wrong[tells].mean() < AGREED)


def _constant(faults: Faults) -> str:
    """Say what comes back without dout: the whole result, or a number that is added to it."""
    if all(f.facts.get("alone") for f, _ in faults):
        return "dout is not used"
    text = recognise(_numbers(faults, np.subtract))
    return f"{text} is added" if text else ""


def _value_shift(faults: Faults) -> str:
    """Name the keys whose values are taken: a weight is lost at one key, and found at another."""
    moves = []
    for fault, problem in faults:
        q = fault.quantity
        gain = np.where(fault.wrong, 0, q.got - q.want)
        moves.append((fault, problem, _origin(q.want, gain, fault.wrong, 8 * q.tolerance)))
    text = _describe_source(moves, "bhts")
    return "values of other keys" if not text or "another" in text else f"values {text}"


def _origins(faults: Faults) -> str:
    """Say where values come from that are exact values of other places; "" if they are not."""
    whole = [(f, p) for f, p in faults if f.wrong.shape == f.quantity.got.shape]
    moves = []
    for fault, problem in sorted(whole, key=lambda x: -int(x[0].wrong.sum()))[:6]:
        q = fault.quantity
        slack = np.minimum(q.tolerance, 4 * np.finfo(np.float32).eps * abs(q.got))
        clear = fault.wrong & (abs(q.got) > 16 * q.tolerance)
        moves.append((fault, problem, _origin(q.got, q.want, clear, slack)))
    axes = whole[0][0].quantity.axes if whole else ""
    text = _describe_source(moves, axes)
    if "another" in text and len(axes) == 4:
        pairs = (np.array([*moved.items()]) for *_, moved in moves if moved)
        stride = next(filter(None, (_strides(x[:, 0, 2:], x[:, 1, 2:]) for x in pairs)), None)
        if stride:
            return f"values of another place: rows of {stride[1]} are read as rows of {stride[0]}"
    return f"values {text}" if text else ""


def _origin(got: Array, want: Array, wrong: Array, slack: Array) -> Moved:
    """Return wrong places with the one other place that has their value, if most have one."""
    order = np.argsort(want, None)
    places = np.argwhere(wrong & np.isfinite(got))
    places = places[:: max(1, len(places) // MOST)]
    values, widths = (x[tuple(places.T)] for x in (got, slack))
    low, high = (np.searchsorted(want.ravel()[order], values + x) for x in (-widths, widths))
    there = np.unravel_index(order[np.minimum(low, want.size - 1)], want.shape)
    pairs = zip(places.tolist(), np.stack(there, -1).tolist(), high - low == 1, strict=True)
    found = {tuple(a): tuple(b) for a, b, alone in pairs if alone and a != b}
    return found if len(found) >= 0.6 * len(places) else {}


def _strides(here: Array, there: Array) -> tuple[int, int] | None:
    """Return (a, b) with a·row + column = b·row′ + column′ for nearly all pairs of places."""
    widths = [*range(8, 264, 8), *range(1, 65)]
    for a in widths:
        for b in widths:
            if a != b:
                flat = a * here[:, 0] + here[:, 1] == b * there[:, 0] + there[:, 1]
                if flat.mean() > 0.9:
                    return a, b
    return None


OF_SCORES: dict[str, str | Callable[[Faults], str]] = {
    "empty rows": _fake_rows,
    "rows": _row_sums,
    "dropout": _say_dropped,
    "scale": partial(_share, "scale", "q·k"),
    "bias": partial(_share, "bias", "the bias"),
    "softcap": _softcap,
    "bias of": _biases,
    "kv head": _heads,
    "moved": _rows_of_others,
}
"""Amount of a fault of s or p by its form, for forms that tell more than the step."""
OF_RESULTS: dict[str, str | Callable[[Faults], str]] = {
    "kv head": _heads,
    "moved": _rows_of_others,
    "shape": _shape,
    "constant": _constant,
    "values of other keys": _value_shift,
    "values left out": "the values of visible keys are left out",
    "dlse": "dlse is left out, or counted otherwise",
    "dweights": "dweights is left out, or counted otherwise",
    "parts": "each part of the keys has its own",
}
"""Amount of a fault of another step, by its step."""
