"""Plain attention under jax.jit: what the check of a function costs that is compiled anew."""

import jax  # type: ignore[import-not-found, unused-ignore]
import jax.numpy as jnp  # type: ignore[import-not-found, unused-ignore]


@jax.jit
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of arrays (..., T, D), (..., S, D) and (..., S, E)."""
    s = jnp.einsum("...td,...sd->...ts", q, k) * (1 / max(q.shape[-1], 1) ** 0.5)
    return jnp.einsum("...ts,...sd->...td", jax.nn.softmax(s, -1), v)
