"""Speed of npattn.torch on a device, beside the float64 matrix product and other systems.

Also the overhead of engine="fused" over a direct call of PyTorch.

    python -m benchmarks.speed.scripts.gpu                          on the GPU, T = S up to 8192
    python -m benchmarks.speed.scripts.gpu --device cpu --small     to see that it runs
    python -m benchmarks.speed.scripts.gpu --json gpu.json

Times are medians. A rate counts the products of the equations: two forward, five backward (the
scores are computed again), of 2·H·T·S·D operations each. Memory is the peak during a call beyond
the memory before and the results; it is measured on CUDA alone.
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
import npattn.torch.kernels
from benchmarks.speed import machine

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


def measure(clock: Clock, name: str, H: int, T: int, D: int) -> Row | None:
    """Measure a contestant forward and backward; None if memory does not suffice."""
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


# --- overhead of engine="fused" -------------------------------------------------------------------


def with_gradients(attend: Attention, inputs: list[Tensor], dout: Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(attend(*inputs), inputs, dout)


def overheads(clock: Clock, H: int, T: int, D: int, dtype: torch.dtype) -> list[Overhead]:
    inputs, dtype_name = operands(H, T, D, dtype, clock.device), str(dtype).removeprefix("torch.")
    dout = torch.randn_like(inputs[0])
    mask = torch.rand(1, 1, T, T, device=clock.device) > 0.5
    pairs: dict[str, tuple[Attention, Attention]] = {
        "plain": (lambda q, k, v: sdpa(q, k, v), fused_attention()),
        "causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True), fused_attention(causal=True)),
        "mask, same kernels": (sdpa_with_mask(mask), fused_attention(mask=mask)),
    }
    if clock.on_cuda and T % 128 == 0:
        pairs["window, FlexAttention"] = (
            flex_window(T, 256, clock.device),
            fused_attention(window=(256, 0)),
        )
    results = []
    for name, (direct, through) in pairs.items():
        calls = [lambda f=f: f(*inputs) for f in (direct, through)]
        calls += [with_gradients(f, inputs, dout) for f in (direct, through)]
        with torch.no_grad():
            forward = clock.rounds_of(*calls[:2])
        both = clock.rounds_of(*calls[2:])
        for kind, rounds in (("forward", forward), ("with gradients", both)):
            a, b = (median(column) for column in zip(*rounds, strict=True))
            ratio = median(through / direct for direct, through in rounds)
            results.append(Overhead(f"{name}, {kind}", dtype_name, T, a, b, ratio))
    return results


def fused_attention(**options: Any) -> Attention:
    return lambda q, k, v: npattn.torch.attention(q, k, v, engine="fused", **options)


def sdpa_with_mask(mask: Tensor) -> Attention:
    """Call PyTorch without cuDNN, which engine="fused" does not use with a mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.device.type == "cpu":
            return sdpa(q, k, v, mask)
        with sdpa_kernel(npattn.torch.kernels.WITH_MASK):
            return sdpa(q, k, v, mask)

    return attend


def flex_window(T: int, left: int, device: torch.device) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def inside(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s <= t) & (t - s <= left)

    blocks = create_block_mask(inside, None, None, T, T, device=str(device))
    torch._dynamo.reset()  # after eight compilations it silently stops compiling
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


# --- the report -----------------------------------------------------------------------------------


def describe(device: torch.device) -> dict[str, str]:
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else machine.cpu()
    return {
        "device": card,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "npattn": npattn.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }


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


def print_overheads(measured: list[Overhead]) -> None:
    print(
        f"\n{'engine=fused beside a direct call':38} {'dtype':8} {'T':>5}   direct ms    fused ms"
    )
    for x in measured:
        print(f"{x.name:38} {x.dtype:8} {x.T:5}", end="")
        print(f"  {x.direct * 1e3:10.3f}  {x.fused * 1e3:10.3f}  {x.ratio - 1:+7.1%}")


def goals(
    rows: list[Row], measured: list[Overhead], ceiling: float
) -> list[tuple[str, bool | None]]:
    """List the goals at the largest size; True if reached, None if not measured."""
    own = [row for row in rows if row.name == "npattn.torch, exact"]
    lines: list[tuple[str, bool | None]] = []
    last = own[-1]
    for kind, rate in (("forward", last.forward_rate), ("backward", last.backward_rate)):
        goal, share = GOALS[kind], rate / ceiling
        lines.append((f"exact {kind} at T = S = {last.T}: {share:.1%} of the float64 product, "
                      f"goal {goal:.0%}", share >= goal))  # fmt: skip
    for kind in ("forward", "backward"):
        lines.append(memory_goal(kind, own))
    largest = max(x.T for x in measured)
    worst = max((x for x in measured if largest == x.T), key=lambda x: x.ratio)
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
    parser.add_argument("--rounds", type=int, default=None, help="calls per median")
    parser.add_argument("--json", type=Path, help="write all figures there too")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # events are recorded where the current device is
    H, D = (4, 32) if args.small else (16, 128)
    lengths = args.lengths or ((64, 128, 256) if args.small else (1024, 2048, 4096, 8192))
    clock = Clock(device, args.rounds or (9 if args.small else 11))

    about = describe(device)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    squares = (256, 512) if args.small else (4096, 8192)
    products = {f"{n} × {n}": product_rate(clock, n) for n in squares}
    print(f"H = {H}, D = E = {D}, B = 1")
    rows = []
    for T in lengths:
        for name in CONTESTANTS:
            row = measure(clock, name, H, T, D)
            if row is None:
                print(f"{name} at T = {T}: out of memory")
            else:
                rows.append(row)
    # Once more, as a warm device is slower.
    products |= {f"{n} × {n}, after all that": product_rate(clock, n) for n in squares}
    ceiling = max(products.values())
    for name, rate in products.items():
        print(f"float64 product of {name}: {rate / 1e12:.3f} Tflop/s")
    print_rows(rows, ceiling)
    narrow = (torch.float32, torch.bfloat16)
    # Calls in a row, as training makes them: the next is prepared while the GPU is busy.
    clock.in_a_row = 16
    added = [x for T in lengths[-2:] for dtype in narrow for x in overheads(clock, H, T, D, dtype)]
    print_overheads(added)
    aims = goals(rows, added, ceiling)
    print()
    for line, reached in aims:
        print(
            f"{ {True: 'reached    ', False: 'NOT reached', None: '–          '}[reached] } {line}"
        )
    if args.json:
        figures = {
            "about": about,
            "product": products,
            "rows": [asdict(row) for row in rows],
            "overheads": [asdict(x) for x in added],
            "goals": [{"goal": line, "reached": reached} for line, reached in aims],
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
