"""What a rule says where it is not asked, and problems of which an experiment says nothing."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from npattn import Problem
from npattn.testing import Implementation
from npattn.testing.rules import PROPERTIES, memory
from npattn.testing.rules.calls import EXPERIMENTS
from npattn.testing.targets.numpy import flash
from tests.testing.rules.relations import trial_of

B, H, T, S, D = 2, 3, 5, 7, 11


def trial_with(**changes):
    """Return a trial of an implementation with other attributes."""
    f = copy.copy(Implementation(flash, framework="numpy"))
    f.__class__ = type("Changed", (Implementation,), changes)
    for name in changes:
        vars(f).pop(name, None)
    return trial_of(f=f)


@pytest.mark.every
@pytest.mark.parametrize(
    ("rule", "changes", "reason"),
    [
        ("packed-inputs", {"keeps_arrays": False}, "its worker keeps nothing between calls"),
        ("packed-inputs", {"packing": "kv"}, "takes one packed array as it is"),
        ("packed-inputs", {"storage": "pages"}, "k and v are stored otherwise than q"),
        ("packed-inputs", {"latent": "parts"}, "its inputs are parts of q and k"),
        ("aliased-inputs", {"packing": "kv"}, "takes k and v in one array"),
        ("aliased-inputs", {"storage": SimpleNamespace(appends=True)},
         "writes new keys and values into its cache"),
        ("two-threads", {"takes_threads": False}, "its worker answers one request after the other"),
        ("two-threads", {"interpreter": "SOME"}, "with SOME kernels run one at a time"),
        ("aggregate", {"output": "float8"},
         "o in 8 bits errs by half of their gap, whatever else is rounded"),
    ],
)  # fmt: skip
def test_calls_that_are_not_possible_are_not_asked(rule, changes, reason):
    assert PROPERTIES[rule].unless(trial_with(**changes)) == reason
    assert PROPERTIES[rule].unless(trial_of()) is None


@pytest.mark.every
@pytest.mark.parametrize(
    ("rule", "lead", "options"),
    [
        ("packed-inputs", (B,), {}),
        ("same-bits-in-batch", (), {}),
        ("same-bits-beside-others", (), {}),
        ("same-bits-beside-others", (B, 1), {}),
        ("same-bits-padded", (B,), {"score_mod": lambda s, *_: s}),
        ("same-bits-in-parts", (B,), {"score_mod": lambda s, *_: s}),
    ],
)
def test_problems_of_which_an_experiment_says_nothing(rule, lead, options):
    q, k = np.ones((*lead[:1], H, T, D)), np.ones((*lead[-1:], H, S, D))
    assert EXPERIMENTS[rule](trial_of(), Problem(q, k, k, **options), {}) is None


@pytest.mark.every
@pytest.mark.parametrize("rule", ["packed-inputs", "same-bits-in-batch"])
def test_a_compiler_is_asked_few_shapes(rule):
    shapes = [
        {(r.T, r.S) for r in PROPERTIES[rule].recipes(trial_of(few_shapes=few), 0, 100)}
        for few in (False, True)
    ]
    assert len(shapes[1]) == 1 < len(shapes[0])


@pytest.mark.parametrize("rule", ["same-bits-in-batch", "after-other-dtype"])
def test_what_a_function_does_not_take_is_left_out(rule):
    def narrow(q, k, v):
        if q.dtype != np.float32 or len(q) < B:
            raise NotImplementedError("float32 and batches alone")
        return flash(q, k, v)

    trial = trial_of(f=Implementation(narrow, framework="numpy"), sizes={"B": (B,)})
    trial = replace(trial, gradients=frozenset())
    sample = PROPERTIES[rule].recipes
    recipe = sample(trial, 0, 10)[0] if sample else trial.space.base()
    assert PROPERTIES[rule].check(trial, recipe) == (0.0 if sample else None)


def test_a_compiler_is_asked_the_first_other_dtype():
    assert memory._other_dtypes(trial_of(), 1) != memory._other_dtypes(trial_of(), 0)
    compiled = trial_of(few_shapes=True)
    assert memory._other_dtypes(compiled, 1) == memory._other_dtypes(compiled, 0)


def test_results_that_are_not_kept_are_not_read_again():
    problem = Problem(*np.ones((3, 1, 1, 2, 2)))
    memory._check_kept_results(trial_with(keeps_arrays=False), problem, None, {}, None)
