"""Sentences of causes and of differences: of a step by its place and amount, or whole."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from npattn import engines

LINES = {
    "s": "s = problem.scale * (q @ k",
    "visible": "s = np.where(problem.visible",
    "p": "p, p_sink, lse = _softmax(",
    "lse": "lse = (m + np.log(total))",
    "o": "o = sum_live(",
    "dv": "dv = sum_live(",
    "dp": "dp = do @ v",
    "delta": "g, g_sink = subtract_mean(dp",
    "ds": "ds = where_live(p * g",
    "dq": "dq = problem.scale",
    "dk": "dk = problem.scale",
    "dbias": "bias=problem.bias_gradient(ds)",
    "dsinks": "sinks=None if ds_sink",
}
"""Beginning of the line of dense.py that computes a step."""
EQUATIONS = {
    "s": "s = scale · q kᵀ + bias",
    "visible": "s = −∞ where a key is hidden",
    "p": "p = exp(s − lse)",
    "lse": "lse = log Σ exp(s)",
    "o": "o = p v",
    "dv": "dv = pᵀ do",
    "dp": "dP = do vᵀ",
    "delta": "δ = Σ p · dP",
    "ds": "dS = p · (dP − δ)",
    "dq": "dq = scale · dS k",
    "dk": "dk = scale · dSᵀ q",
    "dbias": "dbias = dS",
    "dsinks": "dsinks = −Σ p_sink · δ",
}
"""Equation of each step, as a line of a kernel."""
WORDS = {
    "s": "the scores s",
    "visible": "the mask",
    "p": "the weights p",
    "lse": "lse",
    "o": "o",
    "dv": "dv",
    "dp": "dP",
    "delta": "δ",
    "ds": "dS",
    "dq": "dq",
    "dk": "dk",
    "dbias": "dbias",
    "dsinks": "dsinks",
    "dgate": "dgate",
    "nan": "NaN",
}
WHOLE = {
    "state": "results depend on earlier calls",
    "precision": "results are less precise than the dtype allows",
    "layout": "results are arranged otherwise",
}
PLURAL = ("s", "p")
BACKWARD = "backward:"
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
"""Sentence of a function that follows a convention, by convention and value."""
STATE = {
    "after": "a call is right alone, and wrong after another one: something is kept between calls",
    "unsteady": "two calls on the same problem give different results: something is kept between "
    "calls, or is read before it is written",
    "vanished": "the same call is right when it is made again: something is kept between calls, or "
    "is read before it is written",
    "unordered": "two calls on the same problem differ in their last bits, within the tolerance: "
    "sums are added in no fixed order, as by atomic additions",
}
"""Sentence of a difference between calls, by its name."""


@cache
def line_of(step: str) -> int:
    """Return the line of dense.py that computes a step; 0 if none does."""
    path = Path(engines.__path__[0]) / "dense.py"
    for n, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if step in LINES and line.strip().startswith(LINES[step]):
            return n
    return 0


def say(step: str, where: str, amount: str) -> str:
    """Return the sentence of a cause."""
    backward = where.startswith(BACKWARD)
    place = where.removeprefix(BACKWARD).strip()
    subject = WORDS.get(step, step)
    if not step:
        text = "no step was found: results are out of tolerance"
    elif step in WHOLE:
        text = WHOLE[step]
    elif step == "nan":
        finite = " is finite where" in amount
        text = "a NaN is swallowed" if finite else "results are not finite"
    else:
        zero = amount if amount.startswith("0") else ""
        text = f"{subject} {'are' if step in PLURAL or ' ' in step else 'is'} {zero or 'wrong'}"
        amount = amount.removeprefix(zero)
    text += " in the backward, and right in the forward," if backward else ""
    place = "" if step in WHOLE and place == "everywhere" else place
    text = text.rstrip(",") if not place or place == "everywhere" else text
    if place == "contents":
        of_inputs = step == "nan" and " where " in amount  # which it says
        text += "" if of_inputs else " for some values of q and k, and right for others"
        place = ""
    text += " everywhere" if place == "everywhere" else f" {_at(place)}" if place else ""
    text += f": {amount}" if amount and step != "state" else ""
    line = line_of(step)
    return f"{text} [{EQUATIONS[step]}; oracle: npattn/engines/dense.py:{line}]" if line else text


def _at(place: str) -> str:
    """Return a place with its preposition: a noun is no condition."""
    if place == "hidden keys and contents":
        return "where NaN or infinite values are hidden"
    words = {"hidden": "at", "rows": "in"}
    return f"{words.get(place.split()[0], 'where')} {place}"
