"""Work shared out to threads: all of it, once, with one thread of BLAS each, and nothing lost."""

import _thread
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController, threadpool_limits

import npattn
from npattn.engines import threads


@pytest.fixture(autouse=True)
def _libraries():
    forget_libraries()
    yield
    forget_libraries()


def forget_libraries():
    """Find those that are loaded now: another test may have loaded one since the first call."""
    threads._BLAS.__dict__.pop("libraries", None)


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


def test_the_last_of_concurrent_calls_restores_blas_threads():
    """The call that lowered them has ended before the other, but its thread is alive."""
    second_began, first_ended = threading.Event(), threading.Event()

    def first(*_):
        assert second_began.wait(timeout=60)

    def second(*_):
        second_began.set()
        assert first_ended.wait(timeout=60)
        assert set(blas()) == {1}

    with threadpool_limits(3, user_api="blas"), ThreadPoolExecutor(2) as pool:
        one = pool.submit(threads.each, [0], lambda: None, first)
        other = pool.submit(threads.each, [0], lambda: None, second)
        one.result(timeout=60)
        first_ended.set()
        other.result(timeout=60)
        assert set(blas()) == {3}


def test_users_keep_control_of_blas_threads():
    """A thread that has computed here, and lives, takes nobody's right to set them."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(threads.each, [0], lambda: None, lambda *_: None).result(timeout=60)
        with threadpool_limits(3, user_api="blas"):
            assert set(blas()) == {3}


class Library:
    """A library that counts for each thread, as OpenBLAS on OpenMP does."""

    internal_api, threading_layer = "openblas", "openmp"

    def __init__(self):
        self.local = threading.local()

    @property
    def num_threads(self):
        return getattr(self.local, "n", 5)

    def set_num_threads(self, n):
        self.local.n = n


def test_library_that_counts_per_thread_is_restored_in_each():
    library, second_began, first_ended = Library(), threading.Event(), threading.Event()
    threads._BLAS.__dict__["libraries"] = [library]

    def first(*_):
        assert second_began.wait(timeout=60)
        assert library.num_threads == 1

    def second(*_):
        second_began.set()
        assert first_ended.wait(timeout=60)
        assert library.num_threads == 1

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        a = one.submit(threads.each, [0], lambda: None, first)
        b = other.submit(threads.each, [0], lambda: None, second)
        a.result(timeout=60)
        first_ended.set()
        b.result(timeout=60)
        for pool in (one, other):
            assert pool.submit(lambda: library.num_threads).result(timeout=60) == 5
    threads.each(range(11), lambda: None, lambda *_: None)
    assert library.num_threads == 5


@pytest.mark.parametrize("callers", [1, 3])
def test_a_loop_inside_a_loop_returns(callers):
    """All threads are in the outer one, so that none is free for the inner one."""
    done = []

    def outer(barrier):
        def work(item, _):
            if barrier is not None:
                barrier.wait(timeout=60)
            inside = []
            threads.each(range(5), lambda: None, lambda item, _: inside.append(item))
            assert sorted(inside) == list(range(5))
            done.append(item)

        threads.each(range(3), lambda: None, work)

    barriers = [threading.Barrier(3)] if callers == 1 else [None] * callers
    others = [threading.Thread(target=outer, args=(b,), daemon=True) for b in barriers]
    with threadpool_limits(3, user_api="blas"):
        for other in others:
            other.start()
        for other in others:
            other.join(timeout=60)
        assert not any(other.is_alive() for other in others)
        assert sorted(done) == sorted(list(range(3)) * callers)
        assert set(blas()) == {3}


@pytest.fixture
def interruptible():
    """Let interrupts interrupt, which processes of a test run may ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.unmeasured
def test_an_interrupt_leaves_blas_as_it_was(n, interruptible):
    begun = []

    def work(item, _):
        begun.append(item)
        if item == 5:
            _thread.interrupt_main()
        time.sleep(1e-3)

    with threadpool_limits(n, user_api="blas"):
        with pytest.raises(KeyboardInterrupt):
            threads.each(range(1009), lambda: None, work)
        assert len(begun) < 1009
        assert set(blas()) == {n}


@pytest.mark.nightly  # coverage, which has a lock of its own, hangs if it is interrupted
@pytest.mark.unmeasured
@pytest.mark.skipif(sys.platform == "win32", reason="there are no timers")
def test_interrupts_at_any_moment_leave_blas_as_it_was():
    """Also between two lines that lower its threads, restore them, or wait for others."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before, hits = signal.signal(signal.SIGALRM, interrupt), 0
    try:
        with threadpool_limits(3, user_api="blas"):
            threads.each(range(3), lambda: None, lambda *_: None)
            for delay in np.random.default_rng(0).uniform(1e-5, 4e-4, 200):
                try:
                    signal.setitimer(signal.ITIMER_REAL, delay)
                    threads.each(range(3), lambda: None, lambda *_: None)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    hits += 1
                end = time.monotonic() + 60
                while set(blas()) != {3}:  # who was not waited for may still be at it
                    assert time.monotonic() < end
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hits


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_child_forked_inside_a_loop_has_all_threads_of_blas():
    script = """
import os, sys, warnings
import numpy as np
from threadpoolctl import ThreadpoolController, threadpool_limits
from npattn.engines import threads
warnings.simplefilter("ignore")
threadpool_limits(3, user_api="blas")
codes = []
def work(*_):
    child = os.fork()
    if child == 0:
        found = ThreadpoolController().select(user_api="blas").lib_controllers
        os._exit({x.num_threads for x in found} != {3} or threads.count() != 3)
    codes.append(os.waitpid(child, 0)[1])
threads.each(range(5), lambda: None, work)
sys.exit(codes != [0] * 5)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_has_threads_of_its_own():
    script = """
import os, sys, warnings
import numpy as np
from threadpoolctl import threadpool_limits
from npattn.engines import threads
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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_blas_computes_for_the_tiled_engine_in_loops_alone(monkeypatch, dtype):
    # Its threads wait for more of it in a loop of their own, on the cores of those of a loop here.
    asked = []
    for name in ("vdot", "dot", "matmul", "tensordot", "inner"):
        own = getattr(np, name)

        def counted(*arrays, own=own, name=name, **options):
            asked.append((name, bool(threads._BLAS.running)))
            return own(*arrays, **options)

        monkeypatch.setattr(np, name, counted)
    rng = np.random.default_rng(3)
    q, k, v, dout = (rng.standard_normal((2, 3, 331, 64)).astype(dtype) for _ in range(4))
    fwd = npattn.forward(q, k, v, causal=True, dtype=dtype, engine="tiled")
    npattn.backward(fwd, dout)
    assert ("matmul", True) in asked
    assert {name for name, in_loop in asked if not in_loop} == set()
