"""attention, forward, backward, jvp: what goes in, what comes out, and what is refused."""

import importlib
import inspect

import numpy as np
import pytest

import npattn
from npattn import Conventions
from npattn.engines import dense
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.oracle import api
from npattn.problem.foreign import FOREIGN
from npattn.problem.options import FEATURES, OPTIONS

B, H, K, T, S, D, E = 2, 6, 3, 5, 7, 11, 13


def noise(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def inputs():
    return {"q": noise(B, H, T, D), "k": noise(B, K, S, D, seed=1), "v": noise(B, K, S, E, seed=2)}


MASK = noise(B, 1, T, S, seed=3) > -1
EVERY_OPTION = {
    "mask": MASK,
    "causal": "bottom_right",
    "window": (4, 1),
    "bias": noise(H, 1, S, seed=4),
    "scale": 0.7,
    "softcap": 3.0,
    "score_mod": lambda s, b, h, t, s_index: s + 0.1 * s**2 - 0.05 * h * (t - s_index) + 0.2 * b,
    "sinks": noise(H, seed=5),
    "dropout_mask": noise(1, T, S, seed=6) > -0.5,
    "dropout_rate": 0.25,
    "gate": noise(H, 1, E, seed=7),
}


# --- the forward pass -----------------------------------------------------------------------------


def test_attention_is_the_out_of_forward():
    np.testing.assert_array_equal(
        npattn.attention(**inputs(), **EVERY_OPTION), npattn.forward(**inputs(), **EVERY_OPTION).out
    )


@pytest.mark.parametrize("name", EVERY_OPTION)
def test_every_option_changes_something(name):
    # A window without causal is aligned otherwise, and a dropout mask is needed by its rate.
    options = {k: v for k, v in EVERY_OPTION.items() if not (k == name or k.startswith(name + "_"))}
    if name == "dropout_mask":
        del options["dropout_rate"]
    if name == "causal":
        del options["window"]
    with_it = npattn.attention(**inputs(), **options, **{name: EVERY_OPTION[name]})
    without_it = npattn.attention(**inputs(), **options)
    assert abs(with_it - without_it).max() > 1e-3


def test_mask_may_be_the_fourth_positional_argument():
    q, k, v = inputs().values()
    np.testing.assert_array_equal(
        npattn.attention(q, k, v, MASK), npattn.attention(q, k, v, mask=MASK)
    )
    np.testing.assert_array_equal(
        npattn.forward(q, k, v, MASK).out, npattn.attention(q, k, v, mask=MASK)
    )


def test_forward_says_what_was_asked_and_what_computed_it():
    fwd = npattn.forward(**inputs(), causal="top_left")
    assert isinstance(fwd.problem, npattn.Problem)
    assert fwd.problem.causal == "top_left"
    assert fwd.engine == "dense"


@pytest.mark.parametrize("dtype", ["float32", "float64", "longdouble", "complex64", "complex128"])
def test_everything_is_returned_in_the_dtype_computed_in(dtype):
    fwd = npattn.forward(
        **inputs(), bias=noise(T, S), sinks=noise(H), gate=noise(T, E), dtype=dtype
    )
    grads = npattn.backward(fwd, np.ones_like(fwd.out))
    for array in (fwd.out, fwd.lse, fwd.weights, fwd.max_score, *vars(grads).values()):
        if array is fwd.max_score:  # the largest of real parts
            assert array.dtype == np.empty(0, dtype).real.dtype
            continue
        assert array.dtype == np.dtype(dtype)


def test_float32_is_computed_in_float32():
    single, double = (npattn.attention(**inputs(), dtype=d) for d in ("float32", "float64"))
    assert 1e-9 < abs(single - double).max() < 1e-5


def test_mistakes_are_found_before_any_work():
    with pytest.raises(OptionError, match="engine is 'fast', must be one of"):
        npattn.attention(**inputs(), engine="fast")


# --- weights --------------------------------------------------------------------------------------


def test_weights_are_made_when_asked_for_and_once():
    fwd = npattn.forward(**inputs())
    assert "weights" not in vars(fwd)
    assert fwd.weights is fwd.weights


# --- rank 2 ---------------------------------------------------------------------------------------


def one_head(**options):
    return {"q": noise(T, D), "k": noise(S, D, seed=1), "v": noise(S, E, seed=2)} | options


def with_a_head(x):
    return x[None] if isinstance(x, np.ndarray) and x.shape != (1,) else x


ONE_HEAD_OPTIONS = {"mask": MASK[0, 0], "bias": noise(1, S), "sinks": noise(1), "window": (3, 3)}
ONE_HEAD_OPTIONS["gate"] = noise(T, 1)


def test_rank_2_results_have_no_head_axis():
    flat = npattn.forward(**one_head(**ONE_HEAD_OPTIONS))
    whole = npattn.forward(**{n: with_a_head(x) for n, x in one_head(**ONE_HEAD_OPTIONS).items()})
    assert flat.lse.shape == (T,)
    np.testing.assert_array_equal(flat.out, whole.out[0])
    np.testing.assert_array_equal(flat.lse, whole.lse[0])
    np.testing.assert_array_equal(flat.weights, whole.weights[0])


@pytest.mark.parametrize("conventions", [None, Conventions(empty_row="mean", hidden_fill=-3.0)])
def test_gradients_of_rank_2_inputs_have_rank_2(conventions):
    given = one_head(**ONE_HEAD_OPTIONS)
    fwd = npattn.forward(**given, conventions=conventions)
    grads = npattn.backward(fwd, fwd.out, fwd.lse, fwd.weights)
    assert {n: g.shape for n, g in vars(grads).items()} == {n: given[n].shape for n in vars(grads)}


def test_rank_2_gradients_are_those_of_one_head():
    given = one_head(**ONE_HEAD_OPTIONS)
    flat = npattn.forward(**given)
    whole = npattn.forward(**{n: with_a_head(x) for n, x in given.items()})
    got = npattn.backward(flat, flat.out, flat.lse, flat.weights)
    want = npattn.backward(whole, whole.out, whole.lse, whole.weights)
    for name in ("q", "k", "v", "bias"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name)[0])
    np.testing.assert_array_equal(got.sinks, want.sinks)


def test_rank_2_directions_give_rank_2_changes():
    fwd = npattn.forward(**one_head(**ONE_HEAD_OPTIONS))
    do, dlse = npattn.jvp(fwd, noise(T, D), noise(S, D), noise(S, E), noise(1, S), noise(1))
    assert do.shape == fwd.out.shape
    assert dlse.shape == fwd.lse.shape


# --- backward -------------------------------------------------------------------------------------


def test_gradients_that_have_no_input_are_none():
    fwd = npattn.forward(**inputs())
    grads = npattn.backward(fwd, fwd.out)
    assert grads.bias is None
    assert grads.sinks is None


def test_every_gradient_has_the_shape_of_its_input():
    given = {
        "q": noise(4, 1, H, T, D),
        "k": noise(1, 2, K, S, D),
        "v": noise(K, S, E),
        "bias": noise(4, 1, 1, 1, S),
        "sinks": noise(H),
        "gate": noise(4, 1, 1, 1, E),
    }
    fwd = npattn.forward(**given)
    grads = npattn.backward(fwd, fwd.out, fwd.lse, fwd.weights)
    assert fwd.out.shape == (4, 2, H, T, E)
    assert {n: g.shape for n, g in vars(grads).items()} == {n: x.shape for n, x in given.items()}


def test_no_cotangent_of_out_is_one_of_zero():
    fwd = npattn.forward(**inputs())
    dlse = noise(*fwd.lse.shape)
    np.testing.assert_array_equal(
        npattn.backward(fwd, None, dlse).k, npattn.backward(fwd, np.zeros_like(fwd.out), dlse).k
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_cotangents_may_be_narrow(dtype):
    fwd = npattn.forward(**inputs())
    dout = noise(*fwd.out.shape).astype(dtype)
    grads = npattn.backward(fwd, dout)
    assert grads.q.dtype == np.float64
    np.testing.assert_array_equal(grads.q, npattn.backward(fwd, dout.astype(np.float64)).q)


def test_a_complex_cotangent_gives_complex_gradients():
    fwd = npattn.forward(**inputs())
    do, other = noise(*fwd.out.shape), noise(*fwd.out.shape, seed=9)
    got = npattn.backward(fwd, do + 1j * other).q
    np.testing.assert_allclose(got.real, npattn.backward(fwd, do).q, atol=1e-13)
    np.testing.assert_allclose(got.imag, npattn.backward(fwd, other).q, atol=1e-13)


WRONG_COTANGENTS = {
    "dout without a batch": ({"dout": noise(H, T, E)}, ShapeError,
                             f"dout has shape {(H, T, E)}, but out has shape {(B, H, T, E)}"),
    "dout that broadcasts": ({"dout": noise(B, H, T, 1)}, ShapeError, "but out has shape"),
    "dout transposed": ({"dout": noise(B, T, H, E)}, ShapeError, "but out has shape"),
    "dlse with an axis too many": ({"dlse": noise(B, H, T, 1)}, ShapeError,
                                   f"dlse has shape {(B, H, T, 1)}, but lse has shape {(B, H, T)}"),
    "dweights of one head": (
        {"dweights": noise(B, 1, T, S)},
        ShapeError,
        f"dweights has shape {(B, 1, T, S)}, but weights has shape {(B, H, T, S)}",
    ),
    "dout as a number": ({"dout": 1.0}, ShapeError, "dout has shape (), but out has shape"),
    "integer dout": ({"dout": np.ones((B, H, T, E), int)}, DtypeError,
                     "dout is int64, must be floating"),
    "boolean dlse": ({"dlse": np.ones((B, H, T), bool)}, DtypeError, "dlse is bool, must be"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "words"), WRONG_COTANGENTS.values(), ids=WRONG_COTANGENTS
)
def test_error_of_a_wrong_cotangent_names_it(changes, error, words):
    fwd = npattn.forward(**inputs())
    with pytest.raises(error) as caught:
        npattn.backward(fwd, **({"dout": fwd.out} | changes))
    assert words in str(caught.value)


# --- jvp ------------------------------------------------------------------------------------------


def test_nothing_moves_without_a_direction():
    do, dlse = npattn.jvp(npattn.forward(**inputs()))
    assert (do == 0).all()
    assert (dlse == 0).all()


def test_dlse_of_an_empty_row_is_zero():
    fwd = npattn.forward(**inputs(), mask=np.zeros((T, S), bool))
    do, dlse = npattn.jvp(fwd, dq=noise(B, H, T, D), dv=noise(B, K, S, E))
    assert (do == 0).all()
    assert (dlse == 0).all()


@pytest.mark.parametrize("name", ["dbias", "dsinks"])
def test_direction_of_a_missing_input_is_refused(name):
    fwd = npattn.forward(**inputs())
    with pytest.raises(OptionError, match=f"got {name}, but the problem has no {name[1:]}"):
        npattn.jvp(fwd, **{name: noise(H)})


def test_a_direction_has_the_shape_of_its_input():
    with pytest.raises(ShapeError, match=r"dk has shape \(7, 11\), but k has shape"):
        npattn.jvp(npattn.forward(**inputs()), dk=noise(S, D))


def test_a_direction_is_floating():
    with pytest.raises(DtypeError, match="dq is int64, must be floating"):
        npattn.jvp(npattn.forward(**inputs()), dq=np.ones((B, H, T, D), int))


@pytest.mark.parametrize("name", ["dq", "dbias"])
def test_a_complex_direction_or_cotangent_of_the_tiled_engine_is_refused(name):
    fwd = npattn.forward(**inputs(), bias=noise(T, S), engine="tiled")
    with pytest.raises(DtypeError, match=f'{name} is complex128, must be real for engine "tiled"'):
        npattn.jvp(fwd, **{name: 1j * getattr(fwd.problem, name[1:])})
    with pytest.raises(DtypeError, match='dout is complex128, must be real for engine "tiled"'):
        npattn.backward(fwd, 1j * fwd.out)


@pytest.mark.parametrize("function", [npattn.backward, npattn.jvp])
def test_fwd_must_be_a_result_of_forward(function):
    with pytest.raises(OptionError, match="fwd is of type int; pass the result of npattn"):
        function(3, noise(B, H, T, E))


# --- what dir shows -------------------------------------------------------------------------------


def test_dir_shows_public_names_only():
    rooms = "masks biases conventions positions profiles multihead weights variants cache plot"
    for name in (*rooms.split(), "mistakes", "quantization", "certify", "errors", "problem"):
        module = importlib.import_module(f"npattn.{name}")
        assert sorted(dir(module)) == sorted(module.__all__)
        assert {"Array", "Any", "np"}.isdisjoint(dir(module))


# --- unknown options ------------------------------------------------------------------------------

ENTRIES = [npattn.attention, npattn.forward]


@pytest.mark.parametrize("function", ENTRIES)
def test_a_misspelt_option_is_answered_with_the_nearest(function):
    with pytest.raises(OptionError, match="has no option casual: did you mean causal") as caught:
        function(**inputs(), casual=True)
    assert str(caught.value).startswith(function.__name__)
    assert f"[options: {', '.join(FEATURES)}, dtype, engine, precision, conventions]" in str(
        caught.value
    )
    assert isinstance(caught.value, TypeError)  # as Python's own


@pytest.mark.parametrize("function", ENTRIES)
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("attn_mask", "pass a boolean array as mask= (True = may attend), a float array as bias="),
        ("is_causal", 'pass causal=True; where T != S, PyTorch means causal="top_left"'),
        ("softmax_scale", "pass it as scale="),
        ("window_size", "window_size=(-1, 0) is window=(None, 0)"),
        ("dropout_p", "pass dropout_mask= (True = keep) and dropout_rate="),
        ("key_padding_mask", "pass mask=~key_padding_mask[:, None, None, :]"),
        ("enable_gqa", "leave it out: k and v with fewer heads"),
        ("alibi_slopes", "pass bias=npattn.biases.alibi(slopes)"),
        ("alignment", 'pass causal="bottom_right" or causal="top_left", or conventions='),
    ],
)
def test_options_of_other_libraries_are_translated(function, name, answer):
    with pytest.raises(OptionError) as caught:
        function(**inputs(), **{name: None})
    assert f"{function.__name__} has no option {name}: " in str(caught.value)
    assert answer in str(caught.value)


def test_an_unknown_option_is_answered_with_those_that_exist():
    with pytest.raises(OptionError, match=r"forward has no option xyz \[options: mask, causal, "):
        npattn.forward(**inputs(), xyz=1)


def test_no_answer_names_an_option_that_exists():
    arrays, *options = [*inspect.signature(npattn.attention).parameters][2:]
    assert arrays == "v"  # of others, k and v behind a cache are new keys and values
    assert not set(FOREIGN) & set(options)


def test_forward_has_the_signature_of_attention():
    attention, forward = (inspect.signature(f).parameters for f in ENTRIES)
    assert attention == forward
    assert [*attention][3:-4] == [*FEATURES]
    defaults = {name: attention[name].default for name in FEATURES}
    assert defaults == {name: option.default for name, option in OPTIONS.items()}


# --- conventions ----------------------------------------------------------------------------------


def test_the_default_conventions_change_nothing():
    plain, said = (
        npattn.forward(**inputs(), **EVERY_OPTION, conventions=c) for c in (None, Conventions())
    )
    np.testing.assert_array_equal(said.out, plain.out)
    np.testing.assert_array_equal(said.lse, plain.lse)
    np.testing.assert_array_equal(said.weights, plain.weights)
    got, want = (npattn.backward(f, plain.out, plain.lse, plain.weights) for f in (said, plain))
    for name in vars(want):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_forward_keeps_the_original_problem():
    fwd = npattn.forward(**inputs(), mask=MASK, conventions=Conventions(mask_true="hide"))
    assert fwd.problem.mask is MASK


def test_evaluate_takes_a_problem_that_was_made_before():
    problem = npattn.Problem(**inputs(), mask=MASK)
    out, lse, _ = dense.forward(problem)
    fwd = api.evaluate(problem)
    np.testing.assert_array_equal(fwd.out, out)
    np.testing.assert_array_equal(fwd.lse, lse)


# --- edges ----------------------------------------------------------------------------------------


def test_a_name_of_conventions_is_not_conventions():
    with pytest.raises(OptionError, match=r"conventions is 'torch\.sdpa', must be"):
        npattn.attention(**inputs(), conventions="torch.sdpa")


def test_a_score_mod_of_another_shape_is_refused():
    with pytest.raises(OptionError, match=r"score_mod .*shape"):
        npattn.attention(**inputs(), score_mod=lambda s, b, h, t, s_index: s[..., :2])
