"""Cost of one small call of npattn.torch beside the same arithmetic written in torch by hand.

    python -m benchmarks.speed.scripts.torch_small

(2, 4, 16, 16) on one thread of the CPU. By hand is the least code for the same result: the same
compute dtype and mask, without checks, lse and gradients. Each pair runs a hundred rounds in turns,
of fifty calls each. The table has the µs of a call in the fastest and in the median round, and the
difference of the two.
"""

import statistics
import timeit
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

import npattn.torch

Tensor = torch.Tensor
Call = Callable[[], object]


def by_hand(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    s = q @ k.mT * 0.25
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
        s = s.masked_fill(hidden, -torch.inf)
    return torch.softmax(s, -1) @ v


def pairs() -> dict[str, tuple[Call, Call]]:
    """Pairs of calls with the same arithmetic, by hand and by npattn."""
    attention = npattn.torch.attention
    torch.manual_seed(0)
    wide = [torch.randn(2, 4, 16, 16, dtype=torch.float64) for _ in range(3)]
    narrow = [x.float() for x in wide]
    leaves = [x.clone().requires_grad_() for x in wide]
    do = torch.randn(2, 4, 16, 16, dtype=torch.float64)
    return {
        "float64": (lambda: by_hand(*wide), lambda: attention(*wide)),
        "float64, causal": (
            lambda: by_hand(*wide, causal=True),
            lambda: attention(*wide, causal=True),
        ),
        "float32": (lambda: by_hand(*narrow), lambda: attention(*narrow, dtype=torch.float32)),
        "float32, causal": (
            lambda: by_hand(*narrow, causal=True),
            lambda: attention(*narrow, dtype=torch.float32, causal=True),
        ),
        "float32, computed in float64": (
            lambda: by_hand(*(x.double() for x in narrow)),
            lambda: attention(*narrow),
        ),
        "float64, followed by autograd": (lambda: by_hand(*leaves), lambda: attention(*leaves)),
        "float64, forward and backward": (
            lambda: by_hand(*leaves).backward(do),
            lambda: attention(*leaves).backward(do),
        ),
    }


def time_pair(pair: tuple[Call, Call]) -> list[list[float]]:
    """Measure µs of a call, of each of the pair in each round."""
    times: list[list[float]] = [[], []]
    for _ in range(100):
        for call, rounds in zip(pair, times, strict=True):
            rounds.append(1e6 / 50 * timeit.timeit(call, number=50))
    return times


def main() -> None:
    torch.set_num_threads(1)
    table = Table("µs, fastest | middle", "by hand", "npattn", "more")
    for name, pair in pairs().items():
        rounds = time_pair(pair)
        fastest, middle = ([of(x) for x in rounds] for of in (min, statistics.median))
        table.add_row(
            name,
            *(f"{a:.0f} | {b:.0f}" for a, b in zip(fastest, middle, strict=True)),
            f"{fastest[1] - fastest[0]:.0f} | {middle[1] - middle[0]:.0f}",
        )
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
