"""npattn on torch tensors: the same names, on any device, differentiable by autograd.

Masks, biases and conventions are the same objects as in npattn.
"""

from typing import Any

import lazy_loader

import npattn
from npattn.errors import optional_import

with optional_import("npattn.torch needs", "torch", "torch"):
    import torch as _torch  # noqa: F401  checked once, here

_load, _, _names = lazy_loader.attach_stub(__name__, __file__)
_shared = {*dir(npattn)}.difference(_names, ["torch"])
"""Names of npattn that have no version for tensors."""
__all__ = [*_names, *sorted(_shared - {"plot"})]


def __dir__() -> list[str]:
    return sorted({*_names, *_shared})


def __getattr__(name: str) -> Any:
    return getattr(npattn, name) if name in _shared else _load(name)
