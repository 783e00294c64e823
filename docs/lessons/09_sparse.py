"""
9. Sparse patterns
==================

Full attention compares every query with every key. Long texts cannot afford that, so models leave
most pairs out. Which ones, is a mask; how far a word can still see through several layers, is
arithmetic with that mask.
"""

import matplotlib.pyplot as plt
import numpy as np

import npattn
from npattn import masks, plot

T = 24
patterns = {
    "full causal": masks.causal(T),
    "sliding window": masks.window(3, 0),
    "window and sinks": masks.sliding(3, 2),
    "dilated window": masks.dilated(3, 0, 4),
    "every fourth key": masks.causal() & masks.custom(lambda b, h, t, s: s % 4 == 0),
    "chunks": masks.chunked(6) & masks.causal(),
    "global tokens": (masks.global_tokens(2) | masks.window(3, 0)) & masks.causal(),
    "strided and window": (masks.strided(4) | masks.window(3, 0)) & masks.causal(),
    "blocks": masks.blocks(np.eye(4, dtype=bool) | np.eye(4, k=-1, dtype=bool), 6) & masks.causal(),
}
arrays = {name: mask.to_array(T, T).reshape(T, T) for name, mask in patterns.items()}
figure, axes = plt.subplots(3, 3, figsize=(11, 11.5), layout="constrained")
for ax, (name, visible) in zip(axes.flat, arrays.items(), strict=True):
    plot.mask(visible, ax=ax, title=name)

# %%
# What they cost
# --------------
# Work grows with the number of visible pairs. A window has about T times its width, and not T²/2.

for name, visible in arrays.items():
    print(f"{name:20} {visible.sum():3} pairs, at most {visible.sum(axis=1).max():2} keys a query")
assert arrays["full causal"].sum() == T * (T + 1) // 2
assert arrays["sliding window"].sum(axis=1).max() == 4  # itself, and 3 before

# %%
# Every fourth key alone has a flaw: queries 1, 2 and 3 see key 0, but never themselves.

assert not arrays["every fourth key"][1, 1]

# %%
# What they can see
# -----------------
# One layer brings a word what its visible keys know. The next layer brings it what *those* saw. So
# s reaches t in two layers if t sees some key that sees s: a product of the mask, as a matrix of 0
# and 1, with itself. The reach of L layers is its L-th power. Lines that coincide are drawn on each
# other, the later ones thinner.


def share_seen(visible, layers):
    """Share of the causal pairs (t, s) where s can reach t through so many layers."""
    reach = np.linalg.matrix_power(visible.astype(int), layers) > 0
    return reach.sum() / (T * (T + 1) / 2)


layers = range(1, 9)
figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
for width, (name, visible) in zip(range(9, 0, -1), arrays.items(), strict=True):
    ax.plot(layers, [100 * share_seen(visible, n) for n in layers], linewidth=width, label=name)
ax.set(xlabel="layers", ylabel="earlier words that reach a word (%)", ylim=(0, 105))
ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))

# %%
# A window of 3 moves 3 words a layer: it needs eight layers for these 24 words. The dilated window
# sees 4, 8 and 12 words back, through more layers 16 and 20, but never a word between: 28 %.
# Chunks never look out of their chunk. A stride and a window together see everything in two layers.

assert share_seen(arrays["sliding window"], 8) == 1 > share_seen(arrays["sliding window"], 7)
assert share_seen(arrays["dilated window"], 8) < 0.3
assert share_seen(arrays["chunks"], 8) == share_seen(arrays["chunks"], 1)
assert share_seen(arrays["strided and window"], 2) == 1

# %%
# A mask as a rule, not as an array
# ---------------------------------
# The masks above hold a few numbers each, and answer for any rectangle of the scores. An engine
# asks before it computes a rectangle, and skips it where everything is hidden.

n = 1024
q, k, v = np.random.default_rng(0).standard_normal((3, n, 16))
tiled = npattn.attention(q, k, v, masks.window(3, 0), engine="tiled")
dense = npattn.attention(q, k, v, masks.window(3, 0).to_array(n, n))
assert np.allclose(tiled, dense)

# %%
# What you learned
# ----------------
# - A pattern's cost is its number of pairs, and its reach a power of its mask.
# - A stride with a window sees everything in two layers.
#
# .. admonition:: Exercise
#
#    How many layers does a window of seven earlier words need for these 24?
#
# .. dropdown:: Solution
#
#    .. code-block:: python
#
#       wide = masks.window(7, 0).to_array(T, T).reshape(T, T)
#       assert share_seen(wide, 4) == 1 > share_seen(wide, 3)  # 23 words back, seven a layer
