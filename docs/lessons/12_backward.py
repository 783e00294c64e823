"""
12. Deriving the backward, and checking it
==========================================

Training needs the gradient of the loss L by q, k and v. ``dx`` is short for ∂L/∂x, an array of the
shape of x. The rule is always the same: read the forward from its last line up, and turn each line
into a line for gradients. It begins with ``do``, which the layers behind attention hand back.
"""

import matplotlib.pyplot as plt
import numpy as np

import npattn
from npattn.testing import check_gradients

T, S, D, E = 5, 7, 4, 3
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal(shape) for shape in ((T, D), (S, D), (S, E)))
scale = 1 / np.sqrt(D)


def forward(q, k, v):
    s = scale * q @ k.T  # (T, S)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)  # (T, S)
    return p @ v, p  # (T, E)


# %%
# A product
# ---------
# In o = p v, output o[t] is the sum over s of p[t, s] · v[s]. By the chain rule, a change of v[s]
# is felt by every query t, as much as its weight says, and one of p[t, s] by o[t] along v[s]:
#
# .. math:: dv_s = \sum_t p_{ts} \, do_t, \qquad dp_{ts} = do_t \cdot v_s
#
# The softmax
# -----------
# In one row, key i has the weight :math:`p_i = e^{s_i} / \sum_j e^{s_j}`. Raising one score raises
# its own weight, and lowers all others. By the quotient rule (1[i = j] is 1 if i = j, and else 0):
#
# .. math:: \partial p_i / \partial s_j = p_i \, (\mathbf{1}[i = j] - p_j)
#
# Every weight depends on score j, so its gradient is a sum over all of them:
#
# .. math:: ds_j = \sum_i dp_i \, \frac{\partial p_i}{\partial s_j}
#    = p_j \, dp_j - p_j \sum_i p_i \, dp_i = p_j \Big(dp_j - \sum_i p_i \, dp_i\Big)
#
# The sum in brackets is one number for the whole row: the mean of dp, weighted by p. The scores,
# s = scale · q kᵀ, are a product again, so that dq = scale · ds k, and dk = scale · dsᵀ q.


def backward(do, q, k, v):
    _, p = forward(q, k, v)
    dv = p.T @ do  # (S, E)   from o = p v
    dp = do @ v.T  # (T, S)   from o = p v
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))  # (T, S)   from p = softmax(s)
    dq = scale * ds @ k  # (T, D)   from s = scale · q kᵀ
    dk = scale * ds.T @ q  # (S, D)   from s = scale · q kᵀ
    return dq, dk, dv


# %%
# The same from the library
# -------------------------

do = rng.standard_normal((T, E))
grads = npattn.backward(npattn.forward(q, k, v), do)
for got, want in zip(backward(do, q, k, v), (grads.q, grads.k, grads.v), strict=True):
    assert np.allclose(got, want, rtol=0, atol=1e-13)

# %%
# Without a library: Taylor
# -------------------------
# A gradient can be checked by what it predicts. Let the loss be Σ do · o: its gradient by o is do.
# Move q, k, v by h and by −h in a random direction u: the two losses must differ by 2 h times the
# slope, the sum of gradient times u. In Taylor's series even powers of h cancel: what remains
# shrinks as h³, but with a wrong gradient as h only. Here the wrong one forgets the mean in ds.


def without_mean(do, q, k, v):
    _, p = forward(q, k, v)
    ds = p * (do @ v.T)
    return scale * ds @ k, scale * ds.T @ q, p.T @ do


u = [rng.standard_normal(x.shape) for x in (q, k, v)]


def loss(h):
    return (do * forward(*[x + h * y for x, y in zip((q, k, v), u, strict=True)])[0]).sum()


steps = 2.0 ** -np.arange(1, 25)
figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
for name, rule in (("right", backward), ("mean forgotten", without_mean)):
    slope = sum((d * y).sum() for d, y in zip(rule(do, q, k, v), u, strict=True))
    rest = np.array([abs(loss(h) - loss(-h) - 2 * h * slope) for h in steps])
    order = np.log2(rest[2] / rest[4]) / 2  # h falls by 4 between them
    print(f"{name}: the rest shrinks as h to the {order:.2f}")
    assert abs(order - (3 if rule is backward else 1)) < 0.2
    ax.loglog(steps, np.maximum(rest, 1e-18), "o-", markersize=3, label=name)
ax.set(xlabel="step h", ylabel="what the gradient does not explain")
ax.legend()

# %%
# For small steps the curve of the right gradient ends in noise, at the rounding error of the loss,
# 1e-16 to 1e-15. A test with one step may land in that noise; the order is seen before it.
#
# ``check_gradients`` does this for any function, chooses the steps, and names the mistake:


def attention(q, k, v):
    return forward(q, k, v)[0]


assert check_gradients(attention, (q, k, v), vjp=backward).passed
report = check_gradients(attention, (q, k, v), vjp=without_mean)
assert not report.passed
print(report)

# %%
# What you learned
# ----------------
# - Each line of the backward belongs to one of the forward, in the opposite order.
# - A gradient predicts the loss: what it leaves shrinks as h³.
#
# .. admonition:: Exercise
#
#    The scale may be learned, too. Derive the gradient of the loss by it, and check it.
#
# .. dropdown:: Solution
#
#    .. code-block:: python
#
#       dp, p = do @ v.T, forward(q, k, v)[1]
#       ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
#       dscale = (ds * (q @ k.T)).sum()  # from s = scale · q kᵀ
#       h = 1e-5
#       up, down = ((do * npattn.attention(q, k, v, scale=scale + x)).sum() for x in (h, -h))
#       assert np.isclose(dscale, (up - down) / (2 * h), rtol=1e-6)
