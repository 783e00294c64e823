"""The judge: ``check(f)`` tests an attention implementation against every rule of the semantics.

Names are loaded when they are first used. To add rules, targets or mistakes, see
`npattn.testing.extend`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
