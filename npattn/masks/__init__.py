"""Masks: visible keys of each query, as small objects for ``mask=`` (True = may attend).

    causal  window  sliding  dilated  strided  chunked  global_tokens  lengths  documents
    prefix  tree  blocks  custom      & | ~ compose them

An object is no (T, S) array: it holds the arguments it was made from, and answers for a rectangle
of the scores (`Mask.tile`), for the range of keys that some rows see (`Mask.hull`), or for the
whole (`Mask.to_array`). Arrays that it holds are neither copied nor written to.

A mask knows some of its sizes: documents their T and S, lengths their batch axes.
"""

from npattn.masks.bands import causal, window
from npattn.masks.given import blocks, custom, tree
from npattn.masks.mask import Mask, of
from npattn.masks.patterns import chunked, dilated, global_tokens, sliding, strided
from npattn.masks.sequences import documents, lengths, prefix

__all__ = [
    "Mask", "blocks", "causal", "chunked", "custom", "dilated", "documents", "global_tokens",
    "lengths", "of", "prefix", "sliding", "strided", "tree", "window",
]  # fmt: skip
__dir__ = __all__.copy
