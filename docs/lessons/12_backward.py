"""
12. Deriving the backward, and checking it
==========================================

Training needs the gradient of the loss in q, k and v. The rule is always the same: read the forward
upwards, and turn each line into the line for its gradient. ``dx`` is the gradient in ``x``.
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
# In o = p v, output o[t] is the sum over s of p[t, s] · v[s]. A change of v[s] is felt by every
# query, by as much as its weight: dv = pᵀ do. A change of p[t, s] is felt along v[s]: dp = do vᵀ.
#
# The softmax
# -----------
# p = e / Σ e. Raising one score raises its own weight, and lowers all others of the row, since the
# row still sums to 1:
#
# .. math:: \partial p_i / \partial s_j = p_i \, (\mathbf{1}[i = j] - p_j)
#
# Summed against dp, the second part is the same number for the whole row, the mean of dp by the
# weights: ds = p · (dp − Σ p · dp).
#
# The scores
# ----------
# s = scale · q kᵀ is a product again.


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
# Any gradient can be checked by what it predicts. Take a step h in a random direction u, up and
# down: the loss must differ by 2 h ⟨d, u⟩, and what remains shrinks as h³. With a wrong gradient
# the rest shrinks as h only. Here the wrong one forgets the mean: ds = p · dp.


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
# about 1e-16. A test with one step and one tolerance may land in that noise; the order of the rest
# is seen before it.
#
# ``check_gradients`` does this for any function, chooses the steps, and names the mistake:


def attention(q, k, v):
    return forward(q, k, v)[0]


assert check_gradients(attention, (q, k, v), vjp=backward).passed
report = check_gradients(attention, (q, k, v), vjp=without_mean)
assert not report.passed
print(report)
