"""Known systems by name and version: what they mean, how they are called, what they promise."""

from npattn.profiles.profile import Profile

__all__ = ["Profile"]
