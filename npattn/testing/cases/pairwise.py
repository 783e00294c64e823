"""Choose few recipes of many in which every pair of options and structure occurs.

Two options that are right alone may be wrong together, and an option may be wrong in one kind of
structure only. So every option meets every kind of structure, and every two kinds of structure
meet, at least once; and each kind of mask, bias, distribution and size is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.cases.recipe import OPTION_FIELDS, Recipe
from npattn.testing.cases.rows import Rows

BY_SAMPLE = ("padding", "left padding", "prefix", "documents")
"""Masks that differ by sample and not by head."""
STEEP = ("huge logits", "saturated")
"""Distributions in which one key takes all weight, so that the row maximum matters."""
CROWD = 4  # options on at once; a mistake in one hides behind more
_options = attrgetter(*OPTION_FIELDS)  # at once: it is called by the thousand
OFF = _options(Recipe())


def covering(plan: Rows, draws: Rows) -> Iterator[int]:
    """Yield samples until every pair of traits and every kind among them has occurred.

    Parameters
    ----------
    plan : rows
        Recipes that are used anyway.
    draws : rows
        Samples to choose from, each time the one with most that is new. Pairs that occur in none
        of them are not asked for, so that nothing needs to know what a space excludes.

    Yields
    ------
    int
        Number of a row of `draws`.
    """
    candidates = np.flatnonzero(count_options(draws) <= CROWD)
    has, old = (np.array([*traits(rows).values()]) for rows in (draws, plan))
    one, other = np.triu_indices(len(has))  # a trait and itself too
    new = ~(old[one] & old[other]).any(1)
    one, other = one[new], other[new]
    planned, shown = kinds(plan), kinds(draws)
    single = [x for name, x in shown.items() if name not in planned or not planned[name].any()]
    pairs, kind = has[one] & has[other], np.array(single, bool).reshape(-1, has.shape[1])
    # A pair and a kind count twice, a trait once; eight to a byte, since there are many.
    table = np.concatenate([pairs, pairs[one < other], kind, kind])
    table = np.packbits(table[:, candidates], axis=0)
    wanted = np.bitwise_or.reduce(table, axis=1)
    while wanted.any():
        count = np.bitwise_count(table & wanted[:, None]).sum(0)
        best = np.argmax(count)
        wanted &= ~table[:, best]
        yield int(candidates[best])
        table, candidates = table[:, count > 0], candidates[count > 0]  # the rest shows nothing new


def options_on(recipe: Recipe) -> list[str]:
    """Return its options that are not at their default."""
    return [n for n, on, off in zip(OPTION_FIELDS, _options(recipe), OFF, strict=True) if on != off]


def count_options(rows: Rows) -> Array:
    """Return the number of options of each row that are not at their default."""
    return np.asarray(np.sum([*_options_of(rows).values()], axis=0))


def _options_of(rows: Rows) -> dict[str, Array]:
    """Return for each option in which rows it is on."""
    nothing = np.zeros(len(rows["T"]), bool)
    on = zip(OPTION_FIELDS, OFF, strict=True)
    return {n: (rows[n] != off).astype(bool) if n in rows else nothing for n, off in on}


def _whole(rows: Rows) -> Array:
    """Return the rows without a size of 0."""
    return np.asarray(np.logical_and.reduce([rows[x] > 0 for x in "BNHTSDE"]))


def traits(rows: Rows) -> dict[str, Array]:
    """Return in which rows options and kinds of structure are that should occur in pairs.

    None is at sizes of 0.
    """
    rank, H, K, T, S, D, E = (rows[x] for x in ("rank", *"HKTSDE"))
    found = _options_of(rows)
    found |= {f"rank {n}": rank == n for n in (2, 3, 4, 5)}
    found |= {"K = H": K == H, "K = 1": (K == 1) & (H != 1), "1 < K < H": (K > 1) & (K < H)}
    found |= {"E = D": E == D, "E != D": E != D, "T = S": T == S, "T < S": T < S, "T > S": T > S}
    found |= {"T = 1": (T == 1) & (S > 1), "D % 8": D % 8 > 0, "D = 8 n": D % 8 == 0}
    found["broadcast"] = rows["broadcast"]
    scales = rows.get("scale", ())
    found["scale < 0"] = np.array([(x or 0) < 0 for x in scales], bool) if len(scales) else T < 0
    found["steep"] = np.isin(rows["distribution"].astype(str), STEEP)
    found["B = H"] = _square(rows)
    whole = _whole(rows)
    return {name: has & whole for name, has in found.items()}


def kinds(rows: Rows) -> dict[str, Array]:
    """Return in which rows the values of options, distributions and sizes occur."""
    H, T, S, D = (rows[x] for x in "HTSD")
    rank, B, N, broadcast = (rows[x] for x in ("rank", "B", "N", "broadcast"))
    whole, count = _whole(rows), count_options(rows)
    few, on = count <= 2, _options_of(rows)  # with more, rows may see nothing
    found: dict[str, Array] = {}
    for name in ("distribution", *OPTION_FIELDS, *"TSDE"):
        found |= _each(name, rows[name]) if name in rows else {}
    found |= {name: x & (rank > 3) for name, x in _each("B", B).items()}
    # At sizes of 0 a group shows nothing.
    for name, size in (("K", rows["K"]), ("G", H // np.maximum(rows["K"], 1))):
        found |= {name: x & whole for name, x in _each(name, size).items()}
    found |= {"H = 0": H == 0, "S > 128, D > 64": (S > 128) & (D > 64)}
    found |= _broadcasts(rows, (few & broadcast & (rank == 5)).astype(bool))
    # Axes that are swapped go unnoticed by shape.
    for name in ("mask", "bias"):
        by_head = rows.get(name, np.full(len(T), None)) == "heads"
        found[f"B = H, {name} by heads"] = few & _square(rows) & by_head.astype(bool)
    # Nor are these.
    plain = few & (rank > 3) & ~broadcast & ~on["mask"] & ~on["window"] & ~on["causal"]
    for a, b in (("H", "T"), ("K", "S"), ("T", "D"), ("S", "D"), ("S", "E")):
        found[f"{a} = {b}"] = plain & (rows[a] == rows[b]) & (rows[a] > 1)
    by_sample = np.isin(rows["mask"].astype(str), BY_SAMPLE) if "mask" in rows else False
    found["by sample"] = (np.maximum(B, N) > 1) & (H > 1) & by_sample
    return found


def _square(rows: Rows) -> Array:
    """Return the rows with as many samples as heads."""
    return np.asarray((rows["rank"] > 3) & (rows["B"] == rows["H"]) & (rows["H"] != 1))


def _each(name: str, values: Array) -> dict[str, Array]:
    """Return for each value of a column in which rows it is."""
    listed = values.tolist()
    numbers = {value: n for n, value in enumerate(dict.fromkeys(listed))}
    codes = np.fromiter(map(numbers.__getitem__, listed), int, len(listed))
    return {f"{name} = {value}": codes == n for value, n in numbers.items()}


def _broadcasts(rows: Rows, which: Array) -> dict[str, Array]:
    """Return which of two leading axes k and v have whole."""
    kept = np.array([seed % 3 for seed in rows["seed"].tolist()], int)
    states = []
    for axis, name in enumerate("BN", 1):
        whole = np.where(kept == axis, "kept", "not")
        states.append(np.where(rows[name] == 1, "1", whole))
    found = {}
    for pair in {*zip(*(x[which].tolist() for x in states), strict=True)}:
        same = [state == x for state, x in zip(states, pair, strict=True)]
        found[f"broadcast {[*pair]}"] = which & same[0] & same[1]
    return found
