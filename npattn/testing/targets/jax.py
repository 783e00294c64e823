"""jax.nn.dot_product_attention as a target, under ``jax.jit`` as programs run it.

Outside of it each call is traced anew, and each operation compiled for itself.
"""

from npattn.errors import MissingExtraError

try:
    import jax  # type: ignore[import-not-found, unused-ignore]
except ImportError as err:
    raise MissingExtraError(
        "the target jax.nn needs jax; npattn itself does not: pip install 'npattn[jax]'"
    ) from err

__all__ = ["attention"]

attention = jax.jit(
    jax.nn.dot_product_attention,
    static_argnames=(
        *("scale", "is_causal", "local_window_size"),
        *("implementation", "return_residual"),
    ),
)
