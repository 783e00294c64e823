"""Tiers of tests, and profiles of Hypothesis.

``pytest`` runs the fast tier: of each test few variants, and none that is marked `thorough`.
``pytest --tier thorough`` runs more variants, and the tests that are marked. Every night, and by
``pytest tests/masks``, all variants run. The gate draws the same examples every time,
``HYPOTHESIS_PROFILE=nightly pytest --tier all`` others.
"""

import os
import sys
from collections import Counter, defaultdict

# Two workers on two cores: threads of BLAS and torch would wait for each other (children too).
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402  after the environment is set

ALWAYS = {
    "deadline": None,  # these machines are noisy
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("ci", derandomize=True, database=None, max_examples=60, **ALWAYS)
settings.register_profile("nightly", max_examples=2000, print_blob=True, **ALWAYS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


BROAD = (
    "tests/engines/test_engines.py",
    "tests/testing/bounds/",
    "tests/testing/device/",
    "tests/benchmarks/zoo/",
)
"""Tests whose variants run the same lines with other arguments."""
TRACED = 4
"""Variants of such a test whose lines are counted: counting makes a test 1.7 times as long. Of a
test that is marked `broad` they are the first, or as many as the mark says."""


FAST, MORE, SLOW = 2, 8, 1
"""Most variants of a test: in the fast tier, in both tiers, and in both if it is marked `thorough`;
no limit in both if it is marked `every`. They are the first, the last, and some between evenly."""


def pytest_addoption(parser):
    text = "fast: few variants of a test; thorough: more of them; all (default if a path is given)"
    parser.addoption("--tier", choices=("fast", "thorough", "all"), help=text)


def pytest_configure(config):
    if config.option.tier is None:  # workers of pytest-xdist get what is chosen here
        named = config.args_source is pytest.Config.ArgsSource.ARGS
        config.option.tier = "all" if named else "fast"


def choose_variants(items, tier):
    """Return the items of a tier."""
    variants = defaultdict(list)
    for item in items:
        variants[item.nodeid.partition("[")[0]].append(item)
    fast, both = set(), set()
    for alike in variants.values():
        slow, every = map(alike[0].get_closest_marker, ("thorough", "every"))
        fast |= set() if slow else spread(alike, FAST)
        both |= set(alike) if every else spread(alike, SLOW if slow else MORE)
    return fast if tier == "fast" else both - fast


def spread(items, most):
    """Return at most so many items: the first, the last, and some between evenly."""
    last, most = len(items) - 1, min(most, len(items))
    return {items[round(i * last / max(most - 1, 1))] for i in range(most)}


def pytest_collection_modifyitems(config, items):
    mark_items(items)
    if config.option.tier == "all":
        return
    chosen = choose_variants(items, config.option.tier)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def mark_items(items):
    """Mark unmeasured tests, and skip nightly tests unless the profile is nightly."""
    seen = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        counted = TRACED if name.startswith(BROAD) else None
        if (broad := item.get_closest_marker("broad")) is not None:
            (counted,) = broad.args or (1,)
        if counted is not None and seen[name] > counted:
            item.add_marker(pytest.mark.unmeasured)
    if os.environ.get("HYPOTHESIS_PROFILE") == "nightly":
        return
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.skip("takes long: HYPOTHESIS_PROFILE=nightly"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Trace no test that is marked unmeasured, nor the commands that it runs.

    With pytest-xdist, `no_cover` of pytest-cov saves no time: other collectors go on.
    """
    traced = sys.gettrace()
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("unmeasured"):
            sys.settrace(None)
            patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        try:
            return (yield)
        finally:
            sys.settrace(traced)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from tests.browser import Browser

    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()
