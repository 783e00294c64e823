"""The attention inside equinox.nn.MultiheadAttention as a target."""

from __future__ import annotations

from typing import Any

from npattn.errors import optional_import

with optional_import("the target equinox needs", "equinox", "equinox"):
    import jax
    from equinox.nn._attention import dot_product_attention


@jax.jit  # type: ignore[untyped-decorator, unused-ignore]
def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> Any:
    """Call its dot_product_attention for every head, as its MultiheadAttention does."""
    attend: Any = dot_product_attention
    for _ in range(q.ndim - 2):
        attend = jax.vmap(attend, in_axes=(0, 0, 0, None))
    return attend(q, k, v, mask)
