"""Hypothesis strategies of problems, for tests of your own: docs/strategies.md.

`problems` samples an `npattn.Problem`, `recipes` the line of text that makes it. `Space` and
`Pools` say in full what is sampled; most tests need the plain arguments of `problems` alone.

Examples
--------
>>> from hypothesis import given
>>> import npattn
>>> from npattn.testing import exact
>>> from npattn.testing.strategies import problems
>>> @given(problems(heads=(6, 2), max_len=16, options=("mask", "causal")))
... def test_output_is_right(problem):
...     value, tolerance = exact(problem)["o"]
...     got = npattn.attention(problem.q, problem.k, problem.v, problem.mask, causal=problem.causal)
...     assert (abs(got - value) <= tolerance).all()
>>> test_output_is_right()
"""

from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools, problems, recipes

__all__ = ["Pools", "Space", "problems", "recipes"]
