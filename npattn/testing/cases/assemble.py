"""Assemble a recipe of independent samples, adapted to the structure that was accepted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import FEW_HEADS, LONG, Space

LARGE = 3 * 2**13
"""Numbers held by a problem; larger ones cost time and show no more."""


def assemble(space: Space, forced: frozenset[str], seed: int, fields: dict[str, Any]) -> Recipe:
    """Return a recipe of independent samples, adapted to the structure that was accepted."""
    B, rank, (H, K) = fields.pop("B"), fields.pop("rank"), fields.pop("heads")
    leads: dict[str, tuple[int, ...] | None] = {"rank 2": None, "rank 3": (), "rank 4": (B,)}
    lead = leads.get(rank, (B, 3))
    if lead is None:
        H = K = 1
    free = set("BTSDE") - set(space.sizes) - forced
    # By head or by sample: nothing tells them apart but a batch of as many samples as heads.
    by_head = "heads" in (fields.get("mask"), fields.get("bias")) and "B" in free and seed // 2 % 2
    by_head = by_head and not space.few_shapes
    if (fields.pop("B = H") or by_head) and lead and H <= 6:
        lead = (H, *lead[1:])
    _stretch(space, free, seed, fields)
    if fields.get("mask") == "first tile" and seed // 2 % 2:
        # Scores far below 0 after a tile of nothing: 0 is no maximum to begin with.
        fields["distribution"] = "low" if "distribution" not in forced else fields["distribution"]
        if "S" in free and "T != S" in space.structure and not space.few_shapes:
            fields["S"] = max(fields["S"], 65)
    if not set("HK") & set(space.sizes):
        for heads in ((H // max(K, 1), 1), (min(H // max(K, 1), FEW_HEADS), 1)):
            H, K = heads if _cost(lead, H, fields) > LARGE else (H, K)
    if _cost(lead, H, fields) > LARGE and "B" in free:
        lead = None if lead is None else (1,) * len(lead)
    while _cost(lead, H, fields) > LARGE and fields["T"] > 1 and "T" in free:
        square, fields["T"] = fields["T"] == fields["S"], fields["T"] // 2
        if square:
            fields["S"] = fields["T"]
    zero = fields.pop("zero")
    if zero in ("T", "S", "D", "E") and zero in free:
        fields[zero] = 0
    elif zero == "B" and lead:
        lead = (0, *lead[1:])
    elif zero == "H" and lead is not None:
        H = K = 0
    fields["broadcast"] = fields["broadcast"] and bool(lead)
    return Recipe(lead=lead, H=H, K=K, dtype=space.dtype, seed=seed, **fields)


def _stretch(space: Space, free: set[str], seed: int, fields: dict[str, Any]) -> None:
    """Make T, S, D, E round, wide, long or equal if that was sampled, or must be."""
    if fields.pop("round"):
        sizes = free & set("SDE" if fields["T"] == 1 else "TSDE")
        fields |= {letter: _round_size(fields[letter]) for letter in sizes}
    extent = fields.pop("extent")
    if extent == "wide":
        fields |= {"S": (129, 257)[seed // 2 % 2], "D": 65 if "D % 8" in space.structure else 128}
    if (fields.pop("same size") and "E" in free) or "E != D" not in space.structure:
        fields["E"] = fields["D"]
    square = fields.pop("square") and "S" in free
    if extent == "long" and fields["D"] + fields["E"] <= 32:
        fields |= {"S": LONG, "T": min(fields["T"], 3)}
    elif square or "T != S" not in space.structure:
        fields["S"] = fields["T"]
    if "T > S" not in space.structure and fields["T"] > fields["S"]:
        fitting = [n for n in space.pool("T") if n <= fields["S"]]
        fields["T"] = max(fitting, default=fields["S"])


def _cost(lead: tuple[int, ...] | None, H: int, fields: Mapping[str, Any]) -> int:
    """Estimate the numbers held: scores, and q, k, v, which are read less often."""
    T, S, size = fields["T"], fields["S"], fields["D"] + fields["E"]
    return int(math.prod(lead or ()) * H * (T * S + (T + S) * size // 4))


def _round_size(size: int) -> int:
    """Return a round size of the same magnitude: 8, 16 or 64."""
    return 8 if size < 8 else 16 if size < 32 else 64
