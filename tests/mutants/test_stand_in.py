"""A function's stand-in is called as the function is."""

import inspect

import numpy as np
import pytest

import npattn
from npattn.errors import OptionError
from npattn.mistakes import MISTAKES
from npattn.mutants.stand_in import Spy, stand_in
from npattn.mutants.terms import Terms, find_axes, translate
from npattn.testing.adapters.implementation import Implementation


def own(q, k, v, attn_mask=None, is_causal=False, *, window_size=(-1, -1), scale=None, eps=0.5):
    raise AssertionError("the stand-in calls nothing")


def padded(q, k, v, key_padding_mask=None, head_mask=None):
    raise AssertionError("the stand-in calls nothing")


def terms(f, beside=(), layout="BHTD", rename=None, **conventions):
    signature = Implementation(f, framework="numpy", rename=rename).signature
    return Terms(signature, npattn.Conventions(**conventions), layout, beside)


def arrays(T=5, S=7):
    rng = np.random.default_rng(3)
    shapes = ((2, 3, T, 11), (2, 3, S, 11), (2, 3, S, 13))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def agrees(got, *args, **options):
    wanted = npattn.attention(*args, **options).astype(np.float32)
    np.testing.assert_array_max_ulp(got, wanted)
    return True


def test_words_of_the_signature_are_read():
    f, (q, k, v) = stand_in(own, terms(own), None), arrays()
    assert inspect.signature(f) == inspect.signature(own)
    assert agrees(f(q, k, v, is_causal=True, scale=0.3), q, k, v, causal="bottom_right", scale=0.3)
    assert agrees(f(q, k, v, window_size=(2, -1)), q, k, v, window=(2, None))
    mask = np.tri(5, 7, 3, dtype=bool)
    assert agrees(f(q, k, v, mask), q, k, v, mask)
    assert agrees(f(q, k, v, attn_mask=mask.astype(np.float32)), q, k, v, bias=mask * 1.0)


def test_key_padding_and_head_mask():
    f, (q, k, v) = stand_in(padded, terms(padded), None), arrays()
    hidden = np.arange(7) > np.array([[2], [4]])
    gate = np.array([0.5, 0.0, 2.0], np.float32)
    exact = {"mask": ~hidden[:, None, None, :], "gate": gate[:, None, None]}
    assert agrees(f(q, k, v, hidden, gate), q, k, v, **exact)


def test_a_head_mask_of_scores_is_refused():
    f, (q, k, v) = stand_in(padded, terms(padded), None), arrays()
    with pytest.raises(OptionError, match=r"a head mask \(2, 3, 5, 7\), must be \(H,\)"):
        f(q, k, v, head_mask=np.ones((2, 3, 5, 7), np.float32))


def test_conventions_and_layout():
    q, k, v = arrays()
    mask = np.ones((5, 7), bool)
    mask[2] = False
    f = stand_in(own, terms(own, causal="top_left", mask_true="hide", empty_row="mean"), None)
    got = f(q, k, v, ~mask, True)
    assert agrees(
        np.delete(got, 2, -2), *(np.delete(q, 2, -2), k, v), np.delete(np.tri(5, 7) > 0, 2, 0)
    )
    np.testing.assert_allclose(got[:, :, 2], v.mean(-2), atol=np.finfo(np.float32).eps)
    f = stand_in(own, terms(own, layout="BTHD"), None)
    assert agrees(f(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2), q, k, v)


def test_results_beside_the_output():
    q, k, v = arrays()
    o, weights = stand_in(own, terms(own, ("weights",)), None)(q, k, v)
    assert o.shape == (2, 3, 5, 13)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=7 * np.finfo(np.float32).eps)


def test_a_mistake_is_made():
    q, k, v = arrays()
    wrong = stand_in(own, terms(own), MISTAKES["causal-strict"])
    assert np.array_equal(wrong(q, k, v), stand_in(own, terms(own), None)(q, k, v))
    with pytest.raises(AssertionError):
        agrees(wrong(q, k, v, is_causal=True), q, k, v, causal="bottom_right")


def test_a_word_without_effect_may_have_any_value():
    q, k, v = arrays()
    f = stand_in(own, terms(own, rename={"eps": "no effect"}), None)
    assert agrees(f(q, k, v, eps=0.25, is_causal=True), q, k, v, causal="bottom_right")


def test_a_default_that_is_passed_is_no_unknown_word():
    f, (q, k, v) = stand_in(own, terms(own), None), arrays()
    assert agrees(f(q, k, v, eps=float("0.5")), q, k, v)  # equal, and another object


def test_unknown_words_are_refused():
    q, k, v = arrays()
    with pytest.raises(OptionError, match=r"eps=0.25: its meaning is unknown"):
        stand_in(own, terms(own), None)(q, k, v, eps=0.25)
    with pytest.raises(OptionError, match="no convention kv_head='tile'"):
        terms(own, kv_head="tile")


def test_tensors_are_differentiated():
    torch = pytest.importorskip("torch")
    q, k, v = arrays()
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    bias = torch.linspace(-1, 1, 35).reshape(5, 7).requires_grad_()
    out = stand_in(own, terms(own), None)(*tensors, bias)
    out.square().sum().backward()
    fwd = npattn.forward(q, k, v, bias=bias.detach().numpy())
    grads = npattn.backward(fwd, 2 * fwd.out)
    for tensor, name in zip([*tensors, bias], ("q", "k", "v", "bias"), strict=True):
        exact = getattr(grads, name)
        error = abs(tensor.grad.numpy() - exact).max() / abs(exact).max()
        assert error < 35 * np.finfo(np.float32).eps, name  # sums of up to 35 rounded numbers


def test_a_built_in_has_the_signature_of_its_docstring():
    torch = pytest.importorskip("torch")
    sdpa, (q, k, v) = torch.nn.functional.scaled_dot_product_attention, arrays()
    spoken = Implementation(sdpa, framework="torch").signature
    f = stand_in(sdpa, Terms(spoken, npattn.Conventions(causal="top_left")), None)
    out = f(*map(torch.from_numpy, (q, k, v)), None, 0.0, True)
    assert agrees(out.numpy(), q, k, v, causal="top_left")
    assert Implementation(f, framework="torch").signature == spoken


def test_a_spy_counts():
    spy = Spy()
    watched = spy.watch(lambda q, k, v: (q, np.zeros(q.shape[:-1]), np.zeros((2, 3, 5, 7))))
    watched(*arrays())
    watched(*(x.astype(np.float16) for x in arrays()))
    sizes = {"q": (2, 3, 5, 11), "k": (2, 3, 7, 11), "weights": (2, 3, 5, 7)}
    assert spy == Spy(2, ("lse", "weights"), ("float32", "float16"), sizes)


def test_conventions_that_mistakes_cannot_have_are_left_out():
    found, left = translate(npattn.Conventions(softcap="after_bias", kv_head="tile", lse_base="2"))
    assert found == npattn.Conventions(lse_base="2")
    assert left == {"softcap"}


@pytest.mark.parametrize("convention", [{"empty_row": "mean"}, {"empty_row": "nan"}])
def test_without_keys_o_is_0_whatever_an_empty_row_has(convention):
    f, (q, k, v) = stand_in(own, terms(own, beside=("weights",), **convention), None), arrays(S=0)
    o, weights = f(q, k, v)
    assert agrees(o, q, k, v, conventions=npattn.Conventions(**convention))
    assert weights.shape == (2, 3, 5, 0)


def test_lse_in_base_2_with_an_empty_row():
    def own(q, k, v, mask=None, return_lse=False):
        raise AssertionError("the stand-in calls nothing")

    (q, k, v), mask = arrays(), np.arange(5)[:, None] > np.zeros(7)
    f = stand_in(own, terms(own, lse_base="2", lse_empty=0.0), None)
    _, lse = f(q, k, v, mask, return_lse=True)
    exact = npattn.forward(q, k, v, mask).lse / np.log(2)
    np.testing.assert_allclose(lse, np.where(mask[:, 0], exact, 0), rtol=1e-6)


def test_a_row_emptied_by_a_bias_has_its_own_result():
    def own(q, k, v, mask=None, bias=None):
        raise AssertionError("the stand-in calls nothing")

    q, k, v = arrays()
    f = stand_in(own, terms(own, hidden_fill=-1e9, empty_row_bias="nan"), None)
    row = np.arange(5)[:, None] == np.zeros(7)
    bias = np.where(row, -np.inf, 0).astype(np.float32)
    assert np.isnan(f(q, k, v, None, bias)[:, :, 0]).all()
    assert np.allclose(f(q, k, v, ~row)[:, :, 0], v.mean(-2), atol=1e-6)


@pytest.mark.parametrize(
    ("weights", "layout", "axes"),
    [
        ((2, 5, 7, 3), "BTHD", (0, 2, 3, 1)),
        ((2, 3, 5, 7), "BTHD", (0, 1, 2, 3)),
        ((5, 2, 3, 7), "BTHD", (2, 0, 1, 3)),
        ((2, 5, 7, 3), "BHTD", (0, 1, 2, 3)),  # fits none
    ],
)
def test_order_of_the_axes_of_weights(weights, layout, axes):
    sizes = {"q": (2, 5, 3, 11), "k": (2, 7, 3, 11), "weights": weights}
    assert find_axes(sizes, layout) == axes


def test_weights_come_in_the_order_of_the_function():
    def own(q, k, v, return_weights=False):
        raise AssertionError("the stand-in calls nothing")

    q, k, v = arrays()
    own_terms = Terms(terms(own).signature, axes=(0, 2, 3, 1))
    o, p = stand_in(own, own_terms, None)(q, k, v, return_weights=True)
    assert p.shape == (2, 5, 7, 3)
    np.testing.assert_allclose(np.einsum("btsh,bhse->bhte", p, v), o, atol=1e-6)
