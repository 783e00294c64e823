"""
2. Several heads from scratch
=============================

One head gives each query one set of weights. Several heads give it several: each head has its own,
smaller, queries, keys and values, and so can look at something else. This lesson writes the layer
in NumPy and compares it with two others, npattn's and PyTorch's.

It is *self-attention*: queries, keys and values are made from the same tokens x (a token is a word,
as a vector), by three matrices that training would find: wq, wk and wv. A fourth, wo, makes the
output of the layer from those of the heads. Here all four are random.
"""

import importlib.util

import numpy as np

import npattn
from npattn import plot

B, T, C, H = 2, 5, 12, 3  # examples, tokens, width of a token, heads
D = C // H  # width of one head
rng = np.random.default_rng(0)
x = rng.standard_normal((B, T, C))
wq, wk, wv, wo = (rng.standard_normal((C, C)) / np.sqrt(C) for _ in range(4))
bq, bk, bv, bo = rng.standard_normal((4, C)) / 10

# %%
# Split, attend, merge
# --------------------
# One product makes the queries of all heads. Then the width is cut into heads, and the head axis is
# moved in front of the tokens, so that the matrix products run for each head alone.


def split(y):
    """(B, T, H·D) → (B, H, T, D)."""
    return y.reshape(B, T, H, D).swapaxes(1, 2)


def merge(y):
    """(B, H, T, D) → (B, T, H·D): first the axis back, then the reshape."""
    return y.swapaxes(1, 2).reshape(B, T, H * D)


def softmax(s):
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


q, k, v = split(x @ wq + bq), split(x @ wk + bk), split(x @ wv + bv)  # (B, H, T, D)
weights = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(D))  # (B, H, T, T)
out = merge(weights @ v) @ wo + bo  # (B, T, C)
assert np.array_equal(merge(split(x)), x)

# %%
# The heads do not see each other until the last product, ``@ wo``, mixes them. Their weights
# differ:

plot.heads(weights[0], title="three heads, one sentence")

# %%
# npattn's layer
# --------------

mha = npattn.MultiHeadAttention(wq, wk, wv, wo, num_heads=H, bq=bq, bk=bk, bv=bv, bo=bo)
fwd = mha.forward(x)
print("largest difference of the outputs from npattn's:", f"{abs(out - fwd.out).max():.0e}")
assert np.allclose(out, fwd.out, rtol=0, atol=1e-13)
assert np.allclose(weights, fwd.weights, rtol=0, atol=1e-13)

# %%
# PyTorch's layer
# ---------------
# ``torch.nn.MultiheadAttention`` keeps the three input projections in one matrix, and multiplies
# from the other side: y = x Wᵀ + b. So its ``in_proj_weight`` is the three matrices side by side,
# transposed. Its weights are the mean over the heads unless ``average_attn_weights=False``.

if importlib.util.find_spec("torch"):
    import torch

    layer = torch.nn.MultiheadAttention(C, H, batch_first=True, dtype=torch.float64)
    arrays = {
        "in_proj_weight": np.concatenate([wq, wk, wv], axis=1).T,  # (3·C, C)
        "in_proj_bias": np.concatenate([bq, bk, bv]),
        "out_proj.weight": wo.T,
        "out_proj.bias": bo,
    }
    layer.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})
    tokens = torch.tensor(x)
    theirs, their_weights = layer(tokens, tokens, tokens, average_attn_weights=False)
    theirs, their_weights = theirs.detach().numpy(), their_weights.detach().numpy()
    print("largest difference of the outputs from torch's:", f"{abs(out - theirs).max():.0e}")
    assert np.allclose(out, theirs, rtol=0, atol=1e-13)
    assert np.allclose(weights, their_weights, rtol=0, atol=1e-13)
else:
    print("torch is not installed; the comparison with its layer is left out")

# %%
# What you learned
# ----------------
# - Heads are cut from one product; the head axis moves in front of the tokens, and back.
# - npattn's layer and PyTorch's have the same numbers, in another order and transposed.
#
# .. admonition:: Exercise
#
#    Nothing says where a token stands. What happens to the output if the tokens are shuffled?
#
# .. dropdown:: Solution
#
#    .. code-block:: python
#
#       order = [3, 0, 4, 1, 2]
#       assert np.allclose(mha.forward(x[:, order]).out, fwd.out[:, order])  # it is shuffled alike
