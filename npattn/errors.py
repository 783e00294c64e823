"""Errors: one class for each kind of mistake of a caller.

Every message names the argument, its value and the way out, so that nobody needs the source:
``<name> is/has <value>, must be <legal values> [<shapes>]``.
"""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "DtypeError", "InternalError", "MissingExtraError", "NpattnError", "OptionError", "ShapeError",
    "UnknownOptionError", "optional_import",
]  # fmt: skip
__dir__ = __all__.copy


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


@contextmanager
def optional_import(subject: str, package: str, extra: str = "") -> Iterator[None]:
    """Say how to install a package if it cannot be imported in the block.

    Parameters
    ----------
    subject : str
        Beginning of the message, as "npattn.plot needs".
    package : str
        Its name for pip, or several in words.
    extra : str, optional
        Extra of npattn that installs it; default: pip installs the package itself.

    Raises
    ------
    MissingExtraError
        If the block raises ImportError.
    """
    try:
        yield
    except ImportError as err:
        line = f"'npattn[{extra}]'" if extra else package
        raise MissingExtraError(
            f"{subject} {package}; npattn itself does not: pip install {line}"
        ) from err
