"""Space of the problems that an implementation accepts: features, structure, sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from npattn.errors import OptionError
from npattn.problem.options import FEATURES
from npattn.testing.cases.conditions import letters_of
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.shapes import SHAPES
from npattn.testing.parsing import Multiples
from npattn.testing.places import read_condition

RANKS = ("rank 4", "rank 3", "rank 2", "rank 5")
"""Ranks of q, k, v, the commonest first."""
STRUCTURE = (
    "rank 2",
    "rank 3",
    "rank 4",
    "rank 5",
    "K < H",
    "E != D",
    "T != S",
    "T > S",
    "D % 8",
    "broadcast",
    "B = 0",
    "H = 0",
    "T = 0",
    "S = 0",
    "D = 0",
    "E = 0",
    "transposed",
    "stepped",
    "expanded",
    "reversed",
)
"""Structure, which has no parameter and is probed: ranks, sizes, views."""
LATE = "raises in"
"""Words about structure that raises after the probe: no report leaves such a line out."""

ONLY, WHERE, AT = "only ", "where ", "at "
"""Beginnings of the names of refusals: what is taken alone, what is refused, and which line."""

EDGES = (15, 17, 31, 33, 63, 65, 127, 129, 257)  # one beside a multiple of a tile
POOLS = {
    "B": (2, 1, 3),
    "K": (1, 2, 3, 5, 4, 6, 7, 8),
    "G": (1, 2, 3, 4, 5, 6, 7, 8, 12, 14, 16, 20, 24),
    "T": (2, 1, 3, 5, 7, 11) * 2 + (1, 1) + EDGES,  # decoding asks with one query
    "S": (3, 1, 2, 5, 7, 13, 19) * 2 + EDGES,
    "D": (3, 1, 2, 5, 7, 11, 13, 40, 65, 128),
    "E": (2, 1, 3, 5, 9, 17, 33, 128),
}
FEW_HEADS = 4
"""Number of the first values of K and G in `POOLS`; six of seven problems use only them."""
ROUND_D = (8, 16, 64)
LONG = 4096  # keys, for a few queries: sums of thousands of nearly equal weights


@dataclass(frozen=True)
class Space:
    """Features, structure and sizes of the problems that an implementation accepts."""

    features: frozenset[str] = frozenset(FEATURES)  # among `FEATURES`
    structure: frozenset[str] = frozenset(STRUCTURE)  # among `STRUCTURE`
    dtype: str = "float32"
    # sizes to sample, ``{"D": (64, 128)}``, instead of those of `POOLS`; letters B H K T S D E
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    # few shapes carry many contents: the framework compiles for each of them
    few_shapes: bool = False
    # classes of options that are refused together, as {"mask", "causal"}, or alone
    refused: frozenset[frozenset[str]] = frozenset()
    # options that are always on, and a value that is accepted alone
    always: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None  # largest T and S
    excluded: tuple[str, ...] = ()  # conditions of problems that are refused, as "causal and T > S"
    # lines of the user's, as "file.py:7", that refuse problems of which no condition is known
    refused_at: frozenset[str] = frozenset()
    # conditions of all that is taken, as "D in {64, 128}"; `sizes` has them already
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for letter, values in self.sizes.items():
            legal = (
                isinstance(values, Sequence)
                and values
                and all(isinstance(n, int) and n >= 0 for n in values)
            )
            if letter not in "BHKTSDE" or not legal:
                raise OptionError(
                    f"sizes has {letter}={values!r}, must be a letter of B H K T S D E with a "
                    'sequence of integers ≥ 0, as in {"D": (64, 128)}'
                )

    def __hash__(self) -> int:
        sizes = frozenset(self.sizes)
        excluded = self.refused, self.excluded
        return hash((self.features, self.structure, self.dtype, sizes, excluded))

    def refuses(self, classes: frozenset[str]) -> bool:
        """Return True if some of these classes are refused, together or alone."""
        return any(combination <= classes for combination in self.refused)

    def excludes(self, recipe: Recipe) -> bool:
        """Return True if a condition of refused problems holds for a recipe."""
        sample = letters_of(recipe) if self.excluded else {}
        return any(read_condition(text)(sample) for text in self.excluded)

    def takes(self, recipe: Recipe) -> bool:
        """Return True if it has the options, the structure and the sizes of a recipe."""
        sizes = _sizes_of(recipe)
        structure = {
            "K < H": recipe.K < recipe.H,
            "E != D": recipe.E != recipe.D,
            "T != S": recipe.T != recipe.S,
            "T > S": recipe.T > recipe.S,
            "D % 8": any(sizes[x] % 8 and x not in self.sizes for x in "DE"),
            "broadcast": recipe.broadcast,
            **{f"{letter} = 0": sizes[letter] == 0 for letter in "BHTSDE"},
        }
        options = {"dropout_mask" if name == "dropout" else name for name in options_on(recipe)}
        return (
            options <= self.features
            and {name for name, has in structure.items() if has} <= self.structure
            and self.has_sizes(recipe)
            and (recipe.lead is not None or recipe.H == recipe.K == 1)
        )

    def has_sizes(self, recipe: Recipe) -> bool:
        """Return True if the sizes of a recipe are among those to sample."""
        sizes = _sizes_of(recipe)
        return all(sizes[letter] in allowed for letter, allowed in self.sizes.items())

    def pool(self, letter: str) -> tuple[int, ...]:
        """Return the sizes to sample from; 0 is sampled apart."""
        if letter in self.sizes:
            return tuple(sorted(self.sizes[letter], key=lambda n: n == 0))  # the plainest first
        if letter in "DE" and "D % 8" not in self.structure:
            return ROUND_D
        if self.few_shapes and letter != "K":
            return tuple(dict.fromkeys(getattr(shape, letter) for shape in SHAPES))
        if letter in "TS" and self.longest is not None:
            return (*(n for n in POOLS[letter] if n <= self.longest), self.longest)
        return POOLS[letter]

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Pairs (H, K), the simplest first."""
        shared = "K < H" in self.structure
        if "H" in self.sizes:
            pairs = [
                (H, K)
                for H in self.pool("H")
                for K in self.sizes.get("K", range(1, H + 1))
                if K and H % K == 0 and (shared or K == H)
            ]
            return pairs or [(H, H) for H in self.pool("H")]
        if self.few_shapes:
            return [shape.heads if shared else (shape.heads[0],) * 2 for shape in SHAPES]
        groups, shares = POOLS["G"] if shared else (1,), [K for K in self.pool("K") if K]
        pairs = [(K * G, K) for G in groups for K in shares]
        few = [(K * G, K) for G in groups[:FEW_HEADS] for K in shares[:FEW_HEADS]]
        rest = [pair for pair in pairs if pair not in few]
        return few * (6 * len(rest) // len(few) or 1) + rest

    def base(self) -> Recipe:
        """Return the plainest problem, of the first rank, with round sizes."""

        def first(letter: str, default: int) -> int:
            return self.pool(letter)[0] if letter in self.sizes else default

        D = first("D", 16)
        E = D if D in self.sizes.get("E", (D,)) else first("E", D)
        T = first("T", 16)
        S = T if T in self.sizes.get("S", (T,)) else first("S", T)
        K = first("K", first("H", 2))
        H = K if "H" not in self.sizes else first("H", 2)
        base = Recipe(lead=(first("B", 2),), H=H, K=K, T=T, S=S, D=D, E=E, dtype=self.dtype)
        return with_rank(replace(base, **self.always), self.ranks[0])

    @property
    def least_scores(self) -> int:
        """Number of scores of a head in the smallest problem that is sampled."""
        return math.prod(min((n for n in self.pool(x) if n), default=1) for x in "TS")

    @property
    def ranks(self) -> list[str]:
        """Ranks to sample from; the first is the commonest, and that of plain problems."""
        ranks = [rank for rank in RANKS if rank in self.structure]
        return [ranks[0]] * 2 + ranks if ranks else ["rank 4"]

    @property
    def first_rank(self) -> int:
        """Rank of plain problems."""
        return int(self.ranks[0].removeprefix("rank "))

    def extents(self, forced: frozenset[str]) -> tuple[str, ...]:
        """Return extents of T, S and D to sample from: plain, long in S, or wide in S and D."""
        if self.few_shapes:
            return ("",)
        free = set("BTSD") - set(self.sizes) - forced
        long = ("long",) if free >= set("BTS") and "T != S" in self.structure else ()
        wide = ("wide", "wide", "wide") if free >= set("BTSD") else ()
        return ("",) * 45 + wide + long

    @property
    def zeros(self) -> list[str]:
        """Letters whose size may be 0 while the others are not."""
        tied = {"T": "T != S", "S": "T != S", "D": "E != D", "E": "E != D"}
        return [
            letter
            for letter in "BHTSDE"
            if f"{letter} = 0" in self.structure
            and letter not in self.sizes
            and tied.get(letter, f"{letter} = 0") in self.structure
        ]


def describe_limits(space: Space, sizes: Mapping[str, Sequence[int]]) -> tuple[str, str]:
    """Return for which problems a space has answers, by sizes of the user's, and what is refused.

    As ("D in {64, 128}, T % 64 = 0", "causal with T > S"); "" if nothing is to say.
    """
    parts = []
    for letter, values in sizes.items():
        if isinstance(values, Multiples):
            parts.append(f"{letter} % {values.of} = 0")
        else:
            some = [*dict.fromkeys(values)]
            listed = f"{letter} in {{{', '.join(map(str, some))}}}"
            parts.append(f"{letter} = {some[0]}" if len(some) == 1 else listed)
    refused = [re.sub(r"^((?:no )?[a-z_]+) and ", r"\1 with ", text) for text in space.excluded]
    refused += ["some problems"] if space.refused_at else []
    return ", ".join([*parts, *space.only]), ", ".join(refused)


def _sizes_of(recipe: Recipe) -> dict[str, int]:
    sizes = {x: getattr(recipe, x) for x in "HKTSDE"}
    return sizes | {"B": recipe.lead[0] if recipe.lead else 1}


def with_rank(base: Recipe, rank: str) -> Recipe:
    """Return the recipe with q, k, v of a rank."""
    if rank == "rank 2":
        return replace(base, lead=None, H=1, K=1)
    batch = base.lead if base.lead is not None and len(base.lead) == 1 else (2,)
    return replace(base, lead={"rank 3": (), "rank 4": batch, "rank 5": (2, 3)}[rank])
