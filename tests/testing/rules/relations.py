"""Trials whose structure is not probed, and a few mistakes that break a relation."""

import contextlib
import io
import itertools

import numpy as np
import pytest

from npattn.conventions import Conventions
from npattn.mistakes import Attention
from npattn.oracle.api import backward, evaluate
from npattn.problem import Problem
from npattn.testing import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.space import STRUCTURE, Space
from npattn.testing.cases.strategies import Pools
from npattn.testing.report.reproducer import script
from npattn.testing.rules import PROPERTIES
from npattn.testing.trial import GRADIENTS, Trial, Violation


class Oracle:
    """npattn itself under conventions, as an implementation and its gradient."""

    def __init__(self, conventions):
        self.conventions = conventions

    def evaluate(self, q, k, v, **options):
        problem = Problem(q, k, v, alignment=self.conventions.causal, **options)
        return evaluate(problem, self.conventions)

    def forward(
        self, q, k, v, mask=None, *, causal=False, window=None, bias=None, scale=None,
        softcap=None, score_mod=None, sinks=None, dropout_mask=None, dropout_rate=0.0,
        return_lse=False, return_weights=False,
    ):  # fmt: skip
        fwd = self.evaluate(
            q, k, v, mask=mask, causal=causal, window=window, bias=bias, scale=scale,
            softcap=softcap, score_mod=score_mod, sinks=sinks, dropout_mask=dropout_mask,
            dropout_rate=dropout_rate,
        )  # fmt: skip
        results = [fwd.out.astype(q.dtype)]
        results += [fwd.lse] if return_lse else []
        results += [fwd.weights] if return_weights else []
        return results[0] if len(results) == 1 else tuple(results)

    def backward(self, dout, q, k, v, *, out=None, lse=None, dlse=None, **options):
        options.pop("dweights", None)
        grads = vars(backward(self.evaluate(q, k, v, **options), dout, dlse))
        wide = {"bias", "sinks"}
        return {n: x if n in wide else x.astype(q.dtype) for n, x in grads.items() if x is not None}


def trial_of(attention=None, conventions=None, dtype="float32", f=None, **space):
    """Make a trial of an object with forward and backward, and probe nothing."""
    conventions = conventions or Conventions()
    attention = attention or Oracle(conventions)
    f = f or Implementation(attention.forward, backward=attention.backward, framework="numpy")
    space = {"features": f.features, "structure": frozenset(STRUCTURE), "dtype": dtype} | space
    rounding = Rounding.undeclared(dtype)
    return Trial(f, conventions, rounding, Space(**space), gradients=frozenset(GRADIENTS))


def ratios(trial, rule, count):
    """Ratios of the first `count` small recipes that exercise the rule."""
    check = PROPERTIES[rule].check
    pools = Pools(trial.space, **PROPERTIES[rule].draw(trial))
    recipes = map(pools.recipe, range(100 * count))
    small = (r for r in recipes if r.H * r.T * r.S <= 500 and max(r.T, r.S, r.D, r.E) <= 40)
    ratios = (check(trial, recipe) for recipe in small)
    return list(itertools.islice((ratio for ratio in ratios if ratio is not None), count))


def script_output(rule, trial, error):
    """Run the script of a report, and return what it prints."""
    f, text = trial.implementation, script(trial, rule, error.problem, error)
    lines = [line for line in text.splitlines() if not line.startswith("raise SystemExit")]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec("\n".join(lines), {"f": f.f, "f_backward": f.backward})
    return output.getvalue()


def rules_of(*modules):
    """Return the names of the rules of modules."""
    names = {module.__name__ for module in modules}
    return [name for name, p in PROPERTIES.items() if p.check.__module__ in names]


def violation(implementation, rule):
    """Return the trial of a wrong implementation, and the Violation of the rule."""
    trial = trial_of(implementation)
    with pytest.raises(Violation) as caught:
        ratios(trial, rule, 100)
    return trial, caught.value


# --- mistakes that no entry of npattn.mistakes makes in small problems ---------------------------


class LastKeyLost(Attention):
    """The last of an odd number of keys is not read."""

    def visible(self, c):
        S = c.k.shape[-2]
        return super().visible(c) & (np.arange(S) < S - S % 2)


class LastQueryWrittenOver(Attention):
    """The last of an odd number of queries gets the result of the first."""

    def results(self, c):
        o, lse, p = super().results(c)
        if o.shape[-2] % 2:
            o[..., -1, :] = o[..., 0, :]
        return o, lse, p


class MaskOfFirstSample(Attention):
    """The mask of the first sample is used for all."""

    def visible(self, c):
        per_sample = c.mask is not None and c.mask.ndim > 3
        return super().visible(c._replace(mask=c.mask[:1]) if per_sample else c)


class GradientsMixed(Attention):
    """Samples get a share of the gradient of the last one."""

    def gradients(self, c, do, dlse, dw):
        dq, *rest = super().gradients(c, do, dlse, dw)
        return dq + 2.0**-5 * dq[-1:] * (dq.ndim > 3), *rest
