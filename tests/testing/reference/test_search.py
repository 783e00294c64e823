"""A search ends with the smallest failing case, or with the exception of what it asks."""

import math
from dataclasses import dataclass, field

import pytest

from npattn.errors import InternalError
from npattn.testing.comparison import Comparison
from npattn.testing.reference.check import Found
from npattn.testing.reference.search import Search, Time
from npattn.testing.report.outcome import Outcome


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
        assert search.worst == 0.5


def test_a_case_that_fails_once_stays_a_failure():
    cases = iter([7])
    search = Search(judge)
    search.run({"x": (1, 2)}, lambda _: next(cases, 1), 50, 0)
    assert search.failure.case == 7


def test_a_case_is_judged_once():
    asked = []
    search = Search(lambda case: asked.append(case) or judge(1))
    search.run({"x": range(31)}, lambda fields: fields["x"] % 5, 30, 0)
    assert sorted(asked) == list(range(5))


def test_each_value_of_a_field_is_asked_as_often():
    asked = []
    search = Search(lambda case: asked.append(case) or judge(1))
    fields = {"x": range(5), "y": range(7, 12)}
    search.run(fields, lambda case: (*case.values(), len(asked)), 30, 3)
    assert search.failure is None
    assert [sum(x == n for x, *_ in asked) for n in range(5)] == [6] * 5
    assert [sum(y == n for _, y, _ in asked) for n in range(7, 12)] == [6] * 5
    assert len({case[:2] for case in asked}) > 10  # not in step


def test_each_field_of_a_failure_is_made_simpler():
    asked = []

    def wrong_beyond(case):
        asked.append(case)
        return judge(7 if case[0] > 11 and case[1] > 2 else 1)

    search = Search(wrong_beyond)
    search.run({"x": range(31), "y": range(7)}, lambda case: tuple(case.values()), 30, 0)
    assert search.failure.case == (12, 3)
    assert len(set(asked)) == len(asked)  # the first answer stands


def test_an_outcome_says_results_before_gradients():
    ratios = {"dq": 7.0, "o": 2.0, "lse": 3.0, "dk": 0.5}
    shown = [Comparison(n, x, (0,), 0.0, 0.0, 0.0, int(x > 1), 1) for n, x in ratios.items()]
    search = Search(lambda x: shown if x > 1 else [shown[-1]])
    search.run({"x": (1, 2)}, lambda fields: fields["x"], 50, 0)
    empty = Outcome("agreement", "", "", "float32", "not applicable")
    found = search.conclude(empty, lambda case, message: f"{case}: {message}")
    assert (found.status, found.worst, found.recipe, found.kind) == ("failed", 3.0, "2", "")
    assert [c.name for c in found.comparisons] == ["lse", "o", "dq"]
    assert found.script_text == f"2: {found.message}"
    assert found.message.splitlines() == [str(c) for c in found.comparisons]


# --- the time -------------------------------------------------------------------------------------


def test_a_plan_has_the_time_that_is_left():
    now = iter([4.0, 4.0, 9.5, 9.5, 10.5])
    plan = Time(examples=30, budget=10.0, start=0.0, clock=lambda: next(now))
    assert [plan.afford(0.25), plan.afford(0.25, 0.5), plan.afford(0.25)] == [24, 12, 3]
    assert plan.afford(0.0) == 30
    assert plan.is_over
    assert plan.describe("float32") == [
        "27 of 30 examples in float32, for which there is no time (budget= gives more)"
    ]
    assert Time(examples=30, budget=10.0, start=0.0).describe("float32") == []
    assert Time(examples=30, budget=math.inf, start=0.0).afford(0.25) == 30


SIZES = (2, 5, 7, 11, 13, 29, 31, 41, 53, 97)


class Sized:
    """Cases (size, number), of which a tenth are large."""

    largest = staticmethod(lambda case: case[0])


@dataclass
class Slow(Found):
    """A function that takes some seconds for each size, on a clock of its own."""

    seconds: dict = field(default_factory=dict)
    now: float = 0.0
    sizes: list = field(default_factory=list)

    def _judge(self, case, *, quick=False):
        self.sizes.append(case[0])
        self.now += self.seconds.get(case[0], 0.0)
        return case

    def _note(self, case, found):
        self.tried += 1


def ask_slow(seconds, budget=60.0, examples=100):
    found = Slow(Sized(), "float32", 1e-4, seconds=seconds)
    plan = Time(examples, budget, 0.0, clock=lambda: found.now)
    cases = ((SIZES[i % len(SIZES)], i) for i in range(400))
    found.ask(cases, plan)
    return found, [*found.left_out, *plan.describe("float32")]


def test_what_is_fast_is_asked_in_every_size():
    found, lines = ask_slow(dict.fromkeys(SIZES, 0.1))
    assert (found.tried, lines) == (100, [])
    assert found.sizes[:9] == [2, 5, 7, 13, 29, 31, 41, 53, 97]  # first calls, small ones first
    assert found.sizes.count(97) == 10


@pytest.mark.parametrize(
    ("cubic", "below", "beyond", "count"),
    [(1e-5, 33, 3, 100), (1e-4, 33, 1, 66), (1e-3, 11, 2, 78), (0.03, 11, 0, 7)],
)
def test_what_is_slow_is_asked_in_small_sizes(cubic, below, beyond, count):
    found, lines = ask_slow({n: cubic * n**3 for n in SIZES})
    few = f"all but {beyond} problems with " if beyond else ""
    assert lines[0].startswith(f"{few}sizes beyond {below} in float32, for which there is no time")
    assert sum(n > below for n in found.sizes) == beyond
    assert found.tried == count
    assert [x[:9] for x in lines[1:]] == ([] if count == 100 else [f"{100 - count} of 100"])
    assert found.now < 60 + cubic * max(found.sizes) ** 3


def test_a_time_that_first_calls_do_not_show_ends_the_questions():
    found, lines = ask_slow({11: 10.0})
    assert 60 < found.now <= 70
    assert lines == [f"{100 - found.tried} of 100 examples in float32, for which there is no time "
                     "(budget= gives more)"]  # fmt: skip


def test_a_few_are_asked_whatever_the_time():
    found, _ = ask_slow(dict.fromkeys(SIZES, 100.0))
    assert (found.tried, found.sizes) == (3, [2, 5, 7])
