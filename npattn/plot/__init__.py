"""Heat maps of attention weights, masks and errors, as matplotlib figures."""

from npattn.errors import optional_import

with optional_import("npattn.plot needs", "matplotlib", "plot"):
    import matplotlib as _  # noqa: F401  the modules of this folder need it

from npattn.plot.maps import error, head, heads, mask

__all__ = ["error", "head", "heads", "mask"]
__dir__ = __all__.copy
