"""Golden tolerances: those of 10⁴ problems as they were, to what a processor leaves of them.

``python -m tests.testing.bounds.golden`` writes golden.npz anew, after a change that is meant to
change tolerances; `test_golden.py` compares. The problems are sampled here, from nothing but their
number, so that a change of what the judge samples moves none of them.

Another processor adds in another order, which moves most tolerances by some 1e-15 of themselves,
and few by more: the share 1 − p of a row that is nearly one-hot has no more digits than p left it,
an integer model rounds q to one of two neighbours. How much is measured, as backward error: q, k,
v, bias, sinks and gate moved by a unit of float64, at random, eight times. What no input moves is
left out, or allowed: see `sample` and `MODIFIED`.
"""

import math
from pathlib import Path
from zlib import crc32

import numpy as np

from npattn.conventions import Conventions
from npattn.testing.bounds.allowed import tolerance
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.recipe import Recipe

FILE = Path(__file__).with_name("golden.npz")
COUNT = 10_000
RESULTS = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks", "dgate")
CLOSE = 1e-13
"""Relative difference by which a number may differ, or `SPREADS` times what its inputs move it."""
SPREADS = 16
MODIFIED = 2 * 2.0**-53 / 2.0**-24
"""Relative difference beside a score_mod: its error is a difference of two of its values, each
rounded to float64, for scores that are apart by the unit of float32 or more."""
ARRAYS = ("q", "k", "v", "bias", "sinks", "gate")

DTYPES = ("float32", "float32", "float16", "bfloat16", "float64", "float8_e4m3fn")
MODEST = (
    *("normal", "normal", "value offset", "flat", "integers", "duplicate keys", "tiny values"),
    *("near-uniform", "zero keys"),
)
STEEP = (
    *("large logits", "one-hot", "low", "outliers", "heavy tails", "subnormal", "key offset"),
    *("mixed scales", "near ties", "nearly one-hot", "saturated"),
)
MASKS = (
    *("matrix", "full", "heads", "padding", "left padding", "empty padding", "empty rows"),
    *("empty head", "first tile", "prefix", "documents", "single key", "one hidden pair"),
)
BIASES = (
    *("matrix", "full", "heads", "keys", "one for all samples", "one a row", "one a head", "alibi"),
    *("relative", "-inf padding", "-1e4 padding", "-inf rows", "one number"),
)
GATES = ("full", "heads", "head mask", "one a row", "matrix", "signed", "one for all samples")
ROUNDINGS = (None, None, "upcast", "fused", "eager", "fp8", "int8")
CONVENTIONS = (
    *({}, {}, {}, {}, {"causal": "top_left"}, {"kv_head": "tile"}, {"empty_row": "mean"}),
    *({"hidden_fill": -1e4}, {"hidden_add": -10.0}, {"softcap": "after_bias"}, {"lse_base": "2"}),
    *({"softcap": "after_mask"}, {"bias": "before_scale"}, {"weights": "after_dropout"}),
)


def sample(number):
    """Return (recipe, conventions, name of a rounding model or None) of a number."""
    rng = np.random.default_rng([57, number])

    def pick(*values):
        return values[rng.integers(len(values))]

    def at_times(*values):
        return pick(*values) if pick(0, 0, 0, 1) else None

    lead = pick(None, (), (1,), (2,), (2,), (2, 1), (2, 3))
    K, H = (1, 1) if lead is None else pick((1, 1), (2, 2), (3, 3), (1, 3), (2, 4))
    dtype = pick(*DTYPES)
    # The cap of a steep score has slope 1 − tanh², of no digits; float64 has none beyond its own,
    # for a share 1 − p or the difference of two values of a score_mod.
    capped, wide = pick(0, 0, 1), dtype == "float64"
    recipe = Recipe(lead=lead, H=H, K=K, T=pick(1, 2, 5, 17), S=pick(1, 3, 7, 33, 70),
                    D=pick(1, 4, 11, 64), E=pick(1, 5, 8), dtype=dtype, seed=number,
                    distribution=pick(*MODEST, *(() if capped or wide else STEEP)),
                    broadcast=pick(False, False, False, True), mask=at_times(*MASKS),
                    causal=pick(False, False, True),
                    window=at_times((3, None), (2, 1), (None, 0), (0, 0)), bias=at_times(*BIASES),
                    scale=at_times(0.3, 1.0, -0.5),
                    softcap=pick(None, 5.0, 50.0) if capped else None,
                    score_mod=None if wide else at_times("squash" if capped else "distance"),
                    sinks=pick(False, False, True), dropout=at_times(0.0, 0.3),
                    gate=at_times(*GATES))  # fmt: skip
    return recipe, Conventions(**pick(*CONVENTIONS)), pick(*ROUNDINGS)


def compute(number, move=lambda x: x):
    """Return `reduce` of the tolerance of each result of a number, of arrays that are moved."""
    recipe, conventions, name = sample(number)
    problem = recipe.problem(conventions.causal, conventions.mask_true)
    dtype, given = problem.q.dtype, recipe.cotangents(problem)
    arrays = {n: x for n in ARRAYS if (x := getattr(problem, n)) is not None}
    rounding = Rounding.choose(name, dtype)
    kwargs = {"dout": given.dout, "dlse": given.dlse, "conventions": conventions}
    with np.errstate(all="ignore"):
        moved = problem.replace(**{n: move(x) for n, x in arrays.items()})
        tolerances = tolerance(moved, dtype, rounding, **kwargs)
    return [reduce(tolerances[n]) if n in tolerances else (0.0, 0) for n in RESULTS]


def reduce(x):
    """Return a number that a change of any element changes, and one of what is not a number > 0.

    The number is the sum of the fourth roots, weighted by random factors of 1 to 2: of roots,
    elements count that are much smaller than others.
    """
    usual = (x > 0) & (x < np.inf)
    factors = np.random.default_rng(x.size).uniform(1, 2, x.shape)
    total = math.fsum((factors * np.where(usual, x, 0.0) ** 0.25).flat)
    kinds = np.where(np.isnan(x), 3, np.where(x == np.inf, 2, usual)).astype(np.uint8)
    return total, 0 if usual.all() else crc32(kinds.tobytes())


def spread(number):
    """Return by how much, relatively, a unit of float64 in the inputs moves any total."""
    rng = np.random.default_rng([58, number])

    def move(x):
        return x.astype(float) * (1 + rng.choice([-1, 1], x.shape) * 2.0**-52)

    totals, kinds = np.moveaxis([compute(number), *(compute(number, move) for _ in range(8))], 2, 0)
    with np.errstate(invalid="ignore"):
        most = np.nan_to_num(abs(totals[1:] / totals[0] - 1)).max()
    if sample(number)[0].score_mod is not None:
        most = max(most, MODIFIED / SPREADS)
    return most if (kinds == kinds[0]).all() else np.inf


def allowed(totals, spreads):
    """Return how far totals may be from those of the file."""
    return totals * np.maximum(CLOSE, SPREADS * spreads[:, None].astype(float))


def write():
    """Write the file."""
    totals, kinds = np.moveaxis([compute(number) for number in range(COUNT)], 2, 0)
    spreads = np.array([spread(number) for number in range(COUNT)])
    spreads = np.where(spreads < CLOSE / SPREADS, 0, np.nextafter(spreads.astype("f4"), np.inf))
    np.savez_compressed(FILE, totals=totals, kinds=kinds.astype("u4"), spreads=spreads)


if __name__ == "__main__":
    write()
