"""A call of attention as one `Problem`: its arrays, options and sizes, and their checks."""

from npattn.problem.problem import Cotangents, Forward, Gradients, Problem

__all__ = ["Cotangents", "Forward", "Gradients", "Problem"]
__dir__ = __all__.copy
