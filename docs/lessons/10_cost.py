"""
10. What attention costs
========================

Attention with T queries and T keys computes T² scores. This lesson measures what that means, in
seconds and in bytes, for the textbook and for an engine that never holds all scores at once. The
times are those of the machine that built this page.
"""

import time
import tracemalloc

import matplotlib.pyplot as plt
import numpy as np

import npattn

D = 64
sizes = np.array([128, 256, 512, 1024, 2048])
rng = np.random.default_rng(0)


def textbook(q, k, v):
    s = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5  # (T, T)
    e = np.exp(s - s.max(axis=-1, keepdims=True))  # (T, T)
    return e / e.sum(axis=-1, keepdims=True) @ v


def tiled(q, k, v):
    return npattn.attention(q, k, v, engine="tiled", dtype=np.float32)


def measure(f, T):
    """Return the least of three times in seconds, after one that does not count, and memory."""
    q, k, v = rng.standard_normal((3, T, D)).astype(np.float32)
    f(q, k, v)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        f(q, k, v)
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    f(q, k, v)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return min(seconds), peak


# %%
# Count first
# -----------
# Each of the two products, q kᵀ and weights v, takes T·T·D multiplications and as many additions,
# together 4 T² D operations (a Gflop is 10⁹ of them). An array of T×T numbers of 4 bytes takes 4 T²
# bytes. Twice the length is four times the work and four times the memory.

for T in sizes:
    print(f"T = {T:4}: {4 * T**2 * D / 1e9:.3f} Gflop, scores {4 * T**2 / 2**20:6.2f} MiB")

# %%
# Then measure
# ------------

results = {f: np.array([measure(f, T) for T in sizes.tolist()]) for f in (textbook, tiled)}
for f, (seconds, peak) in ((f, table.T) for f, table in results.items()):
    for T, x, y in zip(sizes, seconds, peak, strict=True):
        print(f"{f.__name__:8} T = {T:4}: {1000 * x:7.2f} ms, {y / 2**20:6.2f} MiB")

figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
for column, (ax, unit, name) in enumerate(
    zip(axes, (1e-3, 2**20), ("time (ms)", "memory (MiB)"), strict=True)
):
    for f, table in results.items():
        ax.loglog(sizes, table[:, column] / unit, "o-", label=f.__name__, base=2)
    last = results[textbook][-1, column] / unit
    ax.loglog(sizes, last * (sizes / sizes[-1]) ** 2, ":", color="0.5", label="T²", base=2)
    ax.set(xlabel="T", ylabel=name)
    ax.legend()

# %%
# Memory follows the count: the textbook holds more than one array of T×T numbers at a time, and a
# doubling of T takes four times the memory. The tiled engine goes over the keys in pieces. It holds
# one tile of scores, and for each row the largest score, the sum and the output so far; when a
# larger score turns up, it scales both down.

peaks = {f: table[:, 1] for f, table in results.items()}
assert peaks[textbook][-1] > 2 * 4 * sizes[-1] ** 2
assert 3.5 < peaks[textbook][-1] / peaks[textbook][-2] < 4.5
assert peaks[tiled][-1] < peaks[textbook][-1] / 4

# %%
# Time follows less exactly: it also depends on caches, threads, and on what else the machine does.
# Tiles save memory, not operations: both compute all T² scores. (They may save
# time as well, since a tile fits into the cache.) This is why a long context stays expensive, and
# why lesson 9 leaves pairs out.
#
# Both give the same answer:

q, k, v = rng.standard_normal((3, 512, D)).astype(np.float32)
print(f"largest difference {abs(textbook(q, k, v) - tiled(q, k, v)).max():.0e}")
assert np.allclose(textbook(q, k, v), tiled(q, k, v), atol=1e-5)

# %%
# What you learned
# ----------------
# - Operations and scores grow with T²; tiles save the memory, and not the operations.
# - Memory follows the count, time only roughly.
#
# .. admonition:: Exercise
#
#    From which T on do the float32 scores of 32 heads fill 16 GiB?
#
# .. dropdown:: Solution
#
#    .. code-block:: python
#
#       longest = int((16 * 2**30 / (4 * 32)) ** 0.5)
#       assert longest == 11585
