"""A worker that ends is started anew."""

import pytest

from npattn.testing import check
from npattn.testing.worker.connect import connect

ONCE = """
import os
MARK = os.path.join(os.path.dirname(__file__), "was here")
if os.path.exists(MARK):
    raise ImportError("once is enough")
open(MARK, "w").close()

def f(q, k, v):
    os._exit(3)
"""


@pytest.mark.thorough
def test_a_target_that_cannot_be_imported_again_crashes(tmp_path):
    (tmp_path / "once.py").write_text(ONCE)
    remote = connect(f"{tmp_path}/once.py:f", framework="numpy")
    report = check(remote, only=["agreement-o"], examples=2, diagnosis=False, shrink=False)
    remote.worker.close()
    assert {o.status for o in report.outcomes} == {"crashed"}
    assert not report.passed
    assert "cannot be started again" in "".join(
        [*(o.message for o in report.outcomes), *report.refused]
    )
