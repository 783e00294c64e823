"""Rule about gradients and differences of the implementation itself [13]."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from npattn.oracle.api import evaluate
from npattn.problem import Problem
from npattn.problem.arrays import Array, finfo, sum_to
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules.estimates import Estimate, agree, exact, forward_only
from npattn.testing.rules.register import no_gradients, rule, sampling
from npattn.testing.rules.relate import settle
from npattn.testing.rules.terms import sum_over_group
from npattn.testing.trial import Evaluation, Trial

# Axes of the units of an input that change separate results: rows of q, bias and gate change rows
# of o, heads of k and sinks change heads, columns of the values of a head columns of o. So each
# unit has a step of its own, and is judged by itself.
UNITS = {"q": (-1,), "k": (-2, -1), "v": (-2,), "bias": (-1,), "sinks": (-2, -1), "gate": (-1,)}
LINEAR = ("v", "gate")  # o is linear in them, and lse does not depend on them
LEAST = 2.0**-10  # step of an input that is 0 throughout
PROBES = (2.0**-1, 2.0**-4, 2.0**-10)  # steps at which float64 resolves the remainder
SMOOTH = ("normal", "large logits", "value offset", "integers", "outliers", "duplicate keys",
          "tiny values", "flat")  # fmt: skip


@rule("directional", "13", unless=no_gradients, draw=sampling(few=True, distribution=SMOOTH))
def directional(trial: Trial, recipe: Recipe) -> float | None:
    """A small step of an input changes o and lse as its gradient predicts.

    Central differences of the implementation itself, along a random direction that has the signs of
    the gradient, so that its terms do not cancel. Their remainder is measured on the oracle, and
    allowed. Broken by any gradient that is not that of the forward: of another
    mask, scale or head split, without a term of softmax or softcap, without dlse in dsinks
    (Dao-AILab/flash-attention#2706).
    """
    evaluation = trial.evaluation(recipe)
    names = [name for name in UNITS if Estimate.of(evaluation, f"d{name}") is not None]
    if not names:
        return None
    rng = np.random.default_rng([recipe.seed, 23])
    rare = [name for name in names if name in ("bias", "sinks", "gate")]  # few problems have them
    pool = rare if rare and rng.random() < 0.5 else names
    varied = VariedInput(trial, evaluation, pool[int(rng.integers(len(pool)))])
    if varied.rise(evaluation, evaluation) is None:
        return None  # o or lse has the wrong shape, which is left to rule shape-dtype
    down = evaluation.results[f"d{varied.name}"].astype(np.float64).reshape(varied.x.shape) < 0
    step = np.where(down, -1, 1) * abs(rng.standard_normal(varied.x.shape))
    if varied.name in LINEAR:
        return varied.check(step * max(abs(varied.x).max(), LEAST))  # no step is too long
    return varied.check(step * varied.lengths(step))


@dataclass(frozen=True)
class VariedInput:
    """One input of a judged problem, to take steps to both sides of."""

    trial: Trial
    base: Evaluation
    name: str

    @property
    def x(self) -> Array:
        """The input in float64; sinks are (H, 1, 1)."""
        return self.read(self.base.problem)

    def check(self, step: Array) -> float | None:
        """Compare the rise of o and lse from −step to +step with the gradient."""
        ends = self.replace(self.round(self.x + step)), self.replace(self.round(self.x - step))
        up, down = (forward_only(self.trial).evaluate(p, self.base.cotangents) for p in ends)
        rise, run = self.rise(up, down), self.run(*ends)
        if rise is None:
            return None
        remainder = self.remainder(_ideal(up), _ideal(down), run)
        allowed = Estimate(np.zeros_like(remainder.value), abs(remainder.value) + remainder.error)
        slope = self.slope(self.base, run).plus(allowed)
        return settle([agree(f"rise along {self.name}", rise, slope)], self.base, up, down)

    @np.errstate(all="ignore")  # without a remainder, the step is the longest
    def lengths(self, step: Array) -> Array:
        """Best factor of a step, of the shape of x, for each unit: a power of two.

        Errors count as A / h in the slope, the remainder as c h². Their sum is least at
        h³ = A / 2c; a quarter of that costs little, and is safe if c is larger than measured.
        """
        errors, c = self.rise(self.base, self.base), np.zeros(())
        assert errors is not None  # there is an o
        for h in PROBES:
            ends = self.replace(self.x + h * step), self.replace(self.x - h * step)
            up, down = (self.oracle(problem) for problem in ends)
            c = np.fmax(c, abs(self.remainder(up, down, self.run(*ends)).value) / h**3)
        best = np.cbrt(errors.error / (8 * c))
        best = np.clip(np.where(np.isnan(best), PROBES[0], best), 2.0**-40, PROBES[0])
        return np.asarray(2.0 ** np.floor(np.log2(best)))

    def rise(self, up: Evaluation, down: Evaluation) -> Estimate | None:
        """Difference of Σ dout·o + Σ dlse·lse between the ends, for each unit."""
        dout, dlse = self.base.cotangents
        total = exact(0)
        for name, cotangent in {"o": dout, "lse": None if self.name in LINEAR else dlse}.items():
            if cotangent is None:
                continue
            high, low = Estimate.of(up, name), Estimate.of(down, name)
            if high is None or low is None:
                return None
            part = high.minus(low).times(cotangent.astype(np.float64))
            if name == "lse":
                part = Estimate(part.value[..., None], part.error[..., None])
            total = part.over(self.sum_results).plus(total)
        return total

    def slope(self, evaluation: Evaluation, run: Array) -> Estimate:
        """Gradient times the way from one end to the other, for each unit."""
        gradient = Estimate.of(evaluation, f"d{self.name}")
        assert gradient is not None  # or the input had not been chosen
        value, error = (x.reshape(run.shape) for x in gradient)
        return Estimate(value, error).times(run).over(self.sum_units)

    def remainder(self, up: Evaluation, down: Evaluation, run: Array) -> Estimate:
        """Difference of the oracle less its own gradient."""
        rise = self.rise(up, down)
        assert rise is not None
        return rise.minus(self.slope(_ideal(self.base), run))

    def sum_units(self, x: Array) -> Array:
        """Sum over each unit of the input."""
        return np.asarray(x.sum(UNITS[self.name], keepdims=True))

    def sum_results(self, x: Array) -> Array:
        """Sum results, (..., H, T, n), over those that each unit changes."""
        problem, units = self.base.problem, self.sum_units(self.x).shape
        x = self.sum_units(x)
        if self.name in "kv":
            return sum_over_group(self.trial, problem, x, units)
        return sum_to(x.reshape((1, *x.shape)) if problem.headless else x, units)

    def read(self, problem: Problem) -> Array:
        x: Array = getattr(problem, self.name).astype(np.float64)
        return x[:, None, None] if self.name == "sinks" else x

    def round(self, x: Array) -> Array:
        """Round to the dtype of the input."""
        dtype = getattr(self.base.problem, self.name).dtype
        most = float(finfo(dtype).max)
        return np.where(np.isfinite(x), np.clip(x, -most, most), x).astype(dtype)

    def replace(self, x: Array) -> Problem:
        """Replace the input in the problem."""
        shape = getattr(self.base.problem, self.name).shape
        return self.base.problem.replace(**{self.name: x.reshape(shape)})

    @np.errstate(invalid="ignore")  # −inf in a bias stays where it is
    def run(self, up: Problem, down: Problem) -> Array:
        """Way from one end to the other."""
        run = self.read(up) - self.read(down)
        return np.where(np.isfinite(run), run, 0)

    def oracle(self, problem: Problem) -> Evaluation:
        """Evaluate the oracle, as if it were the implementation."""
        fwd = evaluate(problem, self.trial.conventions, engine="dense")
        exact = {"o": fwd.out, "lse": fwd.lse}
        return _ideal(Evaluation(problem, self.base.cotangents, exact, exact, lambda: exact))


def _ideal(evaluation: Evaluation) -> Evaluation:
    """Replace the results by the exact ones."""
    zero = {name: np.zeros_like(x) for name, x in evaluation.exact.items()}
    return replace(evaluation, results=evaluation.exact, bound=lambda: zero)
