"""Multi-head attention as a module: its projections, heads and output projection."""

from npattn.multihead.multihead import MultiHeadAttention, MultiHeadForward, MultiHeadGradients

__all__ = ["MultiHeadAttention", "MultiHeadForward", "MultiHeadGradients"]


def __dir__() -> list[str]:
    return __all__
