"""Handwritten digits as tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from npattn.errors import MissingExtraError
from npattn.problem.arrays import Array

TEST_SHARE = 5  # one image in five is for the test


class Data(NamedTuple):
    """Images as tokens, and their digits."""

    x: Array  # (N, T, n) between 0 and 1
    y: Array  # (N,)
    test_x: Array
    test_y: Array

    @property
    def classes(self) -> int:
        """Number of digits."""
        return int(max(self.y.max(), self.test_y.max())) + 1


def digits(tokens: str = "rows") -> Data:
    """Load scikit-learn's 1797 handwritten digits of 8×8 pixels, a fifth of them for the test."""
    try:
        # Optional, slow to load, and without types.
        from sklearn.datasets import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
            load_digits,
        )
    except ImportError as err:
        raise MissingExtraError(
            "docs/examples/train needs scikit-learn for its images: pip install 'npattn[train]'"
        ) from err
    dataset = load_digits()
    images = dataset.images / 16.0
    x = images if tokens == "rows" else images.reshape(len(images), 64, 1)
    order = np.random.default_rng(0).permutation(len(x))  # the same split for every seed
    test, rest = np.split(order, [len(x) // TEST_SHARE])
    return Data(x[rest], dataset.target[rest], x[test], dataset.target[test])
