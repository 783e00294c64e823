"""Few images, and a model that is trained on them in a moment."""

import numpy as np
import pytest
from train import Data, Settings


@pytest.fixture(scope="session")
def few():
    """31 images of 5 rows and 3 columns, in 4 classes; 10 for the test."""
    rng = np.random.default_rng(0)
    y = rng.integers(4, size=41)
    x = rng.standard_normal((41, 5, 3)) + np.eye(4, 15)[y].reshape(41, 5, 3)
    return Data(x[:31], y[:31], x[31:], y[31:])


@pytest.fixture
def small():
    """Settings of three heads and three epochs of five steps."""
    return Settings(embed_dim=6, num_heads=3, epochs=3, batch_size=7)
