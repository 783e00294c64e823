"""Sentences of causes and of differences, by what they are about."""

from __future__ import annotations

CONVENTIONS = {
    "causal=bottom_right": "causal and windows are aligned bottom-right: query t sees keys "
    "s ≤ t + S − T",
    "causal=top_left": "causal and windows are aligned top-left: query t sees keys s ≤ t",
    "causal=unless_masked": "causal holds where no mask is given, and the mask alone where one is",
    "window=exclusive": "left of the window counts the keys beside the query",
    "window=inclusive": "left of the window counts the query too",
    "mask_true=attend": "True in the mask shows a key",
    "mask_true=hide": "True in the mask hides a key",
    "empty_row=zero": "a query that sees no key gives 0",
    "empty_row=nan": "a query that sees no key gives NaN",
    "empty_row=mean": "a query that sees no key gives the mean of all values",
    "empty_row_bias=zero": "a query whose keys all have a bias of −inf gives 0",
    "empty_row_bias=nan": "a query whose keys all have a bias of −inf gives NaN",
    "empty_row_bias=mean": "a query whose keys all have a bias of −inf gives the mean",
    "bias=after_scale": "the bias is added as it is",
    "bias=before_scale": "the bias is multiplied by the scale, as q·k is",
    "softcap=before_bias": "the softcap caps scale · q·k, before the bias is added",
    "softcap=after_bias": "the softcap caps the scores after the bias is added",
    "softcap=after_mask": "the softcap caps the scores after the mask: hidden keys take weight",
    "kv_head=repeat": "query head h uses key/value head h // (H / K)",
    "kv_head=tile": "query head h uses key/value head h % K",
    "lse_base=e": "lse is a natural logarithm",
    "lse_base=2": "lse is a logarithm to base 2",
    "weights=before_dropout": "the weights returned are those before dropout",
    "weights=after_dropout": "the weights returned are those after dropout",
    "dropout_at_rate_0=drop": "a dropout mask beside a rate of 0 drops, without rescaling",
    "dropout_at_rate_0=ignore": "a dropout mask beside a rate of 0 does nothing",
}
"""What a function does, by convention and value."""
