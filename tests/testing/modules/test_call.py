"""Signatures of modules, the forms of their masks, and the cases that they are asked."""

import numpy as np
import pytest
import torch
from torch import nn

from npattn.errors import OptionError
from npattn.testing.adapters.modules import TorchModule
from npattn.testing.modules.call import SHAPES, Call, Form
from npattn.testing.modules.case import ModuleCase
from npattn.testing.modules.function import rate_freedom
from tests.testing.modules import lessons

B, H, T, S = 2, 3, 5, 7
SIZES = {"B": B, "H": H, "T": T}


@pytest.mark.parametrize(
    ("module", "inputs", "masks"),
    [
        (lessons.Notebook(), ("query", "key", "value"), ["mask"]),
        (lessons.RawWeights(), ("x", "context"), ["attention_mask"]),
        (lessons.WholeWidth(), ("x",), []),
        (
            nn.MultiheadAttention(15, 3),
            ("query", "key", "value"),
            ["attn_mask", "key_padding_mask"],
        ),
    ],
)
def test_arguments_are_known_by_name(module, inputs, masks):
    call = Call.read(TorchModule(module))
    assert call.inputs == inputs
    assert [name for name, _ in call.masks] == masks


def test_weights_are_asked_for_in_every_way():
    assert Call.read(TorchModule(nn.MultiheadAttention(15, 3))).asks == ("heads", "average", "none")
    assert Call.read(TorchModule(lessons.Notebook())).asks == ("heads",)


def test_a_module_without_input_is_an_error():
    class Nothing(nn.Linear):
        def forward(self):
            return self.weight

    with pytest.raises(OptionError, match="takes no input"):
        Call.read(TorchModule(Nothing(3, 3)))


def visible(full=True):
    rng = np.random.default_rng(0)
    return rng.random((B if full else 1, 1, T if full else 1, S)) < 0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_forms_have_their_shape(shape):
    numbers = {"B": B, "H": H, "T": T, "S": S, "1": 1, "BH": B * H}
    mask = visible(" T " in f" {shape} ")
    array = Form("mask", "True may attend", shape).array(mask, SIZES, np.float32)
    assert array.shape == tuple(numbers[axis] for axis in shape.split())


@pytest.mark.parametrize(
    ("kind", "means"),
    [
        ("True may attend", lambda x: x),
        ("True hides", lambda x: ~x),
        ("1 may attend, 0 hides", lambda x: x == 1),
        ("0 or −inf is added", lambda x: x == 0),
    ],
)
def test_kinds_mean_what_they_say(kind, means):
    array = Form("mask", kind, "B 1 T S").array(visible(), SIZES, np.float32)
    assert np.array_equal(means(array), visible())


def test_heads_of_a_flat_mask_are_inside_the_batch():
    array = Form("mask", "True may attend", "BH T S").array(visible(), SIZES, np.float32)
    assert np.array_equal(array.reshape(B, H, T, S), np.broadcast_to(visible(), (B, H, T, S)))


def test_batch_second_is_turned_both_ways():
    torch.manual_seed(0)
    one = nn.MultiheadAttention(15, 3, batch_first=True)
    other = nn.MultiheadAttention(15, 3)
    other.load_state_dict(one.state_dict())
    case = ModuleCase(B=B, T=T, S=S)
    inputs = case.inputs({"query": 15, "key": 15, "value": 15}, np.float32, "T S")

    def ones(out, weights):
        return np.arange(out.size, dtype=np.float32).reshape(out.shape), np.ones_like(weights)

    first, second = (Call.read(TorchModule(m))(case, inputs, ones) for m in (one, other))
    assert first.out.shape == (B, T, 15)
    assert np.allclose(first.out, second.out, atol=1e-5)
    assert np.allclose(first.inputs["key"], second.inputs["key"], atol=1e-4)


# --- cases ----------------------------------------------------------------------------------------

WIDTHS = {"query": 15, "key": 11, "value": 13}


def test_a_case_prints_what_makes_it_again():
    case = ModuleCase(B=3, T=5, S="T", mask="random", size=3.0, seed=7)
    assert eval(repr(case)) == case
    assert repr(ModuleCase()) == "ModuleCase()"


def test_inputs_have_their_widths_and_lengths():
    query, key, value, mask = ModuleCase(B=2, T=5, S=7).inputs(WIDTHS, np.float32, "T S")
    assert (query.shape, key.shape, value.shape) == ((2, 5, 15), (2, 7, 11), (2, 7, 13))
    assert query.dtype == np.float32
    assert mask is None
    assert ModuleCase(T=5, S="T").keys == 5


def test_inputs_have_their_size():
    one, three = (ModuleCase(size=x, T=5).inputs(WIDTHS, float, "T S").query for x in (1.0, 3.0))
    assert np.array_equal(three, 3 * one)


@pytest.mark.parametrize(
    ("mask", "shape", "expected"),
    [
        ("random", "B 1 T S", (3, 1, 5, 7)),
        ("random", "T S", (1, 1, 5, 7)),
        ("random", "B S", (3, 1, 1, 7)),
        ("padding", "B 1 T S", (3, 1, 1, 7)),
        ("causal", "T S", (1, 1, 5, 7)),
    ],
)
def test_masks_have_the_axes_of_their_form(mask, shape, expected):
    case = ModuleCase(B=3, T=5, S=7, mask=mask, seed=1)
    found = case.inputs(WIDTHS, np.float32, shape).visible
    assert found.shape == expected
    assert found[..., 0].all()
    assert not found.all()


def test_an_empty_row_is_the_first():
    found = ModuleCase(T=5, mask="empty").inputs(WIDTHS, np.float32, "T S").visible
    assert not found[..., 0, :].any()
    assert found[..., 1:, 0].all()


def test_the_form_that_shows_keys_most_freely_is_judged_inside():
    forms = [Form("mask", "True hides", x) for x in ("T S", "B 1 T S", "B H T S", "BH T S")]
    assert [rate_freedom(form) for form in forms] == [0, 1, 3, 3]
