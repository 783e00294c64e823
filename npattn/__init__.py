"""npattn tells whether an attention implementation is right.

An oracle (`attention`, `forward`, `backward`: exact values and gradients, pure NumPy, float64) and
a judge (`npattn.testing`, and ``npattn check`` on the command line).
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
# An import of all names asks for no package beside NumPy.
__all__ = [name for name in __all__ if name not in ("plot", "torch")]
