"""Find out what an implementation accepts, before the rules are asked."""

from npattn.testing.capabilities.probe import Capabilities, probe
from npattn.testing.capabilities.probing import Finding

__all__ = ["Capabilities", "Finding", "probe"]
