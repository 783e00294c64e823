"""Options whose own default is not npattn's are passed, and left out where it means them."""

import numpy as np
import pytest

import npattn
from npattn.testing import check
from npattn.testing.adapters.implementation import Implementation

LEFT_OUT = object()
QUICK = {"framework": "numpy", "shrink": False, "diagnosis": False, "examples": 20}


def right(q, k, v, **options):
    return npattn.attention(q, k, v, **options).astype(q.dtype)


def causal_by_default(q, k, v, causal=True):
    return right(q, k, v, causal="bottom_right" if causal else False)


def scaled_by_default(q, k, v, scale=1.0):
    return right(q, k, v, scale=scale)


def windowed_by_default(q, k, v, window=(3, 0)):
    return right(q, k, v, window=window)


def with_sinks(q, k, v, sinks):
    return right(q, k, v, sinks=sinks.astype(float))


@pytest.mark.parametrize(
    ("f", "reads"),
    [
        (causal_by_default, "causal is True by default"),
        (scaled_by_default, "scale is 1.0 by default"),
        (windowed_by_default, "window is (3, 0) by default"),
    ],
)
def test_own_defaults_are_passed_and_said(f, reads):
    report = check(f, only=["agreement-o"], **QUICK)
    assert report.passed, report
    assert f"reads {reads}" in str(report)


def test_a_function_that_needs_sinks_is_judged_with_sinks():
    report = check(with_sinks, only=["agreement-o", "repeatable"], **QUICK)
    assert report.passed, report
    assert any("always sinks" in line for line in report.refused)


def test_a_default_is_asked_both_ways():
    """Explicitly where npattn means another value, and in half of the sizes where it does not."""
    asked = set()

    def f(q, k, v, causal=True, **given):
        raise AssertionError

    def spy(*arrays, **options):
        asked.add(options.get("causal", LEFT_OUT))
        return causal_by_default(*arrays, **options)

    implementation = Implementation(f, framework="numpy", features=("causal",))
    implementation.f = spy
    assert check(implementation, only=["agreement-o"], **(QUICK | {"framework": "auto"})).passed
    assert asked == {True, False, LEFT_OUT}


def test_a_default_that_is_npattns_is_left_out():
    asked = set()

    def f(q, k, v, causal=False, window=(-1, -1), scale=None):
        asked.update(name for name, x in (("window", window), ("scale", scale)) if x is not None)
        return right(q, k, v, causal="bottom_right" if causal else False)

    implementation = Implementation(f, framework="numpy", features=("causal",))
    assert not implementation.signature.defaults
    assert np.isfinite(implementation.f(*np.ones((3, 1, 1, 1, 1)))).all()


def test_call_that_finds_the_framework_counts_for_no_default():
    """It leaves every option out, so that its result is that of the function's own default."""
    report = check(causal_by_default, only=["first-calls"], examples=2, diagnosis=False)
    assert [o.status for o in report.outcomes if o.rule == "first-calls"] == ["passed"]
