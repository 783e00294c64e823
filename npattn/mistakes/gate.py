"""Mistakes in the output gate, and in head masks [16]."""

from typing import Any

import numpy as np

from npattn.mistakes.attention import Inputs
from npattn.mistakes.gated import Gated
from npattn.mistakes.register import after, change, mistake, one_for_all, some_of_other_inputs
from npattn.problem.arrays import Array, sum_to

change("gate-ignored", "gate", "The gate is ignored.", step="o", where="gate", of=Gated,
       inputs=after(lambda c: c._replace(gate=1.0)))  # fmt: skip


@mistake("gate-through-sigmoid", "gate", step="o", where="gate")
class _GateThroughSigmoid(Gated):
    """The gate goes through a sigmoid that the caller has applied already."""

    def gate(self, o: Array, c: Inputs) -> Array:
        return o / (1 + np.exp(-np.asarray(c.gate))) if np.ndim(c.gate) else o

    def do(self, dout: Array, c: Inputs) -> Array:
        return self.gate(dout, c)

    def dgate(self, dout: Array, c: Inputs, shape: tuple[int, ...]) -> Array:
        slope = 1 / (2 + np.exp(c.gate) + np.exp(-np.asarray(c.gate)))
        return sum_to(dout * self.inner_out(c) * slope, shape)


change("gate-applied-twice", "gate", "The gate multiplies the output twice.",
       step="o", where="gate", of=Gated,
       inputs=after(lambda c: c._replace(gate=c.gate * c.gate)))  # fmt: skip
change("gate-added", "gate", "The output is multiplied by 1 + gate, as by a residual.",
       step="o", where="gate", of=Gated,
       inputs=after(lambda c: c._replace(gate=1.0 + c.gate) if np.ndim(c.gate) else c))  # fmt: skip


@mistake("gate-lost-in-softmax", "gate", step="o", where="gate")
class _GateOnScores(Gated):
    """A gate of heads or rows is added to the scores as a logarithm, where the softmax loses it."""

    def gate(self, o: Array, c: Inputs) -> Array:
        return o if np.ndim(c.gate) and np.shape(c.gate)[-1] == 1 else super().gate(o, c)

    def do(self, dout: Array, c: Inputs) -> Array:
        return self.gate(dout, c)


change("gate-of-first-query", "gate", "The gate of the first query is used for all queries.",
       step="o", where="t ≥ 1 and gate",
       of=Gated, inputs=after(lambda c: c._replace(gate=one_for_all(-2)(c.gate))))  # fmt: skip
change("gate-of-first-sample", "gate", "The gate of the first sample is used for all samples.",
       step="o", where="b ≥ 1 and gate",
       of=Gated, inputs=after(lambda c: c._replace(gate=one_for_all(-4)(c.gate))))  # fmt: skip
change("gate-of-first-column", "gate",
       "The gate of the first column is used for all columns of the output.",
       step="o", where="e ≥ 1 and gate", of=Gated,
       inputs=after(lambda c: c._replace(gate=one_for_all(-1)(c.gate))))  # fmt: skip
change("head-mask-reversed", "gate", "Heads are gated in the reverse order.", step="o",
       where="H > 1 and gate", of=Gated,
       inputs=after(lambda c:
           c._replace(gate=c.gate[..., ::-1, :, :]) if np.ndim(c.gate) > 2 else c))  # fmt: skip


@mistake("head-mask-of-group", "gate", step="o", where="h // G ≠ h and gate")
class _HeadMaskOfGroup(Gated):
    """Query head h is gated by the number of its key/value head, h // (H / K)."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        H, K = c.q.shape[-3], max(c.k.shape[-3], 1)
        if not isinstance(c.gate, np.ndarray) or c.gate.ndim < 3 or c.gate.shape[-3] != H:
            return c
        return c._replace(gate=c.gate[..., np.arange(H) // (H // K), :, :])


change("gate-on-lse", "gate", "lse is multiplied by the gate of a head or a row.", step="lse",
       where="gate", equivalent=True, of=Gated,
       gated_lse=lambda up, lse, c:
           np.where(np.isfinite(lse), lse * np.asarray(c.gate)[..., 0], lse)
           if np.ndim(c.gate) > 1 and np.shape(c.gate)[-1] == 1 else lse)  # fmt: skip
change("gate-missing-in-dq-dk", "gate", "dq and dk are those of the output before the gate.",
       step="dp", where="gate", of=Gated,
       gradients=some_of_other_inputs((0, 1), lambda c: c._replace(gate=1.0)))  # fmt: skip
change("gate-missing-in-dv", "gate", "dv is that of the output before the gate.", step="dv",
       where="gate", of=Gated,
       gradients=some_of_other_inputs((2,), lambda c: c._replace(gate=1.0)))  # fmt: skip


@mistake("delta-of-gated-out", "gate", step="delta", where="gate")
class _DeltaOfGatedOut(Gated):
    """D is Σ (gate · dout) · out with the out after the gate, which holds the gate twice."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        return super().gradients(c, do, dlse - self._excess(c, do), dw)

    def _excess(self, c: Inputs, do: Array) -> Array:
        inner = self.do(do, c) * self.inner_out(c)
        return np.asarray((inner * (np.asarray(c.gate) - 1)).sum(-1, keepdims=True))


@mistake("dgate-of-gated-out", "gate", step="dgate", where="gate")
class _DgateOfGatedOut(Gated):
    """dgate is dout times the output after the gate."""

    def dgate(self, dout: Array, c: Inputs, shape: tuple[int, ...]) -> Array:
        return sum_to(dout * self.gate(self.inner_out(c), c), shape)


@mistake("dgate-of-last-query", "gate", step="dgate", where="T > 1 and gate")
class _DgateOfLastQuery(Gated):
    """dgate takes only the last query of those that share a gate, instead of the sum."""

    def dgate(self, dout: Array, c: Inputs, shape: tuple[int, ...]) -> Array:
        each = dout * self.inner_out(c)
        if shape[-2] == 1:
            each[..., :-1, :] = 0
        return sum_to(each, shape)


change("dgate-zero", "gate", "dgate is 0.", step="dgate", where="gate", of=Gated,
       dgate=lambda up, dout, c, shape: np.zeros(shape))  # fmt: skip


change("max-score-with-sink", "max score", "The sink counts in the largest score.",
       step="lse", where="sinks", of=Gated,
       equivalent=True, max_score=lambda up, c: np.maximum(up(c), c.sinks[..., 0]))  # fmt: skip
change("max-score-of-hidden", "max score", "The largest score is taken before the mask.",
       step="lse", where="hidden keys", of=Gated,
       equivalent=True,
       max_score=lambda up, c: up(c._replace(mask=None, causal=False, window=None)))  # fmt: skip
change("max-score-before-bias", "max score",
       "The largest score is that of scale · q k, without softcap and bias.",
       step="lse", where="bias or softcap", of=Gated,
       equivalent=True, max_score=lambda up, c: up(c._replace(bias=0.0, softcap=None)))  # fmt: skip
change("max-score-from-zero", "max score",
       "The largest score is 0 where all are below, since the maximum begins with 0.",
       step="lse", where="everywhere", of=Gated,
       equivalent=True, max_score=lambda up, c: np.maximum(up(c), 0))  # fmt: skip
