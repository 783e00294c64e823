"""compare of arrays that hold the numbers of a narrower dtype, bit by bit or one by one."""

import numpy as np
import pytest

import npattn
from npattn.errors import DtypeError, OptionError
from npattn.testing import compare

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((1, 2, 5, 8)).astype("bfloat16") for _ in range(3))
OUT = npattn.attention(*(x.astype(float) for x in (Q, K, V))).astype("bfloat16")
WIDE = npattn.Problem(*(x.astype(np.float32) for x in (Q, K, V)))


@pytest.mark.parametrize("got", [OUT.view(np.uint16), OUT.astype(np.float32), OUT])
def test_bits_and_numbers_of_bfloat16_are_compared_as_such(got):
    (one,) = compare(got, WIDE, dtype="bfloat16")
    assert one.passed
    (twice,) = compare(2 * OUT, WIDE, dtype="bfloat16")
    assert not twice.passed


def test_dtype_is_proposed_where_it_fits():
    (one,) = compare(OUT.astype(np.float32), WIDE)
    assert not one.passed
    assert "dtype='bfloat16'" in str(one)
    more = npattn.Problem(*(x + np.float32(1e-4) for x in (WIDE.q, WIDE.k, WIDE.v)))
    assert compare(OUT.astype(np.float32), more)[0].hint == ""


def test_results_cut_to_bfloat16_are_a_mistake():
    problem = npattn.Problem(*RNG.standard_normal((3, 1, 2, 5, 8)).astype(np.float32))
    with pytest.raises(OptionError, match="q is float32 and holds numbers that are not bfloat16"):
        compare(OUT, problem, dtype="bfloat16")


def test_errors_name_a_way_that_works():
    with pytest.raises(OptionError, match="dtype is 'float64', must be"):
        compare(OUT, WIDE, dtype="float64")
    with pytest.raises(DtypeError, match="pass dtype='bfloat16'"):
        compare(OUT.view(np.uint16), WIDE)
    with pytest.raises(DtypeError, match=r"pass q.view\('bfloat16'\)"):
        npattn.Problem(Q.view(np.uint16), K, V)
    assert compare(OUT, npattn.Problem(Q.view(np.uint16).view("bfloat16"), K, V))[0].passed
