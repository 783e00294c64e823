"""Attention in torch operations, tile by tile: what `npattn.engines.tiled` computes, on any device.

    B samples (the leading axes in one)   H query heads   K key/value heads   T queries   S keys
    D query/key size   E value size
    A tile is a block of queries against a strip of keys, of as many samples and heads at once as
    have the same visible keys (`npattn.torch.tiles`). T × S numbers are never held.

A score is exponentiated as it is; the row maximum is computed only where the sum of a row leaves
the range of the dtype: docs/derivations/tiled.md. One check per call, after the last tile, decides
that: nothing waits for the device in between. Every operation is out of place, except for
accumulation, so that autograd can differentiate the backward pass. Numbers in brackets are the
rules of docs/semantics.md.
"""

from npattn.torch.engine.gradients import backward
from npattn.torch.engine.operations import SavedTensors
from npattn.torch.engine.outputs import forward, max_score, weights
from npattn.torch.engine.tangents import jvp

__all__ = ["SavedTensors", "backward", "forward", "jvp", "max_score", "weights"]
