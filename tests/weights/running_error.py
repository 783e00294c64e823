"""A layer in plain formulas, each step with a bound on the rounding of a system in float32.

A `Rounded` holds a value in float64 and a bound on how far a computation with unit roundoff u may
be from it: each operation passes the bounds of its operands on, and adds its own roundings (Higham,
Accuracy and Stability of Numerical Algorithms, sections 3.1 and 3.3). Sums of n terms in any order
are within γ_n = n·u / (1 − n·u); exp, tanh, sin, cos, pow and rsqrt within one unit in the last
place, 2·u.
"""

import numpy as np

U32, U64 = 2.0**-24, 2.0**-53
TINY = 2.0**-126  # what underflows may lose as much


class Rounded:
    def __init__(self, value, error=0.0, u=U32):
        self.value = np.asarray(value, np.float64)
        self.error = np.broadcast_to(np.asarray(error, np.float64), self.value.shape)
        self.u = u

    def like(self, value, error=0.0):
        return Rounded(value, error, self.u)

    @property
    def size(self):
        return abs(self.value) + self.error

    def rounded(self, value, error, times=1):
        """A result that is rounded so many times, once its operands' errors are passed on."""
        return self.like(value, error + times * self.u * (abs(value) + error) + TINY)

    def __matmul__(self, other):
        n = self.value.shape[-1]
        gamma = n * self.u / (1 - n * self.u)
        passed = abs(self.value) @ other.error + self.error @ other.size
        value = self.value @ other.value
        return self.like(value, passed + gamma * (self.size @ other.size) + n * TINY)

    def __add__(self, other):
        return self.rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other):
        return self.rounded(self.value - other.value, self.error + other.error)

    def __mul__(self, other):
        passed = abs(self.value) * other.error + self.error * other.size
        return self.rounded(self.value * other.value, passed)

    def times(self, number):
        """Times a Python number, which is rounded itself."""
        return self * self.like(number, self.u * abs(number))

    def map(self, f):
        return self.like(f(self.value), f(self.error))

    @property
    def mT(self):
        return self.map(lambda x: x.swapaxes(-1, -2))

    def sum(self, axis):
        n = self.value.shape[axis]
        error = self.error.sum(axis, keepdims=True)
        size = self.size.sum(axis, keepdims=True)
        return self.like(
            self.value.sum(axis, keepdims=True), error + n * self.u * size * (1 + 2**-9)
        )

    def tanh(self):  # its slope is at most 1
        return self.rounded(np.tanh(self.value), self.error, 2)

    def append(self, more):
        """One more column, of exact numbers."""
        error = np.concatenate([self.error, np.zeros_like(more)], -1)
        return self.like(np.concatenate([self.value, more], -1), error)

    def softmax(self, visible):
        s = np.where(visible, self.value, -np.inf)
        top = s.max(-1, keepdims=True)
        p = np.exp(s - top)
        p = p / p.sum(-1, keepdims=True)
        # Of each score: its own error, that of the largest, and the rounding of the difference.
        moved = np.where(visible, self.error + self.u * (self.size + abs(top)), 0)
        moved = 2 * moved.max(-1, keepdims=True)
        n = s.shape[-1]
        relative = np.expm1(moved + moved**2) + (n + 2 + 2 + 1) * self.u * (1 + 2 * np.exp(moved))
        return self.like(p, p * relative + n * TINY)


def split(x, heads):
    return x.map(lambda a: a.reshape(*a.shape[:-1], heads, -1).swapaxes(-2, -3))


def merge(x):
    return x.map(lambda a: a.swapaxes(-2, -3).reshape(*a.shape[:-3], a.shape[-2], -1))


def rms_norm(x, weight, eps):
    n = x.value.shape[-1]
    size = np.sqrt((x.value**2).mean(-1, keepdims=True) + eps)
    # The size of a vector moves by at most that of its error.
    moved = np.sqrt((x.error**2).mean(-1, keepdims=True))
    unit = x.value / size
    passed = x.error / (size - moved) + abs(x.value) * moved / (size * (size - moved))
    # Square, sum of n, mean and ε, half of which pass the root; root and product.
    unit = x.rounded(unit, passed, (n + 4) / 2 + 2 + 1)
    return unit * x.like(weight, x.u * abs(weight))  # of Gemma: stored less 1


def layer_norm(x, weight, bias, eps):
    n = x.value.shape[-1]
    gamma = 4 * n * x.u  # one pass or two: a product, two sums and a quotient for each element
    mean, square = x.value.mean(-1, keepdims=True), (x.size**2).mean(-1, keepdims=True)
    error = x.error + x.error.mean(-1, keepdims=True) + gamma * np.sqrt(square)
    centred = x.rounded(x.value - mean, error)
    size = np.sqrt((centred.value**2).mean(-1, keepdims=True) + eps)
    moved = np.sqrt((centred.error**2).mean(-1, keepdims=True)) + gamma * square / size
    passed = centred.error / (size - moved)
    passed = passed + abs(centred.value) * moved / (size * (size - moved))
    unit = x.rounded(centred.value / size, passed, 2 + 1 + 2)
    return unit * x.like(weight) + x.like(bias)


def rope(x, rotary, positions):
    """Turn by angles, position · frequency; frequencies are base^(−2i/R) of R features."""
    D = x.value.shape[-1]
    R = D if rotary.size is None else rotary.size
    values = rotary.base ** (-np.arange(0, R, 2) / R)
    angles = positions[:, None] * values
    # Of a frequency: the exponent's rounding, the power, its reciprocal; and of the product.
    moved = angles * (np.log(rotary.base) + 2 + 1 + 1) * x.u
    cos, sin = (x.rounded(f(angles), moved, 2) for f in (np.cos, np.sin))
    half = rotary.layout == "half"
    first = slice(0, R // 2) if half else slice(0, R, 2)
    second = slice(R // 2, R) if half else slice(1, R, 2)
    a, b = (x.map(lambda y, part=part: y[..., part]) for part in (first, second))
    value, error = x.value.copy(), x.error.copy()
    for part, turned in ((first, a * cos - b * sin), (second, b * cos + a * sin)):
        value[..., part], error[..., part] = turned.value, turned.error
    return x.like(value, error)


def back_rope(x, rotary, positions):
    return rope(x, rotary, -positions)


class Layer:
    """Forward and backward of a `MultiHeadAttention` with options, in steps that are bounded."""

    def __init__(self, mha, x, key=None, *, value=None, causal=False, window=None, scale=None,
                 softcap=None, bias=None, sinks=None, rope=None, u=U32):  # fmt: skip
        self.mha, self.rotary, self.softcap, self.sinks = mha, rope, softcap, sinks
        self.scale = mha.head_size**-0.5 if scale is None else scale
        self.p = {n: Rounded(a, u=u) for n, a in mha.parameters.items()}
        self.x = Rounded(x, u=u)
        self.key = self.x if key is None else Rounded(key, u=u)
        self.value = self.key if value is None else Rounded(value, u=u)
        T, S = self.x.value.shape[-2], self.key.value.shape[-2]
        t, s = np.arange(T)[:, None], np.arange(S)
        self.visible = np.ones((T, S), bool)
        if causal:
            self.visible &= s <= t
        if window is not None:
            self.visible &= t - s <= window[0]
        self.bias = None if bias is None else Rounded(bias, 16 * u * abs(np.asarray(bias)), u)

    def project(self, x, name, heads):
        y = x @ self.p["w" + name]
        if "b" + name in self.p:
            y = y + self.p["b" + name]
        norm = None if name == "v" else self.mha.qk_norm
        if norm == "rms_projection":
            y = rms_norm(y, self.p["norm_" + name].value, self.mha.norm_eps)
        y = split(y, heads)
        if norm in ("rms", "layer"):
            weight = self.p["norm_" + name].value
            if norm == "rms":
                y = rms_norm(y, weight, self.mha.norm_eps)
            else:
                y = layer_norm(y, weight, self.p[f"norm_{name}_bias"].value, self.mha.norm_eps)
        if self.rotary is not None and name != "v":
            y = rope(y, self.rotary, np.arange(y.value.shape[-2]))
        return y

    def forward(self):
        H, K = self.mha.num_heads, self.mha.num_kv_heads
        self.q = self.project(self.x, "q", H)
        k, v = self.project(self.key, "k", K), self.project(self.value, "v", K)
        self.k, self.v = (y.map(lambda a: a.repeat(H // K, -3)) for y in (k, v))
        s = (self.q @ self.k.mT).times(self.scale)
        if self.softcap is not None:
            s = s.times(1 / self.softcap).tanh().times(self.softcap)
        if self.bias is not None:
            s = s + self.bias
        if self.sinks is None:
            self.w = s.softmax(self.visible)
        else:
            seen = np.pad(self.visible, ((0, 0), (0, 1)), constant_values=True)
            sinks = np.broadcast_to(self.sinks[:, None, None], (*s.value.shape[:-1], 1))
            self.w = s.append(sinks).softmax(seen).map(lambda w: w[..., :-1])
        self.merged = merge(self.w @ self.v)
        out = self.merged @ self.p["wo"]
        return out + self.p["bo"] if "bo" in self.p else out

    def backward(self, dout):
        """Gradients of the parameters and of x, without norms, bias, softcap and another key."""
        H, K = self.mha.num_heads, self.mha.num_kv_heads
        dout = self.x.like(dout)

        def flat(y):
            return y.map(lambda a: a.reshape(-1, a.shape[-1]))

        grads = {"wo": flat(self.merged).mT @ flat(dout), "bo": flat(dout).sum(0)}
        do = split(dout @ self.p["wo"].mT, H)
        dw = do @ self.v.mT
        ds = (self.w * (dw - (self.w * dw).sum(-1))).times(self.scale)
        each = {"q": ds @ self.k, "k": ds.mT @ self.q, "v": self.w.mT @ do}
        dx = None
        for name, dy in each.items():
            if self.rotary is not None and name != "v":
                dy = back_rope(dy, self.rotary, np.arange(dy.value.shape[-2]))
            if name != "q":
                shape = (*dy.value.shape[:-3], K, H // K, *dy.value.shape[-2:])
                dy = dy.map(lambda a, shape=shape: a.reshape(shape)).sum(-3)
                dy = dy.map(lambda a: a.squeeze(-3))
            dy = merge(dy)
            grads["w" + name] = flat(self.x).mT @ flat(dy)
            grads["b" + name] = flat(dy).sum(0)
            part = dy @ self.p["w" + name].mT
            dx = part if dx is None else dx + part
        return {**grads, "query": dx}
