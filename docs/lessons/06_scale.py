"""
6. Why the scores are divided by √D
===================================

Without the scale, queries and keys of more numbers make larger scores, and the softmax picks one
key and ignores the rest. The right divisor is the root of the size D of **one head**. Code that
divides by the root of the whole width, √(H·D), makes the opposite mistake.
"""

import matplotlib.pyplot as plt
import numpy as np

import npattn
from npattn import plot

# %%
# The size of a score
# -------------------
# Let all numbers of q and k be independent, with mean 0 and variance 1. A product of two has mean 0
# and variance 1, too. The dot product sums D of them, and variances of independent numbers add up:
# variance D, standard deviation √D.

rng = np.random.default_rng(0)
for D in (4, 16, 64, 256):
    q, k = rng.standard_normal((2, 20_000, D))
    s = (q * k).sum(axis=-1)
    print(f"D = {D:3}: standard deviation {s.std():5.2f}, √D = {np.sqrt(D):5.2f}")
    assert abs(s.std() / np.sqrt(D) - 1) < 0.05

# %%
# Three scales of the same scores
# -------------------------------
# Eight heads of size 64 are 512 wide. Here is one of them, with six queries and six keys.

H, D, T = 8, 64, 6
q, k, v = rng.standard_normal((3, T, D))
scales = {"1 (none)": 1.0, "1/√D": 1 / np.sqrt(D), "1/√(H·D)": 1 / np.sqrt(H * D)}
figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
for ax, (name, scale) in zip(axes, scales.items(), strict=True):
    plot.head(npattn.forward(q, k, v, scale=scale).weights, ax=ax, title=f"scale {name}")

# %%
# Without a scale nearly all of a row is one weight: the softmax is *saturated*. With the whole
# width each row is nearly even: the head can hardly tell its keys apart. Over many queries:

T = 512
q, k, v = rng.standard_normal((3, T, D))
k, v = k[:32], v[:32]  # each query sees 32 keys; an even weight is 0.03
largest, slope = {}, {}
for name, scale in scales.items():
    p = npattn.forward(q, k, v, scale=scale).weights  # (T, 32)
    largest[name] = p.max(axis=-1).mean()
    slope[name] = (p * (1 - p)).sum(axis=-1).mean()
    print(f"{name:9} largest weight {largest[name]:.2f}, slope {slope[name]:.2f}")
assert largest["1 (none)"] > 0.7
assert largest["1/√D"] > 2 * largest["1/√(H·D)"]

# %%
# *Slope* is Σ p (1 − p): the derivative of a weight p by its own score is p (1 − p), so this says
# how much of a gradient gets through the softmax. Saturated, it is near 0, and the head hardly
# learns. Even rows pass gradients, but scores have to grow √H times as large before the head can
# choose.

assert slope["1 (none)"] < 0.4 * slope["1/√D"]

# %%
# The wrong scale changes with the number of heads, although each head works alone:

counts = np.array([1, 2, 4, 8, 16, 32])
curves = {"√D": np.full(6, D), "√(H·D)": counts * D}
figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name, sizes in curves.items():
    means = [
        npattn.forward(q, k, v, scale=n**-0.5).weights.max(axis=-1).mean() for n in sizes.tolist()
    ]
    ax.plot(counts, means, "o-", label=f"divided by {name}")
ax.axhline(1 / 32, color="0.6", linestyle=":", label="even weights")
ax.set(xlabel="heads of size 64", ylabel="largest weight of a row, mean", ylim=(0, None))
ax.legend()

# %%
# What you learned
# ----------------
# - A score of D products has the standard deviation √D, so that D is that of one head.
# - Too large a scale saturates the softmax, and too small a one makes rows even.
#
# .. admonition:: Exercise
#
#    Some models divide q and k by their lengths first. Which scale then makes rows as sharp as
#    1/√D does here?
#
# .. dropdown:: Solution
#
#    .. code-block:: python
#
#       unit_q, unit_k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
#       p = npattn.forward(unit_q, unit_k, v, scale=np.sqrt(D)).weights  # lengths are near √D each
#       assert abs(p.max(axis=-1).mean() / largest["1/√D"] - 1) < 0.1
