"""Sentences of causes and of differences: of a step by its place and amount, or whole."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from npattn import engines

LINES = {
    "s": ("s = scale · q kᵀ + bias", "s = problem.scale * (q @ k"),
    "visible": ("s = −∞ where a key is hidden", "s = np.where(problem.visible"),
    "p": ("p = exp(s − lse)", "p, p_sink, lse = softmax("),
    "lse": ("lse = log Σ exp(s)", "lse = (m + np.log(total))"),
    "o": ("o = p v", "o = sum_live("),
    "dv": ("dv = pᵀ do", "dv = sum_live("),
    "dp": ("dP = do vᵀ", "dp = do @ v"),
    "delta": ("δ = Σ p · dP", "g, g_sink = subtract_mean(dp"),
    "ds": ("dS = p · (dP − δ)", "ds = where_live(p * g"),
    "dq": ("dq = scale · dS k", "dq = problem.scale"),
    "dk": ("dk = scale · dSᵀ q", "dk = problem.scale"),
    "dbias": ("dbias = dS", "bias=problem.bias_gradient(ds)"),
    "dsinks": ("dsinks = −Σ p_sink · δ", "sinks=None if ds_sink"),
}
"""Equation of each step, as a line of a kernel, and the beginning of its line in dense.py."""
WORDS = {
    "s": "the scores s",
    "visible": "the mask",
    "p": "the weights p",
    "dp": "dP",
    "delta": "δ",
    "ds": "dS",
}
"""Names of steps that are not the words for them."""
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
    lines = enumerate(path.read_text("utf-8").splitlines(), 1)
    found = (n for n, line in lines if line.strip().startswith(LINES[step][1]))
    return next(found) if step in LINES else 0


def say(step: str, where: str, amount: str) -> str:
    """Return the sentence of a cause."""
    place = where.removeprefix(BACKWARD).strip()
    if not step:
        text = "no step was found: results are out of tolerance"
    elif step in WHOLE:
        text = WHOLE[step]
        place = "" if place == "everywhere" else place
    elif step == "nan":
        text = "a NaN is swallowed" if " is finite where" in amount else "results are not finite"
    else:
        zero = amount if amount.startswith("0") else ""
        verb = "are" if step in PLURAL or " " in step else "is"
        text = f"{WORDS.get(step, step)} {verb} {zero or 'wrong'}"
        amount = amount.removeprefix(zero)
    if where.startswith(BACKWARD):
        text += " in the backward, and right in the forward"
        text += "," if place not in ("", "everywhere") else ""
    if place == "contents":
        of_inputs = step == "nan" and " where " in amount  # which it says
        text += "" if of_inputs else " for some values of q and k, and right for others"
    elif place:
        text += " everywhere" if place == "everywhere" else f" {_at(place)}"
    text += f": {amount}" if amount and step != "state" else ""
    line = line_of(step)
    return f"{text} [{LINES[step][0]}; oracle: npattn/engines/dense.py:{line}]" if line else text


def _at(place: str) -> str:
    """Return a place with its preposition: a noun is no condition."""
    if place == "hidden keys and contents":
        return "where NaN or infinite values are hidden"
    words = {"hidden": "at", "rows": "in"}
    return f"{words.get(place.split()[0], 'where')} {place}"
