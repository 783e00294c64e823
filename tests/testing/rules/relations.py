"""Trials whose structure is not probed, and mistakes that break a relation, each in one step."""

import itertools

import numpy as np
import pytest

from npattn.api import backward, evaluate
from npattn.conventions import Conventions
from npattn.mistakes import Attention
from npattn.problem import Problem
from npattn.testing import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.space import STRUCTURE, Space
from npattn.testing.cases.strategies import Pools
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


def violation(implementation, rule):
    """Return the trial of a wrong implementation, and the Violation of the rule."""
    trial = trial_of(implementation)
    with pytest.raises(Violation) as caught:
        ratios(trial, rule, 100)
    return trial, caught.value


# --- what is wrong, each in one step --------------------------------------------------------------


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


class DropoutOfFirstRow(Attention):
    """All queries use the dropout of the first."""

    def inputs(self, *arrays, **options):
        inputs = super().inputs(*arrays, **options)
        keep = inputs.keep
        return inputs if isinstance(keep, float) else inputs._replace(keep=keep[..., :1, :])


class GroupsOfThree(Attention):
    """Query head h uses key/value head h // 3, or the last."""

    def share(self, x, H):
        return x[..., np.minimum(np.arange(H) // 3, x.shape[-3] - 1), :, :]


class MaskOfFirstSample(Attention):
    """The mask of the first sample is used for all."""

    def visible(self, c):
        per_sample = c.mask is not None and c.mask.ndim > 3
        return super().visible(c._replace(mask=c.mask[:1]) if per_sample else c)


class OneQueryForgetsWindow(Attention):
    """A path for decoding, one query, does not read the window."""

    def visible(self, c):
        return super().visible(c._replace(window=None) if c.q.shape[-2] == 1 else c)


class GradientsMixed(Attention):
    """Samples get a share of the gradient of the last one."""

    def gradients(self, c, do, dlse, dw):
        dq, *rest = super().gradients(c, do, dlse, dw)
        return dq + 2.0**-5 * dq[-1:] * (dq.ndim > 3), *rest


class PaddingCounted(Attention):
    """The mask is read as a number of first keys."""

    def visible(self, c):
        if c.mask is None:
            return super().visible(c)
        length = c.mask.sum(-1, keepdims=True)
        return super().visible(c._replace(mask=np.arange(c.mask.shape[-1]) < length))


class MaximumOfHidden(Attention):
    """The row maximum is taken over hidden scores too, and exp underflows in float32."""

    def results(self, c):
        m = self.product(c).max(-1, keepdims=True, initial=-np.inf)
        s, live = self.scores(c)
        low = s - m < -100
        return super().results(c._replace(bias=c.bias + np.where(low & live, -np.inf, 0)))


class CausalOfSquares(Attention):
    """causal is not read if T ≠ S."""

    def sides(self, c):
        square = c.q.shape[-2] == c.k.shape[-2]
        return super().sides(c if square else c._replace(causal=False))


class CausalGradientOfAll(Attention):
    """Backward rebuilds the weights without causal."""

    def recompute(self, c):
        return c._replace(causal=False)


class LseOfProbabilities(Attention):
    """lse is taken of the weights."""

    def lse(self, pivot, total, e_sink):
        return np.log(total / np.where(total == 0, 1, total) + 1)


class LseOfEmptyIsZero(Attention):
    """The lse of a fully masked query is 0."""

    def lse(self, pivot, total, e_sink):
        return np.where(total == 0, 0, super().lse(pivot, total, e_sink))


class WindowClobbersMask(Attention):
    """The mask is not read beside a window."""

    def visible(self, c):
        return super().visible(c if c.window is None else c._replace(mask=None))


class WindowReplacesCausal(Attention):
    """causal is not read beside a window."""

    def sides(self, c):
        return super().sides(c if c.window is None else c._replace(causal=False))


class WindowAnchoredAtZero(Attention):
    """A window lies along the diagonal from the first corner, causal from the last."""

    def diagonal(self, T, S):
        return np.arange(T)[:, None]

    def sides(self, c):
        left, right = super().sides(c)
        shift = c.k.shape[-2] - c.q.shape[-2]
        return left, right if right is None or not c.causal else right + shift


class MinusInfIsLarge(Attention):
    """A bias of −inf becomes −20."""

    def inputs(self, *arrays, **options):
        inputs = super().inputs(*arrays, **options)
        return inputs._replace(bias=np.maximum(inputs.bias, -20.0))


class ScaleIgnored(Attention):
    """The scale is always 1/√D."""

    def inputs(self, *arrays, **options):
        inputs = super().inputs(*arrays, **options)
        return inputs._replace(scale=self.default_scale(1, inputs.q.shape[-1]))


class DkScaledTwice(Attention):
    """dk has the scale twice."""

    def dk(self, dx, c, seen):
        return c.scale * super().dk(dx, c, seen)
