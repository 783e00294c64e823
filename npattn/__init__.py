"""npattn tells whether an attention implementation is right.

An oracle (`attention`, `forward`, `backward`: exact values and gradients, pure NumPy, float64) and
a judge (`npattn.testing`, and ``npattn check`` on the command line).
"""

import sys

if sys.argv[:1] == ["-m"] and "--untrusted" in sys.argv and not sys.flags.safe_path:
    sys.path.pop(0)  # the working folder, of code that nobody trusts: before anything is imported

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
# An import of all names asks for no package beside NumPy.
__all__ = [name for name in __all__ if name not in ("plot", "torch")]
