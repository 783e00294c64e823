"""The likely case: the standard deviation of each result, if roundings are as good as random.

Every rounding of a number x is taken for independent, with mean 0 and variance R2 u² x². A sum of n
terms meets n of them at its partial sums, which grow towards the total S as (k/n) S plus a bridge:
R2 u² (n/3 S² + n/2 Σ x²) whatever the order. Variances are pushed through the formulas of the worst
case with squares for absolute values. docs/tolerance.md §6 derives every line.

Independence is false where the same error repeats: equal keys, equal rows, weights that all round
alike. There the limit is inf, and only the worst case counts (generic.py).
"""

from npattn.testing.bounds.variance.backward import DeltaVarianceSums, DqVarianceSums, Variance
from npattn.testing.bounds.variance.forward import OutVarianceSums, storage_variance
from npattn.testing.bounds.variance.generic import (
    DEVIATIONS,
    DISTINCT,
    FEW,
    R2,
    Variety,
    count_rises,
    tile_maxima,
)

__all__ = [
    "DEVIATIONS",
    "DISTINCT",
    "FEW",
    "R2",
    "DeltaVarianceSums",
    "DqVarianceSums",
    "OutVarianceSums",
    "Variance",
    "Variety",
    "count_rises",
    "storage_variance",
    "tile_maxima",
]
