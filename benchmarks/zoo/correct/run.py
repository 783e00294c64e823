"""One call of a kernel: its results, and its backward pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.zoo.correct.forward import ForwardRun, SavedState
from benchmarks.zoo.correct.machine import LOG2E
from npattn.problem.arrays import Array, sum_to


class Run(ForwardRun):
    """Forward and backward pass of a kernel over one problem."""

    @np.errstate(all="ignore")  # hidden scores may be anything
    def results(
        self, dout: Array | None, dlse: Array | None, dweights: Array | None
    ) -> dict[str, Array]:
        """Return o, lse, weights and, with dout, the gradients, by name."""
        state, problem, conventions = self.forward(), self.problem, self.choices.conventions
        base = 1 if conventions.lse_base == "e" else self.wide(LOG2E)
        lse = np.where(state.empty, self.wide(conventions.lse_empty), state.lse * base)
        results = {"o": state.out, "lse": lse[..., 0], "weights": state.weights[..., : problem.S]}
        results = {n: x[0] if problem.headless else x for n, x in results.items()}
        results["o"] = results["o"].astype(self.dtype)
        return results if dout is None else results | self.backward(state, dout, dlse, dweights)

    # --- backward

    def backward(
        self, state: SavedState, dout: Array, dlse: Array | None, dweights: Array | None
    ) -> dict[str, Array]:
        problem, kernel, wide = self.problem, self.choices, self.wide
        (q, k, v, factors), scores, p = state.operands, state.scores, state.p
        live = scores.s != -np.inf
        do = dout.astype(wide).reshape(state.out.shape)
        dl = self.dlse(dlse, state)
        dv = self.gradient(self.drop(p).swapaxes(-1, -2), do, live.swapaxes(-1, -2))
        dp = self.store("dweights", self.dot(do, v.swapaxes(-1, -2)))
        dp = np.where(live, self.store("dweights", self.fit(dp * self.dropout_factor())), wide(0))
        dw = self.dweights(dweights, p)
        delta = self.delta(state, do, dp, dw)
        ds = self.dscores(p, self.fit(dp + dw), delta, dl)
        ds_sink = ds[..., problem.S :]
        ds = np.where(scores.passes, ds[..., : problem.S], wide(0))
        dx = self.store("dscores", self.fit(ds * scores.slope))
        dx = np.where(scores.passes, dx, wide(0))
        after = factors[2] if kernel.tile is not None else wide(1)
        if kernel.tile is None:
            dx = self.fit(dx * factors[2])
            dx = dx if self.rounding.fuses else self.store("dscores", dx)
        live = live[..., : problem.S]
        dq = self.finish(self.gradient(dx, k, live), factors[0] * after)
        dk = self.gradient(dx.swapaxes(-1, -2), q, live.swapaxes(-1, -2))
        if self.folds_bias():
            # dk of the channel of a query is its row of dx: as a product, 0 · NaN would spread.
            ds = dx
        dk = self.finish(dk[..., : problem.D], factors[1] * after)
        dv = self.add_mean(dv[..., : problem.S, :], do, state.empty)
        results = {
            "dq": self.deliver(sum_to(dq[..., : problem.D], problem.q.shape)),
            "dk": self.deliver(sum_to(self.sum_heads(dk), problem.k.shape)),
            "dv": self.deliver(sum_to(self.sum_heads(dv), problem.v.shape)),
        }
        results = {n: x.astype(self.dtype) for n, x in results.items()}
        if problem.bias_array is not None:
            results["dbias"] = sum_to(ds, problem.bias_array.shape).astype(problem.bias_array.dtype)
        if problem.sinks is not None:
            each = ds_sink if kernel.sink == "key" else self.fit(state.p_sink * (dl - delta))
            results["dsinks"] = sum_to(each, (problem.H, 1, 1))[:, 0, 0]
        return results

    def dlse(self, dlse: Array | None, state: SavedState) -> Array:
        if dlse is None:
            return np.zeros_like(state.lse)
        base = 1 if self.choices.conventions.lse_base == "e" else self.wide(LOG2E)
        return np.asarray(dlse.astype(self.wide).reshape(state.lse.shape) * base)

    def dweights(self, dweights: Array | None, p: Array) -> Array:
        dw = np.zeros_like(p)
        if dweights is not None:
            dw[..., : self.problem.S] = dweights.reshape(*p.shape[:-1], self.problem.S)
        return np.where(p == 0, self.wide(0), dw)

    def delta(self, state: SavedState, do: Array, dp: Array, dw: Array) -> Array:
        """Return Σ p dp, or Σ do · out instead if the weights have no cotangent of their own."""
        if self.choices.forgets_delta:
            return np.zeros_like(state.lse)
        either = self.rounding.delta_from == "either" and self.choices.tile is not None
        if (self.rounding.delta_from == "out" or either) and not dw.any():
            return self.sum(self.fit(do * state.out))
        return self.sum(self.fit(state.p * self.fit(dp + dw)))

    def dscores(self, p: Array, dp: Array, delta: Array, dl: Array) -> Array:
        if self.choices.apart:
            out = self.store("dscores", self.fit(p * self.fit(dp - delta)))
            return self.store("dscores", self.fit(out + self.store("dscores", self.fit(p * dl))))
        return self.store("dscores", self.fit(p * self.fit(dp - self.fit(delta - dl))))

    def gradient(self, a: Array, b: Array, live: Array) -> Array:
        """Return a @ b, stored low after every block of the sum if the model declares blocks."""
        block = self.rounding.gradient_block
        if block is None:
            return self.masked_matmul(a, b, live)
        total = np.zeros((*a.shape[:-1], b.shape[-1]), self.wide)
        for i in range(0, a.shape[-1], block):
            step = slice(i, i + block)
            part = self.masked_matmul(a[..., step], b[..., step, :], live[..., step])
            total = self.deliver(self.fit(total + part))
        return total

    def finish(self, dx: Array, factor: Any) -> Array:
        """Multiply dx by the factor of its operand; round first if the model declares it."""
        dx = self.deliver(dx) if self.rounding.gradient_roundings > 1 else dx
        return self.fit(dx * self.wide(factor))

    def sum_heads(self, dx: Array) -> Array:
        """Sum over the query heads that share a head [13]."""
        problem = self.problem
        if problem.headless or problem.H == problem.K:
            return dx
        *lead, H, S, n = self.store("shared", dx).shape
        parts = self.store("shared", dx).reshape(*lead, problem.K, H // problem.K, S, n)
        return self.fit(parts.sum(-3))

    def add_mean(self, dv: Array, do: Array, empty: Array) -> Array:
        """Add to dv the share of fully masked rows whose out is the mean of all values."""
        if self.choices.conventions.empty_row != "mean":
            return dv
        rows = np.where(empty, do, self.wide(0)).swapaxes(-1, -2)
        return np.asarray(dv + self.sum(rows).swapaxes(-1, -2) / self.wide(max(self.problem.S, 1)))
