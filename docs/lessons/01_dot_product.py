"""
1. Scaled dot-product attention by hand
=======================================

Attention is a soft look-up. A *query* is compared with every *key*; the better a key fits, the more
of its *value* goes into the answer:

.. math:: o = \\mathrm{softmax}(q k^T / \\sqrt{D}) \\, v

This lesson computes it in four lines, with numbers that are small enough to check on paper.
"""

import matplotlib.pyplot as plt
import numpy as np

import npattn
from npattn import plot

# %%
# Queries, keys and values
# ------------------------
# T = 3 queries look at S = 4 keys, and each key has a value. All are vectors: a key and a query of
# the same size D, because they are multiplied with each other, a value of any size E.

q = np.array([[4.0, 0.0], [0.0, 4.0], [0.0, 0.0]])  # (T, D)
k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, -1.0]])  # (S, D)
v = np.array([[0.0, 0.0], [5.0, 1.0], [3.0, 4.0], [0.0, 4.0]])  # (S, E)
D = q.shape[-1]

# %%
# Scores
# ------
# The score of a query and a key is their dot product: large where they point the same way, 0 where
# they are orthogonal, negative where they point apart. It is divided by √D (lesson 6 says why).

scores = q @ k.T / np.sqrt(D)  # (T, S)
print(scores.round(2))

# %%
# Weights
# -------
# The softmax turns each row of scores into weights: positive numbers with the sum 1. Subtracting
# the largest score of the row changes nothing, since it cancels in the fraction, and it keeps exp
# from overflowing.

e = np.exp(scores - scores.max(axis=-1, keepdims=True))  # (T, S)
weights = e / e.sum(axis=-1, keepdims=True)  # (T, S)
print(weights.round(2))
assert np.allclose(weights.sum(axis=-1), 1)

# %%
# Query 0 fits keys 0 and 2 equally well, so they have equal weights. Query 2 is all zeros: it fits
# every key equally well, and gives each a quarter. In the picture ≈0 is a weight that is not 0,
# but too small for two digits.

assert weights[0, 0] == weights[0, 2]
assert np.allclose(weights[2], 1 / 4)
plot.head(weights, title="weights: each row sums to 1")

# %%
# Output
# ------
# The output of a query is the weighted mean of the values: the sum of each value times its weight.

o = weights @ v  # (T, E)
print(o.round(2))
assert np.allclose(o[2], v.mean(axis=0))

# %%
# A mean with positive weights never leaves the area between the values. Here a value is a point of
# the plane, and each output lies within the area that the four values span.

figure, ax = plt.subplots(figsize=(5, 4), layout="constrained")
ax.fill(*v.T, color="0.93")
ax.scatter(*v.T, s=70, marker="s", label="values")
ax.scatter(*o.T, s=70, label="outputs")
for name, points in (("v", v), ("o", o)):
    for i, point in enumerate(points):
        ax.annotate(f"{name}{i}", point, xytext=(7, 7), textcoords="offset points")
ax.set(title="outputs are between the values", xlim=(-0.4, 5.6), ylim=(-0.4, 4.6))
ax.legend(loc="upper right")

# %%
# The same from the library
# -------------------------
# ``npattn.attention`` is this formula, for any number of heads and examples and with every option.

assert np.allclose(npattn.attention(q, k, v), o, rtol=1e-14)

# %%
# What you learned
# ----------------
# - A score is a dot product, a weight a share of the row, an output a mean of values.
# - The output never leaves the area between the values.
#
# .. admonition:: Exercise
#
#    Find a query whose output is value 1 alone, up to rounding.
#
# .. dropdown:: Solution
#
#    .. code-block:: python
#
#       only = np.array([[-50.0, 50.0]])  # far along key 1, and away from key 0
#       assert np.allclose(npattn.attention(only, k, v), v[1])
