"""Numbers that a caller or attributes of a module name."""

from types import SimpleNamespace

import numpy as np
import pytest

from npattn.positions import Rotary
from npattn.testing.modules.named import Named

H, D = 3, 5


def module(config=None, **attributes):
    """Return what stands for a module with these attributes."""

    def attribute(names, kind=int):
        found = (attributes[n] for n in names if isinstance(attributes.get(n), kind))
        return next(found, None)

    return SimpleNamespace(owner=SimpleNamespace(config=config), attribute=attribute)


CONFIG = SimpleNamespace(query_pre_attn_scalar=16, rope_parameters={"rope_theta": 50.0})


@pytest.mark.every
@pytest.mark.parametrize(
    ("named", "given", "changes", "notes"),
    [
        ({}, module(), {}, ()),
        ({}, module(scale=0.3), {"scale": 0.3}, ("scale 0.3 by its attribute",)),
        ({}, module(scale=D**-0.5), {}, ()),
        ({"scale": 2.0}, module(scale=0.3), {}, ()),
        ({}, module(CONFIG), {"scale": 0.25, "rotary": 50.0},
         ("scale 1/√16 by config.query_pre_attn_scalar",)),
        ({}, module(SimpleNamespace(), scale=0.3), {}, ()),
        ({}, module(softcap=30), {"softcap": 30.0}, ("softcap 30 by its attribute",)),
        ({}, module(window=7, theta=1e4), {"window": 7, "rotary": 1e4}, ()),
        ({"window": 3, "rotary": 10.0}, module(window=7, theta=1e4), {}, ()),
    ],
)  # fmt: skip
def test_attributes_fill_what_the_caller_leaves_out(named, given, changes, notes):
    reading = SimpleNamespace(num_heads=H, indices={"wq": np.zeros((2, H * D))})
    assert Named(**named).fill(given, reading) == Named(**{**named, **changes}, notes=notes)


@pytest.mark.every
@pytest.mark.parametrize(
    ("rotary", "read", "want", "words"),
    [
        (None, None, None, ""),
        (Rotary(base=7.0), Rotary(), Rotary(base=7.0), "rotary as passed"),
        (7.0, Rotary(size=4), Rotary(size=4, base=7.0), "rotary, half of 4 features, base 7"),
        (None, Rotary(), Rotary(), "rotary, half, base 10000 read, not checked"),
    ],
)
def test_rotary_positions_have_the_named_base(rotary, read, want, words):
    assert repr(Named(rotary=rotary).rope_of(read)) == repr((want, words))


@pytest.mark.every
@pytest.mark.parametrize(
    ("window", "read", "want", "words"),
    [
        (None, (3, 0), None, ""),
        (3, None, None, ""),
        ((5, 1), (3, 0), (5, 1), ""),
        (4, (3, 0), (3, 0), "window 4 (the query counted)"),
        (3, (3, 3), (3, 3), "window 3 (beside the query)"),
        (7, (3, 0), None, ""),
        (3, (3, 1), None, ""),
    ],
)
def test_a_window_is_the_named_one_as_it_was_read(window, read, want, words):
    assert Named(window=window).window_of(read) == (want, words)
