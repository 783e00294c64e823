"""Known systems by name and version: what they mean, how they are called, what they promise."""

from difflib import get_close_matches

from npattn.errors import OptionError
from npattn.profiles import flash_attn, jax, kernels, runtimes, torch, transformers
from npattn.profiles.profile import Profile

__all__ = ["PROFILES", "Profile", "find_profile"]
__dir__ = __all__.copy


_KNOWN = [Profile(name="npattn", version="0.1", about="the semantics of npattn")]
for _module in (torch, flash_attn, jax, runtimes, kernels, transformers):
    _KNOWN += [one for one in vars(_module).values() if isinstance(one, Profile)]
PROFILES = {one.name: one for one in _KNOWN}
"""The profiles of known systems, by name: "onnx" is the newest version, "onnx@1.22" another."""


def find_profile(name: str) -> Profile:
    """Return the profile of a system."""
    if name not in PROFILES:
        near = get_close_matches(name, PROFILES, 1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise OptionError(f"like is {name!r}, must be a known system: {', '.join(PROFILES)}{hint}")
    return PROFILES[name]
