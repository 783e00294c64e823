"""The model: forward, and the gradient of its loss in every parameter.

    x (B, T, n) rows or pixels of an image as tokens    h (B, T, d)    y (B,) digits

    h = x We + be + positions                      learned (T, d), or sinusoidal, or none
    h = h + attention(norm(h))                     npattn.MultiHeadAttention; its scores with the
                                                   relative bias, its weights with dropout
    h = h + relu(norm(h) W1 + b1) W2 + b2
    logits = mean over T of norm(h) · Wc + bc      loss: cross entropy, mean over B

No line conjugates, and maxima are taken by real part, so that a complex step through it gives its
derivative.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn import biases
from npattn.multihead import MultiHeadAttention, MultiHeadForward
from npattn.multihead.projections import NormResiduals, normalise, normalise_backward
from npattn.positions import sinusoidal
from npattn.problem.arrays import Array
from train.settings import Settings

ATTENTION = ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo")
EPS = 1e-5
BUCKETS, MAX_DISTANCE = 32, 128  # of the relative bias, as in T5

Parameters = dict[str, Array]


def random_parameters(settings: Settings, T: int, n: int, classes: int = 10) -> Parameters:
    """Sample the parameters of the model; those that all positions share are the same for each."""
    rng, d = np.random.default_rng([settings.seed, 0]), settings.embed_dim
    mha = MultiHeadAttention.init(d, settings.num_heads, seed=settings.seed)

    def weight(rows: int, columns: int) -> Array:
        return np.asarray(rng.standard_normal((rows, columns)) / np.sqrt(rows))

    p = {
        "we": weight(n, d), "be": np.zeros(d), "pos": 0.1 * rng.standard_normal((T, d)),
        "g1": np.ones(d), "c1": np.zeros(d), **mha.parameters,
        "g2": np.ones(d), "c2": np.zeros(d),
        "w1": weight(d, 4 * d), "b1": np.zeros(4 * d), "w2": weight(4 * d, d), "b2": np.zeros(d),
        "g3": np.ones(d), "c3": np.zeros(d), "wc": weight(d, classes), "bc": np.zeros(classes),
    }  # fmt: skip
    if settings.positions != "learned":
        del p["pos"]
    if settings.positions == "relative":
        p["table"] = np.zeros((BUCKETS, settings.num_heads))
    return {name: x.astype(settings.precision.master) for name, x in p.items()}


class ModelSteps(NamedTuple):
    """Logits, and the intermediate results that the gradients need."""

    n1: NormResiduals
    attention: MultiHeadForward
    n2: NormResiduals
    inner: Array  # before relu
    active: Array  # after relu
    n3: NormResiduals
    pooled: Array
    logits: Array


def attention_module(p: Parameters, settings: Settings) -> MultiHeadAttention:
    """Return the attention of the model, in the dtype of its parameters."""
    arrays: dict[str, Any] = {name: p[name] for name in ATTENTION}
    return MultiHeadAttention(**arrays, num_heads=settings.num_heads)


def forward(
    p: Parameters, settings: Settings, x: Array, dropout_mask: Array | None = None
) -> ModelSteps:
    """Compute the logits of images.

    Parameters
    ----------
    p : dict of array
    settings : Settings
    x : float array (B, T, n)
    dropout_mask : bool array (B, H, T, T), optional
        Weights to keep; None, as in evaluation, drops none.

    Returns
    -------
    ModelSteps
    """
    precision = settings.precision
    x = x.astype(precision.master, copy=False)
    h = precision.linear(x, p["we"], p["be"])
    if settings.positions == "learned":
        h = h + p["pos"]
    elif settings.positions == "sinusoidal":
        h = h + sinusoidal(*h.shape[-2:]).astype(precision.master)
    n1 = normalise(h, "layer", p["g1"], p["c1"], EPS)
    attention = _attend(p, settings, n1.y, dropout_mask)
    h = h + precision.widen(attention.out)
    n2 = normalise(h, "layer", p["g2"], p["c2"], EPS)
    inner = precision.linear(n2.y, p["w1"], p["b1"])
    active = np.where(inner.real < 0, 0, inner)  # NaN stays
    h = h + precision.linear(active, p["w2"], p["b2"])
    n3 = normalise(h, "layer", p["g3"], p["c3"], EPS)
    pooled = n3.y.mean(-2)
    logits = precision.linear(pooled, p["wc"], p["bc"])
    return ModelSteps(n1, attention, n2, inner, active, n3, pooled, logits)


def _attend(
    p: Parameters, settings: Settings, y: Array, dropout_mask: Array | None
) -> MultiHeadForward:
    """Attention of the model, with its bias, dropout and precision."""
    options: dict[str, Any] = {"dtype": settings.precision.attention}
    if settings.positions == "relative":
        options["bias"] = biases.relative(p["table"], max_distance=MAX_DISTANCE)
    if dropout_mask is not None:
        options |= {"dropout_mask": dropout_mask, "dropout_rate": settings.dropout}
    return attention_module(p, settings).forward(y, **options)


def log_softmax(logits: Array) -> Array:
    """Logarithms of the probabilities of the digits."""
    shifted = logits - logits.real.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


@np.errstate(over="ignore", invalid="ignore")  # `LossScale.accept` looks at the result
def loss_and_gradients(
    p: Parameters,
    settings: Settings,
    x: Array,
    y: Array,
    dropout_mask: Array | None = None,
    loss_scale: float = 1.0,
) -> tuple[float, Parameters, ModelSteps]:
    """Mean cross entropy, and its gradient in every parameter.

    Parameters
    ----------
    p, settings, x, dropout_mask
        As in `forward`.
    y : int array (B,)
    loss_scale : float, default 1.0
        The gradients are computed of loss_scale · loss, and divided by it at the end.

    Returns
    -------
    tuple of (float, dict of array, ModelSteps)
        Neither the loss nor the gradients are scaled.
    """
    s, rows = forward(p, settings, x, dropout_mask), np.arange(len(y))
    log_p = log_softmax(s.logits)
    loss = -log_p[rows, y].mean()

    precision = settings.precision
    dlogits = np.exp(log_p)
    dlogits[rows, y] -= 1
    dlogits = dlogits * loss_scale / len(y)
    d: Parameters = {}
    dpooled, d["wc"], d["bc"] = precision.linear_backward(dlogits, s.pooled, p["wc"])
    dy = np.broadcast_to(dpooled[:, None] / x.shape[-2], s.n3.y.shape)
    dh, d["g3"], d["c3"] = normalise_backward(dy, s.n3, "layer", p["g3"])
    drelu, d["w2"], d["b2"] = precision.linear_backward(dh, s.active, p["w2"])
    dinner = np.where(s.inner.real > 0, drelu, 0)
    dn2, d["w1"], d["b1"] = precision.linear_backward(dinner, s.n2.y, p["w1"])
    more, d["g2"], d["c2"] = normalise_backward(dn2, s.n2, "layer", p["g2"])
    dh = dh + more
    grads = s.attention.module.backward(s.attention, dh)
    d |= {name: precision.widen(getattr(grads, name)) for name in ATTENTION}
    if grads.bias is not None:
        d["table"] = precision.widen(grads.bias)
    dn1 = precision.widen(grads.query)
    more, d["g1"], d["c1"] = normalise_backward(dn1, s.n1, "layer", p["g1"])
    dh = dh + more
    if settings.positions == "learned":
        d["pos"] = dh.sum(0)
    x = x.astype(precision.master, copy=False)
    _, d["we"], d["be"] = precision.linear_backward(dh, x, p["we"])
    return loss.item(), {name: d[name] / loss_scale for name in p}, s
