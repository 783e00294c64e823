"""Weights written to keras, flax and equinox: bits, forward, what they have no place for."""

import os

import ml_dtypes
import numpy as np
import pytest

from npattn import MultiHeadAttention, weights
from npattn.errors import DtypeError, OptionError
from npattn.weights.exchange import check_held
from tests.weights.running_error import U64, Layer
from tests.weights.test_weights import assert_same_bits, bits

os.environ.setdefault("KERAS_BACKEND", "torch")

B, T, S, D, E = 2, 5, 7, 3, 11
K, G = 2, 3
WIDTH, IN_K, IN_V, OUT = 13, 17, 19, 23
RNG = np.random.default_rng(0)
DTYPES = ("float64", "float32", "float16", "bfloat16")


def module(*, heads=G, kv=None, width=WIDTH, in_k=IN_K, in_v=IN_V, e=E, out=OUT, biases="qkvo",
           dtype="float64", raw=False, **options):  # fmt: skip
    """A module of these sizes with random weights; raw: any bits at all."""
    kv = heads if kv is None else kv
    shapes = {"wq": (width, heads * D), "wk": (in_k, kv * D), "wv": (in_v, kv * e)}
    shapes |= {"wo": (heads * e, out), "bq": (heads * D,), "bk": (kv * D,), "bv": (kv * e,)}
    shapes |= {"bo": (out,), "norm_q": (D,), "norm_k": (D,)}
    shapes |= {"norm_q_bias": (D,), "norm_k_bias": (D,)}
    names = [n for n in shapes if n[0] == "w" or (n[0] == "b" and n[1] in biases)]
    names += options.pop("norms", ())
    make = bits if raw else lambda shape, dtype: (0.4 * RNG.standard_normal(shape)).astype(dtype)
    p = {n: make(shapes[n], dtype) for n in names}
    return MultiHeadAttention(**p, num_heads=heads, num_kv_heads=kv, **options)


LINEN = {"in_v": IN_K, "e": D}
NORMS = {"norms": ("norm_q", "norm_k"), "qk_norm": "layer"}
BOTH = {"norms": ("norm_q", "norm_k", "norm_q_bias", "norm_k_bias"), "qk_norm": "layer"}
SHARED = {"heads": K * G, "kv": K}
# Writer, its arguments, and modules that it has a place for.
TARGETS = {
    "keras": (weights.to_keras, weights.from_keras, {}, {
        "all sizes": {}, "no bias": {"biases": ""},
        "shared heads": SHARED | {"e": D, "out": WIDTH},
        "shared heads without bias": SHARED | {"e": D, "out": WIDTH, "biases": ""},
    }),
    "linen": (weights.to_flax, weights.from_flax, {"api": "linen"},
              {"plain": {"e": D}, "no bias": {"e": D, "biases": ""}, "norms": {"e": D} | NORMS}),
    "nnx": (weights.to_flax, weights.from_flax, {"api": "nnx"}, {
        "plain": LINEN, "no bias": LINEN | {"biases": ""}, "shared heads": LINEN | SHARED,
        "norms": LINEN | NORMS | {"norm_eps": 0.3}, "norms with bias": LINEN | BOTH,
        "a norm without factors": LINEN | {"qk_norm": "layer", "norms": ("norm_k_bias",)},
        "rms": LINEN | NORMS | {"qk_norm": "rms"},
        "one factor": LINEN | {"qk_norm": "rms", "norms": ("norm_k",)},
    }),
    "equinox": (weights.to_equinox, weights.from_equinox, {},
                {"all sizes": {}, "no bias": {"biases": ""}, "one bias": {"biases": "v"}}),
}  # fmt: skip
CASES = [(target, case) for target, (*_, cases) in TARGETS.items() for case in cases]


def require(target):
    """Skip without the framework; JAX in 64-bit mode. Linen's variables need none."""
    if target == "keras":
        pytest.importorskip("torch")
        keras = pytest.importorskip("keras")
        if keras.backend.backend() != "torch":
            pytest.skip("keras was imported with another backend")
    elif target != "linen":
        pytest.importorskip("equinox" if target == "equinox" else "flax.nnx")


@pytest.fixture
def wide_jax():
    """JAX in 64-bit mode, where it is there."""
    try:
        import jax
    except ImportError:
        yield
        return
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


FIRST = [(target, next(iter(cases)), dtype) for target, (*_, cases) in TARGETS.items()
         for dtype in DTYPES[1:]]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "case", "dtype"), [(*case, "float64") for case in CASES] + FIRST
)
def test_round_trip_keeps_every_bit(wide_jax, target, case, dtype):
    require(target)
    write, read, options, cases = TARGETS[target]
    # Keras brings bfloat16 to torch through float32, which keeps numbers but not all NaN.
    raw = (target, dtype) != ("keras", "bfloat16")
    mha = module(**cases[case], dtype=dtype, raw=raw)
    kept = mha.replace(**{n: x.copy() for n, x in mha.parameters.items()})
    back = read(write(mha, **options))
    assert_same_bits(back, mha)
    assert_same_bits(mha, kept)
    assert not any(np.shares_memory(x, mha.parameters[n]) for n, x in back.parameters.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", TARGETS)
def test_other_dtype_is_rounded_once(wide_jax, target, dtype):
    require(target)
    write, read, options, cases = TARGETS[target]
    mha = module(**next(iter(cases.values())))
    back = read(write(mha, dtype=dtype, **options))
    for name, x in mha.parameters.items():
        assert back.parameters[name].tobytes() == x.astype(dtype).tobytes(), name


def run_keras(layer, query, key, value):
    torch = pytest.importorskip("torch")
    # Without scores it fuses, and in float64 then rounds to float32 on the way.
    arguments = map(torch.from_numpy, (query, value, key))
    return layer(*arguments, return_attention_scores=True)[0].detach().numpy()


def run_linen(variables, query, key, value):
    linen = pytest.importorskip("flax.linen")
    params = variables["params"]
    _, H, size = params["query"]["kernel"].shape
    layer = linen.MultiHeadDotProductAttention(
        H, qkv_features=H * size, out_features=params["out"]["kernel"].shape[-1],
        use_bias="bias" in params["out"], normalize_qk="query_ln" in params,
        param_dtype="float64",
    )  # fmt: skip
    return layer.apply(variables, query, key, value)


def run_nnx(layer, query, key, value):
    # With sow_weights flax computes itself: what it calls in JAX takes the softmax in float32.
    return layer(query, key, value, sow_weights=True)


def run_equinox(layer, query, key, value):
    return np.stack([layer(*(x[i] for x in (query, key, value))) for i in range(B)])


RUN = {"keras": run_keras, "linen": run_linen, "nnx": run_nnx, "equinox": run_equinox}


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize(("target", "case"), CASES)
def test_written_layer_computes_the_same(wide_jax, target, case):
    require(target)
    write, _, options, cases = TARGETS[target]
    mha = module(**cases[case])
    query, key, value = (
        RNG.standard_normal((B, n, len(w))) for n, w in ((T, mha.wq), (S, mha.wk), (S, mha.wv))
    )
    out = np.asarray(RUN[target](write(mha, **options), query, key, value))
    formulas = Layer(filled(mha), query, key, value=value, u=U64).forward()
    assert (abs(out - formulas.value) <= 2 * formulas.error).all()
    fwd = mha.forward(query, key, value)
    assert (abs(fwd.out - formulas.value) <= 2 * formulas.error).all()


def filled(mha):
    """With factors of 1 and terms of 0 in its norms, where there are none."""
    if mha.qk_norm is None:
        return mha
    ones = {n: np.ones(D) for n in ("norm_q", "norm_k") if getattr(mha, n) is None}
    names = ("norm_q_bias", "norm_k_bias") if mha.qk_norm == "layer" else ()
    return mha.replace(**ones, **{n: np.zeros(D) for n in names if getattr(mha, n) is None})


COMMON = [
    ({"wo": None, "bo": None}, "wo is None; the heads are always projected there"),
    ({"bias_k": np.ones(G * D), "bias_v": np.ones(G * D)}, "got bias_k and bias_v; no keys are ap"),
    ({"add_zero_attn": True}, "add_zero_attn is True; no keys are appended there"),
    ({"merge": "reshape"}, "merge is 'reshape', must be \"concat\""),
    ({"wg": np.ones((WIDTH, G * D))}, "got wg, must be None: no gate is written there"),
]
SOME = ({"bk": None}, "got some of bq, bk, bv, bo; all or none are there")
UNSHARED = (
    module(**SHARED, e=D, in_v=IN_K).parameters | {"num_heads": K * G, "num_kv_heads": K},
    r"num_kv_heads is 2, must be 6 as num_heads: none are shared there \(mha.unshared",
)
OTHER_E = ({"wv": np.ones((IN_K, G * E)), "bv": None, "wo": np.ones((G * E, OUT))},
           "heads of values have size 11, must be 3")  # fmt: skip
NORMED = ({"qk_norm": "rms"}, "qk_norm is 'rms', must be None: heads are not normalised there")
ONES = {"norm_q": np.ones(D), "norm_k": np.ones(D)}
REFUSALS = {
    "keras": [*COMMON, SOME, NORMED,
              (UNSHARED[0] | {"wo": np.ones((K * G * D, OUT))}, "wo has 23 columns, must have 13"),
              (module(**SHARED, out=WIDTH).parameters | {"num_heads": K * G, "num_kv_heads": K},
               "heads of values have size 11, must be 3")],
    "linen": [*COMMON, SOME, UNSHARED, OTHER_E,
              (ONES | {"qk_norm": "rms"}, "qk_norm is 'rms' with norm_k, norm_q and norm_eps 1"),
              (ONES | {"qk_norm": "layer", "norm_eps": 0.1}, "and norm_eps 0.1, must be"),
              ({"qk_norm": "layer"}, "with no factors and norm_eps 1e-06, must be"),
              (ONES | {"qk_norm": "layer", "norm_k_bias": np.ones(D)}, "norm_k_bias, norm_q and")],
    "nnx": [*COMMON, SOME, OTHER_E,
            ({"wv": np.ones((IN_V, G * D))}, "wk has 17 rows, wv 19, must be equal"),
            ({"qk_norm": "rms", "norm_q_bias": np.ones(D)}, "nnx.RMSNorm has none")],
    "equinox": [*COMMON, UNSHARED, NORMED],
}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [(t, *pair) for t, pairs in REFUSALS.items() for pair in pairs],
)
def test_part_without_a_place_is_refused_by_name(target, changes, message):
    require(target)
    write, _, options, _ = TARGETS[target]
    mha = module(**LINEN)
    mha = MultiHeadAttention(**(mha.parameters | {"num_heads": G} | changes))
    with pytest.raises(OptionError, match=rf"{message}.*\[to_\w+ of MultiHeadAttention\("):
        write(mha, **options)


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({}, {"dtype": "int32"}, DtypeError, "dtype is int32, must be one of bfloat16, float16"),
        ({}, {"dtype": "float31"}, DtypeError, "dtype is 'float31', must be one of bfloat16"),
        ({"bq": np.ones(G * D, np.float32)}, {}, OptionError,
         "parameters are float32, float64, must be one: pass dtype="),
        ({"bq": np.full(G * D, 1e39)}, {"dtype": "float32"}, OptionError,
         "bq has numbers beyond the range of float32"),
        ({"bq": np.ones(G * D, complex)}, {"dtype": "float32"}, DtypeError,
         "bq is complex128, must be real"),
        ({"bq": np.ones(G * D, np.longdouble), "wq": np.ones((WIDTH, G * D), np.longdouble)}, {},
         OptionError, r"parameters are \w+, \w+, must be one: pass dtype="),
        ({}, {"api": "haiku"}, OptionError, "api is 'haiku', must be one of linen, nnx"),
        ({"wq": np.ones((WIDTH, 0)), "wk": np.ones((IN_K, 0)), "bq": None, "bk": None}, {},
         OptionError, "heads of values have size 3, must be 0"),
    ],
)  # fmt: skip
def test_illegal_dtype_or_argument_is_refused(changes, options, error, message):
    with pytest.raises(error, match=message):
        weights.to_flax(module(**LINEN).replace(**changes), **options)


def test_heads_of_size_0_are_refused():
    mha = MultiHeadAttention(*(np.ones((5, 0)) for _ in range(3)), np.ones((0, 5)), num_heads=2)
    with pytest.raises(OptionError, match="heads have sizes 0 and 0, must be 1 or more"):
        weights.to_flax(mha)


def test_infinite_weights_are_not_taken_for_overflow():
    mha = module(**LINEN)
    mha.bq[0] = np.inf
    assert np.isinf(weights.to_flax(mha, dtype="float16")["params"]["query"]["bias"][0, 0])


def test_other_byte_order_is_written_as_its_numbers():
    mha = module(**LINEN)
    other = mha.replace(**{n: x.astype(">f8") for n, x in mha.parameters.items()})
    assert_same_bits(weights.from_flax(weights.to_flax(other)), mha)


@pytest.mark.parametrize("target", ["nnx", "equinox"])
def test_float64_is_not_narrowed_silently(target):
    require(target)
    jax = pytest.importorskip("jax")
    write, _, options, cases = TARGETS[target]
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    try:
        with pytest.raises(OptionError, match=r"a parameter is float64, but to_\w+ can only ho"):
            write(module(**next(iter(cases.values()))), **options)
    finally:
        jax.config.update("jax_enable_x64", before)


def test_narrower_array_than_given_is_named():
    with pytest.raises(OptionError, match="a parameter is float64, but to_x can only hold it as f"):
        check_held("to_x", np.zeros(3, np.float32), np.zeros(3))
    check_held("to_x", np.zeros(3), np.zeros(3))


def test_keras_draws_no_random_numbers():
    require("keras")
    torch = pytest.importorskip("torch")
    state = torch.random.get_rng_state()
    weights.to_keras(module())
    assert (torch.random.get_rng_state() == state).all()


def test_names_of_narrow_dtypes_are_known():
    assert np.dtype("bfloat16") == ml_dtypes.bfloat16
