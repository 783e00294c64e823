"""Work shared out to threads: all of it, once, with one thread of BLAS each, and nothing lost."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController, threadpool_limits

from npattn import threads


@pytest.fixture(autouse=True)
def libraries():
    """Those that are loaded now: another test may have loaded one since the first call."""
    threads._blas.cache_clear()


def blas():
    """The threads of each BLAS that is loaded."""
    return [
        lib.num_threads for lib in ThreadpoolController().select(user_api="blas").lib_controllers
    ]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("items", [0, 1, 2, 101])
def test_each_item_runs_once_in_its_thread_s_space(n, items):
    done, spaces = [], []

    def space():
        spaces.append(threading.get_ident())
        return spaces[-1]

    def work(item, space):
        assert space == threading.get_ident()
        assert set(blas()) == {1}
        done.append(item)

    with threadpool_limits(n, user_api="blas"):
        assert threads.count() == n
        threads.each(list(range(items)), space, work)
        assert set(blas()) == {n}
    assert sorted(done) == list(range(items))
    assert len(spaces) <= min(n, items)


@pytest.mark.parametrize("n", [1, 3])
def test_exception_propagates_and_stops_further_items(n):
    begun, ended, other = [], [], threading.Event()

    def work(item, _):
        begun.append(item)
        if threading.current_thread() is threading.main_thread():
            assert n == 1 or other.wait(timeout=60)
            raise ZeroDivisionError(f"item {item}")
        other.set()
        time.sleep(0.01)
        ended.append(item)

    with threadpool_limits(n, user_api="blas"):
        with pytest.raises(ZeroDivisionError, match="item"):
            threads.each(range(1009), lambda: None, work)
        assert len(begun) < 1009
        assert len(ended) == len(begun) - 1  # what had begun has ended
        assert set(blas()) == {n}
        after = []
        threads.each(range(7), lambda: None, lambda item, _: after.append(item))
        assert sorted(after) == list(range(7))


def test_concurrent_calls_restore_blas_threads():
    barrier = threading.Barrier(2)

    def call():
        threads.each([0], lambda: None, lambda *_: barrier.wait(timeout=60))

    with threadpool_limits(2, user_api="blas"):
        others = [threading.Thread(target=call) for _ in range(2)]
        for other in others:
            other.start()
        for other in others:
            other.join(timeout=60)
        assert not any(other.is_alive() for other in others)
        assert not barrier.broken
        assert set(blas()) == {2}


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_has_threads_of_its_own():
    script = """
import os, sys, warnings
import numpy as np
from threadpoolctl import threadpool_limits
from npattn import threads
warnings.simplefilter("ignore")
threadpool_limits(2, user_api="blas")
threads.each(range(5), lambda: None, lambda *_: None)
child = os.fork()
done = []
threads.each(range(5), lambda: None, lambda item, _: done.append(item))
if child == 0:
    os._exit(sorted(done) != list(range(5)))
sys.exit(os.waitpid(child, 0)[1] or sorted(done) != list(range(5)))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_a_matrix_product_inside_is_the_one_outside():
    x = np.random.default_rng(0).standard_normal((53, 53))
    found = []
    threads.each(range(3), lambda: None, lambda *_: found.append(x @ x))
    assert all(np.array_equal(y, found[0]) for y in found)
