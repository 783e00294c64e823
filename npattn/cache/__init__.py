"""Attention on keys that lie in packed sequences, in pages, in a cache, or in several parts.

    varlen   varlen_forward   varlen_backward    sequences behind each other, without padding
    paged    paged_forward    paged_backward     keys in pages that a table finds
    append   append_backward                     new keys into a cache or into its pages
    merge    merge_backward                      results of parts of the keys into that of all
    unpack   pack                                q, k and v from one array, and into one

Arrays have the heads after the tokens, as in serving engines: q (total, H, D) or (B, T, H, D). Each
sequence is one problem of `npattn.forward`, so that all its options and rules hold.
"""

from npattn.cache.appending import CacheGradients, append, append_backward
from npattn.cache.merging import merge, merge_backward
from npattn.cache.packed import PackedForward, varlen, varlen_backward, varlen_forward
from npattn.cache.paging import PagedForward, paged, paged_backward, paged_forward
from npattn.cache.unpacking import pack, unpack

__all__ = [
    "CacheGradients", "PackedForward", "PagedForward", "append", "append_backward", "merge",
    "merge_backward", "pack", "paged", "paged_backward", "paged_forward", "unpack", "varlen",
    "varlen_backward", "varlen_forward",
]  # fmt: skip
__dir__ = __all__.copy
