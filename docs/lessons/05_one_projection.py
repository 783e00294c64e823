"""
5. One projection, and two ways to merge the heads
==================================================

Most code makes queries, keys and values with one product, and cuts the result. The two reshapes
around attention, one in and one out, are where it goes wrong most often: a wrong one still gives an
array of the right shape.
"""

import importlib.util

import matplotlib.pyplot as plt
import numpy as np

import npattn

T, C, H = 4, 6, 3
D = C // H
rng = np.random.default_rng(0)
x = rng.standard_normal((T, C))
w = rng.standard_normal((C, 3 * C))  # all three projections side by side

# %%
# Two orders
# ----------
# The columns of ``w`` can be read in two ways. Weights that were trained for one are nonsense in
# the other, so that a port of a model must know which one it was.

qkv = x @ w  # (T, 3·C)
by_kind = qkv.reshape(T, 3, H, D)  # [all q | all k | all v]
by_head = qkv.reshape(T, H, 3, D)  # [q k v of head 0 | q k v of head 1 | …]
q, k, v = by_kind.transpose(1, 2, 0, 3)  # three of (H, T, D)
other_q = by_head.transpose(2, 1, 0, 3)[0]
assert np.array_equal(q[0], other_q[0])  # the first D columns are the same
assert not np.allclose(q[1], other_q[1])  # the next are not

wo = np.eye(C)
for order, queries in (("qkv", q), ("per_head", other_q)):
    mha = npattn.MultiHeadAttention.from_packed(w, None, wo, None, num_heads=H, order=order)
    assert np.allclose((x @ mha.wq).reshape(T, H, D).swapaxes(0, 1), queries)

# %%
# Merging, right and wrong
# ------------------------
# Attention gives (H, T, D). To get one row for each token, the head axis must move back behind the
# tokens *before* the reshape. Without that the reshape runs on, across the border of the tokens.
# To see it, let each number be the index of its token:

o = np.broadcast_to(np.arange(T)[:, None], (H, T, D))  # o[h, t, d] = t
right = o.swapaxes(0, 1).reshape(T, H * D)
wrong = o.reshape(T, H * D)
print("right:\n", right, "\nwrong:\n", wrong, sep="")
assert (right == np.arange(T)[:, None]).all()

figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for ax, title, rows in zip(axes, ("right", "wrong"), (right, wrong), strict=True):
    ax.imshow(rows, cmap="viridis")
    for (row, column), token in np.ndenumerate(rows):
        ink = "white" if token < 2 else "black"
        ax.text(column, row, token, ha="center", va="center", color=ink)
    ax.set(
        title=f"{title}: the token of each number",
        xlabel="feature",
        ylabel="row of the output",
        yticks=range(T),
    )

# %%
# A shape cannot tell the two apart, and the model even trains, badly. Only numbers can.
#
# The judge names it
# ------------------
# ``check_module`` compares a module of PyTorch with exact attention under the module's own weights,
# and looks for the step that explains the difference.

if importlib.util.find_spec("torch"):
    import torch
    from torch import nn

    from npattn.testing import check_module

    class Attention(nn.Module):
        def __init__(self, width=12, num_heads=3):
            super().__init__()
            self.num_heads = num_heads
            self.qkv = nn.Linear(width, 3 * width)
            self.out_proj = nn.Linear(width, width)

        def forward(self, x):
            B, T, C = x.shape
            qkv = self.qkv(x).reshape(B, T, 3, self.num_heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)  # three of (B, H, T, D)
            weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            return self.out_proj((weights @ v).reshape(B, T, C))  # no transpose

    torch.manual_seed(0)
    report = check_module(Attention(), examples=3, only="agreement-output")
    print(report.causes[0].text)
    assert not report.passed
else:
    print("torch is not installed; the judge of modules needs it")

# %%
# What you learned
# ----------------
# - Packed projections have two orders, and a shape does not tell which.
# - Without moving the head axis back, a reshape mixes tokens.
#
# .. admonition:: Exercise
#
#    Only ``wrong`` is left of the outputs. Make ``right`` of it.
#
# .. dropdown:: Solution
#
#    .. code-block:: python
#
#       again = wrong.reshape(H, T, D)  # what was merged is cut as it was
#       assert np.array_equal(again.swapaxes(0, 1).reshape(T, H * D), right)
