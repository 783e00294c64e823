"""Candidates of latent attention and of lists of keys: a part left out, an entry misread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from npattn.errors import NpattnError, OptionError
from npattn.oracle.api import backward, evaluate
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.evidence import Evidence
from npattn.testing.trial import GRADIENTS

Read = Callable[[Array, int], Array]


def part_candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Yield what may be done wrong with parts of q and k, and with lists of keys."""
    f = evidence.trial.implementation
    if f.latent is not None:
        for text, first in (
            ("the rotary parts are left out of the scores", False),
            ("the parts without position are left out of the scores", True),
        ):
            yield _make(text, "rotary", partial(_of_problem, partial(_without_part, first)))
        text = "the default scale is 1/√R, of the rotary parts alone, instead of 1/√(C + R)"
        yield _make(text, "scale", partial(_of_problem, _with_rotary_scale))
        for text, keys in (
            ("the gradient of the compressed keys lacks their share as values", True),
            ("the gradient of the compressed keys lacks their share in the scores", False),
        ):
            yield _make(text, "dk", partial(_of_one_share, keys))
    if f.key_lists is not None:
        for text, read in READS.items():
            yield _make(text, "lists", partial(_of_problem, partial(_read_otherwise, read)))
        text = "unused entries of lists take weight, as keys of zeros with values of zeros"
        yield _make(text, "lists", _of_zeros)


def _make(text: str, topic: str, explains: Callable[[Evidence], bool]) -> Candidate:
    return Candidate("step", text, text, explains, topic=topic)


def _forward(evidence: Evidence) -> Evidence:
    """Return the evidence without gradients, if its results are wrong: they follow."""
    forward = evidence.without(GRADIENTS)
    return forward if forward.wrong else evidence


def _of_problem(alter: Callable[[Evidence], Problem], evidence: Evidence) -> bool:
    try:
        return _forward(evidence).is_of(alter(evidence))
    except (NpattnError, ImplementationError):
        return False


# --- parts of q and k -----------------------------------------------------------------------------


def _without_part(first: bool, evidence: Evidence) -> Problem:
    problem = evidence.problem
    q, C = problem.q.copy(), problem.E
    q[..., slice(0, C) if first else slice(C, None)] = 0
    return problem.replace(q=q, scale=problem.scale)


def _with_rotary_scale(evidence: Evidence) -> Problem:
    """Return the problem with the scale of the rotary parts, if it has the default."""
    problem = evidence.problem
    R = problem.D - problem.E
    if R == 0 or not math.isclose(problem.scale or 0.0, problem.D**-0.5):
        raise OptionError("scale is given, or there are no rotary parts")
    return problem.replace(scale=R**-0.5)


def _of_one_share(keys: bool, evidence: Evidence) -> bool:
    """Return True if dk is the gradient through keys alone, or else the rest of it."""
    if "dk" not in evidence.wrong:
        return False
    trial, problem = evidence.trial, evidence.problem
    do, dlse = (None if x is None else x.astype(np.float64) for x in evidence.cotangents)
    grads = backward(evaluate(problem, trial.conventions, engine="dense"), do, dlse)
    dk = grads.k.copy()
    if not keys:
        dk[..., : problem.E] = grads.v
    predicted = {**evidence.exact, "dk": dk}
    return all(evidence.reproduces(name, [predicted[name]]) for name in evidence.observed)


# --- lists of keys --------------------------------------------------------------------------------

READS: dict[str, Read] = {
    "−1 in a list is read as the last key": lambda x, S: np.where(x < 0, S - 1, x),
    "−1 in a list is read as the first key": lambda x, S: np.maximum(x, 0),
    "lists are read as if keys were numbered from 1": lambda x, S: np.where(x < 0, x, (x - 1) % S),
    "each entry of a list is read as the key after it": lambda x, S: np.where(
        x < 0, x, (x + 1) % S
    ),
    "the last entry of each list is left out": lambda x, S: x[..., :-1],
    "the first entry of each list is left out": lambda x, S: x[..., 1:],
    "the list of the first query is taken for all": lambda x, S: np.broadcast_to(
        x[..., :1, :], x.shape
    ),
    "the lists of the first sample are taken for all": lambda x, S: np.broadcast_to(x[:1], x.shape),
}
"""Mistakes in words → how they read lists; −1 is still unused."""


def _lists(evidence: Evidence) -> Array:
    """Return the lists of a problem with an axis of heads where they have one."""
    f = evidence.trial.implementation
    assert f.key_lists is not None
    found = f.key_lists.arrays(evidence.problem, evidence.trial.conventions.mask_true)
    (lists,) = found.values() or (np.zeros((1, 0), int),)
    shared = f.key_lists.meaning == "key lists" and not evidence.problem.headless
    return lists[..., None, :, :] if shared else lists


def _read_otherwise(read: Read, evidence: Evidence) -> Problem:
    """Return the problem that reads lists in another way; what stands twice counts twice."""
    problem = evidence.problem
    lists = read(_lists(evidence), problem.S)
    counts = np.zeros((*lists.shape[:-1], problem.S + 1))
    at = (*np.indices(lists.shape[:-1], sparse=True),)
    at = tuple(x[..., None] for x in at)
    np.add.at(counts, (*at, np.where(lists < 0, problem.S, lists)), 1)
    counts = counts[..., : problem.S]
    visible = counts > 0
    f = evidence.trial.implementation
    if f.key_lists is not None and f.key_lists.beside_mask and problem.mask is not None:
        hides = evidence.trial.conventions.mask_true == "hide"
        visible = visible & (~np.asarray(problem.mask) if hides else np.asarray(problem.mask))
    mask = ~visible if evidence.trial.conventions.mask_true == "hide" else visible
    if counts.max(initial=0) <= 1:
        return problem.replace(mask=mask)
    added = np.log(np.maximum(counts, 1))
    bias = added if problem.bias_array is None else added + problem.bias_array.astype(np.float64)
    return problem.replace(mask=mask, bias=bias)


def _of_zeros(evidence: Evidence) -> bool:
    """Return True if every unused entry adds exp(0) to the sum of a row."""
    forward = _forward(evidence)
    if forward is evidence:
        return False
    problem = evidence.problem
    unused = (_lists(evidence) < 0).sum(-1)  # (..., H | 1, T)
    fwd = evaluate(problem, evidence.trial.conventions, engine="dense")
    with np.errstate(divide="ignore"):
        lse = np.logaddexp(fwd.lse, np.log(unused))
        share = np.exp(fwd.lse - np.where(np.isneginf(lse), 0, lse))
    predicted = {"o": fwd.out * share[..., None], "lse": lse}
    return all(
        name in predicted and forward.reproduces(name, [predicted[name]])
        for name in forward.observed
    )
