"""
11. bfloat16: where the errors come from
========================================

GPUs compute attention in bfloat16: the range of float32, but only 8 bits of precision, two to three
digits. Which errors are then normal, and which are a bug? The answer can be derived.
"""

import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

import npattn
from npattn import plot
from npattn.testing.bounds.ulp import excess
from npattn.testing.tolerance import allowed

bfloat16 = np.dtype(ml_dtypes.bfloat16)

# %%
# Eight bits
# ----------
# From 1 to 2 numbers are 1/128 apart, from 2 to 4 twice that, and so on. Rounding moves a number by
# at most half of the gap: 2⁻⁸ of its size. Small numbers that are added to large ones disappear.

print("numbers from 1 on:", [float(bfloat16.type(1 + i / 128)) for i in range(4)])
print("256 + 1 =", bfloat16.type(256) + bfloat16.type(1))
assert bfloat16.type(256) + bfloat16.type(1) == 256

# %%
# One rounding at a time
# ----------------------
# The exact output belongs to the *rounded* inputs: what rounding did to them before is not the
# error of the implementation. Then each step is rounded alone, all others being exact.


def round_to_bfloat16(x):
    return x.astype(bfloat16).astype(np.float64)


def attention(q, k, v, at=()):
    """Attention in float64, rounded to bfloat16 after the steps that are named."""
    step = lambda name, x: round_to_bfloat16(x) if name in at else x  # noqa: E731
    s = step("scores", q @ k.T / np.sqrt(q.shape[-1]))  # (T, S)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    p = step("weights", e / e.sum(axis=-1, keepdims=True))  # (T, S)
    return step("output", p @ v)  # (T, E)


T, S, D = 16, 256, 32
rng = np.random.default_rng(0)
q, k, v = (round_to_bfloat16(rng.standard_normal((n, D))) for n in (T, S, S))
exact = npattn.attention(q, k, v)
steps = ["scores", "weights", "output"]
errors = {name: abs(attention(q, k, v, [name]) - exact) for name in steps}
errors["all three"] = abs(attention(q, k, v, steps) - exact)
for name, error in errors.items():
    print(f"rounded {name:9}: largest error {error.max():.4f}, mean {error.mean():.5f}")
assert errors["scores"].mean() > 1.5 * errors["weights"].mean()

# %%
# Scores are the worst place: exp turns an *absolute* error of the score into a *relative* error of
# the weight. A score of 8 may be off by 8 · 2⁻⁸ = 1/32, and then its weight is by 3 %; a weight
# that is rounded itself is off by at most 0.4 %. That is why kernels keep scores and sums in
# float32, and round the weights, for the product with v, and the output.

figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
ax.bar(list(errors), [error.max() for error in errors.values()], color="0.8", label="largest")
ax.bar(list(errors), [error.mean() for error in errors.values()], label="mean")
ax.set(ylabel="error of the output", xlabel="rounded to bfloat16")
ax.legend()

# %%
# How large an error is allowed?
# ------------------------------
# ``allowed`` adds up what each rounding can do to each element of the output, from these q, k and
# v. Nothing is typed in, so a passing element tells something, and so does a failing one. The
# output must be rounded in any case, which is not counted: ``excess`` is 0 where the exact value
# rounds to the number that was returned (hatched below). npattn's own emulation of mixed precision
# stays below 1 everywhere:

inputs = [x.astype(bfloat16) for x in (q, k, v)]
tolerance = allowed(npattn.Problem(*inputs), bfloat16)["o"]  # (T, E)
out = npattn.attention(*inputs, dtype="bfloat16")
ratio = excess(out, exact) / tolerance
print(f"largest error / tolerance: {ratio.max():.2f}")
assert ratio.max() < 1
plot.error(ratio, axes=("query", "value column"), title="mixed precision: right")

# %%
# A bug of the same size as rounding
# ----------------------------------
# Here the sum of each row is itself kept in bfloat16, one term after the other, so that small terms
# disappear. The output looks plausible: only a tolerance that was derived can tell this error from
# rounding. Elements with a cross are beyond it.


def sum_in_bfloat16(q, k, v):
    s = q @ k.T / np.sqrt(D)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    total = np.zeros((T, 1))
    for column in range(S):
        total = round_to_bfloat16(total + e[:, column : column + 1])
    return (e / total @ v).astype(bfloat16), abs(total / e.sum(axis=-1, keepdims=True) - 1)


wrong, error = sum_in_bfloat16(q, k, v)
ratio = excess(wrong, exact) / tolerance
print(f"largest relative error of a sum: {error.max():.1%}")
print(f"largest error / tolerance: {ratio.max():.2f}, {(ratio > 1).sum()} of {ratio.size} beyond")
assert (ratio > 1).any()
plot.error(ratio, axes=("query", "value column"), title="sums in bfloat16")

# %%
# What you learned
# ----------------
# - Errors of scores count most, since exp makes them relative errors of weights.
# - A tolerance that is derived tells a bug from rounding of the same size.
#
# .. admonition:: Exercise
#
#    Sum each row in bfloat16 by halves: pairs, then pairs of pairs. How large is the error of a
#    sum now?
#
# .. dropdown:: Solution
#
#    .. code-block:: python
#
#       e = np.exp(q @ k.T / np.sqrt(D))
#       total = round_to_bfloat16(e)
#       while total.shape[1] > 1:
#           total = round_to_bfloat16(total[:, ::2] + total[:, 1::2])
#       halves = abs(total / e.sum(axis=-1, keepdims=True) - 1)
#       assert halves.max() < error.max() / 4  # eight roundings, and not 256
