"""Reading and writing keras.layers.MultiHeadAttention and GroupQueryAttention."""

from typing import Any

from npattn.errors import OptionError
from npattn.multihead import MultiHeadAttention
from npattn.weights import exchange

NAMES = dict(zip("qkvo", ("query", "key", "value", "output"), strict=True))


def from_keras(layer: Any) -> MultiHeadAttention:
    """Read the weights of a ``keras.layers.MultiHeadAttention`` or ``GroupQueryAttention``.

    Parameters
    ----------
    layer : keras.layers.Layer
        Keras 3, on any backend, built: called once, or ``layer.build(query_shape, value_shape)``.
        Its call takes (query, value, key), `MultiHeadAttention.forward` (query, key, value).
        Its call decides on dropout; without ``training=True`` there is none. The gate of
        ``use_gate=True`` becomes wg and bg.

    Returns
    -------
    MultiHeadAttention

    Raises
    ------
    OptionError
        If layer is something else, a subclass with its own call, not built, quantised, or has a
        sliding window or attention over several axes.
    ShapeError
        If its output has several axes.
    MissingExtraError
        If keras is not installed.

    Examples
    --------
    >>> import keras
    >>> layer = keras.layers.MultiHeadAttention(num_heads=2, key_dim=3, value_dim=5)
    >>> layer.build((None, None, 7), (None, None, 11))
    >>> mha = from_keras(layer)
    >>> mha.wq.shape, mha.wv.shape, mha.wo.shape
    ((7, 6), (11, 10), (10, 7))
    """
    layers = exchange.loaded_package("keras", "from_keras").layers
    kinds = {
        f"keras.layers.{name}": getattr(layers, name)
        for name in ("MultiHeadAttention", "GroupQueryAttention")
    }
    exchange.check_kind("layer", layer, kinds, ("call", "_compute_attention", "_masked_softmax"))
    if not layer.built:
        raise OptionError("layer is not built, must be: layer.build(query_shape, value_shape)")
    config = layer.get_config()
    dense = {name: getattr(layer, f"_{name}_dense") for name in ("query", "key", "value")}
    dense["out"] = layer._output_dense
    if config.get("use_gate"):
        dense["gate"] = layer._gate_dense
    rank = len(dense["query"].equation.split(",")[0])
    axes = getattr(layer, "attention_axes", None)
    exchange.refuse(
        ("sliding_window", config.get("sliding_window"), "a window is given to forward"),
        ("attention_axes", axes if axes not in (None, (rank - 2,)) else None, "flatten the axes"),
        *((f"{n}.quantization_mode", d.quantization_mode, "dequantise") for n, d in dense.items()),
    )
    # A variable's value is a tensor of the backend; a kernel with LoRA is one already.
    kernels = {n: getattr(d.kernel, "value", d.kernel) for n, d in dense.items()}
    biases = {n: getattr(d.bias, "value", d.bias) for n, d in dense.items()}
    return exchange.from_kernels(kernels, biases)


def to_keras(mha: MultiHeadAttention, *, dtype: Any = None) -> Any:
    """Write a built ``keras.layers.MultiHeadAttention`` with the same bits.

    Parameters
    ----------
    mha : MultiHeadAttention
        With all biases or none. One with shared key/value heads becomes a
        ``keras.layers.GroupQueryAttention``, whose output is as wide as its query, and whose values
        have the size of queries.
    dtype : dtype, optional
        float64, float32, float16 or bfloat16, to which parameters are rounded; default their own.
        It becomes the dtype of the layer, in which it computes too.

    Returns
    -------
    keras.layers.Layer
        Its call takes (query, value, key).

    Raises
    ------
    OptionError
        If keras cannot represent the module: no output projection, some biases without the others,
        appended keys, ``merge="reshape"``, qk_norm, a gate; with shared heads also values or an
        output of another size; if parameters have several dtypes, overflow in `dtype`, or are
        float64 where the backend has none.
    DtypeError
        If `dtype` is another one.
    MissingExtraError
        If keras is not installed.

    Examples
    --------
    >>> import npattn
    >>> mha = npattn.MultiHeadAttention.init(6, 2, seed=0, value_size=5, dtype="float32")
    >>> to_keras(mha).value_dense.kernel.shape
    (6, 2, 5)
    """
    with exchange.needed_by("to_keras", "keras"):
        import keras
    H, K = mha.num_heads, mha.num_kv_heads
    out = None if mha.wo is None else mha.wo.shape[1]
    exchange.check_fits(
        "to_keras", mha,
        (K != H and out != len(mha.wq), f"wo has {out} columns, must have {len(mha.wq)} as query"),
        shares_heads=True, value_size=K == H,
    )  # fmt: skip
    p = exchange.read_parameters("to_keras", mha, dtype)
    options = {"use_bias": "bo" in p, "dtype": p["wq"].dtype.name}
    options |= {"kernel_initializer": "zeros"}  # no random numbers are drawn
    if K == H:
        sizes = {"key_dim": mha.head_size, "value_dim": mha.value_size, "output_shape": out}
        layer = keras.layers.MultiHeadAttention(num_heads=H, **sizes, **options)
    else:
        layer = keras.layers.GroupQueryAttention(mha.head_size, H, K, **options)
    layer.build(*((None, None, len(p[name])) for name in ("wq", "wv", "wk")))
    for name, array in exchange.heads_apart(mha, p).items():
        dense = getattr(layer, f"_{NAMES[name[1]]}_dense")
        (dense.kernel if name[0] == "w" else dense.bias).assign(array)
    exchange.check_held("to_keras", layer._query_dense.kernel.value, p["wq"])
    return layer
