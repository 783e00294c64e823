"""Errors: one class for each kind of mistake of a caller.

Every message names the argument, its value and the way out, so that nobody needs the source:
``<name> is/has <value>, must be <legal values> [<shapes>]``.
"""

__all__ = [
    "DtypeError",
    "InternalError",
    "MissingExtraError",
    "NpattnError",
    "OptionError",
    "ShapeError",
    "UnknownOptionError",
]


class NpattnError(Exception):
    """Parent of every error that npattn raises on purpose."""


class ShapeError(NpattnError, ValueError):
    """An array has a rank or a size that does not fit the others."""


class DtypeError(NpattnError, TypeError):
    """An array has a dtype that is not legal here."""


class OptionError(NpattnError, ValueError):
    """An option has an illegal value, or excludes another option of the call."""


class UnknownOptionError(OptionError, TypeError):
    """A keyword names no option; a TypeError too, like Python's own for an unknown keyword."""


class InternalError(NpattnError):
    """npattn itself is wrong: no input should lead here. Please report it."""


class MissingExtraError(NpattnError, ImportError):
    """Optional packages that a part of npattn needs are not installed."""
