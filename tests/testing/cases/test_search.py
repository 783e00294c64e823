"""Simpler cases, step by step."""

from npattn.testing.cases.search import shrink


def test_the_first_simpler_case_that_fails_is_taken():
    asked = []

    def fails(x):
        asked.append(x)
        return x > 4

    assert shrink(19, lambda x: (x // 2, x - 1), fails, 60.0) == 5
    assert asked == [9, 4, 8, 7, 3, 6, 5, 2]  # none twice
    now = iter(range(7))
    assert shrink(19, lambda x: (x // 2, x - 1), fails, 3.5, lambda: next(now)) == 8
