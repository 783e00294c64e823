"""The amount of a fault: by what factor, from which other place, how many times.

A number is named (√D, ln 2, 1 − rate) if the name fits it on every problem that was tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.testing.diagnosis.explore import Point
from npattn.testing.diagnosis.locate import Fault

NEAR = 2e-3
"""Relative difference within which a number is a named one."""
MOST = 400
"""Elements of which it is found out where they come from."""

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


def _scale(problem: Problem) -> float:
    return problem.scale if problem.scale is not None else 1 / math.sqrt(problem.D or 1)


def recognise(values: Sequence[tuple[float, Problem]]) -> str:
    """Return the name of a number that fits all problems; its range if none does."""
    finite = [(x, p) for x, p in values if np.isfinite(x)]
    if not finite:
        return "not finite"
    for name, f in NUMBERS.items():
        wanted = [f(p) for _, p in finite]
        if any(not np.isfinite(w) or abs(w - 1) < NEAR for w in wanted):
            continue
        pairs = zip((x for x, _ in finite), wanted, strict=True)
        if all(abs(x - w) <= NEAR * max(abs(w), NEAR) for x, w in pairs):
            return name
    numbers = [x for x, _ in finite]
    low, high = min(numbers), max(numbers)
    if high - low <= NEAR * max(abs(high), abs(low)):
        return f"{np.median(numbers):.4g}"
    return f"{low:.3g} to {high:.3g}"


def describe(points: Sequence[Point]) -> str:
    """Return the amount of a fault that points share, in words."""
    faults = [(p.fault, p.evidence.problem) for p in points if p.fault is not None]
    fault = faults[0][0]
    describe_step = {
        "p": _weights,
        "s": _scores,
        "visible": _visible,
        "lse": _lse,
        "delta": _delta,
        "ds": _factors,
        "dp": _factors,
        "nan": _nan,
        "state": _state,
    }.get(fault.step, _result)
    return describe_step(faults, points)


Faults = Sequence[tuple[Fault, Problem]]


def _weights(faults: Faults, points: Sequence[Point]) -> str:
    fault, _ = faults[0]
    if fault.form == "empty rows":
        return _fake_rows(faults)
    if fault.form == "rows":
        ratios = [(float(np.exp(x)), p) for f, p in faults if f.form == "rows"
                  for x in f.facts["log"][f.wrong]]  # fmt: skip
        text = recognise(ratios)
        if text == "not finite":
            return "rows sum to 0"
        is_number = " to " in text or text[0].isdigit()
        return f"rows sum to {text}" if is_number else f"rows are × {text}"
    if fault.form == "dropout":
        return "dropped weights are not 0"
    ratios = [
        (float(np.exp(x)), p)
        for f, p in faults
        if f.form == "factor"
        for x in f.facts["log"][f.wrong][:MOST]
    ]
    return _times(ratios)


def _times(ratios: Sequence[tuple[float, Problem]]) -> str:
    values = np.array([x for x, _ in ratios if np.isfinite(x)])
    if not len(values):
        return ""
    whole = np.round(values)
    if (abs(values - whole) <= 0.02 * whole).all() and whole.min() >= 2:
        counts = sorted({int(n) for n in whole})
        return f"counted {', '.join(map(str, counts[:4]))}{' …' if len(counts) > 4 else ''} times"
    part = np.round(1 / values)
    if (abs(1 / values - part) <= 0.02 * part).all() and part.min() >= 2:
        counts = sorted({int(n) for n in part})
        return f"× {', '.join(f'1/{n}' for n in counts[:4])}"
    return f"× {recognise(ratios)}"


def _fake_rows(faults: Faults) -> str:
    for f, p in faults:
        rows = f.quantity.got[f.wrong]
        if rows.size and (abs(rows - 1 / p.S) <= 1e-2 / p.S).all():
            return "the mean of all values, must be 0"
    return "weights are not 0"


def _scores(faults: Faults, points: Sequence[Point]) -> str:
    fault, _ = faults[0]
    if fault.form in ("scale", "bias", "softcap"):
        shares = [(1 + f.facts[fault.form], p) for f, p in faults if f.form == fault.form]
        if fault.form == "softcap":
            return "the softcap is left out" if abs(shares[0][0] - 2) < 0.01 else "softcap"
        what = "q·k" if fault.form == "scale" else "the bias"
        if all(abs(x) < NEAR for x, _ in shares):
            return f"{what} is left out"
        return f"{what} × {recognise(shares)}"
    if fault.form == "kv head":
        return _heads(faults, "keys")
    if fault.form == "moved":
        return _describe_source([f.facts["moved"] for f, _ in faults if f.form == "moved"], "bht")
    off = [abs(f.facts["log"][f.wrong]).max(initial=0) for f, _ in faults if "log" in f.facts]
    return f"scores are off by up to {max(off):.3g}" if off else ""


def _heads(faults: Faults, what: str) -> str:
    """Say of which key head or sample keys and values come."""
    pairs = [(own, other) for f, _ in faults for own, other in f.facts.get("moved", {}).items()]
    if any(b != c for (b, _), (c, _) in pairs):
        return f"{what} of another sample"
    named = sorted({(h, k) for (_, h), (_, k) in pairs})
    return f"{what} of another head: " + ", ".join(f"h = {h} of {k}" for h, k in named[:4])


def _describe_source(maps: Iterable[dict[tuple[int, ...], tuple[int, ...]]], letters: str) -> str:
    """Say from which place elements come that have the values of another."""
    pairs = [(a, b) for m in maps for a, b in m.items()]
    if not pairs:
        return ""
    here, there = (np.array([x[i] for x in pairs]) for i in (0, 1))
    parts = []
    names = {"b": "sample", "h": "head", "t": "query", "s": "key", "d": "column", "e": "column"}
    for i, x in enumerate(letters):
        gap = here[:, i] - there[:, i]
        if not gap.any():
            continue
        if (gap == gap[0]).all():
            sign = "−" if gap[0] > 0 else "+"
            parts.append(f"{names[x]} {x} {sign} {abs(gap[0])}")
        elif (there[:, i] == there[0, i]).all():
            parts.append(f"{names[x]} {there[0, i]}")
        else:
            parts.append(f"another {names[x]}")
    return "of " + ", ".join(parts) if parts else ""


def _visible(faults: Faults, points: Sequence[Point]) -> str:
    fault, _ = faults[0]
    shift = _mask_shift(faults, points)
    if shift:
        return shift
    if fault.form == "extra":
        return "hidden keys take weight"
    if fault.form == "rows of zeros":
        return "no key is seen"
    return "visible keys have weight 0"


def _mask_shift(faults: Faults, points: Sequence[Point]) -> str:
    """Say of which other query or head the mask is, if it is one's."""
    shifts: set[int] | None = None
    for point in points:
        f = point.fault
        if f is None or f.axes != "bhts":
            continue
        q = f.quantity
        visible = point.evidence.trial.visible(point.evidence.problem).reshape(q.want.shape)
        got = abs(q.got) > q.tolerance
        rows = np.argwhere(f.wrong.any(-1))
        rows = rows[:: max(1, len(rows) // 32)]
        T = visible.shape[2]
        fits = set()
        for c in range(-min(T, 130), min(T, 130) + 1):
            if c and all(
                0 <= t - c < T and not (got[b, h, t] ^ visible[b, h, t - c]).any()
                for b, h, t in rows
            ):
                fits.add(c)
        shifts = fits if shifts is None else shifts & fits
    if shifts and len(faults) > 0:
        c = min(shifts, key=abs)
        return f"the mask is of query t {'−' if c > 0 else '+'} {abs(c)}"
    return ""


def _lse(faults: Faults, points: Sequence[Point]) -> str:
    got = np.concatenate([f.quantity.got[f.wrong] for f, _ in faults])
    want = np.concatenate([f.quantity.want[f.wrong] for f, _ in faults])
    if np.isneginf(got).all():
        return "−∞"
    if np.isneginf(want).all():
        return "finite, must be −∞" if np.isfinite(got).all() else "must be −∞"
    gaps = [
        (float(x), p) for f, p in faults
        for x in (f.quantity.got[f.wrong] - f.quantity.want[f.wrong])[:MOST]
    ]  # fmt: skip
    shift, factor = recognise(gaps), recognise(_ratios(faults))
    return f"× {factor}" if " to " in shift and " to " not in factor else f"off by {shift}"


def _ratios(faults: Faults) -> list[tuple[float, Problem]]:
    """Return wrong results divided by exact ones."""
    return [
        (float(x), p)
        for f, p in faults
        for x in _ratio(f.quantity.got[f.wrong], f.quantity.want[f.wrong])[:MOST]
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
    for point in points:
        fault, problem = point.fault, point.evidence.problem
        if fault is None or "shift" not in fault.facts:
            continue
        evidence = point.evidence
        dout = np.asarray(evidence.cotangents.dout, np.float64)
        delta = (dout * evidence.exact["o"]).sum(-1).reshape(fault.facts["shift"].shape)
        bad = fault.facts["bad"]
        own = delta[bad] - fault.facts["shift"][bad]
        shares += [(float(x), problem) for x in _ratio(own, delta[bad])[:MOST]]
        places = np.argwhere(bad)[:MOST]
        found = {}
        for place, value in zip(map(tuple, places), own, strict=False):
            gap = abs(delta - value)
            i = np.unravel_index(int(gap.argmin()), gap.shape)
            if gap[i] <= 1e-3 * abs(value) and tuple(map(int, i)) != place:
                found[tuple(map(int, place))] = tuple(map(int, i))
        if len(found) > 0.9 * len(places):
            moved.append(found)
    values = [x for x, _ in shares if np.isfinite(x)]
    if values and np.max(np.abs(values)) < 1e-2:
        return "δ is 0"
    if moved:
        return "δ " + _describe_source(moved, "bht")
    text = recognise(shares)
    return f"δ × {text}" if text and " to " not in text else "δ is of something else"


def _factors(faults: Faults, points: Sequence[Point]) -> str:
    fault, _ = faults[0]
    if fault.form == "zeros":
        return "0"
    if fault.form == "extra":
        return "hidden keys have a gradient"
    ratios = [
        (float(x), p) for f, p in faults if "f" in f.facts
        for x in f.facts["f"][f.wrong & np.isfinite(f.facts["f"])][:MOST]
    ]  # fmt: skip
    return f"× {recognise(ratios)}" if ratios else ""


def _state(faults: Faults, points: Sequence[Point]) -> str:
    return "depends on earlier calls"


def _nan(faults: Faults, points: Sequence[Point]) -> str:
    fault, _ = faults[0]
    return f"{fault.quantity.name} is NaN or infinite" if fault.form else "finite, must not be"


def _result(faults: Faults, points: Sequence[Point]) -> str:
    """Describe a result that is wrong by itself: 0, a factor, values of another place."""
    fault, _ = faults[0]
    if fault.form == "shape":
        return "another shape"
    if fault.form == "constant":
        return "dout is not used"
    if fault.form == "kv head":
        return _heads(faults, "values")
    if fault.form == "values of other keys":
        return _value_shift(faults)
    if fault.form == "factor" and "value" in fault.facts:
        return f"× {recognise([(f.facts['value'], p) for f, p in faults if 'value' in f.facts])}"
    if fault.form == "moved" and "moved" in fault.facts:
        return _describe_source(
            [f.facts["moved"] for f, _ in faults if f.facts.get("moved")], "bht"
        )
    got = np.concatenate([f.quantity.got[f.wrong] for f, _ in faults])
    if not np.any(got):
        return "0"
    text = recognise(_ratios(faults))
    if " to " not in text:
        return f"× {text}"
    origin = _origins(faults)
    if origin:
        return origin
    if float(np.mean(got == 0)) > 0.5:
        return "0 in part"
    want = np.concatenate([f.quantity.want[f.wrong] for f, _ in faults])
    off = abs(got - want)
    off = off[np.isfinite(off)]
    return f"off by up to {off.max():.3g}" if len(off) else "not finite"


def _value_shift(faults: Faults) -> str:
    """Say of which other keys the values are that keys take."""
    shifts: set[int] | None = None
    for fault, _ in faults:
        if fault.form != "values of other keys":
            continue
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
    maps = []
    axes = ""
    whole = [f for f, _ in faults if f.wrong.shape == f.quantity.got.shape]
    for fault in sorted(whole, key=lambda f: -int(f.wrong.sum()))[:6]:
        q = fault.quantity
        axes = q.axes
        found = _origin(q.got, q.want, q.tolerance, fault.wrong)
        if len(found):
            maps.append({tuple(map(int, a)): tuple(map(int, b)) for a, b in found})
            rows.append((found[:, 0], found[:, 1]))
    if not maps:
        return ""
    text = _describe_source(maps, axes)
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
