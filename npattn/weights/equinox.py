"""Reading equinox.nn.MultiheadAttention."""

from __future__ import annotations

from typing import Any

from npattn.multihead import MultiHeadAttention
from npattn.weights.reading import (
    check_kind,
    dropout_error,
    loaded_package,
    optional,
    read,
    transpose,
)

__all__ = ["from_equinox"]


def from_equinox(module: Any) -> MultiHeadAttention:
    """Read the weights of an ``equinox.nn.MultiheadAttention``.

    Parameters
    ----------
    module : equinox.nn.MultiheadAttention
        Of any sizes, with any of its four biases. Its call takes one sequence, (T, query_size). A
        ``process_heads`` passed to that call is no part of the module.

    Returns
    -------
    MultiHeadAttention

    Raises
    ------
    OptionError
        If module is something else, a subclass with its own call, has a projection that is no
        ``equinox.nn.Linear``, or would drop weights as it stands.
    DtypeError
        If a weight is not floating.
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
    nn = loaded_package("equinox", "from_equinox").nn
    kinds = {"equinox.nn.MultiheadAttention": nn.MultiheadAttention}
    check_kind("module", module, kinds, ("__call__", "_project"))
    if module.dropout.p and not module.dropout.inference:
        cure = "equinox.nn.inference_mode(module)"
        raise dropout_error("module", module.dropout.p, "is not in inference mode", cure)
    arguments: dict[str, Any] = {"num_heads": module.num_heads}
    for letter, name in zip("qkvo", ("query", "key", "value", "output"), strict=True):
        linear = getattr(module, f"{name}_proj")
        check_kind(f"{name}_proj", linear, {"equinox.nn.Linear": nn.Linear}, ("__call__",))
        arguments[f"w{letter}"] = transpose(read(f"{name}_proj.weight", linear.weight))
        arguments[f"b{letter}"] = optional(f"{name}_proj.bias", linear.bias)
    return MultiHeadAttention(**arguments)
