"""
3. The weights of a sentence, head by head
==========================================

A heat map of the weights shows which words a word looks at: a row for each query, a column for each
key. This lesson draws a layer with random weights first, and then one whose heads were given a job.
"""

import numpy as np

import npattn
from npattn import plot

words = ["the", "cat", "sat", "on", "the", "mat"]
T = len(words)

# %%
# A layer that has learned nothing
# --------------------------------
# Each different word has a vector of random numbers, and so do the projections.

rng = np.random.default_rng(0)
vectors = {word: rng.standard_normal(12) for word in sorted(set(words))}
x = np.stack([vectors[word] for word in words])  # (T, C)
mha = npattn.MultiHeadAttention.init(12, 4, seed=0)
weights = mha.forward(x).weights  # (H, T, T)
plot.heads(weights, queries=words, keys=words, title="random weights")

# %%
# Both "the" have the same row, and the same column: their vectors are equal, and nothing says where
# a word stands. Every other pattern comes from the random numbers: the picture of an untrained
# layer means nothing.

assert np.allclose(weights[:, 0], weights[:, 4])  # rows
assert np.allclose(weights[:, :, 0], weights[:, :, 4])  # columns

# %%
# Heads with a job
# ----------------
# Now a word is described by three facts, one after the other: which word it is, its place, and its
# kind. Each fact is a vector with a single 1.

kinds = ["article", "noun", "verb", "preposition", "article", "noun"]


def one_hot(names):
    """(T, number of different names), with a single 1 in each row."""
    return np.array([[float(name == other) for other in dict.fromkeys(names)] for name in names])


word, place, kind = one_hot(words), np.eye(T), one_hot(kinds)  # (T, 5), (T, 6), (T, 4)

# %%
# A head compares what its query asks for with what its keys offer:
#
# - *same word*: asks for its own word, and keys offer theirs;
# - *word before*: asks for the place before its own, and keys offer their place;
# - *nouns*: every query asks for a noun, and keys offer their kind;
# - *everything*: asks for nothing, so that all keys fit equally well.

STRENGTH = 5.0  # a score of 5 is a factor of e⁵ ≈ 148 in the weights
ask_noun = np.tile(kind[1], (T, 1))  # kind[1] is that of "cat"
before = np.roll(place, -1, axis=1)  # row t has its 1 in column t − 1; the first, in the last
before[0] = place[0]  # nothing stands before the first word: it asks for itself
jobs = {
    "same word": (word, word),
    "word before": (before, place),
    "nouns": (ask_noun, kind),
    "everything": (0 * place, place),
}
weights = np.stack(
    [npattn.forward(STRENGTH * q, k, x, scale=1.0).weights for q, k in jobs.values()]
)  # (H, T, T)
plot.heads(weights, queries=words, keys=words, title=", ".join(jobs))

# %%
# In head 0 each "the" looks at both, in equal parts. Head 1 is the diagonal one step to the left
# (its first word has no word before it, and looks at itself). Head 2 has the same row for every
# word, and head 3 is flat. Training can find heads like these: lesson 7 looks at what it found.

same, previous, nouns, everything = weights
assert same[0, 0] == same[0, 4] == same[0].max()
assert (previous.argmax(axis=-1) == [0, 0, 1, 2, 3, 4]).all()
assert set(np.argsort(nouns[0])[-2:]) == {1, 5}  # cat, mat
assert np.allclose(everything, 1 / T)

# %%
# What you learned
# ----------------
# - A heat map has a row for each query; an untrained layer's means nothing.
# - A head has a job if its queries ask for what its keys offer.
#
# .. admonition:: Exercise
#
#    Give a head the job *word after*; the last word asks for itself.
#
# .. dropdown:: Solution
#
#    .. code-block:: python
#
#       after = np.roll(place, 1, axis=1)
#       after[-1] = place[-1]
#       p = npattn.forward(STRENGTH * after, place, x, scale=1.0).weights
#       assert (p.argmax(axis=-1) == [1, 2, 3, 4, 5, 5]).all()
