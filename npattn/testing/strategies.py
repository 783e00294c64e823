"""What is drawn: Hypothesis strategies of recipes and problems.

Sizes are mostly different, odd and not powers of two, because round shapes hide bugs; round ones,
0 and 1 are drawn too. Every list begins with the simplest, to which Hypothesis shrinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from npattn.errors import MissingExtraError, OptionError
from npattn.problem import Problem
from npattn.testing.recipe import BIASES, DISTRIBUTIONS, MASKS, SCORE_MODS, Recipe

try:
    from hypothesis import strategies as st
except ImportError as err:
    raise MissingExtraError(
        "npattn.testing needs hypothesis, rich and click; npattn itself does not: "
        "pip install 'npattn[check]'"
    ) from err

__all__ = ["FEATURES", "STRUCTURE", "Space", "problems", "recipes"]

FEATURES = (
    "mask",
    "causal",
    "window",
    "bias",
    "scale",
    "softcap",
    "score_mod",
    "sinks",
    "dropout_mask",
    "dropout_rate",
)
"""The options of an implementation that change what it computes."""

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

POOLS = {
    "B": (2, 1, 3),
    "K": (1, 2, 3, 5),
    "G": (1, 2, 3, 4),
    "T": (2, 1, 3, 5, 7, 11, 17, 33, 67, 8, 16, 64),
    "S": (3, 1, 2, 5, 7, 13, 19, 37, 65, 129, 8, 16, 64, 128),
    "D": (3, 1, 2, 5, 7, 11, 13, 40, 65, 8, 16, 64),
    "E": (2, 1, 3, 5, 9, 17, 33, 8, 16, 64),
}
ROUND = {"T": (8, 16, 64), "S": (8, 16, 64, 128), "D": (8, 16, 64), "E": (8, 16, 64)}
WINDOWS = ((0, 0), (1, 0), (0, 1), (2, 3), (3, None), (None, 1), (7, 0), (16, 5))
SCALES = (0.5, 1.0, -0.75, 0.0, 1.7)
SOFTCAPS = (2.0, 0.5, 1.0, 30.0)
RATES = (0.5, 0.0, 0.3)


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

    def pool(self, letter: str) -> tuple[int, ...]:
        """The sizes to draw from."""
        if letter in self.sizes:
            return tuple(self.sizes[letter])
        zero = (0,) if f"{letter} = 0" in self.structure else ()
        if letter == "D" and "D % 8" not in self.structure:
            return (*ROUND["D"], *zero)
        return (*POOLS[letter], *zero)

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


def recipes(
    space: Space,
    *,
    force: Mapping[str, Any] | None = None,
    forbid: frozenset[str] = frozenset(),
    nonempty: bool = False,
) -> st.SearchStrategy[Recipe]:
    """Recipes within a space.

    Parameters
    ----------
    space : Space
    force : mapping
        Fields of `Recipe` that have this value, or one of a tuple of them.
    forbid : set of str
        Features that are not drawn.
    nonempty : bool
        No size is 0.

    Returns
    -------
    strategy of Recipe
    """
    pools: dict[str, Sequence[Any]] = {letter: space.pool(letter) for letter in "BTSDE"}
    if nonempty:
        pools = {letter: [n for n in pool if n] or [1] for letter, pool in pools.items()}
    pools["rank"], pools["heads"] = _ranks(space), _heads(space, nonempty)
    pools["distribution"] = list(DISTRIBUTIONS)
    pools["broadcast"] = (False, False, True) if "broadcast" in space.structure else (False,)
    # Kernels dispatch on E = D, on T = S and on round sizes: each gets its share.
    pools["same size"] = (False, True) if "E" not in space.sizes else (False,)
    pools["square"] = (False, False, True) if "S" not in space.sizes else (False,)
    pools["round"] = (False,) if space.sizes else (False, False, False, False, True)
    pools |= _options(space.features - forbid)
    for name, values in (force or {}).items():
        pools[name] = values if isinstance(values, tuple) else (values,)
    names = list(pools)
    drawn = st.tuples(st.integers(0, 2**20), *(st.sampled_from(pool) for pool in pools.values()))
    return drawn.map(lambda xs: _assemble(space, xs[0], dict(zip(names, xs[1:], strict=True))))


def _assemble(space: Space, seed: int, drawn: dict[str, Any]) -> Recipe:
    """A recipe of independent draws, bent to the structure that was accepted."""
    B, rank, (H, K) = drawn.pop("B"), drawn.pop("rank"), drawn.pop("heads")
    lead = {"rank 2": None, "rank 3": (), "rank 4": (B,), "rank 5": (B, 3)}[rank]
    if lead is None:
        H = K = 1
    if drawn.pop("round"):
        drawn |= {letter: _rounded(drawn[letter]) for letter in "TSDE"}
    if drawn.pop("same size") or "E != D" not in space.structure:
        drawn["E"] = drawn["D"]
    if drawn.pop("square") or "T != S" not in space.structure:
        drawn["S"] = drawn["T"]
    if "T > S" not in space.structure and drawn["T"] > drawn["S"]:
        drawn["T"], drawn["S"] = drawn["S"], drawn["T"]
    drawn["broadcast"] = drawn["broadcast"] and bool(lead)
    return Recipe(lead=lead, H=H, K=K, dtype=space.dtype, seed=seed, **drawn)


def _rounded(size: int) -> int:
    """The round size nearest in kind: 8, 16 or 64."""
    return 8 if size < 8 else 16 if size < 32 else 64


def _ranks(space: Space) -> list[str]:
    ranks: list[str] = [r for r in ("rank 4", "rank 3", "rank 2", "rank 5") if r in space.structure]
    # The first is what everybody has; the others share a third of the problems.
    return [ranks[0]] * (2 * len(ranks)) + ranks[1:] if ranks else ["rank 4"]


def _options(features: frozenset[str]) -> dict[str, Sequence[Any]]:
    """Field of `Recipe` → what to draw: off in two of three problems."""
    rates = RATES if "dropout_rate" in features else (0.0,)
    every: list[tuple[str, str, Any, Sequence[Any]]] = [
        ("mask", "mask", None, list(MASKS)),
        ("causal", "causal", False, (True,)),
        ("window", "window", None, WINDOWS),
        ("bias", "bias", None, list(BIASES)),
        ("scale", "scale", None, SCALES),
        ("softcap", "softcap", None, SOFTCAPS),
        ("score_mod", "score_mod", None, list(SCORE_MODS)),
        ("sinks", "sinks", False, (True,)),
        ("dropout_mask", "dropout", None, rates),
    ]
    return {
        field: [off] * (2 * len(on)) + list(on)
        for feature, field, off, on in every
        if feature in features
    }


def _heads(space: Space, nonempty: bool) -> list[tuple[int, int]]:
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
    pairs = [(K * G, K) for G in groups for K in space.pool("K") if K]
    return pairs + ([(0, 0)] if "H = 0" in space.structure and not nonempty else [])


def problems(space: Space | None = None, **options: Any) -> st.SearchStrategy[Problem]:
    """Problems within a space; everything that a `Problem` can be unless said otherwise.

    Parameters
    ----------
    space : Space, optional
    **options
        As in `recipes`.

    Returns
    -------
    strategy of Problem
    """
    return recipes(space or Space(), **options).map(Recipe.problem)
