"""Find out what an implementation accepts, before the rules are asked."""

from npattn.testing.capabilities.conditions import blame_condition, leave_out
from npattn.testing.capabilities.later import StructureRefusedError, blame_structure
from npattn.testing.capabilities.probe import Capabilities, probe
from npattn.testing.capabilities.probing import Finding

__all__ = [
    "Capabilities",
    "Finding",
    "StructureRefusedError",
    "blame_condition",
    "blame_structure",
    "leave_out",
    "probe",
]
