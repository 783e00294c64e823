"""What is drawn: recipes from seeds, planned so that every pair meets, and Hypothesis strategies.

Sizes are mostly different, odd and not powers of two, because round shapes hide bugs; round ones,
those beside the edges of tiles, 0 and 1 are drawn too. Every list begins with the simplest, to
which Hypothesis shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import combinations, zip_longest
from typing import Any

import numpy as np

from npattn.errors import MissingExtraError, OptionError
from npattn.options import FEATURES, OPTIONS
from npattn.problem import Problem
from npattn.testing.cases.distributions import SCORE_MODS
from npattn.testing.cases.pairwise import BY_SAMPLE, CROWD, covering, options_on
from npattn.testing.cases.recipe import BIASES, DISTRIBUTIONS, MASKS, Recipe

try:
    from hypothesis import strategies as st
except ImportError as err:
    raise MissingExtraError(
        "npattn.testing needs hypothesis, rich and click; npattn itself does not: "
        "pip install 'npattn[check]'"
    ) from err

__all__ = ["STRUCTURE", "Pools", "Space", "problems", "recipes"]

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
"""What has no parameter and is probed: ranks, sizes, views."""

EDGES = (15, 17, 31, 33, 63, 65, 127, 129, 257)  # one beside a multiple of a tile
POOLS = {
    "B": (2, 1, 3),
    "K": (1, 2, 3, 5),
    "G": (1, 2, 3, 4),
    "T": (2, 1, 3, 5, 7, 11) * 2 + (1, 1) + EDGES,  # decoding asks with one query
    "S": (3, 1, 2, 5, 7, 13, 19) * 2 + EDGES,
    "D": (3, 1, 2, 5, 7, 11, 13, 40, 65, 128),
    "E": (2, 1, 3, 5, 9, 17, 33, 128),
}
ROUND_D = (8, 16, 64)
LARGE = 3 * 2**13  # numbers; what is larger costs time and shows no more
LONG = 4096  # keys, for a few queries: sums of thousands of nearly equal weights
CANDIDATES = 1200  # recipes from which the plan chooses
FIELDS = 32  # at least as many as pools have lists
PLAIN = Recipe()
KEEP = object()  # a field stays as the seed chose it
WINDOWS, SCALES, SOFTCAPS, RATES = (
    OPTIONS[name].examples for name in ("window", "scale", "softcap", "dropout_rate")
)


@dataclass(frozen=True)
class Space:
    """What an implementation can be asked: its features, the structure it accepted, its sizes.

    Parameters
    ----------
    features : frozenset of str
        Among `FEATURES`.
    structure : frozenset of str
        Among `STRUCTURE`.
    dtype : str
    sizes : mapping of letter to sizes
        Restricts what is drawn, ``{"D": (64, 128)}``; letters B H K T S D E.
    """

    features: frozenset[str] = frozenset(FEATURES)
    structure: frozenset[str] = frozenset(STRUCTURE)
    dtype: str = "float32"
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)

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
        return hash((self.features, self.structure, self.dtype, frozenset(self.sizes)))

    def pool(self, letter: str) -> tuple[int, ...]:
        """The sizes to draw from; 0 is drawn apart."""
        if letter in self.sizes:
            return tuple(self.sizes[letter])
        if letter in "DE" and "D % 8" not in self.structure:
            return ROUND_D
        return POOLS[letter]

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Pairs (H, K), the simplest first."""
        return _heads(self)

    @property
    def largest(self) -> str:
        """The largest sizes that are drawn, in words."""
        largest = {letter: max(self.pool(letter)) for letter in "TSDE"}
        if "long" in _extents(self, frozenset()):
            largest["S"] = LONG
        return ", ".join(f"{letter} {size}" for letter, size in largest.items())

    def base(self) -> Recipe:
        """The plainest problem there is, with round sizes, on which structure is probed."""

        def first(letter: str, default: int) -> int:
            return next(iter(self.sizes.get(letter, (default,))))

        D = first("D", 16)
        E = D if D in self.sizes.get("E", (D,)) else first("E", D)
        T = first("T", 16)
        S = T if T in self.sizes.get("S", (T,)) else first("S", T)
        K = first("K", first("H", 2))
        H = K if "H" not in self.sizes else first("H", 2)
        return Recipe(lead=(first("B", 2),), H=H, K=K, T=T, S=S, D=D, E=E, dtype=self.dtype)


@dataclass(frozen=True)
class Pools:
    """What each field of a recipe is drawn from, the simplest first.

    Parameters
    ----------
    space : Space
    force : mapping
        Fields of `Recipe` that have this value, or one of a tuple of them.
    forbid : set of str
        Features that are not drawn.
    nonempty : bool
        No size is 0.
    """

    space: Space
    force: Mapping[str, Any] = field(default_factory=dict)
    forbid: frozenset[str] = frozenset()
    nonempty: bool = False

    def __hash__(self) -> int:
        return hash((self.space, frozenset(self.force), self.forbid, self.nonempty))

    @cached_property
    def lists(self) -> dict[str, Sequence[Any]]:
        """A field of `Recipe`, or what makes several of them, and its values."""
        space = self.space
        pools: dict[str, Sequence[Any]] = {letter: space.pool(letter) for letter in "BTSDE"}
        if self.nonempty:
            pools = {letter: [n for n in pool if n] for letter, pool in pools.items()}
        pools["rank"], pools["heads"] = _ranks(space), space.heads
        pools["extent"] = _extents(space, frozenset(self.force))
        # Extreme ones hide what plain ones show, so a third is plain.
        pools["distribution"] = ["normal"] * (len(DISTRIBUTIONS) // 2) + list(DISTRIBUTIONS)
        pools["broadcast"] = (False, False, True) if "broadcast" in space.structure else (False,)
        # Kernels dispatch on E = D, on T = S and on round sizes: each gets its share.
        pools["same size"] = (False, False, True) if "E" not in space.sizes else (False,)
        pools["square"] = (False, False, True) if "S" not in space.sizes else (False,)
        pools["round"] = (False,) if space.sizes else (False,) * 5 + (True,)
        # Where B = H axes that are swapped go unnoticed by shape.
        apart = "B" in space.sizes or "B" in self.force
        pools["B = H"] = (False,) if apart else (False, False, False, True)
        zeros = [] if self.nonempty else _zeros(space)
        pools["zero"] = [""] * max(8 * len(zeros), 1) + zeros
        pools |= _options(space.features - self.forbid)
        for name, values in self.force.items():
            pools[name] = values if isinstance(values, tuple) else (values,)
        return pools

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for pools of one space that draw alike."""
        return tuple(sorted(self.force.items())), self.forbid, self.nonempty

    @cached_property
    def _sized(self) -> list[tuple[str, Sequence[Any], int]]:
        return [(name, pool, len(pool)) for name, pool in self.lists.items()]

    @cached_property
    def _switches(self) -> list[tuple[str, list[Any]]]:
        """Each option that is not forced: off, and what it may be."""
        names = [n for n in _options(self.space.features) if n in self.lists]
        return [(n, list(dict.fromkeys(self.lists[n]))) for n in names if n not in self.force]

    @cached_property
    def few(self) -> list[tuple[str, ...]]:
        """Every set of at most two options, by their fields."""
        fields = [n for n in _options(self.space.features - self.forbid) if n not in self.force]
        return [on for size in (0, 1, 2) for on in combinations(fields, size)]

    def recipe(self, seed: int, changes: Sequence[Any] = ()) -> Recipe:
        """What the seed chooses, evenly from every list, but for the changes.

        An odd seed stays on the beaten path, where fast kernels are: two options at most, and no
        odd structure. Mistakes there hide behind every third option.
        """
        if seed % 2:
            rng = np.random.default_rng([seed, 0])
            where = rng.random(len(self.lists)).tolist()  # at once: it is called by the thousand
        else:
            where = _places(seed, max(len(self.lists), FIELDS))
        chosen = {
            name: pool[int(x * n)] for (name, pool, n), x in zip(self._sized, where, strict=False)
        }
        if seed % 2:
            on = self.few[seed // 2 % len(self.few)]
            for name, (off, *values) in self._switches:
                chosen[name] = values[int(rng.integers(len(values)))] if name in on else off
            plain = {"rank": self.lists["rank"][0], "broadcast": False, "zero": ""}
            plain["same size"] = "E" not in self.space.sizes and bool(rng.integers(4))
            chosen |= {n: x for n, x in plain.items() if n not in self.force}
        if changes:
            changed = zip(self.lists, changes, strict=False)
            chosen |= {n: x for n, x in changed if x is not KEEP}
        return _assemble(self.space, frozenset(self.force), seed, chosen)

    def cases(self, seed: int, examples: int) -> Iterator[Recipe]:
        """Recipes to judge with: first those in which every pair of options meets and no third,
        up to half of the examples; then those in which every option meets every kind of structure,
        and each kind is there; then, in turn, one of the beaten path and one of as many options at
        once as models have. A few times more than asked for, since some show nothing.

        A report must be the same everywhere, so the seeds do not come from Hypothesis, whose draws
        depend on what else is loaded.
        """
        if not all(self.lists.values()):
            return  # sizes of 0 only, for a rule that needs more
        yield from self._pairs(seed, examples)
        covered, crowds, seeds = _after_pairs(self, tuple(self.lists), seed, examples)
        yield from covered
        for (beaten, other), crowd in zip_longest(seeds, crowds[: len(seeds)]):
            yield self.recipe(beaten + 1)
            yield crowd or self.recipe(other)

    def _pairs(self, seed: int, examples: int) -> list[Recipe]:
        """Every pair of options, up to half of the examples."""
        first = len(self.few) * (seed % 2**20)
        pairs = min(len(self.few), examples // 2)
        return [self.recipe(2 * (first + n) + 1) for n in range(pairs)]

    def changes(self) -> st.SearchStrategy[tuple[Any, ...]]:
        """Changes to what a seed chose: few, and as it shrinks, all of them."""
        simple = [list(dict.fromkeys(pool)) for pool in self.lists.values()]
        return st.tuples(*(st.sampled_from([*pool, *[KEEP] * 15 * len(pool)]) for pool in simple))

    def near(self, seed: int) -> st.SearchStrategy[Recipe]:
        """Recipes like that of the seed; Hypothesis shrinks them to the simplest."""
        return self.changes().map(lambda changes: self.recipe(seed, changes))


@lru_cache(maxsize=2 * CANDIDATES)
def _places(seed: int, n: int) -> list[float]:
    """n numbers in [0, 1), of which the first are the same for every n. Remembered, for all pools
    have candidates of the same seeds."""
    where: list[float] = np.random.default_rng([seed, 0]).random(n).tolist()
    return where


@lru_cache(maxsize=128)
def _after_pairs(
    pools: Pools, fields: tuple[str, ...], seed: int, examples: int
) -> tuple[list[Recipe], list[Recipe], list[list[int]]]:
    """What covers all that pairs of options leave, crowds of options, and pairs of seeds.

    Remembered, for many rules and implementations draw alike. What a seed chooses depends on the
    order of the fields, which pools that are equal may have differently.
    """
    rng = np.random.default_rng([seed, 11])
    draws = [pools.recipe(2 * int(x)) for x in rng.integers(2**31, size=CANDIDATES)]
    covered = list(covering(pools._pairs(seed, examples), draws))
    crowds = [recipe for recipe in draws if len(options_on(recipe)) > CROWD]
    return covered, crowds, (2 * rng.integers(2**31, size=(5 * examples, 2))).tolist()


def recipes(space: Space | None = None, **options: Any) -> st.SearchStrategy[Recipe]:
    """Recipes within a space.

    Parameters
    ----------
    space : Space, optional
        Default: everything that a `Problem` can be.
    **options
        force, forbid, nonempty, as in `Pools`.

    Returns
    -------
    strategy of Recipe
    """
    pools = Pools(space or Space(), **options)
    return st.tuples(st.integers(0, 2**32 - 1), pools.changes()).map(lambda x: pools.recipe(*x))


def _extents(space: Space, forced: frozenset[str]) -> tuple[str, ...]:
    """How far T, S and D reach: as drawn, long in S, or wide in S and D."""
    free = set("BTSD") - set(space.sizes) - forced
    long = ("long",) if free >= set("BTS") and "T != S" in space.structure else ()
    wide = ("wide", "wide", "wide") if free >= set("BTSD") else ()
    return ("",) * 45 + wide + long


def _zeros(space: Space) -> list[str]:
    """Letters that may be 0 alone."""
    tied = {"T": "T != S", "S": "T != S", "D": "E != D", "E": "E != D"}
    return [
        letter
        for letter in "BHTSDE"
        if f"{letter} = 0" in space.structure
        and letter not in space.sizes
        and tied.get(letter, f"{letter} = 0") in space.structure
    ]


def _assemble(space: Space, forced: frozenset[str], seed: int, drawn: dict[str, Any]) -> Recipe:
    """A recipe of independent draws, bent to the structure that was accepted."""
    B, rank, (H, K) = drawn.pop("B"), drawn.pop("rank"), drawn.pop("heads")
    leads: dict[str, tuple[int, ...] | None] = {"rank 2": None, "rank 3": (), "rank 4": (B,)}
    lead = leads.get(rank, (B, 3))
    if lead is None:
        H = K = 1
    free = set("BTSDE") - set(space.sizes) - forced
    # By head or by sample: nothing tells them apart but a batch of as many samples as heads.
    by_head = "heads" in (drawn.get("mask"), drawn.get("bias")) and "B" in free and seed // 2 % 2
    if (drawn.pop("B = H") or by_head) and lead and H <= 6:
        lead = (H, *lead[1:])
    _stretch(space, free, seed, drawn)
    if drawn.get("mask") == "first tile" and seed // 2 % 2:
        # Scores far below 0 after a tile of nothing: 0 is no maximum to begin with.
        drawn["distribution"] = "low" if "distribution" not in forced else drawn["distribution"]
        if "S" in free and "T != S" in space.structure:
            drawn["S"] = max(drawn["S"], 65)
    if _cost(lead, H, drawn) > LARGE and not set("HK") & set(space.sizes):
        H, K = H // K, 1
    if _cost(lead, H, drawn) > LARGE and "B" in free:
        lead = None if lead is None else (1,) * len(lead)
    while _cost(lead, H, drawn) > LARGE and drawn["T"] > 1 and "T" in free:
        square, drawn["T"] = drawn["T"] == drawn["S"], drawn["T"] // 2
        if square:
            drawn["S"] = drawn["T"]
    zero = drawn.pop("zero")
    if zero in ("T", "S", "D", "E") and zero in free:
        drawn[zero] = 0
    elif zero == "B" and lead:
        lead = (0, *lead[1:])
    elif zero == "H" and lead is not None:
        H = K = 0
    drawn["broadcast"] = drawn["broadcast"] and bool(lead)
    return Recipe(lead=lead, H=H, K=K, dtype=space.dtype, seed=seed, **drawn)


def _stretch(space: Space, free: set[str], seed: int, drawn: dict[str, Any]) -> None:
    """Make T, S, D, E round, wide, long or equal where that was drawn, or must be."""
    if drawn.pop("round"):
        sizes = free & set("SDE" if drawn["T"] == 1 else "TSDE")
        drawn |= {letter: _rounded(drawn[letter]) for letter in sizes}
    extent = drawn.pop("extent")
    if extent == "wide":
        drawn |= {"S": (129, 257)[seed // 2 % 2], "D": 65 if "D % 8" in space.structure else 128}
    if (drawn.pop("same size") and "E" in free) or "E != D" not in space.structure:
        drawn["E"] = drawn["D"]
    square = drawn.pop("square") and "S" in free
    if extent == "long" and drawn["D"] + drawn["E"] <= 32:
        drawn |= {"S": LONG, "T": min(drawn["T"], 3)}
    elif square or "T != S" not in space.structure:
        drawn["S"] = drawn["T"]
    if "T > S" not in space.structure and drawn["T"] > drawn["S"]:
        fitting = [n for n in space.pool("T") if n <= drawn["S"]]
        drawn["T"] = max(fitting, default=drawn["S"])


def _cost(lead: tuple[int, ...] | None, H: int, drawn: Mapping[str, Any]) -> int:
    """About how many numbers are held: scores, and q, k, v, which are read less often."""
    T, S, size = drawn["T"], drawn["S"], drawn["D"] + drawn["E"]
    return int(math.prod(lead or ()) * H * (T * S + (T + S) * size // 4))


def _rounded(size: int) -> int:
    """The round size nearest in kind: 8, 16 or 64."""
    return 8 if size < 8 else 16 if size < 32 else 64


def _ranks(space: Space) -> list[str]:
    ranks: list[str] = [r for r in ("rank 4", "rank 3", "rank 2", "rank 5") if r in space.structure]
    # The first is what everybody has, and what problems on the beaten path have.
    return [ranks[0]] * 2 + ranks if ranks else ["rank 4"]


def _options(features: frozenset[str]) -> dict[str, Sequence[Any]]:
    """Field of `Recipe` → what to draw: off in two of three problems."""
    rates = RATES if "dropout_rate" in features else (0.0,)
    every: dict[str, Sequence[Any]] = {
        "mask": [*MASKS, *BY_SAMPLE],
        "causal": (True,),
        "window": WINDOWS,
        "bias": list(BIASES),
        "scale": SCALES,
        "softcap": SOFTCAPS,
        "score_mod": list(SCORE_MODS),
        "sinks": (True,),
        "dropout": rates,
    }
    return {
        field: [getattr(PLAIN, field)] * (2 * len(on)) + list(on)
        for field, on in every.items()
        if field in features or (field == "dropout" and "dropout_mask" in features)
    }


def _heads(space: Space) -> list[tuple[int, int]]:
    """Pairs (H, K), the simplest first."""
    shared = "K < H" in space.structure
    if "H" in space.sizes:
        pairs = [
            (H, K)
            for H in space.sizes["H"]
            for K in space.sizes.get("K", range(1, H + 1))
            if K and H % K == 0 and (shared or K == H)
        ]
        return pairs or [(H, H) for H in space.sizes["H"]]
    groups = POOLS["G"] if shared else (1,)
    return [(K * G, K) for G in groups for K in space.pool("K") if K]


def problems(space: Space | None = None, **options: Any) -> st.SearchStrategy[Problem]:
    """Problems within a space; as `recipes`."""
    return recipes(space, **options).map(Recipe.problem)
