"""What one small call of npattn.torch costs beside the bare arithmetic in torch, on (2, 4, 16, 16).

    python benchmarks/torch_small.py

Prints for each the time of the middle call of 2000 and that of the fastest, in µs, measured in
turns in one run on one thread, and the difference to the bare arithmetic in the same dtype.
"""

import statistics
import time
from collections.abc import Callable

import torch

import npattn.torch


def bare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


def timed(calls: dict[str, Callable[[], object]]) -> None:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(2000):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e6 * (time.perf_counter() - start))
    first = next(iter(times.values()))
    for name, one in times.items():
        middle, least = statistics.median(one), min(one)
        more = (middle - statistics.median(first), least - min(first))
        print(f"  {name:32s} {middle:6.0f} {least:6.0f}   + {more[0]:5.0f} {more[1]:5.0f}")


def small(dtype: torch.dtype) -> None:
    attention = npattn.torch.attention
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 16, 16, dtype=dtype) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    do = torch.randn(2, 4, 16, 16, dtype=dtype)
    wide = do.double()
    print(f"{dtype}: µs of the middle and of the fastest call, and beyond the bare arithmetic")
    timed({
        "bare": lambda: bare(q, k, v),
        "npattn": lambda: attention(q, k, v),
        "npattn, computed in this dtype": lambda: attention(q, k, v, dtype=dtype),
        "npattn, causal": lambda: attention(q, k, v, causal=True),
    })  # fmt: skip
    timed({
        "bare, backward too": lambda: bare(*leaves).backward(do),
        "npattn, backward too": lambda: attention(*leaves).backward(wide),
    })  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float64, torch.float32):
        small(dtype)


if __name__ == "__main__":
    main()
