"""One sentence from step, place and amount, and the line of dense.py that it is about."""

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
        finite = "finite where" in amount
        text = "a NaN is swallowed" if finite else "results are not finite"
    else:
        text = f"{subject} {'are' if step in PLURAL else 'is'} wrong"
    text += " in the backward, and right in the forward," if backward else ""
    text = text.rstrip(",") if not place or place == "everywhere" else text
    if place == "contents":
        text, place = f"{text} for some values of q and k, and right for others", ""
    text += " everywhere" if place == "everywhere" else f" where {place}" if place else ""
    text += f": {amount}" if amount else ""
    line = line_of(step)
    return f"{text} [{EQUATIONS[step]}; oracle: npattn/engines/dense.py:{line}]" if line else text
