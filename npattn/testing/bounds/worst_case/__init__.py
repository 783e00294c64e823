"""The worst case: how far the steps of a rounding model can take each result from the exact one."""

from npattn.testing.bounds.worst_case.forward import (
    VAST,
    DeltaSums,
    GradientSums,
    Hard,
    OutSums,
    Shares,
    finite,
    swing,
)

__all__ = ["VAST", "DeltaSums", "GradientSums", "Hard", "OutSums", "Shares", "finite", "swing"]
