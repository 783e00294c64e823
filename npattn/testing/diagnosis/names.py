"""Names that engineers have for patterns of step, place and amount.

A name is added to what was read if its pattern holds, never the other way round.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Name(NamedTuple):
    """A pattern, and the name that it has.

    Attributes
    ----------
    id : str
    step : str
        Pattern of the whole step.
    where, amount : str
        Patterns that are found in the place and in the amount.
    text : str
        The name, and advice.
    """

    id: str
    step: str
    where: str
    amount: str
    text: str


ANY = ""
NAMES = (
    Name("keys-counted-again", "p", ANY, "^counted", "tiles or splits overlap"),
    Name("rows-not-empty", "p", "no key", "mean of all", "a row of −∞ is not a uniform one"),
    Name("sink-in-denominator", "p", "sinks", "^rows sum", "look at the sink in the denominator"),
    Name("padded-keys-in-denominator", "p", r"S % \d+ ≠ 0", r"^rows sum to .* to 1$",
         "keys beyond S, or hidden ones, are counted in the denominator"),
    Name("tail-not-in-denominator", "p", r"S % \d+ ≠ 0", "^rows sum to 1 to",
         "the denominator leaves out the keys of the last tile"),
    Name("dropout-scaled-twice", "p", "dropout", r"1/\(1 − rate\)", "1/(1 − rate) is taken twice"),
    Name("dropout-not-scaled", "p", "dropout", "× 1 − rate", "1/(1 − rate) is left out"),
    Name("mask-of-other-query", "visible", ANY, "mask is of query",
         "a tile uses the mask of another tile"),
    Name("tail-not-hidden", "visible", r"S % \d+ ≠ 0|S // ", "^hidden keys take",
         "the last tile is not masked at S"),
    Name("mask-left-out", "visible", "^mask$|^backward: mask$", "^hidden keys take",
         "the mask is not applied"),
    Name("causal-left-out", "visible", "^(backward: )?causal$", "^hidden keys take",
         "causal is not applied"),
    Name("window-edge", "visible", "window and the (left|right) edge", ANY,
         "the window is off by one at this side"),
    Name("scale-left-out", "s", ANY, "q·k × 1/scale$", "the scale is left out"),
    Name("scale-twice", "s", ANY, "q·k × the scale$", "the scale is applied twice"),
    Name("scale-of-default", "s", ANY, "default scale", "the scale that is given is not used"),
    Name("columns-of-padded-size", "s", ANY, "D padded", "the scale is that of the padded D"),
    Name("kv-head", "s|o", ANY, "another head", "query head h belongs to key head h // G"),
    Name("base-2", "lse", ANY, "log₂ e|ln 2", "logarithms of base 2 and e are mixed"),
    Name("delta-not-written", "delta", ANY, "δ is 0",
         "the kernel that computes δ = Σ do·o does not reach these rows"),
    Name("delta-without-dlse", "delta", "dlse", ANY, "δ is Σ do·o − dlse"),
    Name("stride-of-rows", "o|d[qkv]", ANY, "rows of .* are read as",
         "what is stored and what is read have different row strides"),
    Name("unscaled-gradient", "d[qk]", ANY, "× 1/scale$", "the scale is missing in it"),
    Name("not-summed-over-heads", "d[kv]", r"h % G", "^0$",
         "the sum over the heads of a group is not taken"),
    Name("maximum-of-nothing", "nan", "first visible key", ANY,
         "exp(−∞ − −∞): a tile that a row does not see comes before any that it sees"),
    Name("division-by-nothing", "nan", "no key", "NaN", "0/0, or exp(−∞ − −∞), of no key"),
    Name("overflow", "nan", "contents", "NaN or infinite",
         "exp without the maximum of the row, or a product beyond the range of the dtype"),
    Name("hidden-times-zero", "nan", "hidden keys", "NaN or infinite",
         "0 · NaN is NaN: hidden keys are to be selected away, not multiplied by 0"),
    Name("not-rescaled", "p", r"S > \d+", r"^× .* to|^rows sum to .* to",
         "look at exp(m_old − m_new), by which sums of earlier tiles or splits are rescaled"),
    Name("mask-of-other-sample", "visible", r"\b[bB] [≥>]", ANY,
         "look at the stride of the batch axis of the mask"),
    Name("causal-of-backward", "visible", "^backward: .*(T ≠ S|T > S|S > T).*causal", ANY,
         "the backward aligns causal otherwise than the forward"),
    Name("tail-left-out", "visible", r"s ≥ \d+ · \(S //|S % \d+ ≠ 0", "visible keys have",
         "the last, partial tile of keys is left out"),
    Name("tiles-left-out", "visible", r"causal|window|s // \d+ [<>] t", "visible keys have",
         "look at the bounds of the loop over tiles of keys"),
    Name("other-sample", "s|o", ANY, "another sample", "look at the stride of the batch axis"),
    Name("lse-of-idle-split", "lse", "window|T = 1", "−∞",
         "a split that sees no key overwrites lse"),
    Name("lse-of-one-split", "lse", r"S > \d+", "^off by",
         "lse is that of one split, not of all of them"),
    Name("delta-of-part", "delta", ANY, "each part of the keys",
         "δ is Σ do·o with o of the whole row"),
    Name("delta-of-other-row", "delta", ANY, "of another|of query|of sample",
         "δ is read at another place than it was stored at"),
    Name("softcap-not-differentiated", "ds", "softcap", ANY,
         "dS is multiplied by 1 − tanh², of the score over the cap"),
    Name("dropout-in-backward", "dp", "dropout", ANY,
         "dP is masked and scaled by 1/(1 − rate), as P is"),
    Name("gradient-scaled-twice", "d[qk]", ANY, "× the scale$", "the scale is applied twice in it"),
    Name("tail-of-queries", "d[kv]", r"t ≥ \d+ · \(T //|T % \d+ ≠ 0", ANY,
         "queries of the last, partial tile are left out, or counted although there are none"),
    Name("dq-overwritten", "dq", r"S > \d+|s ≥", ANY,
         "dq is a sum over all tiles of keys: one overwrites the others"),
    Name("dkv-overwritten", "d[kv]", r"T > \d+", ANY,
         "it is a sum over all tiles of queries: one overwrites the others"),
    Name("dsinks-overwritten", "dsinks", r"\b[TB] > \d+", ANY,
         "it is a sum over all queries and samples: one block overwrites the others"),
    Name("dbias-not-summed", "dbias", r"\b[BHT] > 1", ANY,
         "it is summed along every axis that the bias is broadcast along"),
    Name("columns-of-keys", "o|dv", "e ≥ D|D < E|E > D", ANY, "v has E columns, k has D"),
    Name("columns-not-stored", "o", r"e ≥ \d+", "^0$", "columns of later tiles are not stored"),
)  # fmt: skip
"""Patterns, the most special first."""


def name_of(step: str, where: str, amount: str) -> tuple[str, str]:
    """Return a short id, and the name of a pattern; "" if it has none."""
    for name in NAMES:
        if (
            re.fullmatch(name.step, step)
            and re.search(name.where, where)
            and re.search(name.amount, amount)
        ):
            return name.id, name.text
    return " ".join(filter(None, (step or "unknown", where and f"where {where}"))), ""
