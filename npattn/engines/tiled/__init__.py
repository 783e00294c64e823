"""Attention tile by tile: the results of `dense` on all cores, never holding T × S numbers.

    B batch   H query heads   K key/value heads   T queries   S keys
    D query/key size   E value size
    A tile is a block of queries against a strip of keys, small enough to stay in a core's cache.
    Threads take blocks of queries (forward) or heads (backward), each with one thread of BLAS.

Two things make it fast. A score is exponentiated as it is, since a floating-point number keeps its
relative precision at any size; the row maximum is subtracted only if the sum of a row leaves the
range of the dtype (`outputs`). And the backward pass divides do by the sum of its row, and makes
Σ do·o one more column of a product, [do, −Σ do·o] [v, 1]ᵀ: exp and one multiplication are all that
is left to do element by element (`gradients`). Derivation: docs/derivations/tiled.md. Numbers in
brackets are the rules of docs/semantics.md.
"""

from npattn.engines.tiled.gradients import backward
from npattn.engines.tiled.operations import Saved
from npattn.engines.tiled.outputs import forward, max_score, weights
from npattn.engines.tiled.tangents import jvp
from npattn.engines.tiled.tiling import choice, visible_tiles

__all__ = ["Saved", "backward", "choice", "forward", "jvp", "max_score", "visible_tiles", "weights"]
