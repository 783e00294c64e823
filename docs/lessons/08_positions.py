"""
8. Positions: sinusoidal, relative, RoPE, ALiBi
===============================================

Attention treats its keys as a set: in another order, the answer is the same. Where a word stands
has to be told to it. There are two places for that: the vectors, or the scores.
"""

import matplotlib.pyplot as plt
import numpy as np

import npattn
from npattn import biases, positions

T, D = 32, 64
rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, T, D))
order = rng.permutation(T)
assert np.allclose(npattn.attention(q, k[order], v[order]), npattn.attention(q, k, v))

# %%
# Sinusoidal: added to the vectors
# --------------------------------
# Each position t has a vector of sines and cosines, from fast to slow, that is added to the word's:
#
# .. math:: x_{t,2i} = \sin(t \, \omega_i), \quad x_{t,2i+1} = \cos(t \, \omega_i), \quad
#    \omega_i = 10000^{-2i/D}
#
# The dot product of two such vectors is Σ cos(ω (t − s)): it depends on their distance alone.

table = positions.sinusoidal(T, D)  # (T, D)
products = table @ table.T  # (T, T)
assert np.allclose(products[:-1, :-1], products[1:, 1:])  # constant along each diagonal

figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
axes[0].imshow(table, cmap="RdBu", aspect="auto")
axes[0].set(title="sinusoidal positions", xlabel="feature", ylabel="position")
image = axes[1].imshow(products, cmap="viridis")
axes[1].set(title="their dot products", xlabel="position", ylabel="position")
figure.colorbar(image, ax=axes[1])

# %%
# RoPE: turning the vectors
# -------------------------
# Rotary positions add nothing. They turn pairs of features of each query and key, as points of a
# plane, by the angle t ω, each pair with an ω of its own. A dot product then depends on the
# difference of the angles, (t − s) ω. So all positions may grow by 99, and nothing changes:

here = npattn.attention(positions.rope(q), positions.rope(k), v)
there = npattn.attention(positions.rope(q, offset=99), positions.rope(k, offset=99), v)
assert np.allclose(here, there)

# %%
# Turning keeps the length of a vector, and values are not turned.

assert np.allclose(np.linalg.norm(positions.rope(q), axis=-1), np.linalg.norm(q, axis=-1))

# %%
# Relative bias: a learned number for each distance
# -------------------------------------------------
# T5 adds a number to each score, from a table with a row for each *bucket* of distances and a
# column for each head. Near distances have a bucket each; far ones share buckets, whose size grows.

H = 4
buckets = np.repeat(np.arange(32.0)[:, None], H, axis=1)  # bucket n adds n, to make it visible
relative = biases.relative(buckets, max_distance=32).to_array(T, T)[0]  # (T, T)
print("distances 1 to 16 back: buckets", relative[16, 15::-1].astype(int))
assert np.array_equal(relative[:-1, :-1], relative[1:, 1:])  # distance alone

# %%
# ALiBi: a straight line
# ----------------------
# ALiBi subtracts a multiple of the distance from the score. Nothing is learned: the slope of each
# head is fixed, from 2^(−8/H) down to 2^(−8) by equal factors; steep ones look near, flat ones far.

slopes = positions.alibi_slopes(H)
print("slopes", slopes)
alibi = biases.alibi(slopes).to_array(T, T)  # (H, T, T)
distance = abs(np.arange(T)[:, None] - np.arange(T))
assert np.allclose(alibi, -slopes[:, None, None] * distance)

# %%
# Side by side
# ------------
# All queries and keys are the same vector here, so that each difference between weights comes from
# the position. This is the row of the last query of a causal model.

same = np.ones((T, D))
table = same + positions.sinusoidal(T, D)
turned = positions.rope(same)
learned = np.linspace(-2, 0, 32)[::-1, None] * np.ones(H)  # stands for a table that was trained
weights = {
    "none": npattn.forward(same, same, v, causal=True).weights,
    "sinusoidal": npattn.forward(table, table, v, causal=True).weights,
    "RoPE": npattn.forward(turned, turned, v, causal=True).weights,
    "relative": npattn.forward(
        same[None], same[None], v[None], causal=True, bias=biases.relative(learned[:, :1])
    ).weights[0],
    "ALiBi, slope 1/16": npattn.forward(
        same[None], same[None], v[None], causal=True, bias=biases.alibi(slopes[1:2])
    ).weights[0],
}
figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
for name, p in weights.items():
    ax.plot(T - 1 - np.arange(T), p[-1], ".-", label=name)
ax.set(xlabel="distance of the key from the last query", ylabel="weight", ylim=(0, None))
ax.legend()

# %%
# Each of them gives the nearest key the most here, in its own way: RoPE and the sinusoidal vectors
# come back in waves, the others fall. Without positions the row is flat.

assert np.allclose(weights["none"][-1], 1 / T)
assert all(p[-1].argmax() == T - 1 for name, p in weights.items() if name != "none")

# %%
# What you learned
# ----------------
# - Attention knows no order: positions are added to vectors, turn them, or change scores.
# - Rotary positions depend on differences alone.
#
# .. admonition:: Exercise
#
#    A model writes one word at a time, with the turned keys in a cache. Turn the last query so
#    that its output is right, and show that the position 0 is wrong.
#
# .. dropdown:: Solution
#
#    .. code-block:: python
#
#       last = npattn.attention(positions.rope(q[-1:], offset=T - 1), positions.rope(k), v)
#       assert np.allclose(last, here[-1:])
#       forgotten = npattn.attention(positions.rope(q[-1:]), positions.rope(k), v)
#       assert not np.allclose(forgotten, here[-1:])
