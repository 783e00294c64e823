"""Results of several calls in one record, and exceptions in one line."""

import numpy as np

from npattn.testing.adapters.base import Results, format_exception_line

PLAIN, WITH_LSE, LSE = np.zeros(2), np.ones(2), np.full(2, 3.0)


def test_a_name_gives_the_array_of_the_first_call():
    results = Results((("o", PLAIN), ("o", WITH_LSE), ("lse", LSE)))
    assert results["o"] is PLAIN
    assert list(results) == ["o", "lse"]
    assert len(results) == 2
    assert all(x is y for x, y in zip(results.values(), (PLAIN, LSE), strict=True))


def test_a_sum_keeps_every_call():
    results = Results((("o", PLAIN),)) + Results((("o", WITH_LSE),))
    assert [id(array) for _, array in results.pairs] == [id(PLAIN), id(WITH_LSE)]
    assert results["o"] is PLAIN


def test_an_exception_becomes_one_line():
    assert format_exception_line(ValueError("two\n  lines")) == "ValueError: two lines"
    assert format_exception_line(KeyError()) == "KeyError"
    assert len(format_exception_line(ValueError("x" * 999))) == len("ValueError: ") + 200
