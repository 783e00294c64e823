"""
7. What heads learn, and pruning them
=====================================

After training, heads differ in what they look at, and in how much they matter.
This lesson trains four heads on handwritten digits for a second or two, looks at each, and removes
them one by one. It runs in ``docs/lessons`` of a clone, and needs scikit-learn.
"""

import dataclasses
import sys

import matplotlib.pyplot as plt
import numpy as np

from npattn import plot

sys.path.insert(0, "../examples")
from train import Settings, digits, forward, train

data = digits()  # images of 8×8 pixels; each of the 8 rows is a token
run = train(Settings(embed_dim=16, num_heads=4, epochs=8), data=data)
print(f"right on {100 * run.accuracy(data.test_x, data.test_y):.1f} % of the test images")

# %%
# Specialisation
# --------------
# These are the weights of the four heads, each the mean over all test images. A vertical stripe is
# a head that looks at one row of the image, whatever the query is.

rows = [f"row {t}" for t in range(8)]
weights = run.weights(data.test_x)  # (B, H, T, T)
plot.heads(weights.mean(axis=0), queries=rows, keys=rows, title="mean weights")

# %%
# Two numbers say how a head works. *Evenness* is the entropy of its rows divided by the largest one
# possible: 1 is a head that looks at everything alike. *Change* is the standard deviation of its
# weights from image to image: 0 is a head that ignores the image.

T = weights.shape[-1]
entropy = -(weights * np.log(weights)).sum(axis=-1).mean(axis=(0, 2)) / np.log(T)  # (H,)
change = weights.std(axis=0).mean(axis=(1, 2))  # (H,)
for h in range(4):
    print(f"head {h}: evenness {entropy[h]:.2f}, change {change[h]:.3f}")
assert ((entropy > 0) & (entropy < 1)).all()

# %%
# A mask for heads
# ----------------
# The output of each head is multiplied by a number before ``wo``: 1 keeps the head, 0 removes it.
# npattn calls this a gate. (The gradient of the loss by these numbers estimates how much each head
# matters, in one backward pass. With four heads it is as easy to try, below.)

mha = run.attention
x = forward(run.parameters, run.settings, data.test_x).n1.y  # what attention gets: (B, T, C)
head_mask = np.array([1.0, 0.0, 1.0, 1.0])
masked = mha.forward(x, gate=head_mask[:, None, None]).out

# %%
# Pruning removes the parameters of a head for good, and gives the same numbers.

pruned = mha.prune([1])
print(f"{mha.num_parameters} parameters of attention, {pruned.num_parameters} without head 1")
assert np.allclose(pruned.forward(x).out, masked, rtol=0, atol=1e-12)

# %%
# How much does each head matter?
# -------------------------------
# A head reaches the output through its D rows of ``wo``. With these set to 0 the rest of the model
# runs as before.


def accuracy_without(heads):
    wo = run.parameters["wo"].copy()  # (H·D, C)
    for h in heads:
        wo[4 * h : 4 * (h + 1)] = 0
    return dataclasses.replace(run, parameters=run.parameters | {"wo": wo}).accuracy(
        data.test_x, data.test_y
    )


removed = {"none": [], **{f"head {h}": [h] for h in range(4)}, "all": [0, 1, 2, 3]}
accuracies = {name: accuracy_without(heads) for name, heads in removed.items()}
for name, accuracy in accuracies.items():
    print(f"without {name:6}: {100 * accuracy:.1f} %")
assert accuracies["all"] < min(accuracies[f"head {h}"] for h in range(4)) < accuracies["none"]

figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
bars = ax.bar(list(accuracies), [100 * a for a in accuracies.values()])
ax.bar_label(bars, fmt="%.0f")
ax.set(ylabel="test accuracy (%)", xlabel="heads that are removed", ylim=(0, 105))

# %%
# Every head matters here, some more than others, and none as much as all together: four heads of
# size 4 leave no room for a spare one. In large models many heads can go for almost nothing. The
# model was not trained for the loss of a head; more steps of training would win back a part of it.

# %%
# What you learned
# ----------------
# - A gate of 0 removes a head, and pruning removes its parameters; the numbers are the same.
# - How much a head matters is measured by leaving it out.
#
# .. admonition:: Exercise
#
#    How right is the model with a single head left, and is each better than none?
#
# .. dropdown:: Solution
#
#    .. code-block:: python
#
#       alone = [accuracy_without({0, 1, 2, 3} - {h}) for h in range(4)]
#       print(alone)
#       assert max(alone) > accuracies["all"]
