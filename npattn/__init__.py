"""npattn: is this attention implementation right?

An oracle (`attention`, `forward`, `backward`: exact values and gradients, pure NumPy, float64) and
a judge (`npattn.testing`, and ``npattn check`` on the command line).
"""

from npattn import conventions, errors, masks
from npattn.api import attention, backward, forward, jvp
from npattn.conventions import Conventions
from npattn.multihead import MultiHeadAttention
from npattn.problem import Forward, Gradients, Problem

__version__ = "0.1.0"

__all__ = [
    "Conventions",
    "Forward",
    "Gradients",
    "MultiHeadAttention",
    "Problem",
    "attention",
    "backward",
    "conventions",
    "errors",
    "forward",
    "jvp",
    "masks",
]
