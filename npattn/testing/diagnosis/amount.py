"""The amount of a fault: by what factor, from which other place, how many times.

A number is named (√D, ln 2, 1 − rate) if the name fits it on every problem that was tried.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

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

Name = Callable[[Problem], float]
NUMBERS: dict[str, Name] = {
    "0": lambda p: 0.0,
    "−1": lambda p: -1.0,
    "2": lambda p: 2.0,
    "1/2": lambda p: 0.5,
    "ln 2": lambda p: math.log(2),
    "log₂ e": lambda p: 1 / math.log(2),
    "the scale": lambda p: _scale(p),
    "1/scale": lambda p: 1 / (_scale(p) or math.nan),
    "√D": lambda p: math.sqrt(p.D),
    "1/√D": lambda p: 1 / math.sqrt(p.D or 1),
    "1/(√D · scale), the default scale in place of the one given": lambda p: (
        1 / (math.sqrt(p.D or 1) * (_scale(p) or math.nan))
    ),
    "D": lambda p: float(p.D),
    "1/D": lambda p: 1 / (p.D or 1),
    "√(D/E)": lambda p: math.sqrt(p.D / (p.E or 1)),
    "√(D/H)": lambda p: math.sqrt(p.D / (p.H or 1)),
    "1/√H": lambda p: 1 / math.sqrt(p.H or 1),
    "√H": lambda p: math.sqrt(p.H),
    "G": lambda p: p.H / (p.K or 1),
    "1/G": lambda p: p.K / (p.H or 1),
    "H": lambda p: float(p.H),
    "1/H": lambda p: 1 / (p.H or 1),
    "B": lambda p: float(math.prod(p.lead)),
    "1/B": lambda p: 1 / (math.prod(p.lead) or 1),
    "S": lambda p: float(p.S),
    "1/S": lambda p: 1 / (p.S or 1),
    "T": lambda p: float(p.T),
    "1 − rate": lambda p: 1 - p.dropout_rate,
    "1/(1 − rate)": lambda p: 1 / (1 - p.dropout_rate),
    "√(D / D padded to 8)": lambda p: math.sqrt(p.D / (-(-p.D // 8) * 8 or 1)),
    "√(D / D padded to 16)": lambda p: math.sqrt(p.D / (-(-p.D // 16) * 16 or 1)),
}
"""Numbers with a name, by what they are on a problem."""
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
POWERS = {f"2{str(n).translate(RAISED)}": 2.0**n for n in (*range(-24, -2), *range(3, 25))}
POWERS |= {f"e{str(n).translate(RAISED)}": math.exp(n) for n in range(-60, 61) if n}
"""Powers that are named too: constants of formats and of clamps."""


def _scale(problem: Problem) -> float:
    return problem.scale if problem.scale is not None else 1 / math.sqrt(problem.D or 1)


def recognise(values: Sequence[tuple[float, Problem]]) -> str:
    """Return the name of the one number that fits all problems; "" if there is none, or it is 1."""
    finite = [(x, p) for x, p in values if np.isfinite(x)]
    if not finite:
        return ""
    small = {name: value for name, value in POWERS.items() if value < NEAR**2}
    for name, value in small.items():  # they are not 0
        if all(abs(x - value) <= NEAR * value for x, _ in finite):
            return name
    for name, f in NUMBERS.items():
        wanted = [f(p) for _, p in finite]
        if any(not np.isfinite(w) or abs(w - 1) < NEAR for w in wanted):
            continue
        pairs = zip((x for x, _ in finite), wanted, strict=True)
        if all(abs(x - w) <= NEAR * max(abs(w), NEAR) for x, w in pairs):
            return name
    numbers = [x for x, _ in finite]
    for name, value in POWERS.items():
        if all(abs(x - value) <= NEAR * value for x in numbers):
            return name
    low, high = min(numbers), max(numbers)
    is_one = high - low <= NEAR * max(abs(high), abs(low)) and f"{np.median(numbers):.4g}" != "1"
    return f"{np.median(numbers):.4g}" if is_one else ""


def _factor(values: Sequence[tuple[float, Problem]], what: str = "") -> str:
    """Return "× 2", or "q·k × 2", if one number fits all problems; "" if none does."""
    text = recognise(values)
    return f"{what} × {text}".strip() if text else ""


def describe(points: Sequence[Point]) -> str:
    """Return the amount of a fault that points share, in words; "" if not all have it."""
    found = [(p.fault, p.evidence.problem) for p in points if p.fault is not None]
    fault = found[0][0]
    faults = [(f, p) for f, p in found if f.form == fault.form]
    if len(faults) < AGREED * len(found):
        faults = [(replace(f, form="several"), p) for f, p in found]
    describe_step = {
        "p": _weights,
        "s": _scores,
        "visible": _visible,
        "lse": _lse,
        "delta": _delta,
        "ds": _factors,
        "dp": _factors,
        "nan": _nan,
        "state": lambda *_: "depends on earlier calls",
        "precision": lambda *_: "",  # errors of roundings have no factor and no source
    }.get(fault.step, _result)
    return describe_step(faults, points)


Faults = Sequence[tuple[Fault, Problem]]
Moved = dict[tuple[int, ...], tuple[int, ...]]
"""Place of a wrong element → the place whose value it has."""


def _weights(faults: Faults, points: Sequence[Point]) -> str:
    """Return a phrase on wrong weights, by the form of the first fault: rows, dropout, factors."""
    fault, _ = faults[0]
    if fault.form == "empty rows":
        return _fake_rows(faults)
    if fault.form == "rows":
        return _row_sums(faults)
    if fault.form == "dropout":
        q = fault.quantity
        lost = (abs(q.got) <= q.tolerance) & (q.want > q.tolerance)
        return "other weights are dropped" if lost.any() else "dropped weights are not 0"
    if fault.form != "factor":
        return ""
    return _times(
        [(float(np.exp(x)), p) for f, p in faults for x in f.facts["log"][f.wrong][:MOST]]
    )


def _row_sums(faults: Faults) -> str:
    """Say what rows sum to, how often a sink counts in them, or their factor."""
    sums, counts, ratios = [], [], []
    for fault, problem in faults:
        got, want = (x.sum(-1)[fault.wrong] for x in (fault.quantity.got, fault.quantity.want))
        sums += [(float(x), problem) for x in got[:MOST]]
        ratio = np.exp(fault.facts["log"][fault.wrong])
        ratios += [(float(x), problem) for x in ratio[:MOST]]
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
    sizes = [x for x, _ in ratios if np.isfinite(x)]
    if sizes and max(sizes) < 1:
        return f"rows sum to less than {must}"
    return f"rows sum to more than {must}" if sizes and min(sizes) > 1 else ""


def _times(ratios: Sequence[tuple[float, Problem]]) -> str:
    values = np.array([x for x, _ in ratios if np.isfinite(x)])
    if not len(values):
        return ""
    whole = np.round(values)
    if (abs(values - whole) <= 0.02 * whole).all() and whole.min() >= 2:
        counts = sorted({int(n) for n in whole})
        return f"counted {', '.join(map(str, counts[:4]))}{' …' if len(counts) > 4 else ''} times"
    return _factor(ratios)


def _fake_rows(faults: Faults) -> str:
    for f, p in faults:
        rows = f.quantity.got[f.wrong]
        if rows.size and (abs(rows - 1 / p.S) <= 1e-2 / p.S).all():
            return "the mean of all values, must be 0"
    return "weights are not 0"


def _scores(faults: Faults, points: Sequence[Point]) -> str:
    """Return a phrase on wrong scores, by the form of the first fault; "" for other forms."""
    fault, _ = faults[0]
    if fault.form in ("scale", "bias", "softcap"):
        shares = [(1 + f.facts[fault.form], p) for f, p in faults]
        if fault.form == "softcap":
            return "the softcap is left out" if abs(shares[0][0] - 2) < 0.01 else "softcap"
        what = "q·k" if fault.form == "scale" else "the bias"
        if all(abs(x) < NEAR for x, _ in shares):
            return f"{what} is left out"
        return _factor(shares, what)
    if fault.form == "bias of":
        fits = [f.facts["sources"] for f, _ in faults]
        all_fit = [text for text in fits[0] if all(text in own for own in fits)]
        return all_fit[0] if all_fit else "the bias of another sample or head"
    if fault.form == "kv head":
        return _heads(faults, "keys")
    if fault.form == "moved":
        return _rows_of_others(faults)
    return ""


def _heads(faults: Faults, what: str) -> str:
    """Say of which key head or sample keys and values come."""
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


def _describe_source(faults: Faults, maps: Iterable[Moved], letters: str) -> str:
    """Say from which place elements come that have the values of another.

    Each map is of a fault: the place of a wrong element → the place whose value it has.
    """
    sizes = [f.quantity.want.shape for f, _ in faults]
    pairs = [(a, b, n) for m, n in zip(maps, sizes, strict=True) for a, b in m.items()]
    if not pairs:
        return ""
    here, there, size = (np.array([x[i][: len(letters)] for x in pairs]) for i in range(3))
    columns = (source_of(x, here[:, i], there[:, i], size[:, i]) for i, x in enumerate(letters))
    parts = [part for part in columns if part]
    return "of " + ", ".join(parts) if parts else ""


def _rows_of_others(faults: Faults) -> str:
    return _describe_source(faults, [f.facts["moved"] for f, _ in faults], "bht")


def _visible(faults: Faults, points: Sequence[Point]) -> str:
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
        rows = np.asarray(q.wrong.any(-1, keepdims=True) & q.known.all(-1, keepdims=True))
        known = rows & np.isfinite(q.got)
        kind = tuple(options_on(point.recipe))
        kinds[kind] += 1
        case = (point.evidence.trial, problem, abs(q.got) > q.tolerance, known)
        sizes = math.prod(problem.lead), problem.H, problem.T * problem.S
        cases.append(((kinds[kind], *(-n for n in sizes)), case))
    # Some of each option, of many samples and heads, and of long ones: others fit several sources.
    taken = (sorted(cases, key=lambda x: x[0][n])[: CASES // 4] for n in (1, 2, 3, 0))
    return mask_source([case for some in taken for _, case in some])


def _lse(faults: Faults, points: Sequence[Point]) -> str:
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


def _numbers(faults: Faults, of: Callable[[Array, Array], Array]) -> list[tuple[float, Problem]]:
    """Return what a function gives of wrong results and the exact ones."""
    return [
        (float(x), p)
        for f, p in faults
        for x in of(f.quantity.got[f.wrong], f.quantity.want[f.wrong])[:MOST]
    ]


def _ratio(got: Array, want: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(np.where(abs(want) > 1e-6, got / want, np.nan))


def _delta(faults: Faults, points: Sequence[Point]) -> str:
    """Say what is taken for δ, from the error in each row."""
    if faults[0][0].form == "dlse":
        return "dlse is left out, or counted otherwise"
    if faults[0][0].form == "parts":
        return "each part of the keys has its own"
    shares, moved = [], []
    largest = 0.0  # error, in units of the largest that δ has if o is rounded to bfloat16
    for point in points:
        fault, problem = point.fault, point.evidence.problem
        if fault is None or "shift" not in fault.facts:
            continue
        evidence = point.evidence
        dout = np.asarray(evidence.cotangents.dout, np.float64)
        delta = (dout * evidence.exact["o"]).sum(-1).reshape(fault.facts["shift"].shape)
        bad = fault.facts["bad"]
        size = (abs(dout) * abs(evidence.exact["o"])).sum(-1).reshape(delta.shape)
        unit = unit_roundoff("bfloat16") * size[bad]
        largest = max(largest, float((abs(fault.facts["shift"][bad]) / unit).max(initial=0)))
        own = delta[bad] - fault.facts["shift"][bad]
        shares += [(float(x), problem) for x in _ratio(own, delta[bad])[:MOST]]
        places = np.argwhere(bad)[:MOST]
        found: Moved = {}
        for place, value in zip(map(tuple, places), own, strict=False):
            gap = abs(delta - value)
            i = np.unravel_index(int(gap.argmin()), gap.shape)
            if gap[i] <= 1e-3 * abs(value) and tuple(map(int, i)) != place:
                found[tuple(map(int, place))] = tuple(map(int, i))
        if len(found) > 0.9 * len(places):
            moved.append((fault, problem, found))
    values = [x for x, _ in shares if np.isfinite(x)]
    if values and np.max(np.abs(values)) < 1e-2:
        return "δ is 0"
    if moved:
        own = [(fault, problem) for fault, problem, _ in moved]
        return "δ " + _describe_source(own, [found for *_, found in moved], "bht")
    return _factor(shares, "δ") or ("by roundings to 16 bits" if largest <= ROUNDINGS else "")


def _factors(faults: Faults, points: Sequence[Point]) -> str:
    fault, _ = faults[0]
    if fault.form == "dweights":
        return "dweights is left out, or counted otherwise"
    if fault.form == "zeros":
        return "0"
    if fault.form == "extra":
        return "hidden keys have a gradient"
    ratios = [
        (float(x), p) for f, p in faults if "f" in f.facts
        for x in f.facts["f"][f.wrong & np.isfinite(f.facts["f"])][:MOST]
    ]  # fmt: skip
    return _factor(ratios)


def _nan(faults: Faults, points: Sequence[Point]) -> str:
    """Describe NaN; which gradients have it depends on the problem."""
    fault, _ = faults[0]
    name = fault.quantity.name
    if not fault.form:
        return f"{name} is finite where it must be NaN"
    beyond = " where no such input reaches it" if fault.facts["of_inputs"] else ""
    return f"{'a gradient' if fault.backward else name} is NaN or infinite{beyond}"


def _result(faults: Faults, points: Sequence[Point]) -> str:
    """Describe a result that is wrong by itself: 0, a factor, values of another place."""
    fault, _ = faults[0]
    if fault.form == "shape":
        got, want = fault.facts["shapes"]
        unsummed = (
            "not summed over the axes that were broadcast, " if fault.facts["unsummed"] else ""
        )
        return f"{unsummed}shape {got}, must be {want}"
    if fault.form == "constant":
        return _constant(faults)
    if fault.form == "kv head":
        return _heads(faults, "values")
    if fault.form == "values of other keys":
        return _value_shift(faults)
    if fault.form == "values left out":
        return "the values of visible keys are left out"
    if fault.form == "factor" and "value" in fault.facts:
        return _factor([(f.facts["value"], p) for f, p in faults])
    if fault.form == "moved":
        return _rows_of_others(faults)
    got, _ = _wrong_numbers(faults)
    text = "0" if not np.any(got) else _factor(_numbers(faults, _ratio)) or _origins(faults)
    if text and fault.step in ("dk", "dv") and any(_is_of_some_rows(f) for f, _ in faults):
        return f"the terms of some queries are {text}"
    return text or ("0 in part" if float(np.mean(got == 0)) > 0.5 else "")


def _is_of_some_rows(fault: Fault) -> bool:
    """Return True if some rows of P or dS are right of a head that has wrong ones."""
    if fault.axes != "bhts":
        return False
    could_be = fault.known & (fault.quantity.want != 0) & fault.wrong.any((-1, -2), keepdims=True)
    wrong, tells = (np.asarray(x.any(-1)) for x in (fault.wrong, could_be))
    return bool(wrong[tells].mean() < AGREED)


def _constant(faults: Faults) -> str:
    """Say what comes back without dout: the whole result, or a number that is added to it."""
    if all(f.facts.get("alone") for f, _ in faults):
        return "dout is not used"
    text = recognise(_numbers(faults, np.subtract))
    return f"{text} is added" if text else ""


def _value_shift(faults: Faults) -> str:
    """Say of which other keys the values are that keys take."""
    shifts: set[int] | None = None
    for fault, _ in faults:
        q, S = fault.quantity, fault.wrong.shape[-1]
        gain = np.where(fault.wrong, 0, q.got - q.want)
        fits = set()
        for c in range(1 - S, S):
            moved = np.zeros_like(gain)
            own = np.where(fault.wrong, q.want, 0)
            here = slice(max(-c, 0), S - max(c, 0))
            there = slice(max(c, 0), S - max(-c, 0))
            moved[..., here] = own[..., there]
            if c and (abs(gain - moved) <= 8 * q.tolerance).mean() > 0.97:
                fits.add(c)
        shifts = fits if shifts is None else shifts & fits
    if shifts:
        c = min(shifts, key=abs)
        return f"values of key s {'−' if c > 0 else '+'} {abs(c)}"
    return "values of other keys"


def _origins(faults: Faults) -> str:
    """Say where values come from that are exact values of other places; "" if they are not."""
    rows: list[tuple[Array, Array]] = []
    maps, told = [], []
    axes = ""
    whole = [f for f, _ in faults if f.wrong.shape == f.quantity.got.shape]
    for fault in sorted(whole, key=lambda f: -int(f.wrong.sum()))[:6]:
        q = fault.quantity
        axes = q.axes
        found = _origin(q.got, q.want, q.tolerance, fault.wrong)
        if len(found):
            maps.append({tuple(map(int, a)): tuple(map(int, b)) for a, b in found})
            told.append((fault, faults[0][1]))
            rows.append((found[:, 0], found[:, 1]))
    if not maps:
        return ""
    text = _describe_source(told, maps, axes)
    if "another" in text and len(axes) == 4:
        stride = next(filter(None, (_strides(a[:, 2:], b[:, 2:]) for a, b in rows)), None)
        if stride:
            return f"values of another place: rows of {stride[1]} are read as rows of {stride[0]}"
    return f"values {text}" if text else ""


def _origin(got: Array, want: Array, tolerance: Array, wrong: Array) -> Array:
    """Return (n, 2, axes): wrong places, and the one place whose exact value each has."""
    flat = want.ravel()
    order = np.argsort(flat)
    ranked = flat[order]
    places = np.argwhere(wrong & np.isfinite(got) & (abs(got) > 16 * tolerance))
    places = places[:: max(1, len(places) // MOST)]
    found = []
    for place in places:
        value = got[tuple(place)]
        slack = min(tolerance[tuple(place)], 4 * np.finfo(np.float32).eps * abs(value))
        low, high = np.searchsorted(ranked, [value - slack, value + slack])
        if high - low == 1:
            found.append((place, np.array(np.unravel_index(order[low], want.shape))))
    if len(found) < 0.6 * max(len(places), 1) or not found:
        return np.zeros((0, 2, want.ndim), int)
    return np.array(found)


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
