"""Cases of differential attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from npattn.testing.bounds.differential import differential_bounds
from npattn.testing.variants.case import Case, Exact, Request, among, normal, option
from npattn.variants import differential


@dataclass(frozen=True, kw_only=True)
class DifferentialCase(Case):
    """One problem of differential attention, of the options of `npattn.variants.differential`.

    `lam` is one number for each "head" or one "number" for all, both as arrays; `G` is H / K. True
    of mask, bias, sinks and norm_weight is an array that the seed samples.
    """

    B: int = among(1, 2)
    K: int = among(1, 2, 3)
    G: int = among(1, 2, 3)
    T: int = among(1, 2, 3, 5, 7, 17, 66)
    S: int = among(1, 2, 3, 5, 11, 16, 70, 130)
    D: int = among(1, 2, 3, 4, 8, 19)
    E: int = among(1, 2, 3, 5, 8, 17)
    causal: bool = option(False, True)
    mask: bool = option(False, True)
    bias: bool = option(False, True)
    sinks: bool = option(False, True)
    scale: float | None = option(None, 1.0, -0.75)
    softcap: float | None = option(None, 2.0)
    lam: str = among("head", "number")
    norm: bool = option(False, True)
    norm_weight: bool = option(False, True)
    norm_eps: float = option(1e-5, 0.01)
    out_scale: float = option(1.0, 0.4)
    seed: int = among(*range(1000))

    @classmethod
    def build(cls, fields: Mapping[str, Any]) -> Self:
        """Return the case with these fields: causal has T = S, and a weight needs a norm."""
        changes = dict(fields)
        changes["norm_weight"] = changes["norm_weight"] and changes["norm"]
        if changes["causal"]:
            changes["S"] = changes["T"]
        return cls(**changes)

    def request(self, dtype: Any) -> Request:
        rng, H = np.random.default_rng(self.seed), self.K * self.G
        queries, keys = (self.B, H, self.T, self.D), (self.B, self.K, self.S, self.D)
        shapes = {"q1": queries, "k1": keys, "q2": queries, "k2": keys, "v": (*keys[:3], self.E)}
        arrays = {name: normal(rng, shape, dtype) for name, shape in shapes.items()}
        named = {"lam": normal(rng, (H,) if self.lam == "head" else (), dtype)}
        more = {"bias": (H, self.T, self.S), "sinks": (H,), "norm_weight": (self.E,)}
        for name, shape in more.items():
            if getattr(self, name):
                named[name] = normal(rng, shape, dtype)
        options: dict[str, Any] = {}
        if self.mask:
            options["mask"] = rng.random((self.B, 1, self.T, self.S)) < 0.75
            options["mask"][..., 0] = True  # a row that sees nothing is another question
        words = ("causal", "scale", "softcap", "norm", "norm_eps", "out_scale")
        options |= {n: getattr(self, n) for n in words if getattr(self, n) is not None}
        return Request(arrays, named, options, {"out": normal(rng, (*queries[:3], self.E), dtype)})

    def exact(self, request: Request, dtype: Any, gradients: bool) -> Exact:
        arrays: dict[str, Any] = {**request.positional, **request.named}
        fwd = differential.forward(**arrays, **request.options)
        dout = request.cotangents["out"].astype(np.float64) if gradients else None
        return differential_bounds(fwd, dtype, dout)
