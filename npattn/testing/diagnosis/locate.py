"""The first quantity that is wrong while all before it are right, in the order of dense.py.

    forward     s → visible → p → lse → o
    backward    dv → dp → δ → ds → dq, dk, dbias, dsinks, dgate

What is wrong in P is told apart by its form: a weight that is 0, or is not, against the mask
(visible); a log ratio that follows contents (s); one that takes few values, by place (p).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from npattn.oracle.api import evaluate
from npattn.problem import Problem
from npattn.problem.arrays import Array, sum_to
from npattn.testing.bounds.rounding import unit_roundoff
from npattn.testing.comparison import compare_arrays
from npattn.testing.diagnosis.evidence import Evidence, observe, scores_shape
from npattn.testing.diagnosis.read import Quantity, Reader, Unreadable
from npattn.testing.diagnosis.sources import biases_like
from npattn.testing.report.pair import AXES
from npattn.testing.trial import GRADIENTS, Trial

SOME = 1e-3
"""Weight from which a key takes part in a row, for what is told of dS."""
CLEAR = 8.0
"""Size of a weight, in units of its tolerance, from which its ratio tells anything."""
FEW = 3
"""Number of keys to each value of a log ratio from which the values are few."""
APART = 0.1
"""Share of the wrong elements of P that two placements must disagree on to acquit P."""
MANY = 8
"""Keys of a row from which a difference that changes at few of them is said to."""
SHARP = 64
"""Odd log ratios, those known best, of which few values are looked for: of many, some are close."""
ROUNDINGS = 4
"""Largest error that counts as roundings, in units of one rounding to bfloat16, or of tolerance."""
LONG = 256
"""Queries or keys from which the roundings of a sum add up to more than that."""
SMALL_FORMS = ("", "content", "factor", "rows", "unlike P", "dlse", "dweights")
"""Forms of what is wrong that roundings may have."""
AGREED = 0.75
"""Share of the rows that must agree on what is read of them."""
ALL = 0.97
"""Share of elements that counts as all: of many, some are close to right by chance."""


@dataclass(frozen=True, eq=False)
class Fault:
    """The first wrong quantity on one problem, and where it is wrong."""

    step: str  # as `Cause.step`
    quantity: Quantity  # what was read; `wrong` below is the part that the step is to blame for
    wrong: Array  # elements that are wrong
    known: Array  # elements of which it is known
    backward: bool = False  # the forward is right and its quantity is computed again
    form: str = ""  # of what is wrong: "factor", "zeros", "extra", "content", "moved", "rows", …
    facts: dict[str, Any] = field(default_factory=dict)  # numbers that describe it

    @property
    def axes(self) -> str:
        """Letters of the axes of `wrong`."""
        return self.quantity.axes[: self.wrong.ndim]


@lru_cache(maxsize=64)
def locate(evidence: Evidence) -> Fault | None:
    """Return the first wrong quantity on a problem; None if nothing is wrong there.

    Its step is "precision" if all errors may be roundings; what was read is in its facts.
    """
    fault = _locate(evidence)
    if fault is None or not _is_small(evidence, fault):
        return fault
    return replace(fault, step="precision", backward=False, facts={"read": fault})


def _is_small(evidence: Evidence, fault: Fault) -> bool:
    """Return True if no error is larger than roundings to 16 bits, and all are of no one factor.

    Of wider inputs, errors of lse that have one sign are no roundings.
    """
    if fault.form not in SMALL_FORMS or fault.step in ("nan", "visible", "state"):
        return False
    results = {name: result(evidence, name) for name in evidence.wrong}
    limit = ROUNDINGS * unit_roundoff("bfloat16")
    if evidence.trial.space.dtype in ("float16", "bfloat16"):  # roundings of long sums add up
        limit *= max(1.0, (max(evidence.problem.T, evidence.problem.S) / LONG) ** 0.5)
    elif "lse" in results:
        signs = np.sign((results["lse"].got - results["lse"].want)[results["lse"].wrong])
        if len(np.unique(signs)) < 2:
            return False
    return all(_is_rounded(q, limit) for q in (fault.quantity, *results.values()))


def _is_rounded(q: Quantity, limit: float) -> bool:
    """Return True if no error is beyond a limit, or a few tolerances, and all are of no factor."""
    error = q.got - q.want
    if not np.isfinite(error[q.wrong]).all() or is_one_factor(q):
        return False
    scale = abs(q.want[np.isfinite(q.want)]).max(initial=q.name == "lse")
    allowed = np.maximum(limit * scale, ROUNDINGS * q.tolerance)
    return bool((abs(error) < allowed)[q.wrong].all())


def is_one_factor(q: Quantity) -> bool:
    """Return True if wrong elements are one multiple of the exact ones: no rounding is.

    Roundings have all sizes, and the wrong ones are the largest alone: others, which could show the
    factor, are off by a part of it.
    """
    with np.errstate(all="ignore"):
        share = np.where(q.known & (q.want != 0), q.got / q.want - 1, np.nan)
        wrong = share[q.wrong & np.isfinite(share)]
        if len(wrong) < 3 or not np.std(wrong) < abs(np.mean(wrong)) / 4:
            return False
        part = share / np.mean(wrong)
    between = ~q.wrong & (part > 0.25) & (part < 0.75)
    return bool(between.sum() <= len(wrong) / 4)


def _locate(evidence: Evidence) -> Fault | None:
    """Return a fault of shape or NaN if there is one, else that of the forward or the backward."""
    wrong = evidence.wrong
    if not wrong:
        return None
    way = 0
    first = next((n for n in ("o", "lse", *GRADIENTS) if n in wrong), None)
    other = [
        n for n in wrong if any(x.shape != evidence.exact[n].shape for x in evidence.observed[n])
    ]
    if other:
        step = "layout" if other[0] in ("o", "lse", "weights", "max_score") else other[0]
        return replace(_whole(step, evidence, other[0], "shape"), facts=_shapes(evidence, other[0]))
    if first is None:  # only the weights or maxima that it returns
        name = next(iter(wrong))
        return _whole("p" if name == "weights" else "lse", evidence, name)
    nan = _nan(evidence)
    if nan is not None:
        return nan
    if "o" in wrong and len(evidence.observed["o"]) > 1:
        ratios = [evidence._ratio("o", x) for x in evidence.observed["o"]]
        way = int(np.argmax(ratios))
    try:
        reader = Reader(evidence.trial, evidence.problem, evidence.cotangents, evidence.view, way)
    except Unreadable:
        return _whole("" if first == "o" else first, evidence, first)
    if first in ("o", "lse"):
        if "o" in wrong and reader.ignores_v(evidence.observed["o"][way]):
            kept = reader.knows_other_queries()  # no weights can be read of it
            return _whole("state" if kept else "o", evidence, "o")
        return _forward(evidence, reader)
    return _backward(evidence, reader)


def _shapes(evidence: Evidence, name: str) -> dict[str, Any]:
    """Return the shape that a result has, the right one, and whether a sum is all that it lacks."""
    exact, tolerance = evidence.exact[name], evidence.tolerance[name]
    got = next(x for x in map(np.asarray, evidence.observed[name]) if x.shape != exact.shape)
    pairs = zip(got.shape, exact.shape, strict=False)
    is_broadcast = got.ndim == exact.ndim and all(n in (1, m) for m, n in pairs)
    return {
        "shapes": (got.shape, exact.shape),
        "unsummed": is_broadcast
        and compare_arrays(name, sum_to(got, exact.shape), exact, tolerance).passed,
    }


def result(evidence: Evidence, name: str) -> Quantity:
    """Return a result beside the exact one, with leading axes flattened."""
    arrays = evidence.observed[name]
    ratios = [evidence._ratio(name, x) for x in arrays]
    got = np.asarray(arrays[int(np.argmax(ratios))])
    exact, tolerance = evidence.exact[name], evidence.tolerance[name]
    axes = AXES[name]
    if got.shape != exact.shape:
        got = np.full(exact.shape, np.nan)
    parts = []
    for x in (got, exact, tolerance):
        x = np.asarray(np.real(x), np.float64)
        x = x.reshape((1,) * max(len(axes) - x.ndim, 0) + x.shape)
        if x.ndim > len(axes):
            x = x.reshape(-1, *x.shape[x.ndim - len(axes) + 1 :])
        parts.append(x)
    return Quantity(name, axes, parts[0], parts[1], parts[2], np.ones(parts[0].shape, bool))


def _whole(step: str, evidence: Evidence, name: str, form: str = "") -> Fault:
    """Return the fault of a result as it is."""
    q = result(evidence, name)
    return Fault(step, q, q.wrong, q.known, form=form)


def _nan(evidence: Evidence) -> Fault | None:
    """Return the fault of results that are NaN or infinite where the exact ones are finite."""
    problem = evidence.problem
    inputs = (np.asarray(x, np.float64) for x in (problem.q, problem.k, problem.v))
    facts = {"of_inputs": not all(np.isfinite(x).all() for x in inputs)}
    for name in evidence.wrong:
        q = result(evidence, name)
        bad = ~np.isfinite(q.got) & np.isfinite(q.want)
        lost = np.isfinite(q.got) & ~np.isfinite(q.want) & (name != "lse")
        if name == "lse":
            bad &= np.isnan(q.got)
        others = q.wrong & ~bad & ~lost
        if (bad | lost).any() and others.sum() <= (bad | lost).sum() / 4:
            form = "nan" if bad.any() else ""
            return Fault("nan", q, bad | lost, q.known, name[0] == "d", form, facts)
        if others.any():
            return None
    return None


# --- forward --------------------------------------------------------------------------------------


def _forward(evidence: Evidence, reader: Reader) -> Fault:
    """Return the fault of a wrong o or lse: in P, in the values that it meets, or after it."""
    lse = result(evidence, "lse") if "lse" in evidence.observed else None
    if "o" not in evidence.wrong:
        assert lse is not None
        return Fault("lse", lse, lse.wrong, lse.known)
    o = result(evidence, "o")
    try:
        p, apart = reader.p
    except Unreadable as err:
        return Fault("", o, o.wrong, o.known, facts={"unread": str(err)})
    wrong = p.wrong
    if (apart & wrong).sum() > APART * max(wrong.sum(), 1):
        return _foreign_values(reader, p, apart, o)
    if not wrong.any():
        return Fault("o", o, o.wrong, o.known)
    if not _explains(evidence, reader, p, o):
        return Fault("o", o, o.wrong, o.known, form="unlike P")
    return weights_fault(evidence, reader, p, lse)


def _foreign_values(reader: Reader, p: Quantity, apart: Array, o: Quantity) -> Fault:
    """Return the fault of an o that is no product of one P and its own values.

    If other values explain it, of another sample or head, they are the fault; or the keys are of
    that head too. apart, (B, H, T, S), is True where two readings of P differ.
    """
    found = reader.foreign_values
    bad = {(int(b), int(h)) for b, h, *_ in np.argwhere(apart)}
    if not bad or bad - found.keys():
        return Fault("o", o, o.wrong, o.known)
    same = all(
        any((abs(got - p.want[b, h]) <= 2 * p.tolerance[b, h]).mean() > ALL for _, _, got in own)
        for (b, h), own in found.items()
    )
    if not same and all(any(_is_of_head(p, reader, *x) for x in own) for own in found.values()):
        return Fault("o", o, o.wrong, o.known)  # q is of that head as well
    rows = np.zeros(p.want.shape[:2], bool)
    for place in found:
        rows[place] = True
    known = np.ones(rows.shape, bool)
    # Of few keys, what several samples and heads hold fits by chance.
    facts = {"moved": {place: own[0][:2] for place, own in found.items() if len(own) == 1}}
    return Fault("o" if same else "s", p, rows, known, form="kv head", facts=facts)


def _is_of_head(p: Quantity, reader: Reader, b: int, k: int, got: Array) -> bool:
    """Return True if weights are the exact ones of a query head of a sample and key head."""
    heads = reader.kv_head == k
    near = abs(got - p.want[b, heads]) <= 2 * p.tolerance[b, heads]
    return bool((near.mean((-1, -2)) > ALL).any())


def _explains(evidence: Evidence, reader: Reader, p: Quantity, o: Quantity) -> bool:
    """Return True if the weights that were read give the wrong o again."""
    problem = evidence.problem
    v = np.asarray(problem.v, np.float64)
    rows = reader.by_query_head(np.where(np.isfinite(v), v, 0), 2)
    with np.errstate(all="ignore"):
        got = np.einsum("bhts,bhse->bhte", np.nan_to_num(p.got), rows)
        own = p.tolerance + evidence.rounding * abs(np.nan_to_num(p.got))
        slack = np.einsum("bhts,bhse->bhte", own, abs(rows)) + o.tolerance
    if problem.gate is not None:
        gate = np.asarray(problem.gate, np.float64)
        whole = np.broadcast_to(gate, evidence.exact["o"].shape).reshape(got.shape)
        got, slack = got * whole, slack * (1 + abs(whole))
    gap = abs(got - o.got)
    return bool((~(gap > 4 * slack)).mean() > ALL)


def weights_fault(
    evidence: Evidence, reader: Reader, p: Quantity, lse: Quantity | None, backward: bool = False
) -> Fault:
    """Return what is wrong in weights that were read: visible, s or p."""
    got, want, tol = p.got, p.want, p.tolerance
    trial, problem = evidence.trial, evidence.problem
    visible = visible_keys(trial, problem).reshape(want.shape)
    kept = want != 0
    finite = np.isfinite(got)
    empty = np.asarray(~visible.any(-1))
    with np.errstate(all="ignore"):
        lost = (want > CLEAR * tol) & (abs(got) <= tol)
        above = ~kept & (abs(got) > 2 * tol) & finite & ~empty[..., None]
        dropped = visible & above & (problem.dropout_mask is not None)
        extra = above & (~visible | dropped)
        fake = empty[..., None] & (abs(got) > tol)
    known = np.ones(want.shape, bool)
    clear = want > CLEAR * tol
    biases = _list_biases(evidence, reader, p)
    if biases:
        rows = p.wrong_rows
        return Fault("s", p, rows, rows | True, backward, "bias of", {"sources": biases})
    negative = clear & (got < -tol)
    if not backward and negative.sum() > p.wrong.sum() / 2:  # no weight is: o was changed
        return _whole("o", evidence, "o")
    if fake.any() and fake.sum() >= p.wrong.sum() * ALL:
        rows = empty[..., None] & np.ones(want.shape, bool)
        own: dict[str, Any] = {"where": "rows that see no key"}
        return Fault("p", p, rows, known, backward, "empty rows", own)
    whole = (lost == clear).all(-1) & clear.any(-1) & ~extra.any(-1)  # rows that are all zeros
    risen = (above & visible & ~dropped).any(-1)  # a weight below all floats has become one
    with np.errstate(all="ignore"):
        log = np.log(got.sum(-1)) - np.log(want.sum(-1))
    if risen.any() and not extra.any() and (abs(log) > tol.sum(-1))[risen].any():
        ratios = {"log": np.where(risen, log, 0.0)}
        return Fault("p", p, risen, np.ones(risen.shape, bool), backward, "rows", ratios)
    if fake.any() and whole.any():  # rows that see no key have what others lack
        extra, whole = extra | fake, np.zeros(whole.shape, bool)
    if (lost & ~whole[..., None]).any() or extra.any():
        if dropped.sum() > extra.sum() / 2:
            return Fault("p", p, p.wrong, known, backward, "dropout")
        hidden = extra | (lost & ~whole[..., None])
        if not extra.any():  # far lower scores leave no weight, and are not hidden
            fit = _regress(evidence, reader, *_log_ratios(p, clear))
            if fit is not None:
                return Fault("s", p, clear, clear, backward, fit[0], {fit[0]: fit[1]})
        if not backward and not extra.any() and _moves_weight(p, lost):
            return Fault("o", p, lost, clear, form="values of other keys")
        if not backward and _leaves_weight(p, lost):
            form = "values of other keys" if extra.any() else "values left out"
            return Fault("o", p, lost, clear, form=form)
        moved = _find_rows(got, want, tol, p.wrong_rows)
        form = "extra" if extra.sum() > lost.sum() else "zeros"
        facts: dict[str, Any] = {"moved": moved} if moved else {}
        both = {"extra": extra, "zeros": lost & ~whole[..., None]}
        facts["kinds"] = [kind for kind, cells in both.items() if cells.any()]
        # Of rows that see no key, hidden keys with weight may be of the mask too.
        told = (clear | ~visible) & ~whole[..., None] & ~(fake & ~extra)
        return Fault("visible", p, hidden, told, backward, form, facts)
    if whole.any() and (p.wrong & ~whole[..., None]).sum() <= p.wrong.sum() * (1 - ALL):
        rows = np.broadcast_to(whole[..., None], want.shape) & clear
        if lse is not None and not lse.wrong[whole].any() and not backward:
            return _whole("o", evidence, "o", "zeros")
        return Fault("visible", p, rows, clear, backward, "rows of zeros")
    moved = _find_rows(got, want, tol, p.wrong_rows)
    if moved:
        rows = p.wrong_rows
        if lse is not None and not lse.wrong.any() and not backward:
            o = result(evidence, "o")
            return Fault("o", o, o.wrong, o.known, form="moved", facts={"moved": moved})
        return Fault("s", p, rows, np.ones(rows.shape, bool), backward, "moved", {"moved": moved})
    return _by_ratio(evidence, reader, p, clear, backward)


def _list_biases(evidence: Evidence, reader: Reader, p: Quantity) -> list[str]:
    """Return whose bias gives all weights that were read, where it is not their own."""
    problem = evidence.problem
    if problem.bias_array is None or problem.dropout_mask is not None or not p.wrong.any():
        return []

    def gives_all(other: Problem) -> bool:
        want = reader.flat(evaluate(other, evidence.trial.conventions).weights)
        slack = 4 * p.tolerance + evidence.rounding * want
        # Right rows are asked as well as wrong ones.
        like = np.asarray((abs(p.got - want) <= slack).all(-1))
        return bool(like[p.wrong_rows].mean() > ALL and like.mean() > AGREED)

    own = problem.bias_array
    lost = np.isneginf(own)
    if lost.any() and gives_all(problem.replace(bias=np.where(lost, 0, own).astype(own.dtype))):
        return []  # it hides no keys, and may be like another that hides none
    known: dict[bytes, bool] = {}
    fits = []
    for text, other in biases_like(problem):
        key = np.asarray(other.bias_array).tobytes()
        if key not in known:
            known[key] = gives_all(other)
        if known[key]:
            fits.append(text)
    return fits


def _leaves_weight(p: Quantity, lost: Array) -> bool:
    """Return True if most other keys take none of the weight that keys lack.

    All do where one is hidden. These are part of the softmax, and their values alone are not their
    own in o.
    """
    taken = np.where(lost, p.want, 0).sum(-1, keepdims=True)  # (B, H, T, 1)
    with np.errstate(all="ignore"):
        grown = p.want * taken / (1 - taken)  # what each would have got of it
        tells = lost.any(-1, keepdims=True) & ~lost & (grown > CLEAR * p.tolerance)
    same = abs(p.got - p.want) <= 2 * p.tolerance
    return bool(tells.any() and same[tells].mean() > 0.5)


def _moves_weight(p: Quantity, lost: Array) -> bool:
    """Return True if weight that keys lack is added to others: their values are read twice.

    lost, (B, H, T, S), is True at the keys that lack theirs. A key that is hidden leaves its weight
    to all others alike, or to none.
    """
    rows = lost.any(-1) & (p.want > 0).any(-1)
    total = abs(p.got.sum(-1) - p.want.sum(-1)) <= 2 * p.tolerance.sum(-1)
    with np.errstate(all="ignore"):
        same = (p.want > CLEAR * p.tolerance) & ~lost
        ratio = np.where(same, p.got / np.where(same, p.want, 1), np.nan)
        slack = np.where(same, 4 * p.tolerance / np.where(same, p.want, 1), 0).max(-1)
    several = rows & (same.sum(-1) > 1)
    unequal = _nan_range(ratio) > slack
    return bool(several.any() and total[rows].all() and unequal[several].mean() > 0.5)


def visible_keys(trial: Trial, problem: Problem) -> Array:
    """Return the keys that each query sees, and that no bias of −∞ hides."""
    visible = trial.visible(problem)
    if problem.bias_array is None:
        return visible
    bias = np.broadcast_to(problem.bias_array, scores_shape(problem))
    return np.asarray(visible & ~np.isneginf(bias.reshape(visible.shape)))


def _find_rows(
    got: Array, want: Array, tol: Array, rows: Array
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return for wrong rows of P the place whose exact row they are; {} if most have none.

    got, want and tol are (B, H, T, S), rows is (B, H, T).
    """
    S = want.shape[-1]
    places = np.argwhere(rows)
    if S < 3 or not len(places):
        return {}
    table = want.reshape(-1, S)
    some = places[:: max(1, len(places) // 64)]
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    distinct = (table > CLEAR * tol.reshape(-1, S)).sum(-1) >= 3
    for place in some:
        row, slack = got[tuple(place)], tol[tuple(place)]
        gap = (abs(table - row) <= 2 * slack + tol.reshape(-1, S)).all(-1) & distinct
        index = np.flatnonzero(gap)
        if len(index):
            places_of = [np.unravel_index(i, want.shape[:-1]) for i in index]
            best = min(places_of, key=lambda x: int((np.array(x) != place).sum()))
            if tuple(place) != tuple(best):
                found[tuple(map(int, place))] = tuple(map(int, best))
    return found if len(found) >= ALL * len(some) else {}


def _by_ratio(
    evidence: Evidence, reader: Reader, p: Quantity, clear: Array, backward: bool
) -> Fault:
    """Tell s from p by the log ratio of the weights, which a row knows up to a constant.

    clear, (B, H, T, S), is True where a weight is large enough to have a ratio.
    """
    log, slack, ok = _log_ratios(p, clear)
    rows = ok.sum(-1) > 0
    spread = _nan_range(log)
    row_slack = np.where(ok, slack, 0).max(-1)
    constant = spread <= 2 * row_slack
    tells = (ok.sum(-1) > 1) | ((p.want > 0).sum(-1) == 1)  # one key has weight 1, whatever s is
    if constant[rows].all() and (rows & tells).any():
        size = _row_medians(log, ok)
        off = rows & (abs(size) > row_slack)
        if not off.any():  # no row is far off
            return Fault("p", p, p.wrong, p.known, backward)
        returned = {"lse", "weights"} & {*evidence.observed} - {*evidence.wrong}
        is_after = len(returned) == 2 and not backward and evidence.problem.dropout_mask is None
        step = "o" if is_after else "p"  # both are right, and o is not
        return Fault(step, p, off, rows, backward, "rows", {"log": size})
    fit = _regress(evidence, reader, log, slack, ok)
    if fit is not None:
        name, value = fit
        return Fault("s", p, ok, ok, backward, name, {name: value})
    other = _other_head(evidence, reader, p)
    if other:
        wrong = p.wrong_rows
        rows = np.asarray(wrong.any(-1))
        moved = {(b, h): (b, other[h]) for b, h in map(tuple, np.argwhere(rows)) if h in other}
        known = np.ones(rows.shape, bool)
        return Fault("s", p, rows, known, backward, "kv head", {"moved": moved})
    if not backward and _keeps_others(p, log, slack, ok):
        return Fault("p", p, ok & (abs(log) > slack), ok, form="content", facts={"log": log})
    reference, whole, few = _reference(log, slack, ok)
    few = few or (evidence.problem.bias_array is None and _is_by_key(log, slack, ok))
    few &= not (p.wrong & ~ok & (p.got > CLEAR * p.tolerance)).any()  # no factor makes them of 0
    with np.errstate(invalid="ignore"):
        relative = log - reference[..., None]
        off = ok & ((abs(relative) > 2 * slack) | whole[..., None])
    step, form = ("p", "factor") if few else ("s", "content")
    return Fault(step, p, off, ok, backward, form, {"log": relative})


def _keeps_others(p: Quantity, log: Array, slack: Array, ok: Array) -> bool:
    """Return True if other weights of wrong rows are right, though the row sums are not.

    A wrong score changes what all weights of its row are divided by. log, slack and ok are
    (B, H, T, S).
    """
    right = np.where(ok & (abs(log) <= slack), slack, np.inf).min(-1)  # best known of each row
    gain = abs((p.got - p.want).sum(-1))
    rows = p.wrong_rows & (ok.sum(-1) > 1)
    keeps = (gain > CLEAR * p.tolerance.sum(-1)) & (gain > 2 * right)
    return bool(rows.any() and keeps[rows].mean() > AGREED)


def _log_ratios(p: Quantity, clear: Array) -> tuple[Array, Array, Array]:
    """Return log ratios of weights to the exact ones, how far they may be off, and where known."""
    with np.errstate(all="ignore"):
        ok = clear & (p.got > p.tolerance)
        log = np.where(ok, np.log(np.where(ok, p.got, 1) / np.where(ok, p.want, 1)), np.nan)
        slack = np.where(ok, 2 * p.tolerance / np.where(ok, p.want, 1), np.inf)
    return log, slack, ok


def _row_medians(x: Array, ok: Array) -> Array:
    """Return the median of each row where it is known, 0 where nothing is."""
    rows = np.asarray(ok.any(-1))
    known = np.where(rows[..., None], np.where(ok, x, np.nan), 0)
    return np.asarray(np.nanmedian(known, -1))


def _nan_range(log: Array) -> Array:
    """Return largest less smallest of each row, 0 where nothing is known."""
    low = np.where(np.isnan(log), np.inf, log).min(-1)
    high = np.where(np.isnan(log), -np.inf, log).max(-1)
    return np.where(np.isfinite(low), high - low, 0.0)


def _reference(log: Array, slack: Array, ok: Array) -> tuple[Array, Array, bool]:
    """Return the log ratio of each row's right keys, rows without any, and if others are few.

    log, slack and ok are (B, H, T, S). Right is the value that most keys of a row share; of values
    that as many share, the first.
    """
    shape = log.shape[:-1]
    reference, whole = np.zeros(shape), np.zeros(shape, bool)
    values, keys = 0, 0
    odd: list[tuple[float, float]] = []
    for place in map(tuple, np.argwhere(ok.any(-1))):
        index = np.flatnonzero(ok[place])
        x, width = log[place][index].tolist(), slack[place][index].tolist()
        groups: list[list[int]] = []  # keys of one value, in the order of their values
        for i in sorted(range(len(x)), key=x.__getitem__):
            last = groups[-1][-1] if groups else None
            if last is not None and x[i] - x[last] <= 2 * max(width[i], width[last]):
                groups[-1].append(i)
            else:
                groups.append([i])
        best = max(groups, key=lambda g: (len(g), -min(g)))
        if len(best) == 1 and len(x) > 3:  # no two keys agree: none is known to be right
            whole[place] = True
        if len(groups) > 1:
            first = next(g for g in groups if 0 in g)
            if len(first) * 3 >= len(best):
                best = first
        reference[place] = x[best[len(best) // 2]]
        others = [g for g in groups if g is not best]
        values += len(others)
        keys += sum(map(len, others))
        middle = [g[len(g) // 2] for g in others]
        odd += [(width[i], x[i] - float(reference[place])) for i in middle]
    if not values:
        return reference, whole, True
    few = keys >= FEW * values
    if not few and len(odd) >= FEW:  # one odd key a row: a factor of its place is in every row
        some = sorted(x for _, x in sorted(odd)[:SHARP])
        slack_of_some = 4 * sorted(odd)[: len(some)][-1][0]
        distinct = 1 + sum(b - a > slack_of_some for a, b in pairwise(some))
        few = distinct * FEW <= len(some)
    return reference, whole, few


def _is_by_key(log: Array, slack: Array, ok: Array) -> bool:
    """Return True if each key has one factor, up to one of each row, that is not 1."""
    both = ok & ok[..., :1, :]
    change = np.where(both, log - log[..., :1, :], 0)  # of a key from the first row to another
    first = both.argmax(-1)[..., None]
    with np.errstate(invalid="ignore"):
        gap = abs(change - np.take_along_axis(change, first, -1))
        width = slack + slack[..., :1, :]
        near = gap <= 2 * (width + np.take_along_axis(width, first, -1))
    asked = (both & (both.sum(-1) > 2)[..., None])[..., 1:, :]
    return bool(asked.any() and near[..., 1:, :][asked].mean() > ALL)


def _regress(
    evidence: Evidence, reader: Reader, log: Array, slack: Array, ok: Array
) -> tuple[str, float] | None:
    """Return the share of q·k or bias that is too much; None if none fits. (B, H, T, S) arrays."""
    problem = evidence.problem
    raw = (problem.scale or 0.0) * reader.products
    features = {"scale": raw}
    if problem.softcap is not None:
        features["softcap"] = raw - problem.softcap * np.tanh(raw / problem.softcap)
    if problem.bias_array is not None:
        bias = np.asarray(problem.bias_array, np.float64)
        whole = np.broadcast_to(bias, scores_shape(problem)).reshape(log.shape)
        features["bias"] = np.where(np.isfinite(whole), whole, 0)
    if problem.score_mod is not None:
        features = {}
    weight = np.where(ok, 1 / np.where(ok, slack, 1), 0)

    def center(x: Array) -> Array:
        total = np.maximum((weight**2).sum(-1, keepdims=True), 1e-300)
        return np.asarray(x - (weight**2 * np.where(ok, x, 0)).sum(-1, keepdims=True) / total)

    y = np.where(ok, center(np.where(ok, log, 0)), 0) * weight
    for name, x in features.items():
        z = np.where(ok, center(x), 0) * weight
        power = (z * z).sum()
        if not power or not np.isfinite(power):
            continue
        share = (z * y).sum() / power
        rest = y - share * z
        enough = np.maximum(ok.sum(-1) - 1, 0).sum() > 1  # each row leaves one key less to tell
        if enough and (abs(rest[ok]) <= 2).mean() > ALL and abs(share) > 1e-3:
            return name, float(share)
    return None


def _other_head(evidence: Evidence, reader: Reader, p: Quantity) -> dict[int, int]:
    """Return for query heads the key head whose keys give the wrong weights; {} if none does."""
    problem = evidence.problem
    if problem.K < 2:
        return {}
    found: dict[int, int] = {}
    bad = sorted(set(np.argwhere(p.wrong)[:, 1].tolist()))
    k = np.asarray(problem.k)
    for other in range(problem.K):
        moved = problem.replace(k=np.broadcast_to(k[..., other : other + 1, :, :], k.shape).copy())
        want, _ = reader.exact_weights(reader.without_gate(moved))
        near = abs(p.got - want) <= 4 * p.tolerance
        for h in bad:
            if h not in found and near[:, h].mean() > ALL:
                found[h] = other
    return found if set(bad) <= set(found) else {}


# --- backward -------------------------------------------------------------------------------------


def _backward(evidence: Evidence, reader: Reader) -> Fault:
    """Return the fault of wrong gradients: dv first, then δ, then dS, then the products of dS."""
    wrong: list[str] = [name for name in GRADIENTS if name in evidence.wrong]
    core: list[str] = [n for n in ("dv", "dq", "dk") if n in wrong]
    where = _place_of_cotangents(evidence)
    facts = {"where": where}
    if not core:
        alone = next(n for n in ("dbias", "dsinks", "dgate") if n in wrong)
        facts["where"] += f" and {alone[1:]}" if where else ""
        return replace(_whole(alone, evidence, alone), facts=facts)
    try:
        if "dv" in core:
            return _from_dv(evidence, reader, core)
        delta = _delta_by_dq(evidence, reader) if "dq" in core else None
        if core == ["dq"] and not (result(evidence, "dq").wrong_rows & _sees_some(evidence)).any():
            # δ is multiplied by weights, which are 0
            return replace(_whole("dq", evidence, "dq"), facts=facts)
        if where:
            q, form = result(evidence, core[0]), where.split()[-1]
            step = "dp" if form == "dweights" and delta is None else "delta"
            return Fault(step, q, q.wrong, q.known, form=form, facts=facts)
        if delta is not None or core == ["dq"]:
            return delta or _whole("dq", evidence, "dq")
        ds = reader.ds
    except Unreadable:
        step = core[0] if "dv" in core or len(core) == 1 else "ds"
        return _whole(step, evidence, core[0])
    fault = _from_ds(evidence, reader, ds)
    if core == ["dk"]:
        if fault is not None and fault.step == "delta":
            return fault
        dk = _whole("dk", evidence, "dk")
        if fault is not None and not _is_of_some_heads(ds.wrong, reader):
            return Fault("dk", ds, ds.wrong, ds.known, form="by query", facts=fault.facts)
        return dk
    if fault is None or "dq" not in evidence.observed:
        return _whole(core[0], evidence, core[0])
    return fault


def _sees_some(evidence: Evidence) -> Array:
    """Return which rows see a key, (B, H, T)."""
    rows = visible_keys(evidence.trial, evidence.problem).any(-1)
    return np.asarray(rows.reshape(-1, evidence.problem.H, evidence.problem.T))


def _place_of_cotangents(evidence: Evidence) -> str:
    """Return "dlse" or "dweights" if all gradients are right where that is 0; "" if not.

    "rows that see no key and dlse" if they are where the dlse of these rows is 0.
    """
    if not np.any(evidence.cotangents.dout):
        return ""  # all gradients are 0 then
    empty = evidence.trial.empty(evidence.problem)
    for place in ("rows that see no key and dlse", "dlse", "dweights"):
        name = place.split()[-1]
        given = getattr(evidence.cotangents, name)
        if given is None or {"dv", "o"} & {*evidence.wrong}:
            continue
        other = np.where(empty, 0, given) if name != place else 0 * given
        if np.array_equal(other, given):
            continue
        cotangents = replace(evidence.cotangents, **{name: other.astype(given.dtype)})
        if not observe(evidence.trial, evidence.problem, cotangents, evidence.view).wrong:
            return place
    return ""


def _from_dv(evidence: Evidence, reader: Reader, core: Sequence[str]) -> Fault:
    """Return the fault of a wrong dv: the weights of the backward, or dv."""
    dv = _whole("dv", evidence, "dv")
    without = reader.dv_without_dout
    if without.any():
        got = np.asarray(evidence.observed["dv"][0], np.float64)
        return replace(dv, form="constant", facts={"alone": np.allclose(without, got)})
    p, apart = reader.p_of_backward
    wrong = p.wrong
    if not wrong.any() or (apart & wrong).sum() > APART * wrong.sum():
        return dv
    if _is_of_some_heads(wrong, reader):
        return dv
    fault = weights_fault(evidence, reader, p, None, backward=True)
    if core == ["dv"] and not (fault.step == "visible" and fault.form == "extra"):
        return Fault("dv", p, wrong, p.known, form=fault.form, facts=fault.facts)
    right_dq = "dq" in evidence.observed and "dq" not in core
    if right_dq and fault.form in ("zeros", "rows of zeros", "rows"):
        return Fault("dv", p, wrong, p.known, form=fault.form, facts=fault.facts)
    return fault


def _is_of_some_heads(wrong: Array, reader: Reader) -> bool:
    """Return True if query heads that share a key head differ: their sum is wrong, and no score."""
    heads = np.asarray(wrong.any((-1, -2)))
    groups = (heads[:, reader.kv_head == k] for k in np.unique(reader.kv_head))
    return any(bool((x.any(1) & ~x.all(1)).any()) for x in groups)


def _from_ds(evidence: Evidence, reader: Reader, ds: Quantity) -> Fault | None:
    """Return the fault of a wrong dS: δ, dS or dP; None if it was right."""
    wrong = ds.wrong
    if not wrong.any():
        return None
    weights = reader.exact_steps["p"]
    with np.errstate(all="ignore"):
        ok = ds.known & (weights > SOME)
        off = np.where(ok, (ds.got - ds.want) / np.where(ok, weights, 1), np.nan)
        slack = np.where(ok, ds.tolerance / np.where(ok, weights, 1), np.inf)
        slack = slack + evidence.rounding * np.where(ok, abs(off), 0)
        f = np.where(ds.known & (abs(ds.want) > CLEAR * ds.tolerance), ds.got / ds.want, np.nan)
    several = ok.sum(-1) > 1
    constant = _nan_range(off) <= 4 * np.where(ok, slack, 0).max(-1)
    shift = _row_medians(off, ok)
    bad = several & wrong.any(-1)
    told = abs(shift) > 2 * CLEAR * np.where(ok, slack, np.inf).min(-1)  # not a bit off alone
    factors = f[np.isfinite(f)]
    if len(factors) > 2 and np.ptp(factors) <= 1e-2 * abs(np.median(factors)):
        value = float(np.median(factors))
        if evidence.problem.dropout_mask is not None:
            rate = evidence.problem.dropout_rate
            kept = 1 - rate
            scales = (kept, 1 / kept, kept * rate, kept / rate)
            if any(abs(value - x) <= 1e-2 * value for x in scales):
                return Fault("dp", ds, wrong, ds.known, form="factor", facts={"value": value})
        name = "dq" if "dq" in evidence.wrong and "dk" in evidence.wrong else "dk"
        q = result(evidence, name)
        return Fault(name, q, q.wrong, q.known, form="factor", facts={"value": value})
    if bad.any() and constant[bad].mean() > ALL and told[bad].mean() > 0.5:
        rows = ds.known.any(-1)
        facts = {"shift": shift, "bad": bad}
        return Fault("delta", ds, bad, rows & several, form="delta", facts=facts)
    if bad.any() and _is_stepwise(off, slack, ok)[bad].mean() > ALL:
        facts = {"shift": shift, "bad": bad}
        return Fault("delta", ds, bad, ds.known.any(-1) & several, form="parts", facts=facts)
    step = "ds" if evidence.problem.softcap or evidence.problem.score_mod else "dp"
    by_terms = _ds_by_terms(evidence, reader, ds)
    if by_terms:
        return Fault("ds", ds, wrong, ds.known, form="terms", facts={"f": f})
    outside = ds.known & (weights == 0) & (abs(ds.got) > ds.tolerance)
    zeros = wrong & (abs(ds.got) <= ds.tolerance)
    if outside.any():
        return Fault("ds", ds, outside, ds.known, form="extra")
    if zeros.sum() >= ALL * wrong.sum():
        known = ds.known & (abs(ds.want) > CLEAR * ds.tolerance)
        return Fault("ds", ds, wrong, known, form="zeros")
    return Fault(step, ds, wrong, ds.known, form="content", facts={"f": f})


def _is_stepwise(off: Array, slack: Array, ok: Array) -> Array:
    """Return True for rows of few values, each of several keys side by side: a δ for each part."""
    stepwise = np.zeros(ok.shape[:-1], bool)
    for place in map(tuple, np.argwhere(ok.sum(-1) >= MANY)):
        x, width = off[place][ok[place]], slack[place][ok[place]]
        steps = abs(np.diff(x)) > 4 * np.maximum(width[1:], width[:-1])
        stepwise[place] = steps.sum() * MANY <= 2 * len(x)
    return stepwise


def _ds_by_terms(evidence: Evidence, reader: Reader, ds: Quantity) -> str:
    """Return "ds" if dS is a sum of other products of P, dP and δ than P dP − P δ; "" if not."""
    exact = reader.exact_steps
    p, dp, delta = exact["p"], exact["dp"], exact["delta"][..., None]
    keep = exact["keep"]
    terms = [p * keep * dp, p * delta, delta * (p > 0), dp * (p > 0), p * p * dp]
    terms += [p * p * delta]
    if evidence.problem.dropout_mask is not None:
        terms += [p * keep * delta, p * keep * keep * dp]
    ok = ds.known & (p > 0)
    weight = 1 / (ds.tolerance[ok] + evidence.rounding * abs(ds.got[ok]))
    a = np.stack([x[ok] * weight for x in np.broadcast_arrays(*terms)], -1)
    if len(a) < 3 * len(terms):
        return ""
    share, *_ = np.linalg.lstsq(a, ds.got[ok] * weight, rcond=1e-9)
    rest = abs(a @ share - ds.got[ok] * weight)
    return "ds" if (rest <= 8).mean() > ALL and (abs(share[2:]) > 0.1).any() else ""


def _delta_by_dq(evidence: Evidence, reader: Reader) -> Fault | None:
    """Return the fault of δ if the error of dq is along P k in each row; None if it is not."""
    dq = result(evidence, "dq")
    problem = evidence.problem
    if min(problem.D, problem.S) < 3 or problem.softcap or problem.score_mod is not None:
        return None
    along = np.einsum("bhts,bhsd->bhtd", reader.exact_steps["p"], reader.keys)
    if dq.got.shape != along.shape:
        return None
    error = dq.got - dq.want
    # The error of a row of one key is along that key, whatever is wrong.
    rows = dq.wrong_rows & ((reader.exact_steps["p"] > SOME).sum(-1) > 1)
    with np.errstate(all="ignore"):
        share = (error * along).sum(-1) / (along * along).sum(-1)
        rest = abs(error - share[..., None] * along)
        slack = 4 * (dq.tolerance + evidence.rounding * abs(error).max(-1, keepdims=True))
    rows &= (abs(error) > 2 * slack).any(-1)  # others are near along anything
    if rows.any() and (rest <= slack)[rows].mean() > ALL:
        shift = np.nan_to_num(share) / (problem.scale or 1)
        return Fault("delta", dq, rows, np.ones(rows.shape, bool), form="delta",
                     facts={"shift": shift, "bad": rows})  # fmt: skip
    return None
