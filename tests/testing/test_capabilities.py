"""What the probe learns of an implementation, and what is sampled afterwards."""

import numpy as np

import npattn
from npattn.conventions import Conventions
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.capabilities import probe
from npattn.testing.cases.space import Space
from npattn.testing.trial import Trial


def probed(f, **kwargs):
    implementation = f if isinstance(f, Implementation) else Implementation(f, **kwargs)
    space = Space(features=implementation.features)
    return probe(Trial(implementation, Conventions(), Rounding.undeclared("float32"), space))


def plain(q, k, v):
    return npattn.attention(q, k, v).astype(q.dtype)


# --- first calls ----------------------------------------------------------------------------------


def test_the_first_calls_are_recorded_as_they_were_answered():
    calls = []

    def warms_up(q, k, v):
        calls.append(q)
        return plain(q, k, v) * np.float32(2 if len(calls) <= 5 else 1)

    found = probed(warms_up, framework="numpy")
    first, later = found.trial.first_calls[0], found.trial.first_calls[-1]
    again = [np.asarray(warms_up(p.q, p.k, p.v)) for p, _, _ in (first, later)]
    np.testing.assert_array_equal(first[2]["o"], 2 * again[0])
    np.testing.assert_array_equal(later[2]["o"], again[1])
    assert 5 < len(found.trial.first_calls) <= 64
