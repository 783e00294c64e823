"""score_mod of a problem: its values, its slope, and the check that it is elementwise.

Numbers in brackets are the rules of docs/semantics.md.
"""

import math
from typing import Any

import numpy as np

from npattn.engines.dual import differentiate
from npattn.errors import OptionError
from npattn.problem import Problem
from npattn.problem.arrays import Array, Tile


def call_score_mod(problem: Problem, s: Array, tile: Tile | None = None) -> Array:
    """Call score_mod on all scores, or on those of one tile (t1 − t0, s1 − s0) [3]."""
    assert problem.score_mod is not None
    x, at = _arguments(problem, s, tile)
    modified = problem.score_mod(x, *at)
    return _read_modified(modified if type(modified) is type(x) else np.asarray(modified), x, s)


def check_elementwise(problem: Problem) -> None:
    """Raise OptionError if score_mod gives other numbers for a corner of a block than in it [3].

    The block has up to two heads, queries and keys: that takes no time.
    """
    mod, sizes = problem.score_mod, tuple(min(n, 2) for n in (problem.H, problem.T, problem.S))
    if mod is None or math.prod(sizes) < 2 or 0 in problem.lead:
        return
    lead = (1,) * len(problem.lead)
    scores = np.linspace(1.1, -0.7, math.prod(sizes)).reshape(*lead, *sizes)
    indices = (np.zeros((1, 1, 1), int), *np.ogrid[tuple(slice(n) for n in sizes)])
    arguments = [scores.astype(problem.dtype), *(i.reshape(*lead, *i.shape) for i in indices)]
    block = np.broadcast_to(_call_on_block(mod, arguments), scores.shape)
    for corner in ((slice(0, 1),) * 3, (slice(-1, None),) * 3):
        part = _call_on_block(mod, [x[(..., *corner)] for x in arguments])
        if not np.allclose(part, block[(..., *corner)], equal_nan=True):
            raise OptionError(
                "score_mod is not elementwise: it gives other scores for one pair of query and key "
                "alone than among others; use s and the indices of the pair only"
            )


def _call_on_block(mod: Any, arguments: list[Array]) -> Array:
    scores = arguments[0]
    try:
        modified = np.asarray(mod(*arguments))
    except ValueError as err:
        raise OptionError(
            f"score_mod raised for scores of shape {scores.shape} ({err}); it must be elementwise: "
            "index what it reads by b, h, t and s_index"
        ) from err
    return _read_modified(modified, scores, scores)


def _arguments(
    problem: Problem, s: Array, tile: Tile | None
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    """Return the scores as score_mod takes them, and b, h, t, s_index."""
    if tile is not None:
        return s.reshape((1,) * len(tile.plane) + s.shape), tile.indices
    batch = np.arange(int(np.prod(problem.lead))).reshape(*problem.lead, 1, 1, 1)
    h, t, s_index = np.ogrid[: problem.H, : problem.T, : problem.S]
    return s, (batch, h, t, s_index)


def _read_modified(modified: Array, x: Array, s: Array) -> Array:
    """Return what score_mod returned, of any shape that broadcasts to x, in the shape of s."""
    if modified.dtype.kind not in "biufc":
        raise OptionError(
            f"score_mod returned an array of dtype {modified.dtype}, must return numbers; "
            "does it return its result?"
        )
    if modified.dtype.kind == s.dtype.kind or modified.dtype.kind in "biu":
        modified = modified.astype(s.dtype, copy=False)  # a table of float64 widens nothing  [15]
    try:
        return np.broadcast_to(modified, x.shape).reshape(s.shape)
    except ValueError:
        raise OptionError(
            f"score_mod returned shape {modified.shape}, must return the shape {x.shape} of s"
        ) from None


def slope(problem: Problem, s: Array, tile: Tile | None = None) -> Array:
    """Derivative of score_mod at s, checked against a difference [3].

    It is by complex step at real s, and by dual numbers at complex s, where no step is left. s has
    all scores, (..., H, T, S), or those of the tile, (t1 − t0, s1 − s0).
    """
    rate = (complex_step if s.dtype.kind == "f" else _dual_step)(problem, s, tile)
    u = np.finfo(s.dtype).eps
    differs = np.ones(s.shape, bool)
    # u^(1/3) balances truncation h² against rounding u / h; a function that bends within such a
    # step is compared over shorter ones. What is not analytic differs over all of them.
    for power in (1 / 3, 5 / 12, 1 / 2):
        differs = differs & _differs(problem, s, rate, u**power * np.maximum(1, abs(s)), tile)
        if not differs.any():
            return rate
    raise OptionError(
        "score_mod has a derivative that differs from its difference quotient; "
        "it must be analytic in s (np.abs and .real are not; write np.where(s.real > 0, s, -s))"
    )


def complex_step(problem: Problem, s: Array, tile: Tile | None = None) -> Array:
    """Derivative of score_mod at s, not checked."""
    tiny = np.finfo(s.dtype).tiny ** 0.5
    try:
        modified = call_score_mod(problem, s + 1j * tiny, tile)
    except TypeError as err:  # of a function of NumPy that takes no complex numbers
        raise OptionError(
            f"score_mod has no derivative at complex scores ({err}); it must be analytic in s: "
            "write it with functions of NumPy that take complex numbers, and np.where"
        ) from err
    return modified.imag / tiny


def _dual_step(problem: Problem, s: Array, tile: Tile | None) -> Array:
    """Derivative of score_mod at s by dual numbers, not checked."""
    mod, (x, at) = problem.score_mod, _arguments(problem, s, tile)
    assert mod is not None
    return _read_modified(differentiate("score_mod", lambda y: mod(y, *at), x), x, s)


def _differs(problem: Problem, s: Array, rate: Array, h: Array, tile: Tile | None) -> Array:
    """Return True where rate is not between the difference quotients over steps of ±h."""
    here, up, down = (call_score_mod(problem, s + d, tile) for d in (0, h, -h))
    rise, fall = (up - here) / h, (here - down) / h
    # The two bracket the derivative of a smooth function; a kink between them widens the bracket.
    # √u is at least the rounding of either, and far below a lost term.
    root = np.finfo(s.dtype).eps ** 0.5
    allowed = abs(rise - fall) + root * (1 + 4 * abs(here) + abs(rise) + abs(fall))
    return abs(rate - (rise + fall) / 2) > allowed
