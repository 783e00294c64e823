"""Hypothesis profiles: the gate draws the same examples every time, a nightly run draws more.

``HYPOTHESIS_PROFILE=nightly pytest`` runs the second.
"""

import os

from hypothesis import HealthCheck, settings

ALWAYS = {
    "deadline": None,  # these machines are noisy
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("ci", derandomize=True, database=None, max_examples=60, **ALWAYS)
settings.register_profile("nightly", max_examples=2000, print_blob=True, **ALWAYS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
