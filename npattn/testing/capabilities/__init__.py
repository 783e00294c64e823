"""Find out what an implementation accepts, before the rules are asked."""

from npattn.testing.capabilities.later import (
    StructureRefusedError,
    blame_structure,
    refuse_structure,
)
from npattn.testing.capabilities.probe import Capabilities, probe
from npattn.testing.capabilities.probing import Finding

__all__ = [
    "Capabilities",
    "Finding",
    "StructureRefusedError",
    "blame_structure",
    "probe",
    "refuse_structure",
]
