"""The judge of modules: attention with its projections inside, (B, T, C) in and out."""

from npattn.testing.modules.case import ModuleCase
from npattn.testing.modules.check import check_module, replay
from npattn.testing.modules.port import compare_module

__all__ = ["ModuleCase", "check_module", "compare_module", "replay"]
