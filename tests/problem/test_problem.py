"""Problem: what it takes, what it refuses and in which words, and what it makes of its options."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

import npattn
from npattn import Problem
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.problem.arrays import sum_to
from npattn.problem.checks import check_cotangent

B, H, K, T, S, D, E = 2, 6, 3, 5, 7, 11, 13


def noise(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def inputs(**changes):
    return {"q": noise(B, H, T, D), "k": noise(B, K, S, D), "v": noise(B, K, S, E)} | changes


def yes(*shape):
    return np.ones(shape, bool)


# --- mistakes of a caller -------------------------------------------------------------------------

SHAPES_OF_THE_REST = f"[q {(B, H, T, D)}, k {(B, K, S, D)}, v {(B, K, S, E)}]"
WHOLE = "(2, 6, 5, 7)"
NAN = math.nan

WRONG_SHAPES = {
    "q of rank 1": ({"q": noise(D)}, "q has rank 1, must have rank 3 or more"),
    "k of rank 0": ({"k": noise()}, "k has rank 0, must have rank 3 or more"),
    "only k of rank 2": ({"k": noise(S, D)}, "k has rank 2, must have rank 3 or more"),
    "only q of rank 2": ({"q": noise(T, D)}, "or pass q, k, v all of rank 2, (length, size)"),
    "other size in k": ({"k": noise(B, K, S, 8)}, "k has size 8, but q has size 11"),
    "other length in v": ({"v": noise(B, K, 8, E)}, "v has 8 keys, but k has 7"),
    "other heads in v": ({"v": noise(B, 2, S, E)}, "v has 2 heads, but k has 3"),
    "K that does not divide H": (
        {"k": noise(B, 4, S, D), "v": noise(B, 4, S, E)},
        "k has 4 heads, which does not divide the 6 heads of q "
        "[q (2, 6, 5, 11), k (2, 4, 7, 11), v (2, 4, 7, 13)]",
    ),
    "K of 0 with H of 6": (
        {"k": noise(B, 0, S, D), "v": noise(B, 0, S, E)},
        "k has 0 heads, but q has 6",
    ),
    "K of 3 with H of 0": ({"q": noise(B, 0, T, D)}, "k has 3 heads, but q has 0"),
    "leading axes that do not broadcast": (
        {"q": noise(3, H, T, D)},
        "q, k, v have leading axes (3,), (2,), (2,), which do not broadcast [q (3, 6, 5, 11)",
    ),
    "mask of rank 1": (
        {"mask": yes(S)},
        "mask has shape (7,), must have rank 2 or more and broadcast against (..., H, T, S) = "
        f"{WHOLE}; for one row of keys pass mask[None, :] {SHAPES_OF_THE_REST}",
    ),
    "mask of (B, S)": (
        {"mask": yes(B, S)},
        f"{WHOLE}; for a (B, S) mask pass mask[:, None, None, :] {SHAPES_OF_THE_REST}",
    ),
    "mask of (B, T, S)": ({"mask": yes(B, T, S)}, "for a (B, T, S) mask pass mask[:, None] [q"),
    "mask that enlarges an axis": ({"mask": yes(4, 1, T, S)}, "mask has shape (4, 1, 5, 7), must"),
    "mask that adds an axis": ({"mask": yes(1, B, H, T, S)}, "mask has shape (1, 2, 6, 5, 7)"),
    "mask of S + 1 keys": ({"mask": yes(T, S + 1)}, "mask has shape (5, 8), must have rank 2"),
    "mask transposed": ({"mask": yes(S, T)}, "mask has shape (7, 5), must have rank 2 or more"),
    "mask of rank 0": ({"mask": np.True_}, "mask has shape (), must have rank 2 or more"),
    "bias of rank 1": ({"bias": noise(S)}, "bias has shape (7,), must have rank 2 or more"),
    "bias of (B, S)": ({"bias": noise(B, S)}, "for a (B, S) bias pass bias[:, None, None, :]"),
    "bias of K heads": ({"bias": noise(K, T, S)}, "bias has shape (3, 5, 7), must have rank 2"),
    "dropout_mask of rank 1": ({"dropout_mask": yes(S)}, "dropout_mask has shape (7,), must"),
    "sinks for K heads": ({"sinks": noise(K)}, "sinks has shape (3,), must have shape (H,) = (6,)"),
    "sinks of (1, H)": ({"sinks": noise(1, H)}, "sinks has shape (1, 6), must have shape (H,)"),
    "one sink as a number": ({"sinks": 0.5}, "sinks has shape (), must have shape (H,) = (6,)"),
}

WRONG_DTYPES = {
    "integer q": (
        {"q": np.ones((B, H, T, D), int)},
        "q is int64, must be floating (float64, float32, float16, bfloat16, float8, complex): "
        "convert it, for example to float64",
    ),
    "boolean k": ({"k": yes(B, K, S, D)}, "k is bool, must be floating"),
    "v of objects": ({"v": np.full((B, K, S, E), None)}, "v is object, must be floating"),
    "no q at all": ({"q": None}, "q is object, must be floating"),
    "q of text": ({"q": "query"}, "q is <U5, must be floating"),
    "q of unequal lists": ({"q": [[1.0, 2.0], [3.0]]}, "q is a builtins.list, which NumPy cannot"),
    "masked array": ({"v": np.ma.masked_array(noise(B, K, S, E))},
                     "v is a masked array; pass its .data, and hide positions with mask="),
    "float mask": ({"mask": noise(T, S)},
                   "mask is float64, must be bool: pass it as bias to add its numbers"),
    "bfloat16 mask": ({"mask": noise(T, S).astype(ml_dtypes.bfloat16)},
                      "mask is bfloat16, must be bool: pass it as bias"),
    "integer mask": (
        {"mask": np.ones((T, S), int)},
        "mask is int64, must be bool: integer masks are ambiguous; pass mask == 1 or mask == 0",
    ),
    "mask of text": ({"mask": np.full((T, S), "x")}, "mask is <U1, must be bool: True = may"),
    "boolean bias": ({"bias": yes(T, S)},
                     "bias is bool, must be floating: pass it as mask (True = may attend)"),
    "integer bias": ({"bias": np.ones((T, S), int)}, "bias is int64, must be floating"),
    "integer sinks": ({"sinks": np.ones(H, int)}, "sinks is int64, must be floating"),
    "float dropout_mask": ({"dropout_mask": noise(T, S)}, "dropout_mask is float64, must be bool"),
    "integer dropout_mask": (
        {"dropout_mask": np.ones((T, S), int)},
        "dropout_mask is int64, must be bool: integer masks are ambiguous; pass dropout_mask == 1",
    ),
    "dtype float8": ({"dtype": "float8_e4m3fn"}, "must be float32, float64, longdouble"),
    "dtype float16 of complex": ({"dtype": "float16", "q": noise(H, T, D) + 1j},
                                 "dtype is float16, but an array is complex: pass complex128"),
    "dtype int": ({"dtype": int}, "dtype is <class 'int'>, must be float32, float64"),
    "dtype that is none": ({"dtype": "nonsense"}, "dtype is 'nonsense', must be float32"),
    "real dtype for complex q": ({"q": noise(B, H, T, D) + 0j, "dtype": "float64"},
                                 "dtype is float64, but an array is complex: pass complex128"),
}  # fmt: skip

WINDOW = "must be a pair (left, right) of integers ≥ 0 or None (unlimited), in keys"

WRONG_OPTIONS = {
    "causal=True with T ≠ S": (
        {"causal": True},
        "causal=True is ambiguous for T = 5 queries and S = 7 keys: pass "
        'causal="bottom_right" (t sees s ≤ t + S − T: the last query, the last key), '
        'causal="top_left" (t sees s ≤ t: the first query, the first key), or conventions=',
    ),
    "unknown causal": ({"causal": "left"},
                       'causal is \'left\', must be True, False, "bottom_right" or "top_left"'),
    "causal as a number": ({"causal": 1}, "causal is 1, must be True, False"),
    "causal=None": ({"causal": None}, "causal is None, must be True, False"),
    "unknown alignment": ({"alignment": "left"}, "alignment is 'left', must be one of"),
    "window as a number": ({"window": 3}, f"window is 3, {WINDOW}"),
    "window of three": ({"window": (1, 2, 3)}, f"window is (1, 2, 3), {WINDOW}"),
    "negative window": ({"window": (-1, 0)}, f"window is (-1, 0), {WINDOW}"),
    "fractional window": ({"window": (1.5, 0)}, f"window is (1.5, 0), {WINDOW}"),
    "boolean window": ({"window": (True, 0)}, f"window is (True, 0), {WINDOW}"),
    "NaN scale": ({"scale": NAN}, "scale is nan, must be a finite number or None (1/√D)"),
    "infinite scale": ({"scale": math.inf}, "scale is inf, must be a finite number or None"),
    "scale beyond float64": ({"scale": 10**400}, "scale is 1000"),
    "scale as text": ({"scale": "1"}, "scale is '1', must be a finite number or None"),
    "complex scale": ({"scale": 1j}, "scale is 1j, must be a finite number or None"),
    "boolean scale": ({"scale": True}, "scale is True, must be a finite number or None"),
    "scale of each head": ({"scale": np.ones(H)}, "must be a finite number or None"),
    "softcap of 0": ({"softcap": 0.0}, "softcap is 0.0, must be a finite number > 0 or None"),
    "negative softcap": ({"softcap": -1}, "softcap is -1.0, must be a finite number > 0"),
    "NaN softcap": ({"softcap": NAN}, "softcap is nan, must be a finite number > 0 or None"),
    "infinite softcap": ({"softcap": math.inf}, "softcap is inf, must be a finite number > 0"),
    "softcap as text": ({"softcap": "30"}, "softcap is '30', must be a finite number > 0"),
    "score_mod that cannot be called": ({"score_mod": 2.0},
        "score_mod is 2.0, must be a callable f(s, b, h, t, s_index)"),
    "rate of 1": ({"dropout_rate": 1.0, "dropout_mask": yes(T, S)},
                  "dropout_rate is 1.0, must be a number in [0, 1)"),
    "negative rate": ({"dropout_rate": -0.1}, "dropout_rate is -0.1, must be a number in [0, 1)"),
    "NaN rate": ({"dropout_rate": NAN}, "dropout_rate is nan, must be a number in [0, 1)"),
    "rate as text": ({"dropout_rate": "0.1"}, "dropout_rate is '0.1', must be a number in [0, 1)"),
    "rate without a mask": (
        {"dropout_rate": 0.1},
        "dropout_rate is 0.1, but there is no dropout_mask: nothing here is random; "
        "pass the weights to keep as a bool array (True = keep)",
    ),
    "unknown engine": ({"engine": "fast"}, "engine is 'fast', must be one of auto, dense"),
    "engine=None": ({"engine": None}, "engine is None, must be one of auto, dense"),
}  # fmt: skip

MISTAKES = [
    pytest.param(changes, error, words, id=name)
    for error, cases in (
        (ShapeError, WRONG_SHAPES),
        (DtypeError, WRONG_DTYPES),
        (OptionError, WRONG_OPTIONS),
    )
    for name, (changes, words) in cases.items()
]


@pytest.mark.every
@pytest.mark.parametrize(("changes", "error", "words"), MISTAKES)
def test_error_of_a_wrong_argument(changes, error, words):
    with pytest.raises(npattn.errors.NpattnError) as caught:
        Problem(**inputs(**changes))
    assert type(caught.value) is error
    assert words in str(caught.value)
    assert len(caught.value.args) == 1


# --- what is accepted -----------------------------------------------------------------------------

DTYPES = [
    np.dtype(name)
    for name in [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3b11fnuz",
        "complex64",
        "complex128",
        "longdouble",
    ]
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_are_kept_exactly_as_they_were_given(dtype):
    given = {name: x.astype(dtype) for name, x in inputs().items()}
    problem = Problem(**given)
    assert problem.q is given["q"]
    assert problem.k is given["k"]
    assert problem.v is given["v"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything_is_computed_in_float64_or_complex128_unless_said(dtype):
    problem = Problem(**{name: x.astype(dtype) for name, x in inputs().items()})
    assert problem.dtype == ("complex128" if dtype.kind == "c" else "float64")


@pytest.mark.parametrize("name", ["bias", "sinks"])
def test_one_complex_array_makes_the_computation_complex(name):
    assert Problem(
        **inputs(**{name: noise(H) + 0j if name == "sinks" else noise(T, S) + 0j})
    ).dtype == ("complex128")


@pytest.mark.parametrize("dtype", ["float32", np.float64, np.longdouble, "complex64"])
def test_dtype_is_normalised(dtype):
    assert Problem(**inputs(dtype=dtype)).dtype == np.dtype(dtype)


class OnlyDlpack:
    """An object with DLPack and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnlyArray:
    """An object with __array__ and nothing else."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class NotToBeRead:
    """An object whose DLPack fails, as an array on another device."""

    dtype = "float32"

    def __dlpack__(self, **options):
        raise BufferError("it is elsewhere")

    def __dlpack_device__(self):
        return (1, 0)


@pytest.mark.parametrize("wrap", [OnlyDlpack, OnlyArray])
def test_other_libraries_arrays_are_read_without_a_copy(wrap):
    given = inputs()
    problem = Problem(**{name: wrap(x) for name, x in given.items()})
    assert np.shares_memory(problem.q, given["q"])
    np.testing.assert_array_equal(problem.v, given["v"])


def test_subclasses_of_arrays_become_plain():
    assert type(Problem(**inputs(q=noise(B, H, T, D).view(np.memmap))).q) is np.ndarray


def test_nested_lists_are_read():
    given = inputs(mask=yes(T, S))
    problem = Problem(**{name: x.tolist() for name, x in given.items()})
    np.testing.assert_array_equal(problem.k, given["k"])
    assert problem.mask.dtype == bool


def test_error_for_an_unreadable_array_names_its_type():
    with pytest.raises(DtypeError) as caught:
        Problem(**inputs(k=NotToBeRead()))
    assert str(caught.value).startswith(f"k is a {__name__}.NotToBeRead of dtype float32, which")
    assert "(it is elsewhere); pass a NumPy array" in str(caught.value)


def test_torch_tensors_are_read_without_a_copy():
    torch = pytest.importorskip("torch")
    given = inputs()
    problem = Problem(**{name: torch.from_numpy(x) for name, x in given.items()})
    assert np.shares_memory(problem.q, given["q"])


def test_a_torch_mask_is_read():
    torch = pytest.importorskip("torch")
    assert Problem(**inputs(mask=torch.ones(T, S, dtype=torch.bool))).mask.all()


def test_error_for_a_tensor_that_requires_grad():
    torch = pytest.importorskip("torch")
    with pytest.raises(DtypeError, match=r"q is a torch\.Tensor of dtype .*detach it"):
        Problem(**inputs(q=torch.ones(B, H, T, D, requires_grad=True)))


def test_a_bfloat16_torch_tensor_is_to_be_widened():
    torch = pytest.importorskip("torch")
    with pytest.raises(DtypeError, match=r"of dtype torch\.bfloat16, .*widen its dtype"):
        Problem(**inputs(q=torch.ones(B, H, T, D, dtype=torch.bfloat16)))


EVERY_OPTION = {
    "mask": np.tri(T, S, 2, dtype=bool),
    "bias": noise(1, T, S, seed=1),
    "sinks": noise(H, seed=2),
    "dropout_mask": noise(T, S, seed=3) > 0,
    "dropout_rate": 0.25,
    "window": (3, 2),
    "softcap": 2.0,
}


@pytest.mark.parametrize(
    "conventions", [None, npattn.Conventions(hidden_fill=-5.0, mask_true="hide")]
)
def test_nothing_that_was_passed_is_written_to(conventions):
    given = inputs(**EVERY_OPTION)
    arrays = [x for x in given.values() if isinstance(x, np.ndarray)]
    before = [x.tobytes() for x in arrays]
    fwd = npattn.forward(**given, conventions=conventions)
    do, dlse, dweights = np.ones_like(fwd.out), np.ones_like(fwd.lse), np.ones_like(fwd.weights)
    npattn.backward(fwd, do, dlse, dweights)
    assert [x.tobytes() for x in arrays] == before
    assert (do == 1).all()
    assert (dlse == 1).all()
    assert (dweights == 1).all()


# --- sizes ----------------------------------------------------------------------------------------


def test_sizes_come_from_the_arrays():
    p = Problem(**inputs())
    assert (p.lead, p.H, p.K, p.T, p.S, p.D, p.E) == ((B,), H, K, T, S, D, E)


def test_leading_axes_broadcast_and_may_differ_in_number():
    assert Problem(noise(H, T, D), noise(4, 1, K, S, D), noise(2, K, S, E)).lead == (4, 2)


def test_rank_2_is_one_head():
    p = Problem(noise(T, D), noise(S, D), noise(S, E), sinks=noise(1), mask=yes(T, S))
    assert p.headless
    assert (p.lead, p.H, p.K) == ((), 1, 1)


@pytest.mark.parametrize(
    "shape", [(T, S), (1, S), (T, 1), (1, 1), (H, T, S), (B, 1, T, S), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("name", ["mask", "bias", "dropout_mask"])
def test_arrays_that_broadcast_against_scores_are_accepted(name, shape):
    array = noise(*shape) if name == "bias" else yes(*shape)
    assert getattr(Problem(**inputs(**{name: array})), name) is array


# --- normalisation --------------------------------------------------------------------------------


def square(**options):
    return Problem(noise(K, S, D), noise(K, S, D), noise(K, S, E), **options)


def rectangular(**options):
    return Problem(**inputs(**options))


BOTTOM_RIGHT = {"causal": "bottom_right", "alignment": "bottom_right"}


@pytest.mark.parametrize(
    ("make", "options", "fields"),
    [
        (square, {}, {"scale": 1 / math.sqrt(D)}),
        (lambda: Problem(noise(H, T, 0), noise(K, S, 0), noise(K, S, E)), {}, {"scale": 1.0}),
        *((square, {"scale": x}, {"scale": float(x)})
          for x in (0, -2, 0.5, np.float32(0.5), np.float16(2), np.array(3.0), np.int8(4))),
        (square, {"softcap": np.float32(30)}, {"softcap": 30.0}),
        (square, {"dropout_rate": np.float32(0.5), "dropout_mask": yes(S, S)},
         {"dropout_rate": 0.5}),
        (square, {"dropout_mask": yes(S, S)}, {"dropout_rate": 0.0}),
        *((square, {"causal": x}, BOTTOM_RIGHT) for x in (True, np.True_, "bottom_right")),
        *((square, {"causal": x}, {"causal": False}) for x in (False, np.False_)),
        (rectangular, {"causal": True, "alignment": "top_left"}, {"causal": "top_left"}),
        (rectangular, {"causal": "bottom_right", "alignment": "top_left"}, BOTTOM_RIGHT),
        (square, {"window": [np.int32(3), None]}, {"window": (3, None)}),
        (square, {"window": (None, None)}, {"window": None}),
    ],
)  # fmt: skip
def test_options_become_plain_values(make, options, fields):
    problem = make(**options)
    for name, value in fields.items():
        got = getattr(problem, name)
        assert got == value
        assert type(got) is type(value)
        assert not isinstance(got, tuple) or list(map(type, got)) == list(map(type, value))


# --- visible --------------------------------------------------------------------------------------


def sees(t, s, T, S, causal, window, alignment):
    """Rules 6 and 7, one position at a time."""
    place = causal or alignment or "bottom_right"
    diagonal = t + (S - T if place == "bottom_right" else 0)
    left, right = window or (None, None)
    return (
        (not causal or s <= diagonal)
        and (left is None or s >= diagonal - left)
        and (right is None or s <= diagonal + right)
    )


@pytest.mark.parametrize(
    "lengths", [(5, 5), (5, 7), (7, 5), (1, 7), (7, 1), (0, 5), (5, 0), (0, 0)], ids=str
)
@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@pytest.mark.parametrize("window", [None, (0, 0), (2, 1), (None, 1), (2, None), (9, 9)], ids=str)
@pytest.mark.parametrize("alignment", [None, "top_left"])
@pytest.mark.broad
def test_visible_is_what_the_rules_say_position_by_position(lengths, causal, window, alignment):
    T, S = lengths
    problem = Problem(noise(1, T, 2), noise(1, S, 2), noise(1, S, 2), causal=causal, window=window,
                      alignment=alignment)  # fmt: skip
    want = [[sees(t, s, T, S, causal, window, alignment) for s in range(S)] for t in range(T)]
    visible = yes(T, S) if problem.visible is None else np.broadcast_to(problem.visible, (T, S))
    np.testing.assert_array_equal(visible, np.array(want, bool).reshape(T, S))


def test_visible_is_none_where_nothing_hides():
    assert Problem(**inputs(bias=noise(T, S))).visible is None


def test_visible_is_the_and_of_mask_causal_and_window():
    mask = noise(B, 1, T, S) > 0
    both = Problem(**inputs(mask=mask, causal="top_left", window=(1, 1))).visible
    alone = Problem(**inputs(causal="top_left", window=(1, 1))).visible
    np.testing.assert_array_equal(both, mask & alone)


# --- the object -----------------------------------------------------------------------------------


def test_a_problem_is_frozen():
    problem = square()
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.scale = 2.0


def test_repr_shows_dtypes_shapes_and_what_was_chosen():
    words = repr(square(mask=yes(S, S), window=(2, None), softcap=30.0))
    assert words.startswith(
        "Problem(q=float64 (3, 7, 11), k=float64 (3, 7, 11), v=float64 (3, 7, 13)"
    )
    assert "mask=bool (7, 7)" in words
    assert "window=(2, None)" in words
    assert "softcap=30.0" in words


@pytest.mark.parametrize(
    "name", ["causal", "bias", "score_mod", "sinks", "dropout", "engine", "lead"]
)
def test_repr_leaves_out_what_is_at_its_default(name):
    assert name not in repr(square())


def test_replace_checks_again():
    with pytest.raises(ShapeError, match="mask has shape"):
        square().replace(mask=yes(S, S + 1))


def test_replace_keeps_the_rest():
    problem = square(window=(2, 1), softcap=3.0).replace(causal=True)
    assert (problem.causal, problem.window, problem.softcap) == ("bottom_right", (2, 1), 3.0)


# --- helpers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (1,), (), (3, 1), (1, 5), (2, 1, 1), (2, 3, 5), (1, 1, 5)])
def test_sum_to_is_the_transpose_of_broadcasting(shape):
    whole = (2, 3, 5)
    x, y = noise(*shape, seed=1), noise(*whole, seed=2)
    assert sum_to(y, shape).shape == shape
    np.testing.assert_allclose((np.broadcast_to(x, whole) * y).sum(), (x * sum_to(y, shape)).sum())


def test_sum_to_keeps_an_axis_of_length_0():
    np.testing.assert_array_equal(sum_to(noise(0, 4), (1, 4)), np.zeros((1, 4)))


def test_cotangent_has_the_shape_of_its_result():
    with pytest.raises(ShapeError, match=r"dout has shape \(3,\), but out has shape \(2,\)"):
        check_cotangent("dout", noise(3), (2,))
