"""Modules that each break some rules, and leave others right."""

import torch

from tests.testing.modules.lessons import Notebook


class OtherWeights(Notebook):
    """Its weights are right, and what it returns as them is not."""

    breaks = ("agreement-weights", "agreement-inputs", "train-mode")
    leaves = ("agreement-output", "eval-mode", "state-dict")

    def forward(self, query, key, value, mask=None):
        out, weights = super().forward(query, key, value, mask)
        return out, weights.roll(1, 1)


class ValuesOfKeys(Notebook):
    """Values are projected from the keys, which self-attention cannot tell."""

    breaks = ("cross-attention",)
    leaves = ("agreement-output", "agreement-inputs", "agreement-parameters", "causal")

    def forward(self, query, key, value, mask=None):
        return super().forward(query, key, key, mask)


class FirstPadding(Notebook):
    """Every example has the padding of the first, if the mask has no axis of queries."""

    breaks = ("mask", "padding")
    leaves = ("agreement-output", "cross-attention", "causal")

    def forward(self, query, key, value, mask=None):
        if mask is not None and mask.ndim == 4 and mask.shape[-2] == 1:
            mask = mask[:1]
        return super().forward(query, key, value, mask)


class StrictCausal(Notebook):
    """A mask that is causal hides the diagonal too, but for the first key."""

    breaks = ("causal",)
    leaves = ("agreement-output", "mask", "padding", "empty-row")

    def forward(self, query, key, value, mask=None):
        if mask is not None and mask.shape[-2] > 1:
            visible = mask != 0
            causal = torch.ones_like(visible).tril()
            if torch.equal(visible, causal):
                mask = causal.tril(-1) | (torch.arange(mask.shape[-2]) == 0)
        return super().forward(query, key, value, mask)


class OddEmptyRows(Notebook):
    """A query that sees nothing gives 7."""

    breaks = ("empty-row",)
    leaves = ("agreement-output", "mask", "causal", "padding")

    def forward(self, query, key, value, mask=None):
        out, weights = super().forward(query, key, value, mask)
        if mask is not None:
            seen = (mask != 0).expand(len(query), self.num_heads, *weights.shape[-2:])[:, 0].any(-1)
            out = torch.where(seen[..., None], out, 7.0)
        return out, weights


class Alternates(Notebook):
    """Every second call is off by a rounding."""

    breaks = ("eval-mode",)
    leaves = ("agreement-output", "agreement-weights", "mask", "train-mode")
    calls = 0

    def forward(self, query, key, value, mask=None):
        out, weights = super().forward(query, key, value, mask)
        self.calls += 1
        return out * (1 + 2**-23 * (self.calls % 2)), weights


class HalfGradient(Notebook):
    """The gradient of the query is half of what it should be."""

    breaks = ("agreement-inputs", "cross-attention", "mask")
    leaves = ("agreement-output", "agreement-parameters", "empty-row", "train-mode", "autocast")

    def forward(self, query, key, value, mask=None):
        return super().forward(0.5 * query + 0.5 * query.detach(), key, value, mask)


BROKEN = (
    *(OtherWeights, ValuesOfKeys, FirstPadding, StrictCausal, OddEmptyRows, Alternates),
    HalfGradient,
)
