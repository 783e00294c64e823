"""The likely case: the standard deviation of each result, if roundings are as good as random."""

from npattn.testing.bounds.variance.forward import (
    DEVIATIONS,
    DISTINCT,
    FEW,
    R2,
    Noise,
    Variety,
    along,
    rises,
    rounded,
    tops,
)

__all__ = [
    "DEVIATIONS",
    "DISTINCT",
    "FEW",
    "R2",
    "Noise",
    "Variety",
    "along",
    "rises",
    "rounded",
    "tops",
]
