"""Sources of wrong values, as functions of the indices: "head h reads key head h % K".

Wrong values that are right values of another place have a source for each index. It is looked for
in a small grammar, and named only if it gives every pair of places:

    i ± c    n − 1 − i    n − 1    c · i    c · (i // c)    i % c    i // c

and h // G, h % K of these.

The same is asked of a mask: which mask, of the same problem with another index or another option,
are the weights that were read?
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from npattn.errors import NpattnError
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.testing.diagnosis.evidence import scores_shape
from npattn.testing.trial import Trial

NAMES = {"b": "sample", "h": "head", "t": "row", "s": "key", "d": "column", "e": "column"}
STEPS = (2, 3, 4, 8, 16, 32, 64, 128)
"""Factors and tiles of the grammar."""
SHIFT = re.compile(r"[a-z] [−+] \d+")
"""A shift is told by two different indices, any other expression by three."""
SHIFTS = 130
"""Largest shift of an index."""
MISSED = 0.03
"""Share of the weights that a source of masks may miss: some are 0 by chance."""
WINDOW = (-2, -1, 1, 2)
"""Keys by which an edge of a window is looked for beside its place."""


RIGHT_HEAD = "h // G"
OF_INDEX = re.compile(r"\w+ (\w) has the \w+ of \w+ (.+)")
OF_HEAD = re.compile(r"query head h takes \w+ of key head (.+), must be h // G")
"""Amounts that name a source as an expression of the index."""
OF_TWO: dict[str, tuple[str, Callable[..., tuple[Any, Any]]]] = {
    "sample b and head h have the mask of sample h and head b": (
        "b ≠ h and B = H",
        lambda b, h, B, H: (np.where(B == H, h, b), np.where(B == H, b, h)),
    ),
    # samples are tiled, and not repeated, over the heads
    "sample b has the mask of sample (H · b + h) % B": (
        "b ≠ (H · b + h) % B",
        lambda b, h, B, H: ((H * b + h) % np.maximum(B, 1), h + 0 * b),
    ),
}
"""Amounts that name sample and head by both, with where these are others, and which they are."""


class Expression(NamedTuple):
    """A source of one index: its text, and its value by the index i and the size n."""

    text: str
    value: Callable[..., Any]


def expressions(x: str) -> Iterator[Expression]:
    """Yield the grammar for an index by its letter, the plainest first."""
    for c in range(1, SHIFTS):
        yield Expression(f"{x} − {c}", lambda i, n, c=c: i - c)
        yield Expression(f"{x} + {c}", lambda i, n, c=c: i + c)
    yield Expression(f"{x.upper()} − 1 − {x}", lambda i, n: n - 1 - i)
    yield Expression(f"{x.upper()} − 1", lambda i, n: n - 1 + 0 * i)
    for c in STEPS:
        yield Expression(f"{c}{x}", lambda i, n, c=c: c * i)
        yield Expression(f"{c} · ({x} // {c})", lambda i, n, c=c: c * (i // c))
        yield Expression(f"{x} % {c}", lambda i, n, c=c: i % c)
        yield Expression(f"{x} // {c}", lambda i, n, c=c: i // c)
        yield Expression(f"{c}{x} % {x.upper()}", lambda i, n, c=c: c * i % np.maximum(n, 1))
    for c in (1, 2):
        yield Expression(f"({x} − {c}) % {x.upper()}", lambda i, n, c=c: (i - c) % np.maximum(n, 1))
        yield Expression(f"({x} + {c}) % {x.upper()}", lambda i, n, c=c: (i + c) % np.maximum(n, 1))


def source_of(x: str, here: Array, there: Array, sizes: Array) -> str:
    """Return the source of an index in words; "another …" if no expression gives every pair.

    `x` is the letter of the index, `here` and `there` (n,) are the index of each wrong element and
    of the element whose value it has, `sizes` (n,) is the size of the axis in the problem of each
    pair.
    """
    name = NAMES[x]
    same = here == there
    if same.all():
        return ""
    if (there == there[0]).all() and len({*here.tolist()}) > 1:
        return f"{name} {there[0]}"
    different = len({*zip(here.tolist(), sizes.tolist(), strict=True)})
    for text, value in expressions(x):
        needed = 2 if SHIFT.fullmatch(text) else 3
        if different >= needed and np.array_equal(value(here, sizes), there):
            return f"{name} {text}"
    return f"another {name}"


def head_source(heads: Array, read: Array, K: Array, G: Array) -> str:
    """Return the key head that query heads read as an expression; "" if none gives every pair."""
    if len({*zip(heads.tolist(), K.tolist(), G.tolist(), strict=True)}) < 3:
        return ""
    if (read == read[0]).all() and len({*heads.tolist()}) > 2:
        return f"{read[0]}"
    for text, value in _key_heads(heads, K, G):
        if text != RIGHT_HEAD and np.array_equal(value, read):
            return text
    return ""


def _key_heads(heads: Array, K: Array, G: Array) -> Iterator[tuple[str, Array]]:
    """Yield expressions of a query head, with the key head that each gives."""
    known = [e for e in expressions("h") if "% H" not in e.text]  # of key heads, % K is asked
    shifts = [e for e in known if SHIFT.fullmatch(e.text)]
    # Heads are tiled sooner than shifted.
    for text, value in [Expression("h", lambda h, n: h), *known[len(shifts) :], *shifts]:
        own = value(heads, K * G)
        bracket = text if text == "h" else f"({text})"
        yield f"{bracket} % K", own % np.maximum(K, 1)
        yield f"{bracket} // G", own // G
        yield text, own


def differs_from_own(amount: str) -> tuple[str, Callable[..., Any]] | None:
    """Return where the source that an amount names is not the right one; None if it names none.

    It is a text, "b ≠ 2 · b % B" or "h // G ≠ h % K", and a function that takes a mapping of
    letters to indices and sizes, and returns where that is so.
    """
    if amount in OF_TWO:
        place, source = OF_TWO[amount]

        def another(t: Any) -> Any:
            b, h = source(*(t[x] for x in "bhBH"))
            return (b != t["b"]) | (h != t["h"])

        return place, another
    if found := OF_INDEX.fullmatch(amount):
        x, text = found[1], found[2]
        values = {e.text: e.value for e in expressions(x)}

        def other(t: Any) -> Any:
            i, n = t[x], t[x.upper()]
            source = values[text](i, n) if text in values else int(text) + 0 * i
            return (source != i) & (source >= 0) & (source < n)

        return _where_differs(x, text), other
    if found := OF_HEAD.fullmatch(amount):
        text = found[1]

        def foreign(t: Any) -> Any:
            own = dict(_key_heads(t["h"], t["K"], t["G"]))
            return (own[text] if text in own else int(text)) != t["h"] // t["G"]

        return f"{RIGHT_HEAD} ≠ {text}", foreign
    return None


def is_seen(amount: str, trial: Trial, problem: Problem) -> bool:
    """Return True if the mask or bias of the source that an amount names is another there."""
    own = _flat(trial.visible(problem), problem)
    if any((x != own).any() for _, x in masks_like(trial, problem, amount)):
        return True
    others = (x.bias_array for _, x in biases_like(problem, amount))
    return any(np.any(x != problem.bias_array) for x in others)


def _where_differs(x: str, text: str) -> str:
    """Return the indices whose source is not themselves, as a condition."""
    if SHIFT.fullmatch(text):
        shift = text.partition(" − ")[2]
        return f"{x} ≥ {shift}" if shift else f"{x} < {x.upper()} − {text.split()[-1]}"
    return f"{x} ≠ " + re.sub(r"(\d)([a-z])", r"\1 · \2", text)


# --- masks ----------------------------------------------------------------------------------------


def masks_like(trial: Trial, problem: Problem, amount: str = "") -> Iterator[tuple[str, Array]]:
    """Yield masks of the same problem with another option or index, each with what it is called.

    Each is a visible array, (B, H, T, S). The plainest comes first. With an amount, the one that is
    called so alone.
    """
    for text, changes in _options(problem):
        if amount not in ("", text):
            continue
        try:
            other = problem.replace(**changes)
            yield text, _flat(trial.visible(other), problem)
        except NpattnError:  # an option that is not legal of this problem
            continue
    mask, visible = problem.mask_array, _flat(trial.visible(problem), problem)
    B, H = visible.shape[:2]
    for told, (_, of_two) in OF_TWO.items():
        if mask is not None and min(B, H) > 1 and amount in ("", told):
            whole = _take(mask, np.arange(B), 0, problem)
            moved = _flat(whole, problem)[of_two(*np.ogrid[:B, :H], B, H)]
            other = problem.replace(mask=moved.reshape(whole.shape))
            yield told, _flat(trial.visible(other), problem)
    for axis, text, source in _indices("bhts", visible.shape):
        x = "bhts"[axis]
        told = f"{NAMES[x]} {x} has the mask of {NAMES[x]} {text}"
        if mask is not None and amount in ("", told):
            other = problem.replace(mask=_take(mask, source, axis, problem))
            yield told, _flat(trial.visible(other), problem)
        told = f"the mask is of query {text}"
        if x == "t" and amount in ("", told):
            yield told, np.take(visible, source, axis)


def biases_like(problem: Problem, amount: str = "") -> Iterator[tuple[str, Problem]]:
    """Yield a problem with the bias of other samples or heads, each with what it is called.

    With an amount, the one that is called so alone.
    """
    bias = problem.bias_array
    if bias is None:
        return
    for axis, text, source in _indices("bh", (math.prod(problem.lead), problem.H)):
        x = "bh"[axis]
        told = f"{NAMES[x]} {x} has the bias of {NAMES[x]} {text}"
        if amount in ("", told):
            yield told, problem.replace(bias=_take(bias, source, axis, problem))


def _indices(letters: str, shape: Sequence[int]) -> Iterator[tuple[int, str, Array]]:
    """Yield an axis, an expression of its index, and its value for each index."""
    for axis, x in enumerate(letters):
        index = np.arange(shape[axis])
        known = [e for e in expressions(x) if x != "b" or "//" not in e.text]  # samples: no tiles
        for text, value in (*known, Expression("0", lambda i, n: 0 * i)):
            source = value(index, np.full(len(index), len(index)))
            source = np.where((source >= 0) & (source < len(index)), source, index)
            if (source != index).any():
                yield axis, text, source


def _take(x: Array, source: Array, axis: int, problem: Problem) -> Array:
    """Return an array of the scores, each with the part of another index."""
    shape = scores_shape(problem)
    whole = _flat(np.broadcast_to(x, shape), problem)
    return np.take(whole, source, axis).reshape(shape)


def _flat(visible: Array, problem: Problem) -> Array:
    return visible.reshape(math.prod(problem.lead), problem.H, problem.T, problem.S)


def _options(problem: Problem) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield options of another meaning: left out, turned round, off by a key."""
    if problem.window is not None:
        for side, name in enumerate(("left", "right")):
            edge = problem.window[side]
            for c in WINDOW:
                if edge is None:
                    continue
                moved = list(problem.window)
                moved[side] = edge + c
                keys = "one key" if abs(c) == 1 else f"{abs(c)} keys"
                size = "long" if c > 0 else "short"
                yield f"the window is {keys} too {size} on the {name}", {"window": tuple(moved)}
            if edge is not None:
                open_side = tuple(None if n == side else x for n, x in enumerate(problem.window))
                yield f"the window is not applied on the {name}", {"window": open_side}
        yield "the window is not applied", {"window": None}
    if problem.causal:
        yield "causal is not applied", {"causal": False}
        other = "bottom_right" if problem.alignment == "top_left" else "top_left"
        yield f"causal is aligned {other.replace('_', ' ')}", {"alignment": other}
    if problem.mask_array is not None:
        yield "the mask is not applied", {"mask": None}
        if problem.mask_array.dtype == bool:
            yield "the mask is turned round", {"mask": ~np.asarray(problem.mask_array)}


def mask_source(cases: Sequence[tuple[Trial, Problem, Array, Array, Array]]) -> str:
    """Return which other mask the weights follow, on all problems; "" if none, or it is the own.

    Each problem comes with the keys with weight, (B, H, T, S), the elements of which it is known,
    and those of rows that are wrong: of masks that give all of these, one that gives the right rows
    too is the true one.
    """
    # source → weights that it misses in wrong rows, and whether right rows have another mask
    left: dict[str, tuple[int, bool]] | None = None
    for trial, problem, seen, known, wrong in cases:
        fits: dict[str, tuple[int, bool]] = {}
        for text, visible in masks_like(trial, problem):
            missed = (seen ^ visible) & known
            count = int((missed & wrong).sum())
            if count <= MISSED * (known & wrong).sum():
                fits.setdefault(text, (count, bool(missed.sum() > MISSED * known.sum())))
        if left is not None:
            both = ((x, left[x], fits[x]) for x in left if x in fits)
            fits = {x: (n + m, in_part or other) for x, (n, in_part), (m, other) in both}
        left = fits
        if not left:
            return ""
    if not left:
        return ""
    best = min(left, key=left.__getitem__)
    kind = best.split()[:3]
    rivals = [x for x, own in left.items() if own == left[best] and x.split()[:3] == kind]
    # Of expressions that differ in a number the smallest is taken.
    forms = {re.sub(r"one key|\d+ keys|\d+", "n", x) for x in rivals}
    return best if len(forms) == 1 else ""  # no problem was long enough to tell them apart
