"""equinox.nn.MultiheadAttention, in."""

from __future__ import annotations

from typing import Any

from npattn.multihead import MultiHeadAttention
from npattn.weights.reading import check_kind, drops, loaded, optional, read, transposed

__all__ = ["from_equinox"]


def from_equinox(module: Any) -> MultiHeadAttention:
    """The weights of an ``equinox.nn.MultiheadAttention``.

    Parameters
    ----------
    module : equinox.nn.MultiheadAttention
        Of any sizes, with any of its four biases. Its call takes one sequence, (T, query_size), and
        a ``process_heads`` that is given to it then is no part of the module.

    Returns
    -------
    MultiHeadAttention

    Raises
    ------
    OptionError
        If it is something else, a subclass with a call of its own, has another thing than an
        ``equinox.nn.Linear`` for a projection, or would drop as it stands.
    MissingExtraError
        If equinox is not installed.

    Examples
    --------
    >>> import equinox, jax
    >>> module = equinox.nn.MultiheadAttention(2, 7, qk_size=3, vo_size=5, key=jax.random.key(0))
    >>> mha = from_equinox(module)
    >>> mha.wq.shape, mha.wv.shape, mha.wo.shape
    ((7, 6), (7, 10), (10, 7))
    """
    nn = loaded("equinox", "from_equinox").nn
    kinds = {"equinox.nn.MultiheadAttention": nn.MultiheadAttention}
    check_kind("module", module, kinds, ("__call__", "_project"))
    if module.dropout.p and not module.dropout.inference:
        cure = "equinox.nn.inference_mode(module)"
        raise drops("module", module.dropout.p, "is not in inference mode", cure)
    given: dict[str, Any] = {"num_heads": module.num_heads}
    for letter, name in zip("qkvo", ("query", "key", "value", "output"), strict=True):
        linear = getattr(module, f"{name}_proj")
        check_kind(f"{name}_proj", linear, {"equinox.nn.Linear": nn.Linear}, ("__call__",))
        given[f"w{letter}"] = transposed(read(f"{name}_proj.weight", linear.weight))
        given[f"b{letter}"] = optional(f"{name}_proj.bias", linear.bias)
    return MultiHeadAttention(**given)
