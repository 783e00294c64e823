"""Reading and writing flax's multi-head attention, nnx and linen."""

import sys
from collections.abc import Mapping
from typing import Any, Literal

from npattn.errors import OptionError
from npattn.multihead import MultiHeadAttention
from npattn.problem.arrays import Array
from npattn.problem.checks import check_choice
from npattn.weights import exchange

NAMES = dict(zip("qkvo", ("query", "key", "value", "out"), strict=True))


def from_flax(source: Any, params: Mapping[str, Any] | None = None) -> MultiHeadAttention:
    """Read the weights of flax's multi-head attention, nnx or linen.

    Parameters
    ----------
    source : nnx.MultiHeadAttention, linen.MultiHeadDotProductAttention, or params of the latter
        With or without bias and ``normalize_qk``; nnx also with ``num_kv_heads``, and with RMSNorm
        in place of LayerNorm. Params alone do not hold the options of the module: they are read
        with the default options.
    params : mapping, optional
        Params of a linen module that is not bound: ``{"query": ...}`` or ``{"params": {...}}``.

    Returns
    -------
    MultiHeadAttention

    Raises
    ------
    OptionError
        If source is something else, a subclass with its own call, has its own attention_fn, einsum
        or dot_general, decodes, would drop weights as it stands, or params has other names.
    ShapeError
        If params are not those of one attention, but of several stacked, say.
    MissingExtraError
        If source is a module and flax is not installed.

    Examples
    --------
    >>> from flax import nnx
    >>> module = nnx.MultiHeadAttention(2, 5, 6, normalize_qk=True, rngs=nnx.Rngs(0))
    >>> mha = from_flax(module)
    >>> mha.wq.shape, mha.wo.shape, mha.qk_norm, mha.norm_q.shape
    ((5, 6), (6, 5), 'layer', (3,))
    """
    if isinstance(source, Mapping):
        if params is not None:
            raise OptionError("got params twice; pass them once, as source")
        return _from_params(source)
    exchange.loaded_package("flax", "from_flax")
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    kinds = {}
    if linen is not None:
        kinds["linen.MultiHeadDotProductAttention"] = linen.MultiHeadDotProductAttention
        kinds["linen.SelfAttention"] = linen.SelfAttention  # the same with one input
    if nnx is not None:
        kinds["nnx.MultiHeadAttention"] = nnx.MultiHeadAttention
    exchange.check_kind("source", source, kinds, ("__call__",))
    if linen is not None and isinstance(source, linen.Module):
        return _from_linen(linen, source, params)
    if params is not None:
        raise OptionError("got params with an nnx module, which has its own; pass None")
    return _from_nnx(nnx, source)


def _check_flax(module: Any, attention: Any) -> None:
    """Raise OptionError if the module drops weights, or is not plain attention."""
    if module.dropout_rate and module.deterministic is False:
        raise exchange.dropout_error(
            "source", module.dropout_rate, "is not deterministic", "deterministic=True"
        )
    other = module.attention_fn if module.attention_fn is not attention else None
    einsums = ("qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls",
               "qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls")  # fmt: skip
    exchange.refuse(
        ("attention_fn", other, "dot_product_attention is what it computes"),
        ("decode", module.decode or None, "its cache is no weight"),
        *((name, getattr(module, name, None), "plain products are taken") for name in einsums),
    )


def _from_linen(linen: Any, module: Any, params: Mapping[str, Any] | None) -> MultiHeadAttention:
    """Return the module of params, by default those bound; raise if its options contradict them."""
    _check_flax(module, linen.dot_product_attention)
    if params is None:
        if module.scope is None:
            raise OptionError("source is not bound, must be, or come with its params")
        params = {"params": module.variables.get("params", {})}
    mha = _from_params(params)
    for option, actual in (
        ("num_heads", mha.num_heads),
        ("normalize_qk", mha.qk_norm is not None),
        ("use_bias", mha.bq is not None),
    ):
        if getattr(module, option) != actual:
            value = getattr(module, option)
            raise OptionError(f"source has {option} {value}, but its params have {actual}")
    return mha


def _from_nnx(nnx: Any, module: Any) -> MultiHeadAttention:
    _check_flax(module, nnx.dot_product_attention)
    linear = {name: getattr(module, name) for name in ("query", "key", "value", "out")}
    for name, part in linear.items():
        exchange.check_kind(name, part, {"nnx.LinearGeneral": nnx.LinearGeneral}, ("__call__",))
    kernels = {n: x.kernel for n, x in linear.items()}
    norms = _nnx_norms(nnx, module) if module.normalize_qk else {}
    return exchange.from_kernels(kernels, {n: x.bias for n, x in linear.items()}, **norms)


def _nnx_norms(nnx: Any, module: Any) -> dict[str, Any]:
    """Read qk_norm and its parameters."""
    kinds = {"nnx.LayerNorm": nnx.LayerNorm, "nnx.RMSNorm": nnx.RMSNorm}
    options: dict[str, Any] = {}
    settings = set()
    for name in ("query_ln", "key_ln"):
        norm = getattr(module, name)
        exchange.check_kind(name, norm, kinds, ("__call__",))
        axes = (norm.reduction_axes, norm.feature_axes)
        exchange.refuse(
            (f"axes of {name}", None if axes == (-1, -1) else axes, "the last is normalised"),
            (f"axis_name of {name}", norm.axis_name, "nothing is shared between devices"),
        )
        options[f"norm_{name[0]}"] = exchange.optional(f"{name}.scale", norm.scale)
        # RMSNorm has none.
        options[f"norm_{name[0]}_bias"] = exchange.optional(
            f"{name}.bias", getattr(norm, "bias", None)
        )
        settings.add(("rms" if isinstance(norm, nnx.RMSNorm) else "layer", float(norm.epsilon)))
    if len(settings) > 1:
        raise OptionError(
            f"query_ln and key_ln are {exchange.join_names(settings)}, must be the same"
        )
    options["qk_norm"], options["norm_eps"] = settings.pop()
    return options


def _from_params(params: Mapping[str, Any]) -> MultiHeadAttention:
    """Read the params of one linen module: kernels, biases, and the two norms if any."""
    if set(params) == {"params"}:
        params = params["params"]
    dense, norms = ("query", "key", "value", "out"), ("query_ln", "key_ln")
    expected = {*dense, *norms} if set(params) & set(norms) else set(dense)
    exchange.check_names("params", params, expected, expected)
    for name in dense:
        exchange.check_names(f"params[{name!r}]", params[name], {"kernel"}, {"kernel", "bias"})
    options: dict[str, Any] = {}
    if "query_ln" in params:
        for name in norms:
            exchange.check_names(f"params[{name!r}]", params[name], {"scale"}, {"scale"})
            options[f"norm_{name[0]}"] = exchange.read(f"{name}.scale", params[name]["scale"])
        options |= {"qk_norm": "layer", "norm_eps": 1e-6}
    kernels = {name: params[name]["kernel"] for name in dense}
    return exchange.from_kernels(
        kernels, {name: params[name].get("bias") for name in dense}, **options
    )


def to_flax(
    mha: MultiHeadAttention, *, api: Literal["linen", "nnx"] = "linen", dtype: Any = None
) -> Any:
    """Write the variables of linen's attention, or an nnx module, with the same bits.

    Parameters
    ----------
    mha : MultiHeadAttention
        With all biases or none, and values of the size of queries.
    api : {"linen", "nnx"}
        "linen" returns ``{"params": {...}}`` of NumPy arrays, and needs no flax; "nnx" a
        ``flax.nnx.MultiHeadAttention``, which can share key/value heads.
    dtype : dtype, optional
        float64, float32, float16 or bfloat16, to which parameters are rounded; default their own.
        Flax then computes in the dtype that these and its inputs promote to.

    Returns
    -------
    dict or flax.nnx.MultiHeadAttention
        The variables are those of ``linen.MultiHeadDotProductAttention(num_heads=H,
        qkv_features=H * D, out_features=out, use_bias=..., normalize_qk=...)``.

    Raises
    ------
    OptionError
        If flax cannot represent the module: no output projection, some biases without the others,
        heads of values of another size, appended keys, a gate, ``merge="reshape"``, or a bias
        beside an RMS norm; in linen also shared key/value heads, and any qk_norm but "layer" with
        norm_q and norm_k, no biases and norm_eps 1e-6; in nnx keys and values of different width.
        If api is another word; if parameters have several dtypes, overflow in `dtype`, or are
        float64 where JAX is not in 64-bit mode.
    DtypeError
        If `dtype` is another one.
    MissingExtraError
        If flax is not installed.

    Examples
    --------
    >>> import npattn
    >>> mha = npattn.MultiHeadAttention.init(6, 2, seed=0)
    >>> to_flax(mha)["params"]["out"]["kernel"].shape
    (2, 3, 6)
    """
    check_choice("api", api, ("linen", "nnx"))
    return _to_linen(mha, dtype) if api == "linen" else _to_nnx(mha, dtype)


def _to_linen(mha: MultiHeadAttention, dtype: Any) -> dict[str, Any]:
    """Return params for linen's module; raise OptionError if it has no place for a part."""
    norms = {name for name in mha.parameters if name.startswith("norm")}
    wrong = mha.qk_norm is not None and (
        mha.qk_norm != "layer" or norms != {"norm_q", "norm_k"} or mha.norm_eps != 1e-6
    )
    factors = exchange.join_names(norms) or "no factors"
    words = f"qk_norm is {mha.qk_norm!r} with {factors} and norm_eps {mha.norm_eps}, must be "
    words += '"layer" with norm_k, norm_q (which can be ones) and 1e-06'
    exchange.check_fits("to_flax", mha, (wrong, words), norms=True)
    arrays = exchange.heads_apart(mha, exchange.read_parameters("to_flax", mha, dtype))
    params: dict[str, Any] = {name: {} for name in NAMES.values()}
    for name, array in arrays.items():
        if name.startswith("norm"):
            params["query_ln" if name == "norm_q" else "key_ln"] = {"scale": array}
        else:
            params[NAMES[name[1]]]["kernel" if name[0] == "w" else "bias"] = array
    return {"params": params}


def _to_nnx(mha: MultiHeadAttention, dtype: Any) -> Any:
    """Return an nnx module of these weights; raise OptionError if it has no place for a part."""
    with exchange.needed_by("to_flax", "flax"):
        from flax import nnx
    biased = mha.norm_q_bias is not None or mha.norm_k_bias is not None
    rows = f"wk has {len(mha.wk)} rows, wv {len(mha.wv)}, must be equal"
    bias = 'got a bias beside qk_norm="rms", must be "layer": nnx.RMSNorm has none'
    wrong = ((len(mha.wk) != len(mha.wv), rows), (mha.qk_norm == "rms" and biased, bias))
    exchange.check_fits("to_flax", mha, *wrong, shares_heads=True, norms=True)
    p = exchange.read_parameters("to_flax", mha, dtype)
    exchange.check_held("to_flax", _jax_array(p["wq"]), p["wq"])
    module = nnx.MultiHeadAttention(
        mha.num_heads, len(p["wq"]), qkv_features=p["wq"].shape[1], out_features=p["wo"].shape[1],
        num_kv_heads=mha.num_kv_heads, in_kv_features=len(p["wk"]), param_dtype=p["wq"].dtype,
        use_bias="bo" in p, normalize_qk=mha.qk_norm is not None, decode=False,
        kernel_init=nnx.initializers.zeros_init(), rngs=nnx.Rngs(0),
    )  # fmt: skip
    if mha.qk_norm is not None:
        module.query_ln = _nnx_norm(nnx, mha, p, "q")
        module.key_ln = _nnx_norm(nnx, mha, p, "k")
    for name, array in exchange.heads_apart(mha, p).items():
        if not name.startswith("norm"):
            linear = getattr(module, NAMES[name[1]])
            part = "kernel" if name[0] == "w" else "bias"
            setattr(linear, part, nnx.Param(_jax_array(array)))
    return module


def _nnx_norm(nnx: Any, mha: MultiHeadAttention, p: Mapping[str, Array], letter: str) -> Any:
    """Return the norm of one letter, q or k, with the factors and biases that there are."""
    scale, bias = p.get(f"norm_{letter}"), p.get(f"norm_{letter}_bias")
    options = {"epsilon": mha.norm_eps, "use_scale": scale is not None, "rngs": nnx.Rngs(0)}
    options["param_dtype"] = p["wq"].dtype
    if mha.qk_norm == "rms":
        norm = nnx.RMSNorm(mha.head_size, **options)
    else:
        norm = nnx.LayerNorm(mha.head_size, use_bias=bias is not None, **options)
        if bias is not None:
            norm.bias = nnx.Param(_jax_array(bias))
    if scale is not None:
        norm.scale = nnx.Param(_jax_array(scale))
    return norm


def _jax_array(array: Array) -> Any:
    import jax

    return jax.numpy.asarray(array)
