"""Refusals that are known before anything is asked: those of the profile, and what they mean."""

from __future__ import annotations

from npattn.problem.options import FEATURES
from npattn.profiles import Profile
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.cases.space import STRUCTURE


def read_refusals(
    implementation: Implementation,
) -> tuple[list[str], frozenset[str], frozenset[frozenset[str]]]:
    """Return what is not asked: a line each, structure, and options alone or together."""
    said, names = _refused_by_profile(implementation.profile)
    conventions = implementation.conventions
    fills = conventions.hidden_fill is not None or conventions.hidden_add is not None
    if fills and "mask or bias" in implementation.signature.meanings.values():
        said.append("mask and bias together: in one parameter the mask is −inf, and no fill")
        names.add("mask+bias")
    options = (frozenset(name.split("+")) for name in names)
    return (
        said,
        frozenset(names & set(STRUCTURE)),
        frozenset(x for x in options if x <= set(FEATURES)),
    )


def _refused_by_profile(profile: Profile | None) -> tuple[list[str], set[str]]:
    """Return what a profile does not promise: a line each, and the names."""
    if profile is None:
        return [], set()
    names = set(profile.refused_names)
    names |= {"D = 0", "E = 0"} if "E != D" in names else set()
    return [f"{line} (not promised by {profile.name})" for line in profile.refuses], names
