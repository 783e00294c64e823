"""Multi-head attention as a module: its projections, heads and output projection."""

from npattn.multihead.multihead import MultiHeadAttention, MultiHeadForward, MultiHeadGradients

__all__ = ["MultiHeadAttention", "MultiHeadForward", "MultiHeadGradients"]
__dir__ = __all__.copy
