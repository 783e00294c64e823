"""Fingerprints: the conventions of functions that are known to have them are found out."""

import math
from dataclasses import replace

import numpy as np
import pytest

from npattn.conventions import Conventions
from npattn.errors import DtypeError, OptionError
from npattn.oracle.api import attention
from npattn.profiles import PROFILES
from npattn.testing import Implementation, fingerprint
from npattn.testing.diagnosis.convention_probes import probe_conventions
from npattn.testing.diagnosis.fingerprint import format_conventions, match_profiles
from npattn.testing.diagnosis.precision import describe_precision, explain_rounding
from npattn.testing.diagnosis.unknown import Unknown
from tests.testing.rules.relations import Oracle, trial_of


def probed(conventions, **space):
    """Probe npattn itself under conventions, as a function that promises none."""
    f = Implementation(Oracle(conventions).forward, framework="numpy")
    trial = trial_of(f=f, **space)
    trial.gradients = frozenset()
    unknown = Unknown(trial)
    probe_conventions(unknown)
    return unknown


EVERY = [
    {},
    {"causal": "top_left", "mask_true": "hide", "lse_base": "2", "lse_empty": math.inf},
    {"kv_head": "tile", "empty_row": "nan", "softcap": "after_mask", "weights": "after_dropout"},
    {"bias": "before_scale", "softcap": "after_bias", "window": "inclusive", "lse_empty": 0.0},
    {"empty_row": "mean", "empty_row_bias": "nan", "dropout_at_rate_0": "ignore"},
    {"hidden_fill": -1e9, "mask_true": "hide", "empty_row_bias": "mean"},
    {"hidden_fill": "min", "window": "inclusive"},
    {"hidden_fill": float(np.float32(-0.7) * np.finfo(np.float32).max)},
    {"hidden_fill": -12.5},
    {"hidden_add": -1e4, "causal": "top_left"},
    {"hidden_add": "min"},
]


@pytest.mark.parametrize("changes", EVERY, ids=str)
@pytest.mark.broad
def test_every_value_is_found_out(changes):
    unknown = probed(Conventions(**changes))
    assert {**vars(unknown.conventions)} == {**vars(Conventions(**changes))}
    assert set(unknown.undetermined) <= {"lse_empty", "empty_row"}


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_fill_of_another_dtype(dtype):
    for changes in ({}, {"hidden_fill": "min"}):
        unknown = probed(Conventions(**changes), dtype=dtype, features={"mask", "scale"})
        assert unknown.conventions == Conventions(**changes)


def test_measured_fill_is_rounded():
    """A number that no system uses comes back in three digits."""
    assert probed(Conventions(hidden_fill=-7654.0)).conventions.hidden_fill == -7650.0


def plain(q, k, v):
    return attention(q, k, v).astype(q.dtype)


@pytest.fixture(scope="module")
def found():
    return fingerprint(plain)


def test_nothing_tells_without_options(found):
    assert found.conventions == Conventions()
    assert found.undetermined["softcap"] == "no such option"
    assert found.undetermined["lse_base"] == "returns no lse"
    assert "kv_head" not in found.undetermined
    assert found.holds


def seq_first(q, k, v, mask=None):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return attention(q, k, v, mask).astype(q.dtype).swapaxes(1, 2)


def test_layout():
    assert fingerprint(seq_first).layout == "BTHD"
    with pytest.raises(OptionError, match="agrees with the oracle in no layout"):
        fingerprint(seq_first, layout="BHTD")


def test_conventions_that_contradict_each_other():
    """A function that is wrong where two options meet does not hold, and says so."""

    def f(q, k, v, mask=None, *, causal=False):
        mask = None if causal else mask
        return attention(q, k, v, mask, causal="top_left" if causal else False).astype(q.dtype)

    found = fingerprint(f)
    agree, tried = found.agreement["o"]
    assert not found.holds
    assert 0 < agree < tried
    assert found.conventions.causal == "top_left"


def test_shared_heads_that_are_refused():
    def f(q, k, v):
        if q.shape[-3] != k.shape[-3]:
            raise ValueError("as many heads")
        return plain(q, k, v)

    assert fingerprint(f).undetermined["kv_head"] == "takes no K < H"


def test_shared_heads_in_another_order():
    def f(q, k, v):
        repeats = q.shape[-3] // k.shape[-3]
        return plain(q, *(np.concatenate([x] * repeats, axis=-3) for x in (k, v)))

    found = fingerprint(f)
    assert found.conventions == Conventions(kv_head="tile")
    assert "kv_head" not in found.undetermined
    assert not any("K < H" in line for line in found.refused)


@pytest.mark.parametrize("rank", [2, 3])
def test_a_function_of_another_rank(rank):
    def f(q, k, v, causal=False):
        if q.ndim != rank:
            raise ValueError("one rank")
        return Oracle(Conventions(causal="top_left")).forward(q, k, v, causal=causal)

    found = fingerprint(Implementation(f, framework="numpy"), dtype="float32")
    assert found.conventions.causal == "top_left"
    assert "float64" not in found.precision  # computed in it, and not refused


def test_mask_without_effect():
    def f(q, k, v, mask=None):
        return plain(q, k, v)

    assert "does not choose" in fingerprint(f).undetermined["mask_true"]


def test_softcap_without_bias_is_ambiguous():
    def f(q, k, v, *, softcap=None, causal=False):
        causal = "bottom_right" if causal else False
        return attention(q, k, v, softcap=softcap, causal=causal).astype(q.dtype)

    reason = fingerprint(f).undetermined["softcap"]
    assert reason == "'before_bias' or 'after_bias': nothing tells"


def rounded(name):
    import ml_dtypes

    dtype = {"bfloat16": ml_dtypes.bfloat16}.get(name, name)

    def f(q, k, v):
        return attention(*(x.astype(dtype) for x in (q, k, v))).astype(dtype).astype(q.dtype)

    return f


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_dtype_computed_in(name):
    trial = trial_of(f=Implementation(rounded(name), framework="numpy"), dtype="float64")
    assert explain_rounding(trial).name == {"float16": "tf32 or float16"}.get(name, name)


def test_precision_of_what_computes_in_its_own_dtype():
    trial = trial_of(f=Implementation(plain, framework="numpy"))
    trial.gradients = frozenset()
    assert describe_precision(trial, 0).startswith("float32 as upcast")


def test_a_bias_that_it_does_not_take_ends_nothing():
    """An ALiBi bias is one a head, (H, T, S)."""

    def f(q, k, v, bias=None):
        if bias is not None and bias.ndim != q.ndim:
            raise ValueError("bias must have the rank of q")
        return attention(q, k, v, bias=bias)

    found = fingerprint(f)
    assert found.precision.startswith("float32 as upcast")


def test_no_attention_at_all():
    with pytest.raises(OptionError, match="npattn check says how"):
        fingerprint(lambda q, k, v: v)


def test_refused_arguments():
    with pytest.raises(DtypeError, match="float8"):
        fingerprint(plain, dtype="float8_e4m3fn")
    with pytest.raises(OptionError, match="beside an Implementation"):
        fingerprint(Implementation(plain), layout="BHTD")


def test_printed_form(found):
    conventions = Conventions(causal="top_left", hidden_fill=-1e9, lse_empty=math.inf)
    text = format_conventions(conventions)
    assert text == 'Conventions(causal="top_left", hidden_fill=-1000000000.0, lse_empty=math.inf)'
    assert eval(text) == conventions
    lines = str(found).splitlines()
    assert lines[:3] == ["plain", "layout         BHTD", "conventions    Conventions()"]
    every = str(replace(found, profiles=tuple(PROFILES))).splitlines()[3]
    assert every == "profiles       all that are known: what was determined tells none apart"
    assert str(replace(found, profiles=())).splitlines()[3].endswith("none that is known")
    assert str(replace(found, profiles=("mlx", "flax"))).splitlines()[3].endswith("  mlx, flax")


def test_profiles():
    f = Implementation(Oracle(Conventions(causal="top_left")).forward, framework="numpy")
    unknown = Unknown(trial_of(f=f))
    unknown.settle(causal="top_left", mask_true="attend", hidden_fill=None, hidden_add=None)
    same = match_profiles(unknown)
    assert "torch.sdpa" in same
    assert not {"npattn", "jax.nn"} & set(same)
    unknown.settle(kv_head="tile")
    assert {"onnx@1.18", "onnx@1.19"} <= set(match_profiles(unknown))
    unknown.settle(lse_empty=math.inf)
    assert "torch.sdpa but for lse_empty" not in match_profiles(unknown)
    unknown.settle(kv_head="repeat")
    assert "torch.sdpa but for lse_empty" in match_profiles(unknown)


def test_a_fill_that_no_row_without_keys_shows_is_none():
    """It adds the least number, and sets such rows to 0, as ONNX Runtime does."""
    add = Oracle(Conventions(hidden_add="min"))

    def f(q, k, v, mask=None):
        out = add.forward(q, k, v, mask=mask)
        return out if mask is None else np.where(mask.any(-1, keepdims=True), out, 0)

    unknown = Unknown(trial_of(f=Implementation(f, framework="numpy")))
    unknown.trial.gradients = frozenset()
    probe_conventions(unknown)
    assert unknown.conventions == Conventions()
    assert unknown.determined["empty_row"] == "zero"


@pytest.mark.parametrize("name", ["mlx", "keras", "keras.torch", "transformers", "jax.nn", "onnx"])
def test_what_behaves_as_a_profile_matches_it(name):
    """Its fill is that of the profile to the last digit, and rows without keys are alike."""
    known = PROFILES[name].conventions
    unknown = probed(known)
    assert name in match_profiles(unknown)
    other = "mean" if known.empty_row_bias is None and known.empty_row != "mean" else "zero"
    assert name not in match_profiles(probed(replace(known, empty_row_bias=other)))


def test_it_is_asked_the_sizes_that_it_takes():
    def blocks(q, k, v, bias=None, scale=None):
        if q.shape[-2] % 64 or k.shape[-2] % 64 or q.shape[-1] != 8:
            raise ValueError("it takes blocks of 64 rows of 8 features")
        conventions = Conventions(bias="before_scale")
        return attention(q, k, v, bias=bias, scale=scale, conventions=conventions)

    f = Implementation(blocks, framework="numpy")
    with pytest.raises(OptionError, match="it takes blocks of 64 rows"):
        fingerprint(f)
    f.sizes = {"T": (128, 64), "S": (64, 128), "D": (8,), "E": (8,)}
    assert fingerprint(f).conventions.bias == "before_scale"
