"""haiku.MultiHeadAttention as a target, its projections the identity."""

from __future__ import annotations

from typing import Any

from npattn.errors import optional_import

with optional_import("the target haiku needs", "dm-haiku", "haiku"):
    import haiku as hk
    import jax
    from jax import numpy as jnp


@jax.jit  # type: ignore[untyped-decorator, unused-ignore]  # else its module is built anew
def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None = None
) -> Any:
    """Call the module on arrays (..., T, H, D), the heads side by side in its features.

    A product with the identity is exact for numbers; a NaN in one feature goes to all, as behind
    any projection.
    """
    (H, D), E = query.shape[-2:], value.shape[-1]
    if key.shape[-2] != H or value.shape[-2] != H or 0 in (H, D, E):
        raise ValueError("query, key and value must have the same heads, and one at least")
    module: Any = hk.transform(
        lambda *flat: hk.MultiHeadAttention(
            *(H, D), w_init=jnp.eye, with_bias=False, value_size=E, model_size=H * E
        )(*flat, mask=mask)
    )
    same = {"query": H * D, "key": H * D, "value": H * E, "linear": H * E}
    parameters = {
        f"multi_head_attention/{name}": {"w": jnp.eye(n, dtype=query.dtype)}
        for name, n in same.items()
    }
    flat = [x.reshape(*x.shape[:-2], -1) for x in (query, key, value)]
    out = module.apply(parameters, None, *flat)
    return out.reshape(*query.shape[:-1], E)
