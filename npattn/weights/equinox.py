"""Reading and writing equinox.nn.MultiheadAttention."""

from typing import Any

from npattn.multihead import MultiHeadAttention
from npattn.weights import exchange

NAMES = dict(zip("qkvo", ("query", "key", "value", "output"), strict=True))


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
    nn = exchange.loaded_package("equinox", "from_equinox").nn
    kinds = {"equinox.nn.MultiheadAttention": nn.MultiheadAttention}
    exchange.check_kind("module", module, kinds, ("__call__", "_project"))
    if module.dropout.p and not module.dropout.inference:
        cure = "equinox.nn.inference_mode(module)"
        raise exchange.dropout_error("module", module.dropout.p, "is not in inference mode", cure)
    arguments: dict[str, Any] = {"num_heads": module.num_heads}
    for letter, name in NAMES.items():
        linear = getattr(module, f"{name}_proj")
        exchange.check_kind(f"{name}_proj", linear, {"equinox.nn.Linear": nn.Linear}, ("__call__",))
        arguments[f"w{letter}"] = exchange.transpose(
            exchange.read(f"{name}_proj.weight", linear.weight)
        )
        arguments[f"b{letter}"] = exchange.optional(f"{name}_proj.bias", linear.bias)
    return MultiHeadAttention(**arguments)


def to_equinox(mha: MultiHeadAttention, *, dtype: Any = None) -> Any:
    """Write an ``equinox.nn.MultiheadAttention`` with the same bits.

    Parameters
    ----------
    mha : MultiHeadAttention
        With any biases and any sizes of heads.
    dtype : dtype, optional
        float64, float32, float16 or bfloat16, to which parameters are rounded; default their own.

    Returns
    -------
    equinox.nn.MultiheadAttention
        Its call takes one sequence, (T, query_size).

    Raises
    ------
    OptionError
        If equinox cannot represent the module: shared key/value heads, no output projection,
        appended keys, ``merge="reshape"``, qk_norm, a gate; if parameters have several dtypes,
        overflow in `dtype`, or are float64 where JAX is not in 64-bit mode.
    DtypeError
        If `dtype` is another one.
    MissingExtraError
        If equinox is not installed.

    Examples
    --------
    >>> import npattn
    >>> mha = npattn.MultiHeadAttention.init(6, 2, seed=0, value_size=5, dtype="float32")
    >>> to_equinox(mha).value_proj.weight.shape
    (10, 6)
    """
    with exchange.needed_by("to_equinox", "equinox"):
        import equinox
        import jax
    exchange.check_fits("to_equinox", mha, separate_biases=True, value_size=True)
    p = exchange.read_parameters("to_equinox", mha, dtype)
    held = {name: jax.numpy.asarray(array) for name, array in p.items()}
    exchange.check_held("to_equinox", held["wq"], p["wq"])
    module = equinox.nn.MultiheadAttention(
        mha.num_heads, query_size=p["wq"].shape[0], key_size=p["wk"].shape[0],
        value_size=p["wv"].shape[0], output_size=p["wo"].shape[1], qk_size=mha.head_size,
        vo_size=mha.value_size,
        **{f"use_{name}_bias": "b" + letter in p for letter, name in NAMES.items()},
        key=jax.random.key(0),
    )  # fmt: skip
    for letter, name in NAMES.items():
        linear = getattr(module, f"{name}_proj")
        new = {"weight": held["w" + letter].T}
        new |= {"bias": held["b" + letter]} if "b" + letter in held else {}
        for part, value in new.items():
            linear = equinox.tree_at(lambda x, part=part: getattr(x, part), linear, value)
        module = equinox.tree_at(lambda m, name=name: getattr(m, f"{name}_proj"), module, linear)
    return module
