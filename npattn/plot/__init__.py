"""Heat maps of attention weights, masks and errors, as matplotlib figures."""

from npattn.plot.maps import error, head, heads, mask

__all__ = ["error", "head", "heads", "mask"]
