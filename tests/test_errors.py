"""Every error of npattn's is one class of its own kind, and also the built-in one of that kind."""

import numpy as np
import pytest

import npattn
from npattn import cache, errors, weights
from npattn.certify import certify
from npattn.quantization import dequantize, quantize
from npattn.testing import Recipe
from npattn.variants import differential, linear


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ShapeError, ValueError),
        (errors.OptionError, ValueError),
        (errors.DtypeError, TypeError),
        (errors.UnknownOptionError, TypeError),
        (errors.MissingExtraError, ImportError),
    ],
)
def test_errors_derive_from_npattn_error_and_a_built_in(error, builtin):
    assert issubclass(error, errors.NpattnError)
    assert issubclass(error, builtin)


def test_all_names_every_error_class():
    own = {n: x for n, x in vars(errors).items() if getattr(x, "__module__", "") == errors.__name__}
    assert set(errors.__all__) == set(own)
    assert [n for n, x in own.items() if not isinstance(x, type)] == ["optional_import"]


# --- sentences in place of Python's own errors ----------------------------------------------------

X = np.random.default_rng(0).standard_normal((2, 3, 5))
FORWARD = npattn.forward(X, X, X)
TWO = differential.forward(X, X, X, X, X, lam=0.3)
WRONG = {
    "certify an array": (lambda: certify(X), "fwd is of type ndarray; pass the result of"),
    "quantize to fp8": (lambda: quantize(X, "fp8"), "dtype is 'fp8', must be one of float8_e4m3fn"),
    "NaN to int8": (lambda: quantize(X * np.nan, "int8", descale=1.0), "NaN, which int8 has not"),
    "dequantize int16": (lambda: dequantize(np.ones((2, 3), "i2"), 1.0), "floating or int8"),
    "dequantize lists": (lambda: dequantize([[1], [1, 2]], 1.0), "values is a builtins.list"),
    "hvp ddq": (lambda: npattn.hvp(FORWARD, X, ddq=X), "hvp has no option ddq: did you mean dq"),
    "double_backward dq": (lambda: npattn.double_backward(FORWARD, X, dq=X), "did you mean ddq"),
    "jvp q": (lambda: npattn.jvp(FORWARD, q=X), "jvp has no option q: did you mean dq"),
    "backward dl": (lambda: npattn.backward(FORWARD, X, dls=X), "did you mean dlse"),
    "linear mask": (lambda: linear.forward(X, X, X, mask=None), "has no option mask"),
    "linear decay": (lambda: linear.forward(X, X, X, decay=0.9), "did you mean log_decay"),
    "linear is_causal": (lambda: linear.forward(X, X, X, is_causal=True), "pass causal=True"),
    "linear without q": (lambda: linear.forward(None, X, X), "q is object, must be floating"),
    "differential dlse": (lambda: differential.backward(TWO, X, dlse=None), "no option dlse"),
    "differential lam": (lambda: differential.forward(X, X, X, X, X), "forward needs lam, which"),
    "two parameters": (lambda: npattn.forward(X, X, X, score_mod=lambda s, b: s),
                       r"score_mod has the parameters \(s, b\), must take five"),
    "recipe": (lambda: Recipe(mask="zz").problem(), "mask is 'zz', must be one of matrix"),
    "names": (lambda: weights.from_checkpoint("x", 0, names={}), "names is of type dict, must be"),
    "merge None": (lambda: cache.merge(None, None), "outs is of type NoneType, must be a sequence"),
    "unpack order": (lambda: cache.unpack(np.ones((2, 3, 3, 5)), order=[]), "order is"),
    "unpack word": (lambda: cache.unpack(np.ones((2, 3, 3, 5)), ordr="parts"),
                    "did you mean order"),
    "Conventions": (lambda: npattn.Conventions(cusal="top_left"), "did you mean causal"),
    "Conventions array": (lambda: npattn.Conventions(causal=X), "causal is array"),
    "replace": (lambda: FORWARD.problem.replace(casual=True), "did you mean causal"),
    "MultiHeadAttention": (lambda: npattn.MultiHeadAttention(X[0], X[0], X[0], num_head=1),
                           "MultiHeadAttention has no option num_head: did you mean num_heads"),
    "init": (lambda: npattn.MultiHeadAttention.init(6, 2), "init needs seed, which"),
    "init dtype": (lambda: npattn.MultiHeadAttention.init(6, 2, seed=0, dtype="f99"),
                   "dtype is 'f99', must be"),
}  # fmt: skip


@pytest.mark.every
@pytest.mark.parametrize("case", WRONG)
def test_misuse_is_answered_with_a_sentence(case):
    call, message = WRONG[case]
    with pytest.raises(errors.NpattnError, match=message):
        call()


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, *_: s - s.max(-1, keepdims=True),
        lambda s, *_: np.cumsum(s, -1),
        lambda s, *_: s + X[0, :, :3],  # a table that is not read by t and s_index
        lambda s, b, h, t, i: s * s.shape[-1],
    ],
)
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_score_mod_that_is_not_elementwise_is_refused_in_forward(mod, engine):
    with pytest.raises(errors.OptionError, match="elementwise"):
        npattn.forward(X, X, X, score_mod=mod, engine=engine)
    table = X[0, :, :3]
    npattn.forward(X, X, X, score_mod=lambda s, b, h, t, i: s + table[t, i], engine=engine)


def test_a_score_mod_that_reads_a_table_of_no_samples_is_not_called():
    x, table = np.empty((0, 2, 3, 4)), np.empty((0, 3))
    out = npattn.forward(x, x, x, score_mod=lambda s, b, h, t, i: s + table[b, t]).out
    assert out.shape == x.shape


@pytest.mark.parametrize("function", [linear.attention, linear.forward])
def test_a_decay_above_1_warns(function):
    options = {"causal": True, "normalise": False}
    with pytest.warns(UserWarning, match="for a factor γ pass log"):
        function(X, X, X, log_decay=np.full((2, 1, 1), 0.9), **options)
    function(X, X, X, log_decay=np.log(np.full((2, 1, 1), 0.9)), **options)
