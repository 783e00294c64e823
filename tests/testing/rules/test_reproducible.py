"""Kernels whose bits depend on the rest of the call are measured as such, and only as such."""

import numpy as np
import pytest

from npattn.mistakes import Attention
from npattn.testing import Implementation
from npattn.testing.adapters.views import lay_out
from npattn.testing.cases.space import STRUCTURE
from npattn.testing.levels import REQUIRED, check_levels
from npattn.testing.rules import PROPERTIES
from npattn.testing.trial import Violation
from tests.testing.rules.relations import trial_of

RULES = tuple(name for name, rule in PROPERTIES.items() if rule.level == "reproducible")


def ask(trial, rule):
    recipes = PROPERTIES[rule].recipes(trial, 0, 100)
    return [PROPERTIES[rule].check(trial, recipe) for recipe in recipes]


def test_they_are_not_required():
    assert len(RULES) == 6
    assert "reproducible" not in REQUIRED
    assert "reproducible" not in check_levels("all")


class Nudged(Attention):
    """o is off by one part in 2²² if a condition holds: within the tolerance, and other bits."""

    def __init__(self, condition):
        self.condition = condition

    def results(self, c):
        o, lse, p = super().results(c)
        return o * (1 + 2.0**-22 * np.asarray(self.condition(c))), lse, p


class Aligned(Attention):
    """Unaligned arrays take another path."""

    def forward(self, q, k, v):
        return super().forward(q, k, v) * np.float32(1 + 2.0**-22 * bool(q.ctypes.data % 8))

    def backward(self, dout, q, k, v, *, out, lse=None):
        return super().backward(dout, q, k, v, out=out, lse=lse)


DEPENDS = {
    "same-bits-again": (Aligned(), "at another alignment"),
    "same-bits-in-batch": (Nudged(lambda c: len(c.q) == 1), "alone in the batch"),
    "same-bits-beside-others": (Nudged(lambda c: c.q[-1].flat[0]), "beside other samples"),
    "same-bits-padded": (Nudged(lambda c: c.k.shape[-2] % 2), "with padding"),
    "same-bits-in-parts": (Nudged(lambda c: c.q.shape[-2] == 1), "with 1 of"),
}


def test_each_rule_has_a_mutant():
    assert {*DEPENDS, "same-bits-threads"} == set(RULES)


@pytest.mark.parametrize("rule", DEPENDS)
def test_bits_that_depend_on_the_rest_are_found(rule):
    attention, when = DEPENDS[rule]
    with pytest.raises(Violation, match=f"other bits {when}.*\no: .* elements, by up to") as caught:
        ask(trial_of(attention), rule)
    assert caught.value.kind == "calls"


@pytest.mark.parametrize("rule", DEPENDS)
def test_base_passes(rule):
    """It computes in float64, whose order of summation float32 does not show."""
    assert 0.0 in ask(trial_of(Attention()), rule)


@pytest.mark.parametrize("rule", DEPENDS)
def test_mistake_that_does_not_depend_on_the_rest_passes(rule):
    wrong = Nudged(lambda c: 2.0**20)
    assert set(ask(trial_of(wrong), rule)) <= {0.0, None}


def test_threads_of_numpy_are_fixed():
    reason = PROPERTIES["same-bits-threads"].unless(trial_of())
    assert reason == "the number of threads of numpy is fixed when the process starts"


def test_threads_of_torch_are_set():
    torch = pytest.importorskip("torch")

    def attention(q, k, v):
        o = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
        return o * (1 + 2.0**-22) if torch.get_num_threads() > 1 and wrong else o

    f = Implementation(attention, framework="torch")
    sizes = {"B": (2,), "T": (4,), "S": (6,), "D": (8,)}
    structure = frozenset(STRUCTURE) - {"K < H", "broadcast"}
    trial, before = trial_of(f=f, sizes=sizes, structure=structure), torch.get_num_threads()
    wrong = False
    assert set(ask(trial, "same-bits-threads")) == {0.0}
    wrong = True
    with pytest.raises(Violation, match="other bits with two threads"):
        ask(trial, "same-bits-threads")
    assert torch.get_num_threads() == before


def test_shifted_arrays_are_contiguous_and_unaligned():
    x = np.arange(30, dtype=np.float32).reshape(2, 3, 5)
    shifted = lay_out(x, "shifted", swap=False)
    assert np.array_equal(shifted, x)
    assert shifted.flags.c_contiguous
    assert shifted.ctypes.data % 8 == 4
