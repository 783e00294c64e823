"""Multi-head latent attention: both forms against the formula, loops and each other."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

import npattn
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.variants import latent
from npattn.variants.latent import NAMES
from tests.variants import formulas
from tests.variants.running_error import assert_within

B, H, T, S, N, R, C, E = 2, 3, 5, 7, 11, 4, 13, 17
FORMS = ("unabsorbed", "absorbed")
BANDS = {
    "full": ({}, np.ones((T, S), bool)),
    "causal": ({"causal": "bottom_right"}, np.tri(T, S, S - T, dtype=bool)),
    "window": ({"window": (1, 2)}, np.tri(T, S, S - T + 2, bool) & ~np.tri(T, S, S - T - 2, bool)),
    "top left": ({"causal": "top_left"}, np.tri(T, S, dtype=bool)),
}


def sample(seed=0, lead=(B,), of_keys=(B,)):
    normal = np.random.default_rng(seed).standard_normal
    shapes = ((*lead, H, T, N), (*lead, H, T, R), (*of_keys, S, C), (*lead, S, R))
    return [normal(shape) for shape in (*shapes, (H, C, N), (H, C, E))]


def cotangents(fwd, seed=9):
    normal = np.random.default_rng(seed).standard_normal
    return normal(fwd.out.shape), normal(fwd.lse.shape), normal(fwd.weights.shape)


def formula(arrays, visible, do=None, dlse=None, **options):
    return formulas.latent(arrays, visible, do, dlse, **options)


def assert_is(fwd, grads, exact, names=NAMES):
    for name in ("out", "lse", "weights"):
        assert_within(name, getattr(fwd, name), exact[name])
    for name in names:
        assert_within(f"d{name}", getattr(grads, name), exact[name])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("band", BANDS)
def test_is_the_formula_of_the_paper(form, band):
    options, visible = BANDS[band]
    arrays = sample()
    fwd = latent.forward(*arrays, form=form, **options)
    do, dlse, _ = cotangents(fwd)
    exact = formula(arrays, visible, do, dlse)
    assert_is(fwd, latent.backward(fwd, do, dlse), exact)
    assert np.array_equal(latent.attention(*arrays, form=form, **options), fwd.out)


@pytest.mark.parametrize("form", FORMS)
def test_options_are_those_of_attention(form):
    arrays, rng = sample(1), np.random.default_rng(5)
    mask, bias = np.tri(T, S, 4, bool), rng.standard_normal((H, 1, S))
    options = {"scale": 0.3, "softcap": 1.5, "bias": bias}
    fwd = latent.forward(*arrays, form=form, mask=mask, **options)
    do, dlse, _ = cotangents(fwd)
    exact = formula(arrays, mask, do, dlse, **options)
    exact["bias"] = exact["bias"].sum_to(bias.shape)
    assert_is(fwd, latent.backward(fwd, do, dlse), exact, (*NAMES, "bias"))


@pytest.mark.parametrize("lead", [(), (2, 3)])
@pytest.mark.parametrize("of_keys", [(), (1,), (3,)])
@pytest.mark.parametrize("form", FORMS)
def test_leading_axes_broadcast_and_gradients_are_summed(lead, of_keys, form):
    if of_keys == (3,) and not lead:
        lead = (1,)  # keys have axes that queries have not
    arrays = sample(2, lead, of_keys)
    fwd = latent.forward(*arrays, form=form)
    do, dlse, _ = cotangents(fwd)
    exact = formula(arrays, np.ones((T, S), bool), do, dlse)
    assert_is(fwd, latent.backward(fwd, do, dlse), exact)


@pytest.mark.parametrize("form", FORMS)
def test_is_what_the_loops_say(form):
    arrays = sample(3, (), ())
    visible = BANDS["causal"][1]
    fwd = latent.forward(*arrays, form=form, causal="bottom_right")
    out, lse = formulas.latent_in_loops(arrays, visible, 1 / math.sqrt(N + R))
    exact = formula(arrays, visible)
    assert abs(out - fwd.out).max() <= 2.0**-52 * exact["out"].e.max()
    assert abs(lse - fwd.lse).max() <= 2.0**-52 * exact["lse"].e.max()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_the_complex_steps_of_the_loops(form):
    rng = np.random.default_rng(4)
    shapes = ((2, 3, 2), (2, 3, 1), (4, 3), (4, 1), (2, 3, 2), (2, 3, 2))
    arrays = [rng.standard_normal(shape) for shape in shapes]
    visible, scale = np.tri(3, 4, 1, bool), 0.7
    fwd = latent.forward(*arrays, form=form, causal="bottom_right", scale=scale)
    do, dlse, _ = cotangents(fwd)
    grads = latent.backward(fwd, do, dlse)
    exact = formula(arrays, visible, do, dlse, scale=scale)
    step = 1e-200  # its square is 0, so that only rounding is left
    for i, name in enumerate(NAMES):
        for at in np.ndindex(arrays[i].shape):
            moved = [x.astype(complex) for x in arrays]
            moved[i][at] += 1j * step
            out, lse = formulas.latent_in_loops(moved, visible, scale)
            slope = ((do * out).sum() + (dlse * lse).sum()).imag / step
            gap = abs(slope - getattr(grads, name)[at])
            assert gap <= 2.0**-52 * exact[name].e[at], name


@pytest.mark.parametrize("form", FORMS)
def test_weights_have_a_gradient_and_sinks_too(form):
    """In one direction, by complex step of the forward pass."""
    arrays, sinks = sample(5), np.array([0.5, -1.0, 2.0])
    fwd = latent.forward(*arrays, form=form, sinks=sinks)
    do, dlse, dweights = cotangents(fwd)
    grads = latent.backward(fwd, do, dlse, dweights)
    rng, step = np.random.default_rng(6), 1e-200
    along = [rng.standard_normal(x.shape) for x in (*arrays, sinks)]
    moved = [x + 1j * step * d for x, d in zip((*arrays, sinks), along, strict=True)]
    end = latent.forward(*moved[:6], form=form, sinks=moved[6])
    pairs = ((do, end.out), (dlse, end.lse), (dweights, end.weights))
    slope = sum((a * b).sum() for a, b in pairs).imag / step
    parts = [(getattr(grads, n) * d) for n, d in zip((*NAMES, "sinks"), along, strict=True)]
    got, size = sum(x.sum() for x in parts), sum(abs(x).sum() for x in parts)
    roundings = sum(x.size for x in parts) + 4 * (N + R + C + S + T + E)
    assert abs(got - slope) <= roundings * 2.0**-53 * size


@pytest.mark.parametrize("form", FORMS)
def test_a_query_that_sees_nothing_gives_0_and_passes_nothing(form):
    arrays = sample(8)
    mask = np.ones((T, S), bool)
    mask[2] = False
    arrays[0][:, :, 2] = np.nan
    fwd = latent.forward(*arrays, form=form, mask=mask)
    do, dlse, _ = cotangents(fwd)
    do[:, :, 2] = np.nan
    grads = latent.backward(fwd, do, dlse)
    assert not fwd.out[:, :, 2].any()
    assert np.isneginf(fwd.lse[:, :, 2]).all()
    assert not grads.q_nope[:, :, 2].any()
    kept = np.arange(T) != 2
    rest = [x[:, :, kept] for x in arrays[:2]] + arrays[2:]
    others = latent.forward(*rest, form=form)
    without = latent.backward(others, do[:, :, kept], dlse[..., kept])
    exact = formula(rest, True, do[:, :, kept], dlse[..., kept])
    for name in NAMES[2:]:
        gap = abs(getattr(grads, name) - getattr(without, name))
        assert (gap <= 2.0**-52 * exact[name].e).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_hidden_key_matters_to_nobody(form, value):
    arrays = sample(9)
    mask = np.ones((T, S), bool)
    mask[:, 3] = False
    fwd = latent.forward(*arrays, form=form, mask=mask)
    do, dlse, _ = cotangents(fwd)
    grads = latent.backward(fwd, do, dlse)
    arrays[2][:, 3], arrays[3][:, 3] = value, value
    changed = latent.forward(*arrays, form=form, mask=mask)
    assert np.array_equal(changed.out, fwd.out)
    after = latent.backward(changed, do, dlse)
    for name in NAMES:
        assert np.array_equal(getattr(after, name), getattr(grads, name))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("letter", "HTSNRCE")
def test_every_size_may_be_0(form, letter):
    sizes = dict(zip("HTSNRCE", (H, T, S, N, R, C, E), strict=True)) | {letter: 0}
    h, t, s, n, r, c, e = sizes.values()
    shapes = ((B, h, t, n), (B, h, t, r), (B, s, c), (B, s, r), (h, c, n), (h, c, e))
    arrays = [np.ones(shape) for shape in shapes]
    fwd = latent.forward(*arrays, form=form)
    assert fwd.out.shape == (B, h, t, e)
    grads = latent.backward(fwd, np.ones_like(fwd.out), np.ones_like(fwd.lse))
    for name, shape in zip(NAMES, shapes, strict=True):
        assert getattr(grads, name).shape == shape
        assert np.isfinite(getattr(grads, name)).all()


def test_scale_of_no_sizes_is_1():
    arrays = [np.ones(shape) for shape in ((1, 2, 0), (1, 2, 0), (3, 2), (3, 0), (1, 2, 0))]
    fwd = latent.forward(*arrays, np.ones((1, 2, 3)))
    assert fwd.attention.problem.scale == 1.0
    assert latent.forward(*arrays, np.ones((1, 2, 3)), scale=None).attention.problem.scale == 1.0


def test_conventions_hold():
    arrays, mask = sample(10), np.zeros((T, S), bool)
    mean = npattn.Conventions(empty_row="mean", causal="top_left")
    one, other = (
        latent.forward(*arrays, form=form, mask=mask, causal=True, conventions=mean)
        for form in FORMS
    )
    values = (arrays[2][:, None] @ arrays[5]).mean(-2, keepdims=True)
    allowed = 2.0**-52 * (S + C) * (abs(arrays[2])[:, None] @ abs(arrays[5])).sum(-2).max()
    for fwd in (one, other):
        assert abs(fwd.out - values).max() <= allowed


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_is_nan_by_convention_adds_to_no_weight(form):
    arrays = sample(12)
    mask = np.ones((arrays[0].shape[-3], T, S), bool)
    mask[0, 1] = False
    options = {"form": form, "mask": mask}
    fwd = latent.forward(*arrays, **options, conventions=npattn.Conventions(empty_row="nan"))
    dout = np.random.default_rng(5).standard_normal(fwd.out.shape)
    grads = latent.backward(fwd, dout)
    plain = latent.backward(latent.forward(*arrays, **options), dout)  # where it passes nothing
    assert np.isnan(fwd.out[:, 0, 1]).all()
    for name in ("c", "k_rope", "w_uk", "w_uv"):
        np.testing.assert_array_equal(getattr(grads, name), getattr(plain, name))


def test_dtypes():
    arrays = sample(11)
    narrow = [x.astype(np.float32) for x in arrays]
    assert latent.attention(*narrow).dtype == np.float64
    assert latent.attention(*narrow, dtype=np.float32).dtype == np.float32
    assert latent.attention(*arrays[:5], arrays[5] + 0j).dtype == np.complex128


WRONG = {
    "rank of q_nope": (0, (T, N), ShapeError, r"q_nope has shape \(5, 11\), must be"),
    "rank of w_uk": (4, (1, H, C, N), ShapeError, "w_uk has shape .* must be \\(H, C, N\\)"),
    "heads of q_rope": (1, (B, H + 1, T, R), ShapeError, "q_rope has sizes"),
    "rotary size": (3, (B, S, R + 1), ShapeError, "k_rope has sizes"),
    "w_uk": (4, (H, N, C), ShapeError, "w_uk has sizes"),
    "w_uv": (5, (H, E, C), ShapeError, "w_uv has sizes"),
    "layout of c": (2, (B, 1, S, C), ShapeError, r"pass c\.squeeze\(-3\)"),
    "layout of k_rope": (3, (B, 1, S, R), ShapeError, r"pass k_rope\.squeeze\(-3\)"),
    "leading axes": (2, (B + 1, S, C), ShapeError, "leading axes do not broadcast"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_shapes_are_errors(case):
    at, shape, error, match = WRONG[case]
    arrays = sample()
    arrays[at] = np.ones(shape)
    with pytest.raises(error, match=match):
        latent.forward(*arrays)


def test_wrong_arguments_are_errors():
    arrays = sample()
    with pytest.raises(OptionError, match="form is 'absorb'"):
        latent.attention(*arrays, form="absorb")
    with pytest.raises(OptionError, match=r"has no option is_causal: .*causal"):
        latent.attention(*arrays, is_causal=True)
    with pytest.raises(DtypeError, match="bfloat16, must be"):
        latent.attention(*arrays, dtype="bfloat16")
    with pytest.raises(DtypeError, match="c is int64"):
        latent.attention(*arrays[:2], np.ones((B, S, C), int), *arrays[3:])
    fwd = latent.forward(*arrays)
    with pytest.raises(ShapeError, match="dout has shape"):
        latent.backward(fwd, fwd.out[0])


def test_backward_takes_its_own_forward_alone():
    with pytest.raises(OptionError, match=r"fwd is of type NoneType; pass the result of"):
        latent.backward(None, np.ones(1))


def test_arguments_are_not_written_to():
    arrays = sample()
    copies = [x.copy() for x in arrays]
    for form in FORMS:
        fwd = latent.forward(*arrays, form=form)
        latent.backward(fwd, np.ones_like(fwd.out))
    for x, copy in zip(arrays, copies, strict=True):
        assert np.array_equal(x, copy)


# --- mistakes -------------------------------------------------------------------------------------


def changed_forward(arrays, mistake):
    """Latent attention with a mistake in it."""
    query, rotary, c, k_rope, w_uk, w_uv = arrays
    if mistake == "scale of N alone":
        return latent.forward(*arrays, scale=1 / math.sqrt(N))
    if mistake == "rotary part forgotten":
        return latent.forward(query, 0 * rotary, *arrays[2:])
    if mistake == "w_uv of another head":
        return latent.forward(*arrays[:5], np.roll(w_uv, 1, 0))
    if mistake == "absorbed without the transpose":
        square = query[..., :, :N] @ w_uk[:, :N, :N]  # what runs where C = N
        u = latent.forward(*arrays, form="absorbed")
        q = np.concatenate([square, rotary], -1)
        k = np.concatenate([c[..., :N], k_rope], -1)[..., None, :, :]
        inside = npattn.forward(q, k, c[..., None, :, :], scale=u.attention.problem.scale)
        return SimpleNamespace(out=inside.out @ w_uv, lse=inside.lse, weights=inside.weights)
    return latent.forward(*arrays)


def changed_backward(arrays, grads, fwd, do, mistake):
    """Gradients with a mistake in them."""
    changes = {}
    if mistake == "dc without values":
        w_uv = arrays[5]
        dv = npattn.backward(fwd.attention, do).v
        changes["c"] = grads.c - (dv @ w_uv.swapaxes(-1, -2)).sum(-3)
    if mistake == "dk_rope of one head":
        own = npattn.backward(fwd.attention, do).k
        changes["k_rope"] = own[:, 0, :, N:]
    return SimpleNamespace(**{n: changes.get(n, getattr(grads, n)) for n in NAMES})


MISTAKES = {
    "scale of N alone": "lse",
    "rotary part forgotten": "lse",
    "w_uv of another head": "out",
    "absorbed without the transpose": "lse",
    "dc without values": "dc",
    "dk_rope of one head": "dk_rope",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_found(mistake):
    arrays = sample(12)
    fwd = latent.forward(*arrays)
    do, _, _ = cotangents(fwd)
    grads = latent.backward(fwd, do)
    exact = formula(arrays, np.ones((T, S), bool), do, np.zeros(fwd.lse.shape))
    assert_is(fwd, grads, exact)
    wrong = changed_forward(arrays, mistake)
    wrong_grads = changed_backward(arrays, grads, fwd, do, mistake)
    name = MISTAKES[mistake]
    got = getattr(wrong_grads, name[1:]) if name[0] == "d" else getattr(wrong, name)
    with pytest.raises(AssertionError, match=f"{name} is off by"):
        assert_within(name, got, exact[name.removeprefix("d")])
