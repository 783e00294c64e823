"""Problems and rules that show a mistake in place of a function, if any does."""

import pytest

import npattn
from npattn.mistakes import MISTAKES
from npattn.mutants.witness import inspect_function


def attention(q, k, v, mask=None, *, scale=None):
    return npattn.attention(q, k, v, mask, scale=scale).astype(q.dtype)


@pytest.fixture(scope="module")
def subject():
    return inspect_function(attention, "mine:attention")


def test_a_mistake_is_shown_by_a_share_of_the_problems(subject):
    found = subject.find(MISTAKES["mask-after-softmax"])
    assert 0 < found.share < 1
    assert "from mine import attention" in found.test
    compile(found.test, "test_mine.py", "exec")


def test_a_mistake_that_no_problem_shows_is_shown_by_a_rule(subject):
    found = subject.find(MISTAKES["nan-of-query-zeroed"])
    assert found.share == 0
    assert "nan-query" in found.test


def test_a_mistake_of_an_option_that_it_lacks_is_shown_by_nothing(subject):
    assert subject.find(MISTAKES["dsinks-zero"]) is None


def test_heads_are_not_shared_where_the_function_tiles_them():
    def tiled(q, k, v):
        return npattn.attention(q, k, v, conventions=npattn.Conventions(kv_head="tile")).astype(
            q.dtype
        )

    found = inspect_function(tiled, "mine:tiled")
    assert found.terms.conventions.kv_head == "repeat"
    assert "K < H" not in found.space.structure
