"""Mistakes that an earlier prototype of the bounds found: hard, sharp, aggregate.

Six columns: bfloat16, float16, float32 on normal inputs, then on inputs with outlier channels. Y
found, n not found. It emulated another kernel, with other outliers.
"""

from __future__ import annotations

DISCRETE = {
    "tail key missing, n=4096": "YYY YYY YYY nYY YYY YYY",
    "tail key missing, one row, n=4096": "nYY YYY YYY nnn nnn nnn",
    "tail key missing, n=256": "YYY YYY YYY YYY YYY YYY",
    "first key missing, n=4096": "nYY YYY YYY YYY YYY YYY",
    "one zero pad key attended, n=4096": "nnn nnY nYY nnn nnn nYY",
    "one zero pad key attended, n=256": "nnY YYY YYY nnY YYY YYY",
    "causal off by one (all rows)": "YYY YYY YYY YYY YYY YYY",
    "causal off by one (row 63 only)": "YYY YYY YYY YYY YYY YYY",
    "window 64 -> 63": "YYY YYY YYY YYY YYY YYY",
    "dropout p=.1: rescale missing": "YYY YYY YYY YYY YYY YYY",
    "dropout p=.001: rescale missing": "nnY YYY YYY nnY YYY YYY",
    "GQA: wrong KV head, one query head": "YYY YYY YYY YYY YYY YYY",
    "GQA: tile instead of repeat": "YYY YYY YYY YYY YYY YYY",
    "acc in low dtype per block of 64": "nYY nYY nnn YYY YYY nnn",
    "acc in low dtype per 16 keys": "YYY YYY nnn YYY YYY nnn",
    "acc in low dtype per 16 keys, n=4096": "nYY nYY nnn YYY YYY nnn",
    "QK accumulated in low dtype per 16": "YYY YYY nnn YYY YYY nnn",
    "scores stored in low dtype": "nYY nYY nnn YYY YYY nnn",
    "q*scale rounded to low dtype": "nnn nnn nnn YYn YYn nnn",
    "row sum l in low dtype": "nnn nYY nnn YYn YYY nnn",
    "row sum l in low dtype, n=4096": "nYY nYY nnn YYY YYY nnn",
    "l from rounded P": "nnn nnn nnn nnn nnn nnn",
    "exp result rounded to low dtype": "nnn nnn nnn nnn nnn nnn",
    "P truncated instead of rounded": "nnY nnY nnn YYY nnY nnn",
    "O truncated instead of rounded": "nnY nnY nnn nnY YYY nnn",
    "rescale of l skipped in block 1": "YYY YYY YYY YYY YYY YYY",
    "rescale of acc skipped in block 1": "YYY YYY YYY YYY YYY YYY",
    "key at block edge counted twice": "YYY YYY YYY YYY YYY YYY",
    "key at block edge twice, n=4096": "nYY YYY YYY nYY YYY YYY",
    "V row at block edge shifted": "YYY YYY YYY YYY YYY YYY",
    "V row at block edge shifted, n=4096": "nYY YYY YYY nYY YYY YYY",
    "softcap 50 applied though none": "YYY YYY YYY YYY YYY YYY",
    "last head-dim element ignored in QK": "YYY YYY YYY YYY YYY YYY",
    "bwd: LSE saved in low dtype": "YYY YYY nnn YYY YYY nnn",
    "bwd: D of last row = 0": "YYY YYY YYY YYY YYY YYY",
    "bwd: D rows shifted by one": "YYY YYY YYY YYY YYY YYY",
    "bwd: D stored in low dtype": "nnn nnn nnn nnn nnn nnn",
    "bwd: dP stored in low dtype": "nnY nnY nnn nnY YYn nnn",
    "bwd: tail key missing, n=4096": "YYY YYY YYY YYY YYY YYY",
    "bwd: last query row missing": "YYY YYY YYY YYY YYY YYY",
    "bwd: first row missing in dV": "YYY YYY YYY YYY YYY YYY",
    "bwd: dS truncated": "nnY nnY nnn YYY nnY nnn",
    "bwd: P truncated in dV": "nnY nnY nnn YYY YYY nnn",
    "bwd: dQ accumulated in low dtype": "nYY nnY nnn YYn nnn nnn",
    "bwd: dQ accumulated low, n=4096": "nYY nYY nnn YYY YYY nnn",
    "bwd: GQA one head not summed": "YYY YYY YYY YYY YYY YYY",
    "bwd: GQA group of 8 summed in low dtype": "nYY nYY nnn nYY nYY nnn",
    "bwd: dropout mask not applied to dP": "YYY YYY YYY YYY YYY YYY",
}

CONTINUOUS = {
    "fwd: scale x(1+e)": "3e-3/3e-3/3e-4 1e-3/1e-3/3e-5 1e-4/3e-6/1e-6",
    "fwd: output gain x(1+e)": "1e-2/1e-2/3e-4 1e-3/1e-3/3e-5 1e-4/3e-6/1e-6",
    "fwd: constant offset e in O": "3e-3/1e-3/3e-5 3e-4/1e-4/3e-6 3e-5/3e-7/1e-7",
    "fwd: exp wrong by e (oscillating)": "3e-2/1e-2/3e-3 3e-3/1e-3/3e-4 3e-4/1e-6/1e-6",
    "fwd: masked keys leak, weight e": "3e-3/3e-3/1e-3 1e-3/3e-4/1e-4 3e-5/1e-6/1e-6",
    "fwd: ALiBi slope x(1+e)": "3e-3/3e-3/1e-3 1e-3/1e-3/1e-4 1e-4/3e-6/1e-6",
    "bwd: D x(1+e)": "1e-1/3e-2/1e-2 1e-2/3e-3/3e-3 1e-3/1e-5/1e-5",
    "bwd: P recomputed with scale x(1+e)": "3e-3/3e-3/3e-4 3e-4/3e-4/3e-5 3e-5/1e-6/1e-6",
    "bwd: LSE off by e": "1e-2/1e-2/3e-4 1e-3/1e-3/3e-5 3e-4/3e-6/1e-6",
    "bwd: dQ scale x(1+e)": "1e-2/1e-2/3e-4 3e-3/1e-3/1e-4 3e-4/1e-5/1e-6",
    "bwd: dK scale x(1+e)": "3e-2/1e-2/3e-4 3e-3/1e-3/3e-5 3e-4/3e-6/1e-6",
    "bwd: dV gain x(1+e)": "1e-2/1e-2/3e-4 3e-3/1e-3/3e-5 3e-4/3e-6/1e-6",
}
"""The smallest size found, in half decades, on normal inputs."""
