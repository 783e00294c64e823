"""Small problems with a different prime for each size."""

import numpy as np

from npattn.testing import Recipe

B, H, K, T, S, D, E = 2, 6, 3, 5, 7, 11, 13
SIZES = {"lead": (B,), "H": H, "K": K, "T": T, "S": S, "D": D, "E": E}


def problem(**options):
    return Recipe(**(SIZES | options)).problem()


def zeros_for(q, v):
    """Return zeros of the shape and dtype of o."""
    return np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
