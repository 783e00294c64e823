"""jax.nn.dot_product_attention as a target, under ``jax.jit`` as programs run it.

Outside of it each call is traced anew, and each operation compiled for itself.
"""

import functools
from typing import Any

from npattn.errors import optional_import

with optional_import("the target jax.nn needs", "jax", "jax"):
    import jax


NAMES = (*("scale", "is_causal", "local_window_size"), *("implementation", "return_residual"))
attention = jax.jit(jax.nn.dot_product_attention, static_argnames=NAMES)


def _held_to(implementation: str) -> Any:
    """Return the same with one implementation alone."""
    held = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    return jax.jit(held, static_argnames=NAMES)


cudnn, xla = _held_to("cudnn"), _held_to("xla")
