"""Conventions of other systems, as a translation around the engine.

A `Problem` under `Conventions` becomes a canonical one (docs/semantics.md), an engine computes it,
and its results are translated back. The engines know nothing of conventions.
Each translation, with its gradient: docs/derivations/conventions.md.
"""

from npattn.conventions.fields import Conventions
from npattn.conventions.fields import check_conventions as check_conventions

__all__ = ["Conventions"]


def __dir__() -> list[str]:
    return __all__
