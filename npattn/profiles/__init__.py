"""Known systems by name and version: what they mean, how they are called, what they promise."""

from npattn.profiles.flash_attn import FLASH_ATTN
from npattn.profiles.jax import NN
from npattn.profiles.onnx import ATTENTION, ATTENTION_1_22
from npattn.profiles.own import NPATTN
from npattn.profiles.profile import Profile
from npattn.profiles.torch import SDPA

__all__ = ["PROFILES", "Profile"]

PROFILES = {
    profile.name: profile for profile in (NPATTN, SDPA, NN, ATTENTION, ATTENTION_1_22, FLASH_ATTN)
}
"""The profiles of known systems, by name: "onnx" is the newest version, "onnx@1.22" another."""
