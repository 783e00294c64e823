"""
13. Training on digits: one head against four
=============================================

Are several heads better than one, with the same number of parameters? This lesson trains both on
1797 handwritten digits, with gradients by npattn and nothing else. It takes some seconds. It runs
in ``docs/lessons`` of a clone, and needs scikit-learn.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np

from npattn import plot

sys.path.insert(0, "../examples")
from train import Settings, compare, digits

# %%
# The task
# --------
# An image has 8×8 pixels. Each of its rows is a token of 8 numbers, so the sequence is 8 tokens
# long. A fifth of the images is kept for the test.

data = digits()
print(f"{len(data.x)} images to learn from, {len(data.test_x)} for the test")
figure, axes = plt.subplots(1, 10, figsize=(10, 1.4), layout="constrained")
for digit, ax in enumerate(axes):
    ax.imshow(data.x[data.y == digit][0], cmap="gray_r")
    ax.set(xticks=[], yticks=[], title=digit)

# %%
# Two models
# ----------
# Embedding and positions, one layer of attention, a small network, a classifier. Four heads of size
# 4 have as many parameters as one head of size 16. Both models start from the same seed and see the
# same batches.

settings = Settings(embed_dim=16, num_heads=4, epochs=8)
comparison = compare(settings, data=data)
print(comparison)

# %%
# The last line counts the images that only one of the models gets right, and says whether tossing a
# coin for each would give as large a difference. That is needed: 1 % is four images.

runs = comparison.runs
assert len({run.num_parameters for run in runs.values()}) == 1
right = {name: int(answers.sum()) for name, answers in comparison.right.items()}
assert right["multi-head"] > right["single-head"]
assert comparison.p_value < 0.05

# %%
# The loss
# --------
# Each step has another batch, so that single losses jump; the line is a mean over twelve steps.

figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for name, run in runs.items():
    axes[0].plot(np.convolve(run.losses, np.full(12, 1 / 12), mode="valid"), label=name)
    axes[1].plot(range(1, 9), [100 * a for a in run.accuracies], "o-", label=name)
axes[0].set(xlabel="step", ylabel="loss", ylim=(0, None))
axes[1].set(xlabel="epoch", ylabel="test accuracy (%)")
axes[1].legend()

# %%
# What the heads look at
# ----------------------
# Mean weights over the test images: four patterns in one model, and a single one in the other,
# which has to serve everything.

rows = [f"row {t}" for t in range(8)]
means = {name: run.weights(data.test_x).mean(axis=0) for name, run in runs.items()}
plot.heads(means["multi-head"], queries=rows, keys=rows, title="four heads")

# %%
plot.head(means["single-head"][0], queries=rows, keys=rows, title="one head")

# %%
# One result is not a law
# -----------------------
# This is one seed, one small model, and eight epochs. After 40 epochs at twice the width, one head
# reaches 98.1 % and four reach 98.9 % (``docs/train.md``), a difference of three images. What the
# lesson shows is how to ask: equal parameters, equal data, and a test for chance.

# %%
# What you learned
# ----------------
# - With equal parameters, several heads beat one here; a test for chance belongs to it.
# - One seed of a small model is no law.
#
# .. admonition:: Exercise
#
#    Two models differ on n images, and one of them is right on all n. From which n on is that
#    unlikely (below 5 %, both ways) if a coin decided?
#
# .. dropdown:: Solution
#
#    .. code-block:: python
#
#       n = next(n for n in range(1, 99) if 2 * 0.5**n < 0.05)
#       assert n == 6
