"""Conventions of other systems, as a translation around the engine.

A `Problem` under `Conventions` becomes a canonical one (docs/semantics.md), an engine computes it,
and its results are translated back. The engines know nothing of conventions.
Each translation, with its gradient: docs/derivations/conventions.md.
"""

from npattn.conventions.fields import Conventions
from npattn.conventions.fields import check_conventions as check_conventions
from npattn.conventions.tangents import canonical_direction as canonical_direction
from npattn.conventions.tangents import translate_changes as translate_changes

__all__ = ["Conventions"]
__dir__ = __all__.copy
