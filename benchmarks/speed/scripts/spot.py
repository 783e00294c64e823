"""Cost of `spot_check` on long sequences: seconds, and memory in a process of its own.

    python -m benchmarks.speed.scripts.spot [KEYS ...]

k and v are files that are mapped into memory; q, out and lse are too, but only the sampled rows are
filled. Peak memory is that of the process; pages of the files, which the system can drop at any
time, are part of it and are shown apart.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from npattn.testing import spot_check
from npattn.testing.spot import sample_indices

H, D, SAMPLES, STEP = 8, 64, 64, 2**14
GIB = 2**30


def map_file(folder: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.memmap(folder / name, np.float32, "w+", shape=shape)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, float]:
    """Compute one row in float32, a tile of keys at a time."""
    q = q * np.float32(D**-0.5)
    m, total, o = np.float32(-np.inf), np.float32(0), np.zeros(D, np.float32)
    for s in range(0, len(k), STEP):
        scores = k[s : s + STEP] @ q
        top = max(m, scores.max())
        e = np.exp(scores - top)
        total = total * np.exp(m - top) + e.sum(dtype=np.float32)
        o = o * np.exp(m - top) + e @ v[s : s + STEP]
        m = top
    return o / total, float(m + np.log(total))


def write_arrays(folder: Path, S: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    q, k, v, out = (map_file(folder, name, (H, S, D)) for name in ("q", "k", "v", "out"))
    lse = map_file(folder, "lse", (H, S))
    for x in (k, v):
        for h in range(H):
            x[h] = rng.standard_normal((S, D), dtype=np.float32)
    rows, _ = sample_indices(np.random.default_rng(0), (H, S), SAMPLES)
    for h, t in rows:
        q[h, t] = rng.standard_normal(D, dtype=np.float32)
        out[h, t], lse[h, t] = attend(q[h, t], k[h], v[h])
    return {"out": out, "lse": lse, "q": q, "k": k, "v": v}


def child(folder: Path, S: int) -> None:
    arrays = {
        name: np.memmap(
            folder / name, np.float32, "r", shape=(H, S) if name == "lse" else (H, S, D)
        )
        for name in ("out", "lse", "q", "k", "v")
    }
    start, used = time.perf_counter(), time.process_time()
    result = spot_check(**arrays, samples=SAMPLES)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    status = Path("/proc/self/status").read_text()
    files = int(status.split("RssFile:")[1].split()[0]) * 1024 / GIB
    print(
        f"S {S:8d}: {seconds:6.1f} s ({used:.1f} s of one processor), peak {peak:.2f} GiB, without "
        f"pages of the files {peak - files:.2f} GiB\n{result}"
    )


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), int(sys.argv[3]))
        return
    for S in [int(n) for n in sys.argv[1:]] or [2**16, 2**18, 2**20]:
        with tempfile.TemporaryDirectory() as name:
            write_arrays(Path(name), S)
            command = [sys.executable, __file__, "--child", name, str(S)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
