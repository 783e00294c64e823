"""npattn.torch on a device: how near the exact engine comes to the float64 matrix product, what
others need for the same, and what engine="fused" adds to a direct call of PyTorch.

    python benchmarks/gpu.py                          on the GPU, T = S up to 8192
    python benchmarks/gpu.py --device cpu --small     to see that it runs
    python benchmarks/gpu.py --json gpu.json

Times are medians. A rate counts the products that the equations have: two forward, five backward
(the scores are made again), of 2·H·T·S·D operations each. Memory is the peak during a call beyond
what was there before and what the call returns; it is measured on CUDA alone.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import npattn
import npattn.torch

Tensor = torch.Tensor
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

FORWARD, BACKWARD = 2, 5  # products
GOALS = {"forward": 0.60, "backward": 0.50, "overhead": 0.05}


@dataclass
class Row:
    """One contestant at one size: seconds, operations a second, bytes; None was not measured."""

    name: str
    dtype: str
    T: int
    forward: float
    backward: float
    forward_rate: float
    backward_rate: float
    forward_memory: int | None
    backward_memory: int | None


@dataclass
class Overhead:
    """A direct call and the same through engine="fused": medians of their seconds and ratios."""

    name: str
    dtype: str
    T: int
    direct: float
    fused: float
    ratio: float


class Clock:
    """Seconds and bytes of a call on a device."""

    def __init__(self, device: torch.device, rounds: int, in_a_row: int = 1) -> None:
        self.device, self.rounds, self.in_a_row = device, rounds, in_a_row
        self.on_cuda = device.type == "cuda"

    def once(self, call: Callable[[], Any]) -> float:
        if not self.on_cuda:
            start = time.perf_counter()
            for _ in range(self.in_a_row):
                call()
            return (time.perf_counter() - start) / self.in_a_row
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(self.in_a_row):
            call()
        events[1].record()
        torch.cuda.synchronize(self.device)
        return events[0].elapsed_time(events[1]) / 1000 / self.in_a_row

    def rounds_of(self, *calls: Callable[[], Any]) -> list[list[float]]:
        """Seconds of calls in turn, round by round, so that what disturbs one disturbs all."""
        for call in calls:
            call()
        return [[self.once(call) for call in calls] for _ in range(self.rounds)]

    def seconds(self, *calls: Callable[[], Any]) -> list[float]:
        """The medians of calls in turn."""
        return [median(column) for column in zip(*self.rounds_of(*calls), strict=True)]

    def extra(self, call: Callable[[], Any]) -> int | None:
        """Bytes at the peak beyond what was there and what is returned."""
        if not self.on_cuda:
            return None
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        returned = call()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        tensors = returned if isinstance(returned, tuple) else (returned,)
        return peak - before - sum(x.nbytes for x in tensors)


# --- the contestants ------------------------------------------------------------------------------


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return npattn.torch.attention(q, k, v)


def math_float64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The reference that kernels are usually tested with: the textbook, in float32."""
    s = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    return s.softmax(-1) @ v.float()


CONTESTANTS: dict[str, tuple[Attention, torch.dtype]] = {
    "npattn.torch, exact": (exact, torch.float64),
    "npattn.torch, exact, of float32": (exact, torch.float32),
    "sdpa, math": (math_float64, torch.float64),
    "eager": (eager, torch.float32),
    "eager, of bfloat16": (eager, torch.bfloat16),
}


def operands(
    H: int, T: int, D: int, dtype: torch.dtype, device: torch.device, B: int = 1
) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shape = (B, H, T, D)
    return [
        torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        .to(dtype)
        .requires_grad_()
        for _ in "qkv"
    ]


def product_rate(clock: Clock, n: int) -> float:
    """Operations a second of the float64 product of two n × n matrices."""
    a, b = (torch.randn(n, n, dtype=torch.float64, device=clock.device) for _ in "ab")
    (seconds,) = clock.seconds(lambda: a @ b)
    return 2 * n**3 / seconds


def measured(clock: Clock, name: str, H: int, T: int, D: int) -> Row | None:
    """A contestant forward and backward; None where memory does not suffice."""
    attend, dtype = CONTESTANTS[name]
    try:
        q, k, v = operands(H, T, D, dtype, clock.device)
        out = attend(q, k, v)
        dout = torch.randn_like(out)

        def forward() -> Tensor:
            return attend(q, k, v)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        seconds = clock.seconds(forward, backward)
        with torch.no_grad():
            memory = [clock.extra(forward)]
        memory.append(clock.extra(backward))
    except torch.OutOfMemoryError:
        return None
    operations = 2 * H * T * T * D
    rates = [n * operations / s for n, s in zip((FORWARD, BACKWARD), seconds, strict=True)]
    return Row(name, str(dtype).removeprefix("torch."), T, *seconds, *rates, *memory)


# --- what engine="fused" adds ---------------------------------------------------------------------


def with_gradients(attend: Attention, given: list[Tensor], dout: Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(attend(*given), given, dout)


def overheads(clock: Clock, H: int, T: int, D: int, dtype: torch.dtype) -> list[Overhead]:
    given, word = operands(H, T, D, dtype, clock.device), str(dtype).removeprefix("torch.")
    dout = torch.randn_like(given[0])
    mask = torch.rand(1, 1, T, T, device=clock.device) > 0.5
    pairs: dict[str, tuple[Attention, Attention]] = {
        "plain": (lambda q, k, v: sdpa(q, k, v), fused()),
        "causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True), fused(causal=True)),
        "mask, same kernels": (masked(mask), fused(mask=mask)),
    }
    if clock.on_cuda and T % 128 == 0:
        pairs["window, FlexAttention"] = (windowed(T, 256, clock.device), fused(window=(256, 0)))
    found = []
    for name, (direct, through) in pairs.items():
        calls = [lambda f=f: f(*given) for f in (direct, through)]
        calls += [with_gradients(f, given, dout) for f in (direct, through)]
        with torch.no_grad():
            forward = clock.rounds_of(*calls[:2])
        both = clock.rounds_of(*calls[2:])
        for kind, rounds in (("forward", forward), ("with gradients", both)):
            a, b = (median(column) for column in zip(*rounds, strict=True))
            ratio = median(through / direct for direct, through in rounds)
            found.append(Overhead(f"{name}, {kind}", word, T, a, b, ratio))
    return found


def fused(**options: Any) -> Attention:
    return lambda q, k, v: npattn.torch.attention(q, k, v, engine="fused", **options)


def masked(mask: Tensor) -> Attention:
    """Without cuDNN, which PyTorch may prefer, and engine="fused" does not ask with a mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.device.type == "cpu":
            return sdpa(q, k, v, mask)
        with sdpa_kernel(npattn.torch.kernels.WITH_MASK):
            return sdpa(q, k, v, mask)

    return attend


def windowed(T: int, left: int, device: torch.device) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def inside(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s <= t) & (t - s <= left)

    blocks = create_block_mask(inside, None, None, T, T, device=str(device))
    torch._dynamo.reset()  # what is compiled for a ninth time is not, without a word
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


# --- the report -----------------------------------------------------------------------------------


def described(device: torch.device) -> dict[str, str]:
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu()
    return {
        "device": card,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "npattn": npattn.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in names if line.startswith("model name")]
    return models[0] if models else platform.processor() or "CPU"


def bytes_of(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**20:.1f}"


def print_rows(rows: list[Row], ceiling: float) -> None:
    print(f"\n{'':33} {'dtype':8} {'T':>5}", end="")
    print("   forward ms   Tflop/s  of product   extra MiB", end="")
    print("   backward ms   Tflop/s  of product   extra MiB")
    for row in rows:
        print(f"{row.name:33} {row.dtype:8} {row.T:5}", end="")
        for seconds, rate, memory in (
            (row.forward, row.forward_rate, row.forward_memory),
            (row.backward, row.backward_rate, row.backward_memory),
        ):
            print(f"   {seconds * 1e3:10.3f} {rate / 1e12:9.3f} {rate / ceiling:10.1%}", end="")
            print(f"  {bytes_of(memory):>10}", end="")
        print()


def print_overheads(found: list[Overhead]) -> None:
    print(
        f"\n{'engine=fused beside a direct call':38} {'dtype':8} {'T':>5}   direct ms    fused ms"
    )
    for x in found:
        print(f"{x.name:38} {x.dtype:8} {x.T:5}", end="")
        print(f"  {x.direct * 1e3:10.3f}  {x.fused * 1e3:10.3f}  {x.ratio - 1:+7.1%}")


def goals(rows: list[Row], found: list[Overhead], ceiling: float) -> list[tuple[str, bool | None]]:
    """What is aimed at, at the largest size, and whether it is reached; None was not measured."""
    own = [row for row in rows if row.name == "npattn.torch, exact"]
    lines: list[tuple[str, bool | None]] = []
    last = own[-1]
    for kind, rate in (("forward", last.forward_rate), ("backward", last.backward_rate)):
        goal, share = GOALS[kind], rate / ceiling
        lines.append((f"exact {kind} at T = S = {last.T}: {share:.1%} of the float64 product, "
                      f"goal {goal:.0%}", share >= goal))  # fmt: skip
    for kind in ("forward", "backward"):
        lines.append(memory_goal(kind, own))
    largest = max(x.T for x in found)
    worst = max((x for x in found if largest == x.T), key=lambda x: x.ratio)
    added = worst.ratio - 1
    lines.append((f"fused beside a direct call at T = S = {largest}: {added:+.1%} at most "
                  f"({worst.name}, {worst.dtype}), goal {GOALS['overhead']:+.0%}",
                  added <= GOALS["overhead"]))  # fmt: skip
    return lines


def memory_goal(kind: str, own: list[Row]) -> tuple[str, bool | None]:
    """Twice the length must not need more than twice the memory: T × S would need four times."""
    memory = {row.T: getattr(row, f"{kind}_memory") for row in own}
    T = own[-1].T
    large, small = memory[T], memory.get(T // 2)
    if large is None or small is None:
        return f"exact {kind}, extra memory: not measured", None
    growth = large / max(small, 1)
    return (
        f"exact {kind}, extra memory from T = {T // 2} to {T}: "
        f"{bytes_of(small)} to {bytes_of(large)} MiB, goal at most twice",
        growth <= 2,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU does in seconds")
    parser.add_argument("--lengths", type=int, nargs="+", help="T = S, each twice the last")
    parser.add_argument("--rounds", type=int, default=None, help="calls, of which the median is")
    parser.add_argument("--json", type=Path, help="write all figures there too")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events are recorded where the current device is
    H, D = (4, 32) if chosen.small else (16, 128)
    lengths = chosen.lengths or ((64, 128, 256) if chosen.small else (1024, 2048, 4096, 8192))
    clock = Clock(device, chosen.rounds or (9 if chosen.small else 11))

    about = described(device)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    squares = (256, 512) if chosen.small else (4096, 8192)
    products = {f"{n} × {n}": product_rate(clock, n) for n in squares}
    print(f"H = {H}, D = E = {D}, B = 1")
    rows = []
    for T in lengths:
        for name in CONTESTANTS:
            row = measured(clock, name, H, T, D)
            if row is None:
                print(f"{name} at T = {T}: out of memory")
            else:
                rows.append(row)
    # Once more: what is warm is slower.
    products |= {f"{n} × {n}, after all that": product_rate(clock, n) for n in squares}
    ceiling = max(products.values())
    for name, rate in products.items():
        print(f"float64 product of {name}: {rate / 1e12:.3f} Tflop/s")
    print_rows(rows, ceiling)
    narrow = (torch.float32, torch.bfloat16)
    # Calls in a row, as training makes them: the next is prepared while the GPU is busy.
    clock.in_a_row = 16
    found = [x for T in lengths[-2:] for dtype in narrow for x in overheads(clock, H, T, D, dtype)]
    print_overheads(found)
    aims = goals(rows, found, ceiling)
    print()
    for line, reached in aims:
        print(
            f"{ {True: 'reached    ', False: 'NOT reached', None: '–          '}[reached] } {line}"
        )
    if chosen.json:
        figures = {
            "about": about,
            "product": products,
            "rows": [asdict(row) for row in rows],
            "overheads": [asdict(x) for x in found],
            "goals": [{"goal": line, "reached": reached} for line, reached in aims],
        }
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
