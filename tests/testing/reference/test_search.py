"""A search ends with the smallest failing case, or with the exception of what it asks."""

import pytest

from npattn.errors import InternalError
from npattn.testing.comparison import Comparison
from npattn.testing.reference.search import Search


def judge(x):
    if x == 3:
        raise InternalError("no tolerance")
    ratio = 2.0 if x > 4 else 0.5
    return [Comparison("o", ratio, (0,), 0.0, 0.0, 0.0, int(ratio > 1), 1)]


@pytest.mark.parametrize("values", [(1, 2, 7, 5), (1, 2, 3, 5, 7)])
def test_an_exception_beside_a_failure_is_raised(values):
    search = Search(judge)
    if 3 in values:
        with pytest.raises(InternalError, match="no tolerance"):
            search.run({"x": values}, lambda fields: fields["x"], 50, 0)
    else:
        search.run({"x": values}, lambda fields: fields["x"], 50, 0)
        assert search.failure.case == 7  # values come with the simplest first
        assert search.worst == {"o": 0.5}


def test_a_case_that_fails_once_stays_a_failure():
    cases = iter([7])
    search = Search(judge)
    search.run({"x": (1, 2)}, lambda _: next(cases, 1), 50, 0)
    assert search.failure.case == 7
