"""Linear attention: a feature map and a sum in place of the softmax, with decay and states."""

from npattn.variants.linear.api import attention, backward, forward
from npattn.variants.linear.features import FEATURE_MAPS, FeatureMap
from npattn.variants.linear.problem import LinearForward, LinearGradients, LinearProblem

__all__ = [
    "FEATURE_MAPS", "FeatureMap", "LinearForward", "LinearGradients", "LinearProblem", "attention",
    "backward", "forward",
]  # fmt: skip
