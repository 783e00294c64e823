"""What a caller can do wrong: one class a kind of mistake.

Every message reads ``<name> is/has <found>, <what it must be> [<shapes>]``, so that it can be
acted on without looking at the source.
"""

__all__ = [
    "DtypeError",
    "MissingExtraError",
    "NpattnError",
    "OptionError",
    "ShapeError",
    "UnknownOptionError",
]


class NpattnError(Exception):
    """The parent of every error that npattn raises on purpose."""


class ShapeError(NpattnError, ValueError):
    """An array has a rank or a size that does not fit the others."""


class DtypeError(NpattnError, TypeError):
    """An array has a dtype that cannot be meant here."""


class OptionError(NpattnError, ValueError):
    """An option has a value that is not legal, or not together with another option."""


class UnknownOptionError(OptionError, TypeError):
    """A keyword is no option; a TypeError too, as Python's own answer to an unknown keyword."""


class MissingExtraError(NpattnError, ImportError):
    """A part of npattn was used whose optional packages are not installed."""
