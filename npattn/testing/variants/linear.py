"""Cases of linear attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from npattn.testing.bounds.linear import linear_bounds
from npattn.testing.variants.case import Case, Exact, Request, among, normal, option
from npattn.variants import linear

GROWTH = 14
"""Powers of ten by which long keys grow a state: a solution that exchanges rows loses as many
digits, and float32 has room for the square."""


@dataclass(frozen=True, kw_only=True)
class LinearCase(Case):
    """One problem of linear attention, of the options of `npattn.variants.linear.attention`.

    `decay` is the kind of log_decay: None, or one number for each "head" (K, 1, 1), "key"
    (B, K, T, 1) or "feature" (B, K, T, D); `G` is H / K; `state` is True with an initial state,
    `beta` with the delta rule, whose keys have length 1, or if `long` so much that its state
    grows by up to GROWTH powers of ten.
    """

    B: int = among(1, 2)
    K: int = among(1, 2, 3)
    G: int = among(1, 2, 3)
    T: int = among(1, 2, 3, 5, 7, 16, 17, 33, 66, 130)
    S: int = among(1, 2, 3, 5, 11, 16, 70)
    D: int = among(1, 2, 3, 4, 8, 19, 64)
    E: int = among(1, 2, 3, 5, 8, 17)
    causal: bool = option(False, True)
    feature_map: Any = option(  # noqa: RUF009  it returns a field
        "elu", "identity", "relu", "softmax", function=True
    )
    normalise: bool = option(True, False)
    eps: float = option(0.0, 1e-6, 0.125)
    scale: float | None = option(None, 1.0, -0.75)
    decay: str | None = option(None, "head", "key", "feature", name="log_decay")
    beta: bool = option(False, True)
    long: bool = among(False, True)
    state: bool = option(False, True, name="initial_state")
    seed: int = among(*range(1000))

    @classmethod
    def build(cls, fields: Mapping[str, Any]) -> Self:
        """Return the case with these fields: decay needs causal, and causal T = S.

        The delta rule needs causal and no normalisation, and features no longer than their rows.
        """
        changes = dict(fields)
        if changes["normalise"] or not changes["causal"] or changes["feature_map"] == "elu":
            changes["beta"] = False
        if not changes["beta"]:
            changes["long"] = False
        if not changes["causal"]:
            changes["decay"] = None
        else:
            changes["S"] = changes["T"]
        return cls(**changes)

    def request(self, dtype: Any) -> Request:
        rng, lead, H = np.random.default_rng(self.seed), (self.B,), self.K * self.G
        T, S, D, E, kv = self.T, self.S, self.D, self.E, (self.B, self.K)
        shapes = {"q": (*lead, H, T, D), "k": (*kv, S, D), "v": (*kv, S, E)}
        arrays = {name: normal(rng, shape, dtype) for name, shape in shapes.items()}
        if self.normalise and self.feature_map in ("identity", "relu"):
            # Sums of weights that cancel, or are 0, determine no quotient.
            for name in "qk":
                positive = slice(None) if self.feature_map == "identity" else slice(0, 1)
                part = arrays[name][..., positive]
                part[...] = abs(part) + arrays[name].dtype.type(0.125)
        named = {}
        if self.beta:
            length = np.sqrt((arrays["k"].astype(np.float64) ** 2).sum(-1, keepdims=True))
            # Keys of length √x ∜D change a state's mean square by 1 + x²/3 each, for β in 0 … 1.
            x = np.sqrt(3 * (10 ** (2 * GROWTH / T) - 1)) if self.long else D**-0.5
            arrays["k"] = (np.sqrt(x) * D**0.25 * arrays["k"] / length).astype(dtype)
            named["beta"] = rng.uniform(0, 1, (*kv, S, 1)).astype(dtype)
        decays = {"head": (self.K, 1, 1), "key": (*kv, S, 1), "feature": (*kv, S, D)}
        if self.decay is not None:
            named["log_decay"] = -abs(normal(rng, decays[self.decay], dtype))
        if self.state:
            named["initial_state"] = normal(rng, (*kv, D, E), dtype)
            if self.normalise:
                named["initial_normaliser"] = abs(normal(rng, (*kv, D), dtype))
        words = ("causal", "feature_map", "normalise", "eps", "scale")
        options = {n: getattr(self, n) for n in words if getattr(self, n) is not None}
        cotangents = {"out": (*lead, H, T, E), "state": (*kv, D, E), "normaliser": (*kv, D)}
        if not self.normalise:
            del cotangents["normaliser"]
        return Request(
            arrays, named, options, {n: normal(rng, s, dtype) for n, s in cotangents.items()}
        )

    def exact(self, request: Request, dtype: Any, gradients: bool) -> Exact:
        arrays: dict[str, Any] = {**request.positional, **request.named}
        fwd = linear.forward(**arrays, **request.options)
        cotangents = {n: x.astype(np.float64) for n, x in request.cotangents.items()}
        douts = (cotangents.get(n) if gradients else None for n in ("out", "state", "normaliser"))
        return linear_bounds(fwd, dtype, *douts)
