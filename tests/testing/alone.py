"""One rule, asked of a mutant alone; what its base accepts is probed once."""

from dataclasses import replace
from functools import cache

from npattn.conventions import Conventions
from npattn.mistakes import Attention, Gated
from npattn.testing import Implementation, Rounding
from npattn.testing.capabilities import probe
from npattn.testing.cases.space import Space
from npattn.testing.rules import PROPERTIES
from npattn.testing.runner.rounds import Judge
from npattn.testing.trial import Trial


def probe_trial(implementation, dtype, rounding=None):
    """Return the trial of an implementation, probed, under a model or its name."""
    model = rounding or Rounding.undeclared(dtype)
    model = Rounding.from_name(model) if isinstance(model, str) else model
    space = Space(features=implementation.features, dtype=dtype)
    return probe(Trial(implementation, Conventions(), model, space)).trial


@cache
def probed_base(dtype, rounding, with_gate):
    right = Gated() if with_gate else Attention()
    forward, backward = right.forward, right.backward
    return probe_trial(Implementation(forward, backward=backward), dtype, rounding)


def judge_alone(mutant, rule, dtype, examples, **kwargs):
    """Return the outcome of a rule, or None if neither base has the mutant's features.

    kwargs are of `Judge.judge`, or `evenly`: sample options evenly, as for rules that are named.
    """
    implementation = Implementation(mutant.forward, backward=mutant.backward)
    known = probed_base(dtype, mutant.rounding, "gate" in implementation.features)
    if implementation.features != known.implementation.features:
        return None
    trial = replace(known, implementation=implementation, memo={})
    own = {"shrinks": False, "evenly": kwargs.pop("evenly", False)}
    judge = Judge(trial, examples, 0, lambda *_: None, **own)
    with implementation.framework.one_thread():
        return judge.judge(PROPERTIES[rule], trial, **kwargs)
