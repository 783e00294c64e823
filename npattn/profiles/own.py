"""npattn itself: the semantics as they are."""

from npattn.profiles.profile import Profile

__all__ = ["NPATTN"]

NPATTN = Profile(name="npattn", version="0.1", about="the semantics of npattn")
