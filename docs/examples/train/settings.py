"""Settings of a training run, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn.errors import OptionError
from npattn.problem.checks import check_integer
from train.precision import PRECISIONS, Precision

TOKENS = ("rows", "pixels")
POSITIONS = ("learned", "none", "sinusoidal", "relative")


@dataclass(frozen=True)
class Settings:
    """Settings of a run, checked when made.

    Parameters
    ----------
    tokens : {"rows", "pixels"}
        Parts of the image that are tokens.
    embed_dim, num_heads : int
        embed_dim is a multiple of num_heads; one head makes a single-head model.
    epochs, batch_size : int
    lr : float
        Adam's step, which falls to 0 along half a cosine.
    seed : int
    warmup : int, default 0
        Steps in which Adam's step rises from lr / warmup to lr, before it falls.
    dropout : float, default 0.0
        In [0, 1): share of the attention weights that training drops, by masks from the seed.
    positions : {"learned", "none", "sinusoidal", "relative"}
        Vectors added to the tokens, learned or of `npattn.positions.sinusoidal`; or a learned
        bias of the scores, `npattn.biases.relative`.
    dtype : {"float64", "float32", "bfloat16", "float16"}
        The last two are mixed precision: operands and results of products are rounded, parameters
        and sums are float32, and the loss is scaled where float16 would lose small gradients.

    Raises
    ------
    OptionError
        If a setting has an illegal value, or embed_dim is no multiple of num_heads.
    """

    tokens: str = "rows"
    embed_dim: int = 32
    num_heads: int = 4
    epochs: int = 40
    batch_size: int = 64
    lr: float = 4e-3
    seed: int = 0
    warmup: int = 0
    dropout: float = 0.0
    positions: str = "learned"
    dtype: str = "float64"

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            check_integer(name, getattr(self, name), least)
        for name, legal in LEGAL.items():
            if getattr(self, name) not in legal:
                values = " or ".join(f'"{value}"' for value in legal)
                raise OptionError(f"{name} is {getattr(self, name)!r}, must be {values}")
        if self.embed_dim % self.num_heads:
            raise OptionError(_explain_heads(self.embed_dim, self.num_heads))
        if not _is_number(self.lr) or not 0 < self.lr < np.inf:
            raise OptionError(f"lr is {self.lr!r}, must be a finite number > 0")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise OptionError(
                f"dropout is {self.dropout!r}, must be in [0, 1): 0.1 drops a tenth of the weights"
            )

    @property
    def precision(self) -> Precision:
        """Dtypes to compute and to store in."""
        return PRECISIONS[self.dtype]


LEAST = {"embed_dim": 1, "num_heads": 1, "epochs": 1, "batch_size": 1, "seed": 0, "warmup": 0}
LEGAL = {"tokens": TOKENS, "positions": POSITIONS, "dtype": tuple(PRECISIONS)}


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def _explain_heads(embed_dim: int, num_heads: int) -> str:
    """Return the message for heads that do not divide the width, with the nearest that do."""
    below = embed_dim - embed_dim % num_heads
    widths = [n for n in (below, below + num_heads) if n]
    divisors = [n for n in range(1, embed_dim + 1) if embed_dim % n == 0]
    counts = [max(n for n in divisors if n < num_heads)]
    counts += [n for n in divisors if n > num_heads][:1]
    return (
        f"embed_dim is {embed_dim}, must be a multiple of the {num_heads} heads: "
        f"pass embed_dim {' or '.join(map(str, widths))}, "
        f"or num_heads {' or '.join(map(str, counts))}"
    )
