"""Assemble rows of independent samples, adapted to the structure that was accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.cases.rows import Rows, column
from npattn.testing.cases.space import FEW_HEADS, LONG, Space

LARGE = 3 * 2**13
"""Numbers held by a problem; larger ones cost time and show no more."""


def assemble(space: Space, forced: frozenset[str], seeds: Sequence[int], fields: Rows) -> Rows:
    """Return rows of independent samples, adapted to the structure that was accepted."""
    where, rows = np.where, dict(fields)
    turn = np.array([seed // 2 % 2 for seed in seeds], bool)
    rank = np.array([int(name[-1]) for name in rows.pop("rank")])
    H, K = np.array([*rows.pop("heads")]).T
    H, K = where(rank == 2, 1, H), where(rank == 2, 1, K)
    batched = rank > 3
    B, N = where(batched, rows["B"], 1), where(rank == 5, 3, 1)
    free = set("BTSDE") - set(space.sizes) - forced
    # By head or by sample: nothing tells them apart but a batch of as many samples as heads.
    by_head = turn & (_equals(rows, "mask", "heads") | _equals(rows, "bias", "heads"))
    by_head &= "B" in free and not space.few_shapes
    B = where((rows.pop("B = H") | by_head) & batched & (H <= 6), H, B)
    _stretch(space, free, turn, rows)
    # Scores far below 0 after a tile of nothing: 0 is no maximum to begin with.
    tile = _equals(rows, "mask", "first tile") & turn
    if "distribution" not in forced:
        rows["distribution"] = where(tile, "low", rows["distribution"])
    if "S" in free and "T != S" in space.structure and not space.few_shapes:
        rows["S"] = where(tile, np.maximum(rows["S"], 65), rows["S"])
    T, S, size = rows["T"], rows["S"], rows["D"] + rows["E"]

    def large() -> Array:
        # Numbers held: scores, and q, k, v, which are read less often.
        return np.asarray(B * N * H * (T * S + (T + S) * size // 4) > LARGE)

    if not set("HK") & set(space.sizes):
        G = H // np.maximum(K, 1)
        for heads in (G, np.minimum(G, FEW_HEADS)):
            too_large = large()
            H, K = where(too_large, heads, H), where(too_large, 1, K)
    if "B" in free:
        too_large = large()
        B, N = where(too_large, 1, B), where(too_large, 1, N)
    while "T" in free and (too_large := large() & (T > 1)).any():
        half = where(too_large, T // 2, T)
        T, S = half, where(too_large & (T == S), half, S)
    zero = rows.pop("zero")
    rows |= {"T": T, "S": S}
    rows |= {x: where(zero == x, 0, rows[x]) for x in "TSDE" if x in free}
    rows |= {"rank": rank, "B": where((zero == "B") & batched, 0, B), "N": N}
    headed = (zero != "H") | (rank == 2)
    rows |= {"H": where(headed, H, 0), "K": where(headed, K, 0)}
    rows["broadcast"] = rows["broadcast"] & batched
    return rows | {"seed": column(seeds), "dtype": column([space.dtype] * len(seeds))}


def _stretch(space: Space, free: set[str], turn: Array, rows: Rows) -> None:
    """Make T, S, D, E round, wide, long or equal if sampled so, or needed; turn is (rows,)."""
    where, structure = np.where, space.structure
    rounds, single = rows.pop("round"), rows["T"] == 1
    for x in free & set("TSDE"):
        size = rows[x]
        rounded = where(size < 8, 8, where(size < 32, 16, 64))
        rows[x] = where(rounds & ~(single & (x == "T")), rounded, size)
    extent = rows.pop("extent")
    wide, long = extent == "wide", extent == "long"
    T, S, D = rows["T"], where(wide, where(turn, 257, 129), rows["S"]), rows["D"]
    D = where(wide, 65 if "D % 8" in structure else 128, D)
    same, square = rows.pop("same size") & ("E" in free), rows.pop("square") & ("S" in free)
    E = where(same | ("E != D" not in structure), D, rows["E"])
    long &= D + E <= 32
    T = where(long, np.minimum(T, 3), T)
    S = where(long, LONG, where(square | ("T != S" not in structure), T, S))
    if "T > S" not in structure:
        pool = np.sort(space.pool("T"))
        fitting = np.searchsorted(pool, S, "right") - 1
        T = where(T <= S, T, where(fitting < 0, S, pool[fitting]))
    rows |= {"T": T, "S": S, "D": D, "E": E}


def _equals(rows: Rows, name: str, value: object) -> Array:
    """Return the rows in which an option has this value."""
    return np.asarray(rows[name] == value) if name in rows else np.zeros(len(rows["T"]), bool)
