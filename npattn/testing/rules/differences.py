"""Property: the gradient against differences of the implementation itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from npattn.api import evaluate
from npattn.arrays import Array, finfo, sum_to
from npattn.problem import Problem
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules.estimates import (
    Estimate,
    agree,
    exact,
    forward_only,
    settle,
    shared,
    small,
)
from npattn.testing.rules.register import no_gradients, rule
from npattn.testing.trial import Judged, Trial

# What one unit of an input decides alone: rows of q and of the bias decide rows of o, heads of k
# and sinks those of their heads, columns of the values of a head columns of o. So each unit has a
# step of its own, and is judged by itself.
UNITS = {"q": (-1,), "k": (-2, -1), "v": (-2,), "bias": (-1,), "sinks": (-2, -1)}
SEEN = (2.0**-1, 2.0**-4, 2.0**-10)  # steps in which float64 shows what a difference leaves out
SMOOTH = ("normal", "large logits", "value offset", "integers", "outliers", "duplicate keys",
          "tiny values", "flat")  # fmt: skip


@rule(
    "directional",
    "13",
    unless=no_gradients,
    draw=lambda t: {"force": small(t, distribution=SMOOTH), "nonempty": True},
)
def directional(trial: Trial, recipe: Recipe) -> float | None:
    """A step of an input changes o and lse by what its gradient says.

    Central differences of the implementation itself, along a random direction that has the signs of
    the gradient, so that its terms do not cancel. What such a difference leaves out is measured on
    the oracle, and allowed. Broken by any gradient that is not that of the forward: of another
    mask, scale or head split, without a term of softmax or softcap, without dlse in dsinks
    (Dao-AILab/flash-attention#2706).
    """
    judged = trial.judged(recipe)
    names = [name for name in UNITS if Estimate.of(judged, f"d{name}") is not None]
    if not names:
        return None
    rng = np.random.default_rng([recipe.seed, 23])
    rare = [name for name in names if name in ("bias", "sinks")]  # few problems have them
    pool = rare if rare and rng.random() < 0.5 else names
    moved = _Moved(trial, judged, pool[int(rng.integers(len(pool)))])
    if moved.rise(judged, judged) is None:
        return None  # o or lse has not its shape: the business of another rule
    down = judged.results[f"d{moved.name}"].astype(np.float64).reshape(moved.x.shape) < 0
    step = np.where(down, -1, 1) * abs(rng.standard_normal(moved.x.shape))
    if moved.name == "v":
        return moved.along(step * abs(moved.x).max())  # o is linear in v: no step is too long
    return moved.along(step * moved.lengths(step))


@dataclass(frozen=True)
class _Moved:
    """One input of a problem that was judged, to be moved to both sides."""

    trial: Trial
    judged: Judged
    name: str

    @property
    def x(self) -> Array:
        """The input in float64; sinks are (H, 1, 1)."""
        return self.wide(self.judged.problem)

    def along(self, step: Array) -> float | None:
        """The rise of o and lse from one end of a step to the other, against the gradient."""
        ends = self.to(self.rounded(self.x + step)), self.to(self.rounded(self.x - step))
        up, down = (forward_only(self.trial).judge(p, self.judged.cotangents) for p in ends)
        rise, run = self.rise(up, down), self.run(*ends)
        if rise is None:
            return None
        left_out = self.left_out(_ideal(up), _ideal(down), run)
        room = Estimate(np.zeros_like(left_out.value), abs(left_out.value) + left_out.error)
        slope = self.slope(self.judged, run).plus(room)
        return settle([agree(f"rise along {self.name}", rise, slope)], self.judged, up, down)

    @np.errstate(all="ignore")  # where nothing is left out, the step is the longest
    def lengths(self, step: Array) -> Array:
        """What to multiply a step with in each unit: a power of two.

        Errors count as A / h in the slope, what is left out as c h². Their sum is least where
        h³ = A / 2c; a quarter of that costs little, and has room where c is larger than was seen.
        """
        errors, c = self.rise(self.judged, self.judged), np.zeros(())
        assert errors is not None  # there is an o
        for h in SEEN:
            ends = self.to(self.x + h * step), self.to(self.x - h * step)
            up, down = (self.oracle(problem) for problem in ends)
            c = np.fmax(c, abs(self.left_out(up, down, self.run(*ends)).value) / h**3)
        best = np.cbrt(errors.error / (8 * c))
        best = np.clip(np.where(np.isnan(best), SEEN[0], best), 2.0**-40, SEEN[0])
        return np.asarray(2.0 ** np.floor(np.log2(best)))

    def rise(self, up: Judged, down: Judged) -> Estimate | None:
        """Σ dout·o + Σ dlse·lse at one end less that at the other, for each unit."""
        dout, dlse = self.judged.cotangents
        total = exact(0)
        # lse does not depend on v.
        for name, cotangent in {"o": dout, "lse": None if self.name == "v" else dlse}.items():
            if cotangent is None:
                continue
            high, low = Estimate.of(up, name), Estimate.of(down, name)
            if high is None or low is None:
                return None
            part = high.minus(low).times(cotangent.astype(np.float64))
            if name == "lse":
                part = Estimate(part.value[..., None], part.error[..., None])
            total = part.over(self.decided).plus(total)
        return total

    def slope(self, judged: Judged, run: Array) -> Estimate:
        """The gradient times the way from one end to the other, for each unit."""
        gradient = Estimate.of(judged, f"d{self.name}")
        assert gradient is not None  # or the input had not been chosen
        value, error = (x.reshape(run.shape) for x in gradient)
        return Estimate(value, error).times(run).over(self.unit)

    def left_out(self, up: Judged, down: Judged, run: Array) -> Estimate:
        """What a difference of the oracle lacks of its own gradient."""
        rise = self.rise(up, down)
        assert rise is not None
        return rise.minus(self.slope(_ideal(self.judged), run))

    def unit(self, x: Array) -> Array:
        """The sum over each unit of the input."""
        return np.asarray(x.sum(UNITS[self.name], keepdims=True))

    def decided(self, x: Array) -> Array:
        """The sum over what each unit decides: (..., H, T, n), of results."""
        problem, units = self.judged.problem, self.unit(self.x).shape
        x = self.unit(x)
        if self.name in "kv":
            return shared(self.trial, problem, x, units)
        return sum_to(x.reshape((1, *x.shape)) if problem.headless else x, units)

    def wide(self, problem: Problem) -> Array:
        x: Array = getattr(problem, self.name).astype(np.float64)
        return x[:, None, None] if self.name == "sinks" else x

    def rounded(self, x: Array) -> Array:
        """To the dtype of the input."""
        dtype = getattr(self.judged.problem, self.name).dtype
        most = float(finfo(dtype).max)
        return np.where(np.isfinite(x), np.clip(x, -most, most), x).astype(dtype)

    def to(self, x: Array) -> Problem:
        """The problem with another input."""
        shape = getattr(self.judged.problem, self.name).shape
        return self.judged.problem.replace(**{self.name: x.reshape(shape)})

    @np.errstate(invalid="ignore")  # −inf in a bias stays where it is
    def run(self, up: Problem, down: Problem) -> Array:
        """The way from one end to the other."""
        run = self.wide(up) - self.wide(down)
        return np.where(np.isfinite(run), run, 0)

    def oracle(self, problem: Problem) -> Judged:
        """The oracle's forward, as if it were the implementation's."""
        fwd = evaluate(problem, self.trial.conventions, engine="dense")
        want = {"o": fwd.out, "lse": fwd.lse}
        return _ideal(Judged(problem, self.judged.cotangents, want, want, want))


def _ideal(judged: Judged) -> Judged:
    """The oracle as if it were the implementation."""
    nothing = {name: np.zeros_like(x) for name, x in judged.want.items()}
    return replace(judged, results=judged.want, allowed=nothing)
