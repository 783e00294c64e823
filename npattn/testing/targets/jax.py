"""jax.nn.dot_product_attention as a target, under ``jax.jit`` as programs run it.

Outside of it each call is traced anew, and each operation compiled for itself.
"""

from npattn.errors import optional_import

with optional_import("the target jax.nn needs", "jax", "jax"):
    import jax


attention = jax.jit(
    jax.nn.dot_product_attention,
    static_argnames=(
        *("scale", "is_causal", "local_window_size"),
        *("implementation", "return_residual"),
    ),
)
