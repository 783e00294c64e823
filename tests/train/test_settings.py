"""Settings are checked when made, and their errors name the ways out."""

import re

import numpy as np
import pytest
from train import Settings

from npattn.errors import OptionError


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"embed_dim": 7}, "embed_dim is 7, must be a multiple of the 4 heads: pass embed_dim 4"),
        ({"tokens": "words"}, 'tokens is \'words\', must be "rows" or "pixels"'),
        ({"epochs": 0}, "epochs is 0, must be an integer ≥ 1"),
        ({"epochs": 2.5}, "epochs is 2.5, must be an integer"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"lr": 0.0}, "lr is 0.0, must be a finite number > 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": "1"}, "lr is '1'"),
        ({"seed": -1}, "seed is -1"),
        ({"warmup": -1}, "warmup is -1"),
        ({"dropout": 1.0}, "dropout is 1.0, must be in [0, 1)"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"dropout": True}, "dropout is True"),
        ({"positions": "rope"}, 'must be "learned" or "none" or "sinusoidal" or "relative"'),
        ({"dtype": "float8"}, "dtype is 'float8'"),
    ],
)
def test_illegal_settings_raise(kwargs, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        Settings(**kwargs)


@pytest.mark.parametrize(
    ("sizes", "ways"),
    [
        ((7, 4), "embed_dim 4 or 8, or num_heads 1 or 7"),
        ((32, 5), "embed_dim 30 or 35, or num_heads 4 or 8"),
        ((2, 3), "embed_dim 3, or num_heads 2"),
    ],
)
def test_heads_that_do_not_divide_name_the_nearest_that_do(sizes, ways):
    """Each way out is one."""
    width, heads = sizes
    with pytest.raises(OptionError, match=f": pass {ways}$"):
        Settings(embed_dim=width, num_heads=heads)
    widths, counts = (re.findall(r"\d+", part) for part in ways.split(", or "))
    for n in map(int, widths):
        assert Settings(embed_dim=n, num_heads=heads).embed_dim == n
    for n in map(int, counts):
        assert Settings(embed_dim=width, num_heads=n).num_heads == n


def test_numbers_of_numpy_are_numbers():
    settings = Settings(lr=np.float32(0.5), dropout=np.float64(0.25), epochs=np.int64(3))
    assert (settings.lr, settings.dropout, settings.epochs) == (0.5, 0.25, 3)
