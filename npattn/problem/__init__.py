"""What a call is: its arrays, options, sizes and their checks, in one `Problem`."""

from npattn.problem.problem import Cotangents, Forward, Gradients, Problem

__all__ = ["Cotangents", "Forward", "Gradients", "Problem"]


def __dir__() -> list[str]:
    return __all__
