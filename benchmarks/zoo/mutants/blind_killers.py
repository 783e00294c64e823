"""Rules that must find each mutant of npattn.mistakes.blind: at least one has to fail it.

The rules were written down before the first run of the judge. A rule or sampling that was added
since, for what was first missed, is named beside them.
"""

from __future__ import annotations

BLIND_KILLERS: dict[str, str] = {
    # bias
    "blind-bias-far-below-hides": "agreement-lse agreement-o empty-row offset-bias",
    "blind-bias-minus-inf-clamped": "empty-row agreement-o agreement-lse",
    "blind-dbias-after-cap": "agreement-dbias directional",
    "blind-dbias-of-row-constant": "agreement-dbias dbias-rows directional lse-gradient",
    # causal
    "blind-causal-offset-clamped": "agreement-o agreement-lse empty-row",
    # dropout
    "blind-dropout-in-lse": "agreement-lse",
    "blind-dweights-dropped": "agreement-dq agreement-dk agreement-dbias",
    "blind-delta-dropped": "agreement-dq agreement-dk directional",
    "blind-dropped-row-dlse": "agreement-dq agreement-dk lse-gradient",
    "blind-weights-path-without-dropout": "agreement-o agreement-weights",
    # dtypes
    "blind-float64-read-as-float32": "agreement-o agreement-lse",
    # empty
    "blind-lse-epsilon": "empty-row agreement-lse structure",
    # gradients
    "blind-delta-without-dweights": "agreement-dq agreement-dk agreement-dbias",
    "blind-broadcast-last-wins": "agreement-dk agreement-dv value-euler structure",
    # heads
    "blind-packed-decode": "agreement-o agreement-lse causal-as-mask window-as-mask",
    # hidden
    "blind-values-cleared-by-column": "hidden-nan-v hidden-nan-kv",
    "blind-hidden-inf": "hidden-nan-v hidden-nan-k hidden-nan-kv",
    "blind-delta-of-hidden-values": "hidden-nan-v hidden-nan-kv agreement-dq",
    "blind-dq-of-hidden-keys": "hidden-nan-k hidden-nan-kv agreement-dq",
    "blind-dk-of-nan-query": "nan-query nan-query-alone agreement-dk",
    "blind-nan-spreads-over-columns": "nan-value agreement-o hidden-nan-v structure",
    # mask
    "blind-mask-rank-3-as-batch": "look-alike-masks agreement-o",
    "blind-mask-rank-2-as-padding": "look-alike-masks agreement-o",
    "blind-mask-of-group": "agreement-o agreement-lse permute-heads shared-heads",
    # scale
    "blind-scale-of-padded-size": "agreement-o agreement-lse structure",
    "blind-zero-scale-dq": "agreement-dq scale-of-query equal-scores",
    "blind-negative-scale-dk": "agreement-dk query-key-euler directional",
    "blind-maximum-before-scale": "large-products agreement-o agreement-lse scale-of-query",
    # shapes
    "blind-batch-modulo": "agreement-o agreement-lse permute-batch batch-alone",
    "blind-rank-2-weights": "shape-dtype agreement-weights structure",
    # sinks
    "blind-sinks-by-group": "agreement-o agreement-lse sink-key permute-heads",
    "blind-sink-not-in-maximum": "agreement-lse agreement-dsinks sink-key",
    "blind-sink-minus-inf": "sink-minus-inf",
    "blind-empty-row-lse-without-sink": "empty-row agreement-lse",
    "blind-empty-row-dsinks": "agreement-dsinks empty-row lse-gradient directional",
    "blind-weights-without-sink": "agreement-weights rows-sum-to-one sink-key",
    "blind-dsinks-without-dlse": "agreement-dsinks lse-gradient directional",
    "blind-dsinks-of-first-tile": "agreement-dsinks directional",
    # sizes
    "blind-no-size-scale": "structure agreement-o agreement-lse",
    "blind-no-keys-sink": "structure empty-row agreement-lse",
    "blind-no-values-lse": "structure agreement-lse agreement-weights",
    "blind-no-values-gradient": "structure agreement-dq agreement-dk lse-gradient",
    "blind-no-queries-dk": "structure agreement-dk agreement-dv unseen-keys",
    # softcap
    "blind-cap-slope-with-bias": "agreement-dq agreement-dk directional",
    "blind-cap-slope-without-scale": "agreement-dq agreement-dk directional",
    "blind-cap-slope-by-exp": "saturated agreement-dq agreement-dk",
    "blind-sink-capped": "agreement-o agreement-lse sink-key",
    # softmax
    "blind-maximum-of-padding": "offset-bias agreement-o agreement-lse saturated",
    # state
    "blind-cache-without-causal": "agreement-o agreement-lse repeatable causal-prefix",
    "blind-bias-masked-in-place": "inputs-unchanged repeatable",
    "blind-values-in-memory-order": "views agreement-o agreement-dv structure",
    # window
    "blind-window-ignored-with-mask": "agreement-o agreement-lse window-as-mask",
    "blind-window-half-open-ignored": "agreement-o agreement-lse window-as-mask",
    "blind-window-before-causal": "agreement-o agreement-lse causal-as-mask",
    "blind-window-left-falsy": "agreement-o agreement-lse window-as-mask",
    "blind-window-top-left": "agreement-o agreement-lse window-as-mask",
    "blind-window-in-int32": "window-infinite agreement-o agreement-lse",
    "blind-tile-ends-at-first-query": "agreement-o agreement-lse causal-as-mask",
}
"""Mutant → rule ids, separated by spaces."""
