"""Hypothesis profiles: the gate draws the same examples every time, a nightly run draws more.

``HYPOTHESIS_PROFILE=nightly pytest`` runs the second.
"""

import os
import sys
from collections import Counter

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
    "tests/test_engines.py",
    "tests/testing/bounds/",
    "tests/testing/device/",
    "tests/zoo/",
)
"""Tests whose variants run the same lines with other arguments."""
TRACED = 4
"""Variants of such a test whose lines are counted: counting makes a test 1.7 times as long. Of a
test that is marked `broad` they are the first, or as many as the mark says."""


def pytest_collection_modifyitems(items):
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
