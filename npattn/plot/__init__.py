"""Heat maps of attention weights, masks and errors, as matplotlib figures."""

from npattn.errors import MissingExtraError

try:
    import matplotlib as _  # noqa: F401  the modules of this folder need it
except ImportError as err:
    raise MissingExtraError(
        "npattn.plot needs matplotlib; npattn itself does not: pip install 'npattn[plot]'"
    ) from err

from npattn.plot.maps import error, head, heads, mask

__all__ = ["error", "head", "heads", "mask"]
