"""Weights: forward and gradients of each framework, bits, files, refusals."""

import copy
import dataclasses
import functools
import importlib
import json
import os
import stat
import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn import MultiHeadAttention, weights
from npattn.errors import DtypeError, MissingExtraError, NpattnError, OptionError, ShapeError
from npattn.weights import files
from tests.make import assert_same_bits

os.environ.setdefault("KERAS_BACKEND", "torch")

B, H, T, S, D, E, IN_Q, IN_K, IN_V, OUT = 2, 3, 5, 29, 7, 11, 13, 17, 19, 23
K, G = 3, 2  # key/value heads, and query heads that share one
RNG = np.random.default_rng(0)
MASK = np.random.default_rng(1).random((B, 1, T, S)) < 0.7
MASK[..., 0] = True  # systems differ on fully masked rows
INPUTS = ("query", "key", "value")

DTYPES = ("float64", "float32", "float16", "bfloat16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def normal(*shape):
    return RNG.standard_normal(shape)


def bits(shape, dtype):
    """Any bits at all: NaN with payloads, −0, subnormal numbers."""
    dtype = np.dtype(dtype)
    return np.frombuffer(RNG.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def fill(shapes, dtype="float64"):
    return {name: bits(shape, dtype) for name, shape in shapes.items()}


def assert_close(name, got, want, allowed=1e-12):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, name
    gap = abs(got - want).max() / abs(want).max()
    assert gap <= allowed, f"{name} is off by {gap:.2g} of its largest"


def assert_agrees(mha, inputs, dout, out, gradients, mask=None, allowed=1e-12):
    """The framework's out, and its gradients by our names, are those of mha; none is missing."""
    assert mha.wq.dtype == np.float64
    fwd = mha.forward(*inputs, mask)
    assert_close("out", out, fwd.out, allowed)
    want = mha.backward(fwd, dout)
    names = {n for n in (*INPUTS, *mha.parameters) if getattr(want, n) is not None}
    assert set(gradients) == names
    extra = mha.bias_k is not None or mha.add_zero_attn
    for name in names:
        exact = getattr(want, name)
        if name == ("bk" if mha.qk_norm is None else "norm_k_bias") and not extra:
            # It adds one number to all scores of a query, which changes nothing.
            rounding = allowed * abs(getattr(want, "bq" if name == "bk" else "norm_q_bias")).max()
            assert abs(exact).max() < rounding
            assert abs(np.asarray(gradients[name])).max() < rounding
        else:
            assert_close(name, gradients[name], exact, allowed)


def drawn(self_attention=False, unbatched=False, sizes=(IN_Q, IN_K, IN_V), out=OUT):
    lead = () if unbatched else (B,)
    if self_attention:
        inputs = (normal(*lead, T, sizes[0]),)
    else:
        lengths = (T, S, S)
        inputs = tuple(normal(*lead, n, size) for n, size in zip(lengths, sizes, strict=True))
    return inputs, normal(*lead, T, out)


# --- torch ----------------------------------------------------------------------------------------

EMBED = H * D
TORCH_MODULES = {
    "packed": {},
    "no bias": {"bias": False},
    "kdim and vdim": {"kdim": IN_K, "vdim": IN_V},
    "kdim alone": {"kdim": IN_K, "bias": False},
    "bias_k and bias_v": {"add_bias_kv": True},
    "a key of zeros": {"add_zero_attn": True},
    "all": {"kdim": IN_K, "vdim": IN_V, "add_bias_kv": True, "add_zero_attn": True},
}


def torch_module(dtype="float64", embed=EMBED, heads=H, **options):
    torch = pytest.importorskip("torch")
    module = torch.nn.MultiheadAttention(
        embed, heads, batch_first=True, dtype=torch.float64, **options
    )
    for parameter in module.parameters():
        parameter.data = torch.from_numpy(0.3 * normal(*parameter.shape))
    return module.to(getattr(torch, dtype))


def run_torch(module, inputs, dout, mask=None, **options):
    torch = pytest.importorskip("torch")
    leaves = [torch.tensor(x, requires_grad=True) for x in inputs]
    given = leaves * 3 if len(leaves) == 1 else leaves
    hidden = None
    if mask is not None:
        hidden = torch.from_numpy(np.repeat(~mask, H, axis=1).reshape(B * H, T, S))
    out, _ = module(*given, attn_mask=hidden, **options)
    out.backward(torch.from_numpy(dout))
    # Gradients lie as the parameters do, so that the importer says which is which.
    of_gradients = copy.deepcopy(module)
    for parameter, own in zip(of_gradients.parameters(), module.parameters(), strict=True):
        parameter.data = own.grad
    found = weights.from_torch(of_gradients).parameters
    found |= {name: leaf.grad for name, leaf in zip(INPUTS, leaves, strict=False)}
    return out.detach(), found


@pytest.mark.parametrize("options", TORCH_MODULES)
@pytest.mark.parametrize("mask", [None, MASK], ids=["all seen", "mask"])
@pytest.mark.parametrize("asked", [{}, {"need_weights": False}], ids=["weights", "fused"])
def test_torch_agrees_forward_and_backward(options, mask, asked):
    words = TORCH_MODULES[options]
    module = torch_module(**words)
    inputs, dout = drawn(sizes=(EMBED, module.kdim, module.vdim), out=EMBED)
    out, gradients = run_torch(module, inputs, dout, mask, **asked)
    assert_agrees(weights.from_torch(module), inputs, dout, out, gradients, mask)


@pytest.mark.parametrize("unbatched", [False, True])
def test_torch_agrees_in_self_attention(unbatched):
    module = torch_module(add_bias_kv=True)
    inputs, dout = drawn(True, unbatched, (EMBED,) * 3, EMBED)
    assert_agrees(weights.from_torch(module), inputs, dout, *run_torch(module, inputs, dout))


@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8, "float8_e4m3fnuz", "float8_e5m2fnuz"])
@pytest.mark.parametrize("options", TORCH_MODULES)
def test_round_trip_through_torch_keeps_every_bit(options, dtype):
    torch = pytest.importorskip("torch")
    module = torch_module(**TORCH_MODULES[options]).to(getattr(torch, dtype))
    for parameter in module.parameters():
        raw = torch.from_numpy(bits(parameter.shape, f"i{parameter.dtype.itemsize}").copy())
        parameter.data = raw.view(parameter.dtype)
    mha = weights.from_torch(module)
    assert {array.dtype for array in mha.parameters.values()} == {
        np.dtype(getattr(ml_dtypes, dtype, dtype))
    }
    back = weights.to_torch(mha)
    assert back.state_dict().keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        other = back.state_dict()[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        assert (other.view(torch.uint8) == tensor.view(torch.uint8)).all(), name
    assert_same_bits(weights.from_torch(back), mha)


def test_to_torch_module_trains_and_keeps_random_state():
    torch = pytest.importorskip("torch")
    mha = MultiHeadAttention.init(EMBED, H, seed=0, key_size=IN_K, value_in=IN_V, add_bias_kv=True)
    state = torch.random.get_rng_state()
    module = weights.to_torch(mha, batch_first=False)
    assert (torch.random.get_rng_state() == state).all()
    assert not module.batch_first
    assert weights.to_torch(mha).batch_first
    assert all(p.requires_grad and p.device.type == "cpu" for p in module.parameters())
    query, key, value = (torch.ones(n, B, size, dtype=torch.float64) for n, size in
                         ((T, EMBED), (S, IN_K), (S, IN_V)))  # fmt: skip
    module(query, key, value)[0].sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_arrays_and_tensors_share_no_memory():
    module = torch_module()
    mha = weights.from_torch(module)
    kept = mha.replace(**{n: x.copy() for n, x in mha.parameters.items()})
    for parameter in module.parameters():
        parameter.data += 1
    assert_same_bits(mha, kept)
    for parameter in weights.to_torch(mha).parameters():
        parameter.data += 1
    assert_same_bits(mha, kept)


def test_any_memory_layout_converts_to_torch():
    torch = pytest.importorskip("torch")
    mha = weights.from_torch(torch_module())
    odd = mha.replace(wq=np.asfortranarray(mha.wq), wk=mha.wk[::-1, ::-1][::-1, ::-1],
                      wv=mha.wv.astype(">f8"), bo=np.broadcast_to(mha.bo[:1], EMBED))  # fmt: skip
    same = weights.from_torch(weights.to_torch(odd))
    assert_same_bits(same, mha.replace(bo=np.repeat(mha.bo[:1], EMBED)))
    assert torch.is_tensor(weights.to_torch(odd).in_proj_weight)


def test_parametrised_weights_are_read_as_computed():
    torch = pytest.importorskip("torch")
    module = torch_module()
    torch.nn.utils.parametrize.register_parametrization(module, "in_proj_weight", torch.nn.Tanh())
    inputs, _ = drawn(True, sizes=(EMBED,) * 3, out=EMBED)
    out = module(*[torch.from_numpy(inputs[0])] * 3)[0].detach()
    assert_close("out", out, weights.from_torch(module).forward(*inputs).out)


def own_forward():
    torch = pytest.importorskip("torch")
    return type("Own", (torch.nn.MultiheadAttention,), {"forward": lambda self, q, k, v: q})(6, 2)


def integer_module():
    torch = pytest.importorskip("torch")
    module = torch_module()
    module.out_proj.weight = torch.nn.Parameter(torch.ones(EMBED, EMBED, dtype=torch.int8), False)
    return module


def complex_module():
    module = torch_module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls complex modules new
        return module.to(complex)


def torch_word(make):
    return lambda: make(pytest.importorskip("torch"))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: torch_module() and {}, OptionError, "module is a builtins.dict, must be a torch"),
        (torch_word(lambda torch: torch.nn.Linear(3, 5)), OptionError, r"is a torch\S*Linear, mus"),
        (own_forward, OptionError, "Own with its own forward, must be a torch.nn.Multihead"),
        (torch_word(lambda torch: torch.ao.nn.quantizable.MultiheadAttention(6, 2)), OptionError,
         "quantizable.* with its own forward"),
        (lambda: torch_module(dropout=0.25), OptionError, r"has dropout 0.25 and is in training m"),
        (torch_word(lambda torch: torch.nn.MultiheadAttention(6, 2, device="meta")), OptionError,
         "in_proj_weight is on the meta device, must be on one"),
        (integer_module, DtypeError, "out_proj.weight is torch.int8, must be a floating dtype"),
        (complex_module, DtypeError, "in_proj_weight is torch.complex128"),
    ],
)  # fmt: skip
def test_unsupported_torch_module_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        weights.from_torch(make())


def test_inactive_dropout_is_ignored():
    module = torch_module(dropout=0.25).eval()
    inputs, dout = drawn(True, sizes=(EMBED,) * 3, out=EMBED)
    assert_agrees(weights.from_torch(module), inputs, dout, *run_torch(module, inputs, dout))


def ours(**changes):
    """One that torch holds, with other parameters or options."""
    given = dict.fromkeys(("wq", "wk", "wv", "wo"), np.ones((6, 6)))
    given |= dict.fromkeys(("bq", "bk", "bv", "bo"), np.ones(6)) | {"num_heads": 2} | changes
    return MultiHeadAttention(**given)


NO_BIAS = dict.fromkeys(("bq", "bk", "bv", "bo"))


@pytest.mark.every
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wo": None, "bo": None}, "wo is None; the heads are always projected there"),
        ({"num_kv_heads": 1, "wk": np.ones((6, 3)), "wv": np.ones((6, 3))} | NO_BIAS,
         r"num_kv_heads is 1, must be 2 as num_heads: none are shared there \(mha.unsh"),
        ({"merge": "reshape"}, "merge is 'reshape', must be \"concat\""),
        ({"qk_norm": "rms"}, "qk_norm is 'rms', must be None"),
        ({"wq": np.ones((5, 6))}, r"wq has shape \(5, 6\), must be \(5, 5\): torch has H·D"),
        ({"wv": np.ones((5, 4)), "wo": np.ones((4, 6)), "bv": np.ones(4)}, r"wv has shape \(5, 4"),
        ({"wo": np.ones((6, 5)), "bo": np.ones(5)}, r"wo has shape \(6, 5\), must be \(6, 6\)"),
        ({"bk": None}, "got some of bq, bk, bv, bo; all or none are there"),
        ({"bo": None}, "got some of bq, bk, bv, bo; all or none are there"),
        ({"bv": np.ones(6, np.float32)}, "bv is float32, must be float64 as wq"),
        (dict.fromkeys(("wq", "wk", "wv", "wo"), np.ones((6, 6), complex)) | NO_BIAS,
         "wq is complex128, must be a real floating"),
        (dict.fromkeys(("wq", "wk", "wv", "wo"), np.ones((6, 6), np.longdouble)) | NO_BIAS,
         "must be a real floating dtype that torch has"),
        (dict.fromkeys(("wq", "wk", "wv", "wo"), np.ones((0, 0))) | NO_BIAS,
         "heads have sizes 0 and 0, must be 1 or more"),
    ],
)  # fmt: skip
def test_to_torch_refuses_unsupported_modules(changes, message):
    pytest.importorskip("torch")
    with pytest.raises(OptionError, match=message + r".*\[to_torch of MultiHeadAttention\("):
        weights.to_torch(ours(**changes))


def test_appended_keys_are_refused_by_all_but_torch():
    extra = {"bias_k": np.ones(6), "bias_v": np.ones(6)}
    for changes, message in (
        ({"add_zero_attn": True}, "add_zero_attn is T"),
        (extra, "got bias_k"),
    ):
        with pytest.raises(OptionError, match=rf"{message}.*\[to_flax of MultiHeadAttention\("):
            weights.to_flax(ours(**changes))


# --- keras ----------------------------------------------------------------------------------------


@pytest.fixture
def keras():
    pytest.importorskip("torch")
    found = pytest.importorskip("keras")
    if found.backend.backend() != "torch":
        # Its backend is chosen when it is imported, and gradients are taken through torch here.
        pytest.skip("keras was imported with another backend")
    return found


def keras_layer(
    keras, kind="MultiHeadAttention", sizes=(IN_Q, IN_V, IN_K), dtype="float64", **words
):
    own = {"num_heads": H, "key_dim": D}
    if kind == "GroupQueryAttention":
        own = {"num_query_heads": K * G, "num_key_value_heads": K, "head_dim": D}
    layer = getattr(keras.layers, kind)(**own, **words, dtype=dtype)
    layer.build(*((None, None, size) for size in sizes))  # query, value, key
    for variable in layer.trainable_variables:
        variable.assign(0.3 * normal(*variable.shape))
    return layer


def run_keras(layer, inputs, dout, mask=None, **options):
    torch = pytest.importorskip("torch")
    leaves = [torch.tensor(x, requires_grad=True) for x in inputs]
    query, key, value = leaves * 3 if len(leaves) == 1 else leaves
    mask = None if mask is None else torch.from_numpy(mask[:, 0])
    layer.zero_grad()
    out = layer(query, value, key, attention_mask=mask, **options)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(torch.from_numpy(dout))
    kept = [variable.value.detach().numpy().copy() for variable in layer.trainable_variables]
    for variable in layer.trainable_variables:
        variable.assign(variable.value.grad)
    found = weights.from_keras(layer).parameters
    for variable, value in zip(layer.trainable_variables, kept, strict=True):
        variable.assign(value)
    found |= {name: leaf.grad.numpy() for name, leaf in zip(INPUTS, leaves, strict=False)}
    return out.detach().numpy(), found


# Keras fuses where no scores are asked for, and in float64 then rounds to float32 on the way.
SCORES = {"return_attention_scores": True}
FUSED_AND_SCORES = [({}, 1e-5), (SCORES, 1e-12)]


KERAS = {
    "plain": {},
    "value size": {"value_dim": E},
    "value and output size": {"value_dim": E, "output_shape": OUT},
    "no bias": {"use_bias": False},
    "gate": {"use_gate": True, "value_dim": E},
    "gate without bias": {"use_gate": True, "use_bias": False},
}
SHARED = [{"use_bias": bias, "use_gate": gate} for bias in (True, False) for gate in (False, True)]


@pytest.mark.parametrize("mask", [None, MASK], ids=["all seen", "mask"])
@pytest.mark.parametrize("asked", FUSED_AND_SCORES, ids=["fused", "scores"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("MultiHeadAttention", options) for options in KERAS.values()]
    + [("GroupQueryAttention", options) for options in SHARED],
    ids=lambda x: "+".join(f"{n}={v}" for n, v in x.items()) if isinstance(x, dict) else x,
)
def test_keras_agrees_forward_and_backward(keras, kind, options, asked, mask):
    layer = keras_layer(keras, kind, **options)
    mha = weights.from_keras(layer)
    shares = kind == "GroupQueryAttention"
    assert (mha.num_heads, mha.num_kv_heads) == ((K * G, K) if shares else (H, H))
    inputs, dout = drawn(out=options.get("output_shape", IN_Q))
    words, allowed = asked
    out, gradients = run_keras(layer, inputs, dout, mask, **words)
    assert_agrees(mha, inputs, dout, out, gradients, mask, allowed)


def test_keras_agrees_in_self_attention(keras):
    layer = keras_layer(keras, sizes=(IN_Q, IN_Q), dropout=0.5)  # dropped only in training
    inputs, dout = drawn(True, out=IN_Q)
    assert_agrees(weights.from_keras(layer), inputs, dout, *run_keras(layer, inputs, dout))


def test_keras_agrees_along_last_of_several_axes(keras):
    layer = keras.layers.MultiHeadAttention(H, D, attention_axes=2, dtype="float64")
    inputs, dout = (normal(B, 3, T, IN_Q),), normal(B, 3, T, IN_Q)
    layer.build((None, None, None, IN_Q), (None, None, None, IN_Q))
    assert_agrees(weights.from_keras(layer), inputs, dout, *run_keras(layer, inputs, dout))


def test_keras_lora_weights_are_read_as_computed(keras):
    torch = pytest.importorskip("torch")
    layer = keras_layer(keras)
    layer.query_dense.enable_lora(2)
    layer.query_dense.lora_kernel_b.assign(normal(*layer.query_dense.lora_kernel_b.shape))
    inputs, _ = drawn()
    query, key, value = map(torch.from_numpy, inputs)
    out = layer(query, value, key, **SCORES)[0].detach()
    assert_close("out", out, weights.from_keras(layer).forward(*inputs).out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keras_weights_are_read_to_the_bit(keras, dtype):
    torch = pytest.importorskip("torch")
    layer = keras_layer(keras, dtype=dtype)
    tensor = layer.query_dense.kernel.value
    whole = bits((IN_Q, H * D), f"i{tensor.dtype.itemsize}")
    tensor.data = torch.from_numpy(whole.reshape(IN_Q, H, D).copy()).view(tensor.dtype)
    mha = weights.from_keras(layer)
    assert mha.wq.dtype.name == dtype
    assert mha.wq.tobytes() == whole.tobytes()


def own_keras(keras, method):
    def call(self, *args, **kwargs):
        raise NotImplementedError

    kind = type("Own", (keras.layers.MultiHeadAttention,), {method: call})
    layer = kind(H, D)
    layer.build((None, T, IN_Q), (None, S, IN_Q))
    return layer


def over_two_axes(keras):
    layer = keras.layers.MultiHeadAttention(H, D)
    layer.build((None, 3, 5, IN_Q), (None, 3, 5, IN_Q))
    return layer


def quantised(keras):
    layer = keras_layer(keras, dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy, at keras itself
        layer.value_dense.quantize("int8")
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda keras: keras.layers.Dense(3), r"layer is a keras\S+Dense, must be a keras.lay"),
        (lambda keras: keras.layers.MultiHeadAttention(H, D), r"layer is not built, must be: lay"),
        (lambda keras: keras_layer(keras, sliding_window=3), "sliding_window is 3, which"),
        (lambda keras: own_keras(keras, "call"), "with its own call"),
        (lambda keras: own_keras(keras, "_compute_attention"), "with its own _compute_attention"),
        (quantised, "value.quantization_mode is 'int8'"),
        (over_two_axes, r"attention_axes is \(1, 2\), which"),
        (lambda keras: keras_layer(keras, output_shape=(2, 3)), r"'out': \(3, 7, 2, 3\).*three"),
    ],
)
def test_unsupported_keras_layer_is_refused(keras, make, message):
    layer = make(keras)
    with pytest.raises((OptionError, ShapeError), match=message):
        weights.from_keras(layer)


# --- flax and equinox -----------------------------------------------------------------------------


@pytest.fixture
def jax():
    found = pytest.importorskip("jax")
    with found.enable_x64(True):
        yield found


def noisy(jax, tree):
    return jax.tree.map(lambda x: jax.numpy.asarray(0.3 * normal(*x.shape)), tree)


def run_jax(jax, apply, tree, inputs, dout, read):
    """out and gradients of a function of (tree, *inputs); read turns a tree into parameters."""
    inputs = [jax.numpy.asarray(x) for x in inputs]
    out, pull = jax.vjp(apply, tree, *inputs)
    dtree, *rest = pull(jax.numpy.asarray(dout))
    return out, read(dtree).parameters | dict(zip(INPUTS, rest, strict=False))


LINEN = {
    "plain": {"out_features": OUT},
    "no bias": {"use_bias": False},
    "norms": {"normalize_qk": True},
    "dropout that is off": {"dropout_rate": 0.5, "deterministic": True},
}


def linen_module(jax, inputs, **options):
    linen = pytest.importorskip("flax.linen")
    words = {"num_heads": H, "qkv_features": H * D, "param_dtype": "float64", **options}
    module = linen.MultiHeadDotProductAttention(**words)
    return module, noisy(jax, module.init(jax.random.key(0), *inputs))


@pytest.mark.parametrize("options", LINEN)
@pytest.mark.parametrize("mask", [None, MASK], ids=["all seen", "mask"])
def test_linen_agrees_forward_and_backward(jax, options, mask):
    words = LINEN[options]
    inputs, dout = drawn(out=words.get("out_features", IN_Q))
    module, params = linen_module(jax, inputs, **words)

    def apply(tree, *inputs):
        return module.apply(tree, *inputs, mask=mask)

    out, gradients = run_jax(jax, apply, params, inputs, dout, weights.from_flax)
    mha = weights.from_flax(module, params)
    assert_agrees(mha, inputs, dout, out, gradients, mask)
    assert_same_bits(weights.from_flax(params), mha)
    assert_same_bits(weights.from_flax(params["params"]), mha)
    assert_same_bits(weights.from_flax(module, params["params"]), mha)
    assert_same_bits(weights.from_flax(module.bind(params)), mha)


@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")
def test_linen_agrees_with_frozen_or_boxed_params(jax):
    linen = pytest.importorskip("flax.linen")
    flax = pytest.importorskip("flax")
    inputs, dout = drawn(True, out=IN_Q)
    module = linen.SelfAttention(num_heads=H, qkv_features=H * D, param_dtype="float64")
    params = noisy(jax, module.init(jax.random.key(0), *inputs))
    out, gradients = run_jax(jax, module.apply, params, inputs, dout, weights.from_flax)
    mha = weights.from_flax(module, params)
    assert_agrees(mha, inputs, dout, out, gradients)
    boxed = jax.tree.map(lambda x: linen.Partitioned(x, (None,) * x.ndim), params)
    assert_same_bits(weights.from_flax(flax.core.freeze(params)), mha)
    assert_same_bits(weights.from_flax(boxed), mha)


NNX = {
    "plain": {"out_features": OUT},
    "no bias": {"use_bias": False},
    "norms": {"normalize_qk": True},
    "norms without bias": {"normalize_qk": True, "use_bias": False},
    "shared heads": {"num_heads": K * G, "qkv_features": K * G * D, "num_kv_heads": K},
    "dropout that is off": {"dropout_rate": 0.5, "deterministic": True},
}


def nnx_module(jax, **options):
    nnx = pytest.importorskip("flax.nnx")
    words = {"num_heads": H, "in_features": IN_Q, "qkv_features": H * D, "in_kv_features": IN_K}
    words |= {"param_dtype": "float64", "decode": False, **options}
    module = nnx.MultiHeadAttention(**words, rngs=nnx.Rngs(0))
    nnx.update(module, noisy(jax, nnx.state(module, nnx.Param)))
    return module


SOW = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")


def run_nnx(jax, module, inputs, dout, mask=None):
    nnx = pytest.importorskip("flax.nnx")
    shape, params, rest = nnx.split(module, nnx.Param, ...)

    def apply(tree, *inputs):
        # With sow_weights flax computes itself: what it calls in JAX takes the softmax in float32.
        return nnx.merge(shape, tree, rest)(*inputs, mask=mask, sow_weights=True)

    def read(dtree):
        return weights.from_flax(nnx.merge(shape, dtree, rest))

    return run_jax(jax, apply, params, inputs, dout, read)


@SOW
@pytest.mark.parametrize("options", NNX)
@pytest.mark.parametrize("mask", [None, MASK], ids=["all seen", "mask"])
def test_nnx_agrees_forward_and_backward(jax, options, mask):
    module = nnx_module(jax, **NNX[options])
    inputs, dout = drawn(sizes=(IN_Q, IN_K, IN_K), out=NNX[options].get("out_features", IN_Q))
    out, gradients = run_nnx(jax, module, inputs, dout, mask)
    mha = weights.from_flax(module)
    assert mha.qk_norm == ("layer" if NNX[options].get("normalize_qk") else None)
    assert_agrees(mha, inputs, dout, out, gradients, mask)


@SOW
@pytest.mark.parametrize("norm", ["RMSNorm", "LayerNorm", "LayerNorm without scale"])
def test_nnx_agrees_with_replaced_norms(jax, norm):
    nnx = pytest.importorskip("flax.nnx")
    module = nnx_module(jax, normalize_qk=True)
    kind, *bare = norm.split()
    words = {"use_scale": False} if bare else {}
    for name in ("query_ln", "key_ln"):
        own = getattr(nnx, kind)(D, epsilon=0.03, param_dtype="float64", **words, rngs=nnx.Rngs(0))
        setattr(module, name, own)
    nnx.update(module, noisy(jax, nnx.state(module, nnx.Param)))
    mha = weights.from_flax(module)
    assert (mha.qk_norm, mha.norm_eps) == ("rms" if kind == "RMSNorm" else "layer", 0.03)
    assert (mha.norm_q is None) == bool(bare)
    assert (mha.norm_q_bias is None) == (kind == "RMSNorm")
    inputs, dout = drawn(sizes=(IN_Q, IN_K, IN_K), out=IN_Q)
    assert_agrees(mha, inputs, dout, *run_nnx(jax, module, inputs, dout))


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_weights_are_read_to_the_bit(jax, dtype):
    params = linen_params(dtype=dtype)
    mha = weights.from_flax(jax.tree.map(jax.numpy.asarray, params))
    assert_same_bits(mha, weights.from_flax(params))
    assert mha.wo.flags.writeable
    assert not np.shares_memory(weights.from_flax(params).wo, params["out"]["kernel"])


def linen_default(**options):
    def make(jax):
        module, params = linen_module(jax, drawn(True)[0])
        return module.clone(**options), params

    return make


def own_linen(jax):
    linen = pytest.importorskip("flax.linen")

    class Own(linen.MultiHeadDotProductAttention):
        def __call__(self, x):
            return x

    return (Own(num_heads=H),)


def nnx_with(change, **options):
    def make(jax):
        module = nnx_module(jax, **options)
        change(pytest.importorskip("flax.nnx"), module)
        return (module,)

    return make


def replaced(name, make):
    return lambda nnx, module: setattr(module, name, make(nnx))


def linen_params(norms=False, dtype="float64"):
    """Return the variables of a linen module, without flax: plain dicts of arrays."""
    params = {
        name: {"kernel": bits((size, H, D), dtype), "bias": bits((H, D), dtype)}
        for name, size in (("query", IN_Q), ("key", IN_K), ("value", IN_V))
    }
    params["out"] = {"kernel": bits((H, D, OUT), dtype)}
    if norms:
        params |= {name: {"scale": bits((D,), dtype)} for name in ("query_ln", "key_ln")}
    return params


def changed(*path, **values):
    """The params of a linen module with other entries at a path; None removes one."""
    params = linen_params(norms=True)
    at = functools.reduce(lambda tree, word: tree[word], path, params)
    at |= values
    for name in [n for n, value in values.items() if value is None]:
        del at[name]
    return params


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
def test_linen_params_are_read_without_flax(norms, dtype):
    params = linen_params(norms, dtype)
    mha = weights.from_flax({"params": params})
    assert_same_bits(mha, weights.from_flax(params))
    for name, letter in (("query", "q"), ("key", "k"), ("value", "v")):
        kernel, bias = params[name]["kernel"], params[name]["bias"]
        found = mha.parameters["w" + letter].reshape(kernel.shape)
        assert found.tobytes() == kernel.tobytes()
        assert mha.parameters["b" + letter].tobytes() == bias.tobytes()
    assert mha.wo.tobytes() == params["out"]["kernel"].tobytes()
    assert mha.wo.shape == (H * D, OUT)
    assert mha.bo is None
    assert (mha.num_heads, mha.num_kv_heads, mha.merge) == (H, H, "concat")
    assert (mha.qk_norm, mha.norm_eps) == (("layer", 1e-6) if norms else (None, mha.norm_eps))
    if norms:
        assert mha.norm_k.tobytes() == params["key_ln"]["scale"].tobytes()


@pytest.mark.every
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"params": {}, "cache": {}}, "params has no key, out, query, value, must"),
        (changed(gate={"kernel": 1}), "params has gate, must have no more than key, key_ln, out"),
        (changed(key_ln=None), "params has no key_ln, must have key, key_ln"),
        (changed(query=None), "params has no query, must"),
        (changed("out", kernel=None), r"params\['out'\] has no kernel, must"),
        (changed("out", lora_a=1), r"params\['out'\] has lora_a, must have no more than bias, ker"),
        (changed("query_ln", bias=1), r"params\['query_ln'\] has bias, must have no more than s"),
        (changed(value=np.ones((3, 5))), r"params\['value'\] is a numpy.ndarray, must be"),
        (changed("key", kernel=np.ones((2, IN_K, H, D))), "the kernels have shapes .*three axes"),
        (changed("key", kernel=np.ones((IN_K, H + 2, D))), "kernels have .* must agree on their h"),
        (changed("out", kernel=np.ones((D, H, OUT))), "the kernels have .* must agree on their he"),
        (changed("key", bias=np.ones((D, H))), r"the bias of key has shape \(7, 3\), must"),
        (changed("key", bias=np.ones((H, D), int)), "the bias of key is int64, must be floating"),
    ],
)
def test_illegal_linen_params_are_refused(params, message):
    with pytest.raises(NpattnError, match=message):
        weights.from_flax(params)


def test_params_passed_twice_are_refused():
    with pytest.raises(OptionError, match="got params twice"):
        weights.from_flax({}, {})


def nothing(*_):
    return None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda jax: (3,), "source is a builtins.int, must be a linen.MultiHeadDotProductAttentio"),
        (own_linen, "Own with its own __call__"),
        (lambda jax: linen_default()(jax)[:1], "source is not bound, must be, or come with"),
        (linen_default(decode=True), "decode is True, which MultiHeadAttention does not have"),
        (linen_default(dropout_rate=0.5, deterministic=False), "has dropout 0.5 and is not determ"),
        (linen_default(attention_fn=lambda q, k, v: q), "attention_fn is <function"),
        (linen_default(qkv_dot_general=nothing), "qkv_dot_general is <function"),
        (linen_default(num_heads=1), f"source has num_heads 1, but its params have {H}"),
        (linen_default(use_bias=False), "source has use_bias False, but its params have True"),
        (linen_default(normalize_qk=True), "source has normalize_qk True, but its params"),
        (nnx_with(nothing, decode=True), "decode is True"),
        (nnx_with(nothing, dropout_rate=0.5, deterministic=False), "has dropout 0.5 and is not de"),
        (nnx_with(nothing, attention_fn=nothing), "attention_fn is <function nothing"),
        (nnx_with(nothing, out_dot_general_cls=nothing), "out_dot_general_cls is <function"),
        (lambda jax: (nnx_module(jax), {}), "got params with an nnx module"),
        (nnx_with(replaced("key", lambda nnx: nnx.Linear(3, 5, rngs=nnx.Rngs(0)))),
         r"key is a flax.nnx\S+Linear, must be a nnx.LinearGeneral"),
        (nnx_with(replaced("key_ln", lambda nnx: nnx.RMSNorm(D, rngs=nnx.Rngs(0))),
                  normalize_qk=True), "query_ln and key_ln are .*, must be the same"),
        (nnx_with(replaced("key_ln", lambda nnx: nnx.GroupNorm(D, D, rngs=nnx.Rngs(0))),
                  normalize_qk=True), "key_ln is a .*GroupNorm, must be a nnx.LayerNorm or nnx.RM"),
        (nnx_with(replaced("query_ln", lambda nnx: nnx.LayerNorm(
            D, reduction_axes=(-2, -1), rngs=nnx.Rngs(0))), normalize_qk=True),
         r"axes of query_ln is \(\(-2, -1\), -1\), which"),
    ],
)  # fmt: skip
def test_unsupported_flax_module_is_refused(jax, make, message):
    pytest.importorskip("flax.linen")
    pytest.importorskip("flax.nnx")
    given = make(jax)
    with pytest.raises(NpattnError, match=message):
        weights.from_flax(*given)


def test_traced_jax_weights_are_refused(jax):
    pytest.importorskip("flax.linen")
    _, params = linen_module(jax, drawn(True)[0])
    with pytest.raises(DtypeError, match=r"the kernel of query is a jax.*Tracer"):
        jax.jit(lambda tree: weights.from_flax(tree).wq)(params)


EQUINOX = {
    "plain": {},
    "sizes": {"key_size": IN_K, "value_size": IN_V, "qk_size": D, "vo_size": E, "output_size": OUT},
    "all biases": {f"use_{name}_bias": True for name in ("query", "key", "value", "output")},
    "one bias": {"use_value_bias": True, "vo_size": E},
    "dropout that is off": {"dropout_p": 0.5, "inference": True},
}


def equinox_module(jax, size=IN_Q, **options):
    equinox = pytest.importorskip("equinox")
    options = {"dtype": "float64", **options}
    module = equinox.nn.MultiheadAttention(H, size, **options, key=jax.random.key(0))
    return jax.tree.map(
        lambda x: noisy(jax, x) if equinox.is_array(x) else x, module, is_leaf=equinox.is_array
    )


@pytest.mark.parametrize("options", EQUINOX)
@pytest.mark.parametrize("mask", [None, MASK[0, 0]], ids=["all seen", "mask"])
def test_equinox_agrees_forward_and_backward(jax, options, mask):
    equinox = pytest.importorskip("equinox")
    words = {"qk_size": D, "vo_size": D} | EQUINOX[options]
    module = equinox_module(jax, **words)
    params, static = equinox.partition(module, equinox.is_array)
    sizes = (IN_Q, words.get("key_size", IN_Q), words.get("value_size", IN_Q))
    inputs, dout = drawn(unbatched=True, sizes=sizes, out=words.get("output_size", IN_Q))

    def apply(tree, *inputs):
        return equinox.combine(tree, static)(*inputs, mask=mask)

    def read(dtree):
        return weights.from_equinox(equinox.combine(dtree, static))

    out, gradients = run_jax(jax, apply, params, inputs, dout, read)
    assert_agrees(weights.from_equinox(module), inputs, dout, out, gradients, mask)


def own_equinox(jax):
    equinox = pytest.importorskip("equinox")

    class Own(equinox.nn.MultiheadAttention):
        def __call__(self, x):
            return x

    return Own(1, 3, key=jax.random.key(0))


def equinox_with_identity(jax):
    equinox = pytest.importorskip("equinox")
    module = equinox_module(jax)
    return equinox.tree_at(lambda m: m.value_proj, module, equinox.nn.Identity())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda jax: jax.numpy.ones(3), "must be a equinox.nn.MultiheadAttention"),
        (own_equinox, "Own with its own __call__"),
        (equinox_with_identity, "value_proj is a equinox.*Identity, must be a equinox.nn.Linear"),
        (lambda jax: equinox_module(jax, dropout_p=0.5), "has dropout 0.5 and is not in inference"),
    ],
)
def test_unsupported_equinox_module_is_refused(jax, make, message):
    pytest.importorskip("equinox")
    with pytest.raises(OptionError, match=message):
        weights.from_equinox(make(jax))


# --- files ----------------------------------------------------------------------------------------

FULL_SHAPES = {
    "wq": (IN_Q, G * K * D), "wk": (IN_K, K * D), "wv": (IN_V, K * E), "wo": (G * K * E, OUT),
    "bq": (G * K * D,), "bk": (K * D,), "bv": (K * E,), "bo": (OUT,),
    "bias_k": (K * D,), "bias_v": (K * E,),
    "norm_q": (D,), "norm_k": (D,), "norm_q_bias": (D,), "norm_k_bias": (D,),
    "wg": (IN_Q, G * K * E), "bg": (G * K * E,),
}  # fmt: skip
FULL_OPTIONS = {"num_heads": G * K, "num_kv_heads": K, "add_zero_attn": True, "merge": "reshape",
                "qk_norm": "layer", "norm_eps": 0.1}  # fmt: skip


def full(dtype="float64", **changes):
    return MultiHeadAttention(**(fill(FULL_SHAPES, dtype) | FULL_OPTIONS | changes))


@pytest.fixture
def path(tmp_path):
    pytest.importorskip("safetensors")
    return tmp_path / "mha.safetensors"


@pytest.mark.parametrize("dtype", DTYPES)
def test_file_keeps_every_bit_and_option(path, dtype):
    mha = full(dtype)
    weights.save(mha, path)
    found = weights.load(path)
    assert_same_bits(found, mha)
    assert all(array.flags.writeable for array in found.parameters.values())
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_file_has_every_parameter_and_option():
    fields = {f.name for f in dataclasses.fields(MultiHeadAttention) if f.init and f.name != "_"}
    assert fields == set(FULL_SHAPES) | set(files.OPTIONS)
    assert set(full().options) == set(files.OPTIONS) == set(FULL_OPTIONS)


def test_memory_layouts_byte_orders_and_mixed_dtypes_are_saved(path):
    mha = full()
    odd = mha.replace(
        wq=np.asfortranarray(mha.wq),
        wk=mha.wk[::-1],
        wv=mha.wv.astype(">f8"),
        bo=np.broadcast_to(mha.bo[:1], OUT),
        bq=normal(*mha.bq.shape).astype(np.float32),
        add_zero_attn=np.True_,
    )
    weights.save(odd, str(path))
    plain = odd.replace(wv=odd.wv.astype("=f8"), add_zero_attn=True)
    assert_same_bits(weights.load(str(path)), plain)


sizes = st.sampled_from([0, 1, 2, 3])


@st.composite
def modules(draw):
    K, D, E = draw(st.sampled_from([1, 2])), draw(sizes), draw(sizes)
    G, in_q, in_k, in_v, out = draw(st.sampled_from([1, 3])), *(draw(sizes) for _ in range(4))
    shapes = {"wq": (in_q, G * K * D), "wk": (in_k, K * D), "wv": (in_v, K * E)}
    more = {"bq": (G * K * D,), "bk": (K * D,), "bv": (K * E,)}
    if draw(st.booleans()):
        shapes["wo"] = (G * K * E, out)
        more["bo"] = (out,)
    qk_norm = draw(st.sampled_from([None, "rms", "layer"]))
    if qk_norm:
        more |= dict.fromkeys(("norm_q", "norm_k", "norm_q_bias", "norm_k_bias"), (D,))
    shapes |= {n: shape for n, shape in more.items() if draw(st.booleans())}
    if draw(st.booleans()):
        shapes |= {"bias_k": (K * D,), "bias_v": (K * E,)}
    return MultiHeadAttention(
        **{n: bits(shape, draw(st.sampled_from(DTYPES))) for n, shape in shapes.items()},
        num_heads=G * K,
        num_kv_heads=K,
        add_zero_attn=draw(st.booleans()),
        merge=draw(st.sampled_from(["concat", "reshape"])),
        qk_norm=qk_norm,
        norm_eps=draw(st.floats(0, 1e300)),
    )


@given(mha=modules())
def test_generated_modules_survive_a_file(tmp_path_factory, mha):
    pytest.importorskip("safetensors")
    path = tmp_path_factory.mktemp("any") / "mha"
    weights.save(mha, path)
    assert_same_bits(weights.load(path), mha)


def test_other_tools_read_the_file(path):
    numpy_files = pytest.importorskip("safetensors.numpy")
    mha = full("float32")
    weights.save(mha, path)
    arrays = numpy_files.load_file(path)
    assert arrays.keys() == mha.parameters.keys()
    assert arrays["wo"].tobytes() == mha.wo.tobytes()
    with importlib.import_module("safetensors").safe_open(path, framework="np") as file:
        metadata = file.metadata()
    assert metadata["kind"] == "npattn.MultiHeadAttention"
    assert metadata["version"] == "1"
    assert json.loads(metadata["options"]) == FULL_OPTIONS
    assert json.loads(metadata["shapes"]) == {n: list(s) for n, s in FULL_SHAPES.items()}


def small():
    return MultiHeadAttention(**fill({"wq": (2, 2), "wk": (2, 2), "wv": (2, 3)}), num_heads=1)


def assert_whole_or_refused(path, mha):
    """A file whose bytes were changed loads as it was, or raises our error."""
    try:
        found = weights.load(path)
    except NpattnError as err:
        return str(path) not in str(err)
    assert_same_bits(found, mha)
    return True


def test_truncated_file_is_refused(path):
    mha = small()
    weights.save(mha, path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert not assert_whole_or_refused(path, mha), length
    path.write_bytes(data + b"\0")
    assert not assert_whole_or_refused(path, mha)
    path.write_bytes(data)
    assert assert_whole_or_refused(path, mha)


@pytest.mark.parametrize("flip", [0x01, 0x08, 0x20, 0x80, 0xFF])
def test_file_with_one_changed_byte_is_refused(path, flip):
    mha = small()
    weights.save(mha, path)
    data = path.read_bytes()
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ flip]) + data[i + 1 :])
        # 1e-06 may become 1E-06; what is not in the header has no second spelling.
        whole = assert_whole_or_refused(path, mha)
        assert not whole or data[i : i + 3] == b"e-0", (i, data[i])


@given(junk=st.binary(max_size=200))
def test_junk_is_refused(tmp_path_factory, junk):
    pytest.importorskip("safetensors")
    path = tmp_path_factory.mktemp("junk") / "mha"
    path.write_bytes(junk)
    assert not assert_whole_or_refused(path, small())


def write(path, mha=None, arrays=None, digest=True, **metadata):
    """A file as save writes it, but for what is given; with a digest that fits, if it can."""
    mha = small() if mha is None else mha
    arrays = dict(mha.parameters) if arrays is None else arrays
    given = {
        "kind": files.KIND,
        "version": files.VERSION,
        "options": json.dumps(mha.options),
        "shapes": json.dumps({name: array.shape for name, array in arrays.items()}),
    } | metadata
    given["sha256"] = "0"
    if digest and given["options"].endswith("}"):
        given["sha256"] = files._digest(json.loads(given["options"]), arrays)
    given = {name: value for name, value in given.items() if value is not None}
    path.write_bytes(pytest.importorskip("safetensors.numpy").save(arrays, given))


def with_option(**changes):
    options = small().options | changes
    return {"options": json.dumps({n: x for n, x in options.items() if x != "gone"})}


def arrays_with(**changes):
    return {n: x for n, x in (small().parameters | changes).items() if x is not None}


SHAPES = '{"wq": [2, 2], "wk": [2, 2], "wv": [2, 3]}'


@pytest.mark.every
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"kind": None}, OptionError, "is a safetensors file of wk, wq, wv, must be a file"),
        ({"kind": "other"}, OptionError, "is a safetensors file of wk, wq, wv, must be a file"),
        ({"version": "2"}, OptionError, "version is '2', must be '1'"),
        ({"version": None}, OptionError, "version is None, must be '1'"),
        ({"shapes": None}, OptionError, "metadata has no shapes, must have kind, options, sha256"),
        ({"more": "3"}, OptionError, "metadata has more, must have no more than"),
        ({"options": "{]"}, OptionError, "options is no JSON"),
        ({"options": "[" * 100_000}, OptionError, "options is no JSON"),
        ({"shapes": "[3]"}, OptionError, "shapes is a list, must be an object"),
        (with_option(num_heads="gone"), OptionError, "options has no num_heads, must have"),
        (with_option(dropout=0.5), OptionError, "options has dropout, must have no more than add_"),
        (with_option(num_heads="1"), OptionError, "num_heads is '1', must be an integer"),
        (with_option(num_heads=None), OptionError, "num_heads is None, must be an integer"),
        (with_option(num_heads=5, num_kv_heads=1), ShapeError, r"cannot be loaded: wq has shape"),
        (with_option(num_kv_heads=[1]), OptionError, r"num_kv_heads is \[1\], must"),
        (with_option(merge="sum"), OptionError, "merge is 'sum', must be one of"),
        (with_option(merge=["concat"]), OptionError, r"merge is \['concat'\], must be one of"),
        (with_option(norm_eps=-1.0), OptionError, "norm_eps is -1.0, must"),
        (with_option(norm_eps="x"), OptionError, "norm_eps is 'x', must"),
        (with_option(add_zero_attn=1), OptionError, "add_zero_attn is 1, must be True or False"),
        ({"arrays": arrays_with(wk=None), "shapes": SHAPES},
         OptionError, "the file has no wk, must have wk, wq, wv"),
        ({"arrays": arrays_with(wx=np.ones(3)), "shapes": SHAPES},
         OptionError, "the file has wx, must have no more than wk, wq, wv"),
        ({"shapes": '{"wq": [2, 2], "wk": [2, 2], "wv": [3, 2]}'},
         ShapeError, r"wv has shape \(2, 3\), must have that of the metadata, \[3, 2\]"),
        ({"arrays": arrays_with(wk=np.ones((2, 3)))}, ShapeError, r"wk has shape \(2, 3\), must"),
        ({"arrays": arrays_with(wk=np.ones((2, 2), int))}, OptionError, "wk is I64, must be one"),
        ({"arrays": arrays_with(wx=np.ones(3))}, OptionError, "has wx, must have no more than"),
        ({"arrays": arrays_with(wq=None)}, OptionError, "has no wq, must have"),
        ({"digest": False}, OptionError, r"sha256 is 0, must be \w{64}: the file was ch"),
    ],
)  # fmt: skip
def test_inconsistent_file_is_refused(path, given, error, message):
    write(path, **given)
    with pytest.raises(error, match=message) as caught:
        weights.load(path)
    assert str(path) in str(caught.value)


def test_consistent_handmade_file_is_loaded(path):
    mha = small()
    write(path, mha)
    assert_same_bits(weights.load(path), mha)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_foreign_safetensors_file_is_refused(path, metadata):
    tensors = {"model.layers.0.weight": np.ones((3, 5))}
    pytest.importorskip("safetensors.numpy").save_file(tensors, path, metadata)
    with pytest.raises(
        OptionError, match=r"is a safetensors file of model.layers.0.weight, must be"
    ):
        weights.load(path)


@pytest.mark.parametrize("header", [b"{}", b'{"__metadata__":null}', b'{"__metadata__":{}}'])
def test_empty_safetensors_file_is_refused(path, header):
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(OptionError, match="safetensors file"):
        weights.load(path)


def test_missing_file_raises_file_not_found(path):
    with pytest.raises(FileNotFoundError):
        weights.load(path)
    with pytest.raises(IsADirectoryError):
        weights.load(path.parent)
    with pytest.raises(FileNotFoundError):
        weights.save(small(), path.parent / "absent" / "mha")


@pytest.mark.parametrize("dtype", [complex, np.longdouble, ml_dtypes.float8_e4m3fn])
def test_unsupported_dtype_is_refused_before_writing(path, dtype):
    mha = small()
    weights.save(mha, path)
    with pytest.raises(OptionError, match=r"wv is .*, must be one of bfloat16, float16, float32"):
        weights.save(mha.replace(wv=np.ones((2, 3), dtype)), path)
    assert_same_bits(weights.load(path), mha)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failed_write_keeps_the_old_file(path, monkeypatch, call):
    mha = small()
    weights.save(mha, path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="disk full"):
        weights.save(full(), path)
    assert_same_bits(weights.load(path), mha)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_replaced_file_keeps_link_and_permissions(path):
    weights.save(small(), path)
    path.chmod(0o640)
    link = path.with_name("link")
    link.symlink_to(path)
    mha = full()
    weights.save(mha, link)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert_same_bits(weights.load(path), mha)


# --- what is not there ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("torch", lambda: weights.from_torch(object())),
        ("torch", lambda: weights.to_torch(ours())),
        ("keras", lambda: weights.from_keras(object())),
        ("flax", lambda: weights.from_flax(object())),
        ("equinox", lambda: weights.from_equinox(object())),
        ("keras", lambda: weights.to_keras(ours())),
        ("flax", lambda: weights.to_flax(ours(), api="nnx")),
        ("equinox", lambda: weights.to_equinox(ours())),
        ("safetensors", lambda: weights.save(ours(), "never written")),
        ("safetensors", lambda: weights.load("never read")),
        ("safetensors", lambda: weights.from_checkpoint("never read", 0)),
    ],
)
def test_missing_package_is_named_with_its_extra(monkeypatch, package, call):
    monkeypatch.setitem(sys.modules, package, None)
    extra = "weights" if package == "safetensors" else package
    message = rf"npattn.weights.\w+ needs {package}; .*: pip install 'npattn\[{extra}\]'"
    with pytest.raises(MissingExtraError, match=message):
        call()


@pytest.mark.parametrize("package", ["keras", "flax", "equinox"])
def test_unimported_framework_is_not_imported(monkeypatch, package):
    pytest.importorskip(package)
    monkeypatch.delitem(sys.modules, package, raising=False)
    message = f"from_{package} takes an object of {package}, which is not imported"
    with pytest.raises(OptionError, match=message):
        getattr(weights, f"from_{package}")(3)
    assert package not in sys.modules


def test_either_half_of_flax_suffices(jax, monkeypatch):
    module, params = linen_module(jax, drawn(True)[0])
    modern = nnx_module(jax)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "flax.nnx")
        assert weights.from_flax(module, params).num_heads == H
    monkeypatch.delitem(sys.modules, "flax.linen")
    assert weights.from_flax(modern).num_heads == H


def test_importing_weights_loads_no_framework():
    code = "import sys, npattn.weights; print(*sys.modules)"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "npattn.weights.files" in loaded
    assert loaded.isdisjoint({"torch", "jax", "keras", "flax", "equinox", "safetensors"})
