"""Hypothesis strategies of problems, for tests of your own.

Examples
--------
>>> from hypothesis import given
>>> from npattn.testing.strategies import problems
>>> @given(problems())
... def test_weights_sum_to_one(problem):
...     ...
"""

from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools, problems, recipes

__all__ = ["Pools", "Space", "problems", "recipes"]
