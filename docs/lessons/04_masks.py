"""
4. Masks, and what −1e9 does
============================

A mask says which keys a query may attend to. Two are in every language model: *causal* (no word
sees a later one) and *padding* (no word sees the filler behind a short sentence).
"""

import matplotlib.pyplot as plt
import numpy as np

import npattn
from npattn import Conventions, masks, plot

T = 6
causal = masks.causal(T)  # query t sees keys s ≤ t
padding = masks.lengths([6, 4])  # two sentences, of 6 words and of 4

figure, axes = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
plot.mask(causal, ax=axes[0], title="causal")
four = np.broadcast_to(padding.to_array(T, T)[1, 0], (T, T))  # one row holds for every query
plot.mask(four, ax=axes[1], title="padding, 4 words")
plot.mask((causal & padding).to_array(T, T)[1, 0], ax=axes[2], title="both")

# %%
# A hidden key leaves the softmax: its weight is exactly 0, and the others share the 1.

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 2, 1, T, 8))  # three of (B, H, T, D)
fwd = npattn.forward(q, k, v, causal & padding)
assert (fwd.weights[1, 0, :, 4:] == 0).all()
assert np.allclose(fwd.weights.sum(axis=-1), 1)
plot.head(fwd.weights[1, 0], title="weights of the short sentence")

# %%
# A large negative number instead
# -------------------------------
# Much code hides a key by setting its score to −1e9. In float32 and float64 that is as good, in a
# row that sees at least one key: exp(−1e9) is 0 exactly.

print("exp(-1e9) =", np.exp(np.float32(-1e9)))
filled = npattn.attention(q, k, v, causal & padding, conventions=Conventions(hidden_fill=-1e9))
assert np.allclose(filled, fwd.out, rtol=0, atol=1e-14)

# %%
# It goes wrong in three places. **One: float16** has no such number. Its smallest is −65504, so
# −1e9 becomes −∞, or is refused.

with np.errstate(over="ignore"):
    print("-1e9 in float16 =", np.float16(-1e9), "  the smallest is", np.finfo(np.float16).min)

# %%
# **Two: a row that sees nothing.** With the filler in front, as is usual when a model writes, the
# first query of a causal row sees filler alone. All its scores are −1e9, so every *hidden* key gets
# the same weight: the output is the mean of what must be hidden. With −∞ it is worse: subtracting
# the largest score gives −∞ − (−∞), which is NaN, and one NaN spreads through the whole model.


def softmax(s):
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


with np.errstate(invalid="ignore"):
    print("filled with -1e9:", softmax(np.full(4, -1e9)))
    print("filled with -inf:", softmax(np.full(4, -np.inf)))

# %%
# **Three: −1e9 added** to the score, and not put in its place. Float32 has about seven digits: near
# 1e9 its numbers are 64 apart, so that the score is lost in the sum.

print("numbers near 1e9 are", np.spacing(np.float32(1e9)), "apart in float32")
assert np.float32(-1e9) + np.float32(3) == np.float32(-1e9)

# %%
# What a query that sees nothing should give is a convention. Here query 2 sees no key. npattn says
# 0, unless it is told otherwise; a report of ``npattn check`` names what an implementation does.

nothing = np.ones((T, T), bool)
nothing[2] = False
names = {
    "npattn: 0": Conventions(),
    "-1e9: the mean": Conventions(hidden_fill=-1e9),
    "-inf: NaN": Conventions(empty_row="nan"),
}
figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
for ax, (name, conventions) in zip(axes, names.items(), strict=True):
    weights = npattn.forward(q, k, v, nothing, conventions=conventions).weights[0, 0]
    plot.head(weights, ax=ax, title=name)
    print(f"{name:16}", weights[2].round(2))

# %%
# What you learned
# ----------------
# - A hidden key has the weight 0; −1e9 in its place is as good only in some dtypes and rows.
# - What a query that sees nothing gives is a convention, which a report names.
#
# .. admonition:: Exercise
#
#    Let each word see itself and the word before it, in its own sentence. How many keys does each
#    query of the short sentence see?
#
# .. dropdown:: Solution
#
#    .. code-block:: python
#
#       two = (masks.window(1, 0) & padding).to_array(T, T)[1, 0]
#       assert two.sum(axis=1).tolist() == [1, 2, 2, 2, 1, 0]
