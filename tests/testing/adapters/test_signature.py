"""Parameters as other libraries name them: read, said, and passed in their own form."""

import functools

import numpy as np
import pytest

import npattn
from npattn.errors import OptionError
from npattn.problem.foreign import FOREIGN
from npattn.problem.meanings import MEANINGS
from npattn.profiles import Profile
from npattn.testing import Cotangents, Implementation, ImplementationError, check
from npattn.testing.targets.numpy import flash, flash_backward
from tests.testing.primes import SIZES, B, D, E, H, S, T, problem, zeros_for


def record(signature):
    """Return a function of a signature, which returns zeros, and its arguments, call by call."""
    calls = []

    def keep(arguments):
        q, v = arguments.pop("q"), arguments.pop("v")
        calls.append({n: x for n, x in arguments.items() if n != "k"})
        return zeros_for(q, v)

    scope = {"keep": keep}
    exec(f"def f(q, k, v, {signature}): return keep(dict(locals()))", scope)
    return scope["f"], calls


def test_every_foreign_meaning_exists():
    assert {foreign.meaning for foreign in FOREIGN.values()} - {""} <= set(MEANINGS)


# --- reading --------------------------------------------------------------------------------------


READ = [
    *((f"{n}=None", {"scale"}, (), f"{n} as scale") for n in ("softmax_scale", "sm_scale")),
    *((f"{n}=None", {"scale"}, (), f"{n} as scale") for n in ("scale_factor", "scaling")),
    *((f"{n}=None", {"softcap"}, (), f"{n} as softcap") for n in ("logit_cap", "soft_cap")),
    ("logits_soft_cap=None", {"softcap"}, (), "logits_soft_cap as softcap"),
    ("softmax_scale=None, scale=None", {"scale"}, ("softmax_scale",), ""),  # its own name wins
    ("mask=None, *, causal=False, scale=None", {"mask", "causal", "scale"}, (), ""),
    ("causal=False, size=64, *, num_warps=4", {"causal"}, ("size", "num_warps"), ""),
    ("attn_mask: 'npt.NDArray[np.bool_] | None' = None", {"mask"}, (), "attn_mask as mask"),
    ("attn_mask: 'Float[Array, \"T S\"] | None' = None", {"bias"}, (), "attn_mask as bias"),
    ("attn_mask=None", {"mask", "bias"}, (), "attn_mask as mask and bias"),
]
UNREADABLE = [
    ("q, k, v, size, *, stages", {}, r"needs size, stages.*rename="),
    ("x, causal=False", {}, "2 positional parameters, must have three: q, k, v"),
    ("q, k, v, near=None", {"rename": {"near": "windows"}}, "did you mean window"),
    (
        "q, k, v, mask=None",
        {"features": ["heads"]},
        "is not a feature, must be one of mask, causal",
    ),
    ("q, k, v, causal=False", {"rename": {"causal": "cause"}}, "is not a feature, must be one of"),
]


def define(signature):
    scope = {}
    exec(f"def f({signature}): return q", scope)
    return scope["f"]


@pytest.mark.parametrize(("options", "features", "untested", "reads"), READ)
def test_options_are_read_by_name_and_annotation(options, features, untested, reads):
    read = Implementation(define(f"q, k, v, {options}"), framework="numpy")
    assert (read.features, read.untested) == (features, untested)
    assert read.reads == ((reads,) if reads else ())


@pytest.mark.parametrize(("signature", "arguments", "said"), UNREADABLE)
def test_a_signature_that_cannot_be_used_is_an_error(signature, arguments, said):
    with pytest.raises(OptionError, match=said):
        Implementation(define(signature), framework="numpy", **arguments)


def test_is_causal_implies_top_left():
    def foreign(q, k, v, is_causal=False):
        return zeros_for(q, v)

    def own(q, k, v, causal=False):
        return zeros_for(q, v)

    read = Implementation(foreign, framework="numpy")
    assert read.reads == ("is_causal as causal (top_left)",)
    assert read.conventions.causal == "top_left"
    renamed = Implementation(foreign, framework="numpy", rename={"is_causal": "causal"})
    for plain in (renamed, Implementation(own, framework="numpy")):
        assert plain.conventions == npattn.Conventions()


def test_sequences_are_read_by_name_where_they_are_needed():
    """Who can be called without them may take padded arrays, and nobody guesses."""

    def needs(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None):
        return q

    def has(q, k, v, cu_seqlens=None):
        return zeros_for(q, v)

    read = Implementation(needs, framework="numpy")
    assert read.storage.takes == {"offsets of queries", "offsets of keys", "longest queries"}
    assert read.features == {"mask"}
    assert read.reads[0] == "cu_seqlens_k as mask (lengths)"
    padded = Implementation(has, framework="numpy")
    assert padded.storage is None
    (line,) = padded.untested
    assert line == (
        "cu_seqlens: optional, and its arrays padded, "
        "unless rename={'cu_seqlens': 'offsets of both'} says more"
    )

    def has_offsets(q, k, v, offsets=None, longest=None, block_size=64):
        return zeros_for(q, v)

    other = Implementation(has_offsets, framework="numpy")  # of positions, or of tiles
    assert other.storage is None
    assert other.untested == ("offsets", "longest", "block_size")
    told = Implementation(has, framework="numpy", rename={"cu_seqlens": "offsets of both"})
    assert told.storage.takes == {"offsets of both"}


def test_dropout_of_its_own_is_never_asked():
    f, calls = record("dropout_p=0.0, *, dropout_rate=0.0, seed=0")
    read = Implementation(f, framework="numpy")
    assert read.features == set()
    assert [line.split(":")[0] for line in read.untested] == ["dropout_p", "seed", "dropout_rate"]
    with pytest.raises(AssertionError, match="dropout_mask"):
        read.forward(problem(dropout=0.5))
    assert all(call["dropout_p"] == call["dropout_rate"] == 0 for call in calls)


def test_rate_of_dropout_is_kept_at_0():
    f, calls = record("dropout_p=0.1")
    Implementation(f, framework="numpy").forward(problem())
    assert calls == [{"dropout_p": 0.0}]


def test_rename_takes_meanings():
    f, calls = record("masking=None, near=None")
    rename = {"masking": "mask or bias", "near": "window or −1"}
    read = Implementation(f, framework="numpy", rename=rename)
    assert read.features == {"mask", "bias", "window"}
    read.forward(problem(window=(None, 3), bias="full"))
    assert calls[-1]["masking"].dtype == np.float32
    assert calls[-1]["near"] == (-1, 3)


class Callable:
    """A callable object with the signature of a kernel."""

    def __call__(self, q, k, v, attn_mask=None):
        return zeros_for(q, v)


def test_callable_objects_and_partials_are_read():
    assert Implementation(Callable(), framework="numpy").features == {"mask", "bias"}
    bound = functools.partial(flash, causal=True)
    assert "window" in Implementation(bound).features


class Module:
    """A module as torch makes them: its ``__call__`` names nothing."""

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def forward(self, query, key, value, mask=None):
        return flash(query, key, value, mask=mask)


def test_module_is_read_by_its_forward():
    read = Implementation(Module(), framework="numpy")
    assert read.features == {"mask"}
    assert read.untested == ()
    with pytest.raises(OptionError, match=r"rename has nonsense.*\(query, key, value, mask\)"):
        Implementation(Module(), rename={"nonsense": "mask"}, framework="numpy")


# --- calling --------------------------------------------------------------------------------------


class FlashAttn:
    """flash_attn_func as its users know it: (B, T, H, D), windows with −1, results beside o."""

    def __init__(self):
        self.windows = []

    def __call__(
        self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
        softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        self.windows.append(window_size)
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        out, lse = flash(
            q, k, v, causal=causal, scale=softmax_scale, softcap=softcap or None,
            window=tuple(None if n == -1 else n for n in window_size), return_lse=True,
        )  # fmt: skip
        out = out.swapaxes(1, 2)
        return (out, lse, None) if return_attn_probs else out


def test_flash_attn_is_called_in_its_own_form():
    f = FlashAttn()
    read = Implementation(f, framework="numpy", layout="BTHD")
    assert read.features == {"scale", "causal", "window", "softcap"}
    assert read.reads == (
        "softmax_scale as scale",
        "window_size as window (−1 is unlimited)",
        "return_attn_probs as lse (not differentiated)",
    )
    case = problem(causal=True, window=(2, None), scale=0.5, softcap=2.0)
    results = read.forward(case)
    assert f.windows[-1] == (2, -1)
    exact = npattn.forward(
        case.q, case.k, case.v, causal=case.causal, window=(2, None), scale=0.5, softcap=2.0
    )
    np.testing.assert_allclose(results["o"], exact.out, atol=1e-5)
    np.testing.assert_allclose(results["lse"], exact.lse, atol=1e-5)


def test_unlimited_side_of_numbers_reaches_beyond_every_key():
    f, calls = record("local_window_size=None")
    read = Implementation(f, framework="numpy")
    read.forward(problem())
    read.forward(problem(window=(3, None)))
    assert [call["local_window_size"] for call in calls[-2:]] == [None, (3, T + S)]


def test_heads_are_declared_shared_only_where_they_are():
    f, calls = record("enable_gqa=False")
    read = Implementation(f, framework="numpy")
    assert read.reads == ("enable_gqa as K < H",)
    read.forward(problem())
    read.forward(problem(K=H))
    assert [call["enable_gqa"] for call in calls[-2:]] == [True, False]


def test_key_padding_hides_where_it_is_true():
    f, calls = record("key_padding_mask=None")
    read = Implementation(f, framework="numpy")
    case = problem()
    mask = np.random.default_rng(0).random((B, 1, 1, S)) < 0.5
    read.forward(case.replace(mask=mask))
    np.testing.assert_array_equal(calls[-1]["key_padding_mask"], ~mask[:, 0, 0])
    with pytest.raises(ImplementationError, match="takes key padding alone"):
        read.forward(problem(mask="full"))


@pytest.mark.parametrize("meaning", ["mask or bias", "added mask or bias", "key padding"])
def test_a_mask_that_hides_where_it_is_true_is_turned_where_its_form_changes(meaning):
    f, calls = record("seen=None")
    reads = {}
    for polarity in ("attend", "hide"):
        mine = Profile(
            name="mine",
            version="1",
            about="",
            conventions=npattn.Conventions(mask_true=polarity),
            signature={"seen": meaning},
        )
        reads[polarity] = Implementation(f, like=mine, framework="numpy")
    bias = {} if meaning == "key padding" else {"bias": "full"}
    case = problem(**bias)
    mask = np.random.default_rng(0).random((B, 1, 1, S)) < 0.5
    reads["attend"].forward(case.replace(mask=mask))
    reads["hide"].forward(case.replace(mask=~mask))
    np.testing.assert_array_equal(calls[-2]["seen"], calls[-1]["seen"])


def test_parameters_without_default_are_always_passed():
    given = []

    def f(q, k, v, attention_mask, is_causal, scaling, window_size, dropout_p, need_weights):
        given.append((attention_mask, is_causal, scaling, window_size, dropout_p, need_weights))
        return (zeros_for(q, v), np.ones((B, H, T, S))) if need_weights else zeros_for(q, v)

    Implementation(f, framework="numpy").forward(problem())
    assert given[0] == (None, False, D**-0.5, (-1, -1), 0.0, False)


def test_need_weights_returns_a_pair():
    def f(q, k, v, need_weights=True):
        out = zeros_for(q, v)
        return out, np.ones((B, H, T, S)) if need_weights else None

    results = Implementation(f, framework="numpy").forward(problem())
    assert results["weights"].shape == (B, H, T, S)
    assert [name for name, _ in results.pairs] == ["o", "o", "weights"]


def test_lse_of_other_systems_is_not_differentiated():
    def f(q: "torch.Tensor", k, v, return_softmax_lse=False):  # noqa: F821
        scores = q @ k.transpose(-1, -2) * D**-0.5
        out = scores.softmax(-1) @ v
        return (out, scores.detach().logsumexp(-1)) if return_softmax_lse else out

    pytest.importorskip("torch")
    foreign = Implementation(f)
    told = Implementation(f, rename={"return_softmax_lse": "return_lse"})
    assert (foreign.returns_lse, foreign.takes_dlse) == (True, False)
    assert (told.returns_lse, told.takes_dlse) == (True, True)
    case = problem(K=H)
    dout = np.ones((B, H, T, E), np.float32)
    assert set(foreign.gradients(case, Cotangents(dout, None))) == {"dq", "dk", "dv"}


def test_lse_by_position_is_swapped():
    def f(q, k, v, return_residual=False):
        out, lse = flash(q, k, v, return_lse=True)
        return (out, lse.swapaxes(-1, -2)) if return_residual else out

    case = problem()
    exact = npattn.forward(case.q, case.k, case.v)
    lse = Implementation(f, framework="numpy").forward(case)["lse"]
    np.testing.assert_allclose(lse, exact.lse, atol=1e-5)


# --- one parameter for mask and bias --------------------------------------------------------------


def attend(q, k, v, attn_mask=None):
    boolean = attn_mask is not None and attn_mask.dtype == bool
    kind = {} if attn_mask is None else {"mask" if boolean else "bias": attn_mask}
    return flash(q, k, v, **kind)


def attend_backward(dout, q, k, v, *, out, lse, attn_mask=None):
    boolean = attn_mask is not None and attn_mask.dtype == bool
    kind = {} if attn_mask is None else {"mask" if boolean else "bias": attn_mask}
    _, lse = flash(q, k, v, return_lse=True, **kind)
    grads = flash_backward(dout, q, k, v, out=out, lse=lse, **kind)
    named = grads if isinstance(grads, dict) else dict(zip("qkv", grads, strict=True))
    return {"attn_mask" if n == "bias" else n: x for n, x in named.items()}


@pytest.mark.parametrize(
    "options", [{"mask": "full"}, {"bias": "heads"}, {"mask": "full", "bias": "heads"}]
)
def test_mask_and_bias_share_a_parameter(options):
    read = Implementation(attend, backward=attend_backward, framework="numpy")
    case = problem(**options)
    given = {n: getattr(case, n) for n in ("q", "k", "v", "mask", "bias")}
    exact = npattn.forward(**given)
    np.testing.assert_allclose(read.forward(case)["o"], exact.out, atol=1e-5)
    dout = np.random.default_rng(1).standard_normal(exact.out.shape).astype(np.float32)
    grads = read.gradients(case, Cotangents(dout, None))
    wanted = npattn.backward(exact, dout)
    np.testing.assert_allclose(grads["dk"], wanted.k, atol=1e-4)
    if case.bias is not None:
        assert grads["dbias"].shape == case.bias.shape
        np.testing.assert_allclose(grads["dbias"], wanted.bias, atol=1e-4)


def test_8_bits_cannot_hold_mask_beside_bias():
    read = Implementation(attend, framework="numpy")
    with pytest.raises(ImplementationError, match="cannot hold −inf"):
        read.forward(problem(mask="full", bias="full", dtype="float8_e4m3fn"))


def test_backward_has_names_of_its_own():
    given = []

    def forward(q, k, v, softmax_scale=None, window_size=(-1, -1)):
        return zeros_for(q, v)

    def backward(dout, q, k, v, *, scale=None, window_size=(-1, -1)):
        given.append((scale, window_size))
        return q, k, v

    read = Implementation(forward, backward=backward, framework="numpy")
    dout = np.zeros((B, H, T, E), np.float32)
    read.gradients(problem(scale=0.5, window=(2, None)), Cotangents(dout, None))
    assert given == [(0.5, (2, -1))]


# --- attention functions of Hugging Face's models ------------------------------------------------


def eager(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention as their models call it: heads repeated by the module, and a mask that is added."""
    assert module.head_dim == query.shape[-1]
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


@pytest.mark.parametrize("options", [{}, {"mask": "padding"}, {"mask": "full", "bias": "full"}])
def test_attention_of_hugging_face_is_called_with_module(options):
    pytest.importorskip("torch")
    rename = {"attention_mask": "added mask or bias"}
    read = Implementation(
        eager, rename=rename, framework="torch", features=["mask", "bias", "scale"]
    )
    assert read.signature.module
    case = problem(**options)
    exact = npattn.forward(**{n: getattr(case, n) for n in ("q", "k", "v", "mask", "bias")})
    np.testing.assert_allclose(read.forward(case)["o"], exact.out, atol=1e-5)
    dout = np.random.default_rng(1).standard_normal(exact.out.shape).astype(np.float32)
    grads = read.gradients(case, Cotangents(dout, None))
    np.testing.assert_allclose(grads["dk"], npattn.backward(exact, dout).k, atol=1e-4)


def test_bias_of_its_own_is_not_added_to_mask():
    """A model's ALiBi has a parameter of its own, and the added mask holds the mask alone."""

    def attend(q, k, v, alibi=None, added=None):
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + alibi + added
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights @ v / weights.sum(-1, keepdims=True)

    rename = {"alibi": "bias", "added": "added mask or bias"}
    read = Implementation(attend, rename=rename, framework="numpy")
    case = problem(K=SIZES["H"], mask="padding", bias="full")
    exact = npattn.forward(**{n: getattr(case, n) for n in ("q", "k", "v", "mask", "bias")})
    np.testing.assert_allclose(read.forward(case)["o"], exact.out, atol=1e-5)


def test_drop_in_for_transformers_passes():
    pytest.importorskip("torch")
    report = check(eager, like="transformers", framework="torch",
                   sizes={"D": (8,), "T": (5,), "S": (7,), "E": (8,)}, examples=4,
                   only=["agreement-o", "agreement-dk"])  # fmt: skip
    assert report.passed, str(report)
    assert "module as one of Hugging Face's" in report.settings["reads"]
    assert "attention_mask as mask and bias" in report.settings["reads"]
    assert set(report.settings["features"]) == {"bias", "mask", "scale"}


def test_a_module_stays_where_inputs_are_no_leaves():
    pytest.importorskip("torch")
    read = Implementation(eager, like="transformers", framework="torch")
    case = problem()
    sliced = read.without_leaves().forward(case)["o"]
    np.testing.assert_array_equal(sliced, read.forward(case)["o"])


def test_what_comes_with_a_cache_is_read_beside_one_alone():
    def top_k(q, k_all, v_all, k=5, v=None, custom_mask=None, kv_layout="NHD", rotary_cos=None):
        return zeros_for(q, v_all)

    read = Implementation(top_k, framework="numpy")
    assert read.storage is None
    assert read.features == {"mask"}
    assert read.signature.meanings == {"custom_mask": "mask"}
    assert read.untested == ("k", "v", "kv_layout", "rotary_cos")

    def grows(q, k_cache, v_cache, cache_seqlens, k, v, rotary_cos=None, rotary_interleaved=True):
        return q

    read = Implementation(grows, framework="numpy")
    assert read.storage.takes == {"lengths of keys", "new keys", "new values"}
    assert read.storage.required == read.storage.takes
    assert read.untested == ("rotary_cos", "rotary_interleaved")
    assert not read.has_gradients
    assert "new keys behind them" in read.reads[-1]

    def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, cache_leftpad=None, seqused_k=None):
        return q

    assert Implementation(packed, framework="numpy").storage.keys == "packed"

    def lone(q, k_cache, v_cache, k, cu_seqlens_q, cu_seqlens_k):
        return q

    with pytest.raises(OptionError, match="needs k, which the judge does not know"):
        Implementation(lone, framework="numpy")


def test_packed_arrays_stand_where_q_k_and_v_do():
    def f(qkv, causal=False, backward=None):
        return qkv[..., 0, :, :]

    def g(q, kv, softmax_scale=None):
        return q

    def later(q, k, kv):
        return q

    found = [Implementation(x, framework="numpy") for x in (f, g, later)]
    assert [x.signature.leading for x in found] == [("qkv",), ("q", "kv"), ("q", "k", "v")]
    assert [x.features for x in found] == [{"causal"}, {"scale"}, set()]
    told = Implementation(later, framework="numpy", rename={"k": "packed k and v"}, features=())
    assert told.signature.leading == ("q", "kv")
