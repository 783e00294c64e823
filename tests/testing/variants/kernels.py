"""Linear and differential attention as people write them, in float32, and with mistakes."""

import numpy as np

F = np.float32


def phi(kind, x):
    if kind == "elu":
        return np.where(x > 0, x + 1, np.expm1(np.minimum(x, 0)) + F(1))
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "softmax":
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    return x


def slope(kind, x, dy):
    if kind == "elu":
        return np.where(x > 0, F(1), np.exp(np.minimum(x, 0))) * dy
    if kind == "relu":
        return np.where(x > 0, dy, F(0))
    if kind == "softmax":
        p = phi(kind, x)
        return p * (dy - (p * dy).sum(-1, keepdims=True))
    return dy


class Linear:
    """Linear attention in its quadratic form; each method is a step that a mistake overrides."""

    def features(self, kind, x):
        return phi(kind, x)

    def pull_back(self, kind, x, dy):
        return slope(kind, x, dy)

    def gaps(self, G):
        return G[..., :, None, :] - G[..., None, :, :]

    def seen(self, T):
        return np.tri(T, dtype=bool)

    def total(self, w, eps):
        return w.sum(-1, keepdims=True) + eps

    def heads(self, x, G):
        return np.repeat(x, G, -3)

    def prepare(self, q, k, causal, feature_map, scale, log_decay):
        G, (B, K, S, D) = q.shape[-3] // k.shape[-3], k.shape
        scale = F(D**-0.5 if scale is None else scale)
        fq, fk = self.features(feature_map, q) * scale, self.features(feature_map, k)
        decay = np.ones((1, 1, 1, 1, 1), F)
        if log_decay is not None:
            g = np.broadcast_to(log_decay, (B, K, S, D))
            decay = np.exp(np.where(self.seen(S)[..., None], self.gaps(np.cumsum(g, -2)), -np.inf))
            decay = self.heads_of_decay(decay, G)
        elif causal:
            decay = self.seen(S).astype(F)[None, None, :, :, None]
        return G, scale, fq, self.heads(fk, G), decay

    def heads_of_decay(self, decay, G):
        return np.repeat(decay, G, 1)

    def __call__(
        self, q, k, v, *, causal=False, feature_map="elu", normalise=True, eps=0.0, scale=None,
        log_decay=None,
    ):  # fmt: skip
        G, _, fq, fk, decay = self.prepare(q, k, causal, feature_map, scale, log_decay)
        w = (fq[..., :, None, :] * fk[..., None, :, :] * decay).sum(-1)
        o = w @ self.heads(v, G)
        return o / self.total(w, F(eps)) if normalise else o

    def backward(
        self, dout, q, k, v, *, causal=False, feature_map="elu", normalise=True, eps=0.0,
        scale=None, log_decay=None,
    ):  # fmt: skip
        G, s, fq, fk, decay = self.prepare(q, k, causal, feature_map, scale, log_decay)
        w = (fq[..., :, None, :] * fk[..., None, :, :] * decay).sum(-1)
        hv, dn = self.heads(v, G), dout
        dw = dout @ hv.swapaxes(-1, -2)
        if normalise:
            total = self.total(w, F(eps))
            dn = dout / total
            dw = self.through_total(dn @ hv.swapaxes(-1, -2), dn, w @ hv / total)
        dfq = (dw[..., None] * fk[..., None, :, :] * decay).sum(-2)
        dfk = (dw[..., None] * fq[..., :, None, :] * decay).sum(-3)

        def shared(x):
            return x.reshape(x.shape[0], -1, G, *x.shape[2:]).sum(2)

        grads = {
            "q": self.pull_back(feature_map, q, s * dfq),
            "k": self.pull_back(feature_map, k, shared(dfk)),
            "v": shared(w.swapaxes(-1, -2) @ dn),
        }
        if log_decay is not None:
            each = self.reverse(shared(fq * dfq) - shared(fk * dfk))
            axes = tuple(i for i in range(4) if i < 4 - log_decay.ndim)
            each = each.sum(axes) if axes else each
            axes = tuple(i for i, n in enumerate(log_decay.shape) if n == 1 != each.shape[i])
            grads["log_decay"] = each.sum(axes, keepdims=True)
        return grads

    def through_total(self, dw, dn, o):
        return dw - (dn * o).sum(-1, keepdims=True)

    def reverse(self, dG):
        return np.flip(np.flip(dG, -2).cumsum(-2), -2)


def _features(self, kind, x):
    return phi(kind, x) - (F(1) if kind == "elu" else 0)


LINEAR_MISTAKES = tuple(
    (type(name, (Linear,), steps), names)
    for name, names, steps in (
        ("DecayOffByOne", "out", {
            "gaps": lambda self, G: np.roll(G, 1, -2)[..., :, None, :] - G[..., None, :, :]}),
        ("ReadBeforeWrite", "out", {
            "seen": lambda self, T: np.tri(T, k=-1, dtype=bool),
            "total": lambda self, w, eps: w.sum(-1, keepdims=True) + eps + F(1e-20)}),
        ("NoNormaliser", "out", {"total": lambda self, w, eps: np.ones_like(w[..., :1])}),
        ("NormaliserOfAllKeys", "out", {
            "total": lambda self, w, eps: w.sum(-1, keepdims=True).max(-2, keepdims=True) + eps}),
        ("EpsForgotten", "out", {"total": lambda self, w, eps: w.sum(-1, keepdims=True)}),
        ("EluWithoutOne", "out", {"features": _features}),
        ("TiledHeads", "out", {"heads": lambda self, x, G: np.concatenate([x] * G, -3)}),
        ("NoSlope", "dq dk", {"pull_back": lambda self, kind, x, dy: dy}),
        ("NoGradientOfTheTotal", "dq dk", {"through_total": lambda self, dw, dn, o: dw}),
        ("ReverseInOrderOfTime", "dlog_decay", {"reverse": lambda self, dG: dG.cumsum(-2)}),
    )
)  # fmt: skip
TiledHeads = LINEAR_MISTAKES[6][0]


# --- differential attention -------------------------------------------------------------------


class Differential:
    """Differential attention by the difference of weights, with its backward."""

    out_scale = None

    def scale_of(self, D, which):
        return F(D**-0.5)

    def weights(self, q, k, which, causal):
        G = q.shape[-3] // k.shape[-3]
        s = q @ np.repeat(k, G, -3).swapaxes(-1, -2) * self.scale_of(q.shape[-1], which)
        if causal:
            s = np.where(np.tri(s.shape[-1], dtype=bool), s, F(-np.inf))
        e = np.exp(s - s.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def beside(self, lam):
        return lam if lam.ndim == 0 else lam[:, None, None]

    def combine(self, p1, p2, lam):
        return p1 - lam * p2

    def size(self, y, eps):
        return np.sqrt((y * y).mean(-1, keepdims=True) + F(eps))

    def __call__(
        self, q1, k1, q2, k2, v, *, lam, causal=False, norm=False, norm_eps=1e-5, out_scale=1.0
    ):
        p = self.combine(
            self.weights(q1, k1, 1, causal), self.weights(q2, k2, 2, causal), self.beside(lam)
        )
        y = p @ np.repeat(v, q1.shape[-3] // v.shape[-3], -3)
        y = y / self.size(y, norm_eps) if norm else y
        return y * F(out_scale)

    def backward(
        self, dout, q1, k1, q2, k2, v, *, lam, causal=False, norm=False, norm_eps=1e-5,
        out_scale=1.0,
    ):  # fmt: skip
        p1, p2 = self.weights(q1, k1, 1, causal), self.weights(q2, k2, 2, causal)
        G, beside = q1.shape[-3] // v.shape[-3], self.beside(lam)
        hv, p = np.repeat(v, G, -3), self.combine(p1, p2, beside)
        dy = dout * F(out_scale)
        if norm:
            y = p @ hv
            size = self.size(y, norm_eps)
            dy = self.through_norm(dy, y / size, size)
        dp = dy @ hv.swapaxes(-1, -2)

        def shared(x):
            return x.reshape(x.shape[0], -1, G, *x.shape[2:]).sum(2)

        def through(p, dp, q, k, which):
            ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * self.scale_of(q.shape[-1], which)
            return ds @ np.repeat(k, G, -3), shared(ds.swapaxes(-1, -2) @ q)

        dq1, dk1 = through(p1, dp, q1, k1, 1)
        dq2, dk2 = through(p2, self.second(dp, beside), q2, k2, 2)
        dlam = self.to_lambda(dp, p2)
        dlam = dlam.sum((0, 2, 3)) if lam.ndim else np.asarray(dlam.sum())
        dv = shared(p.swapaxes(-1, -2) @ dy)
        return {"q1": dq1, "k1": dk1, "q2": dq2, "k2": dk2, "v": dv, "lam": dlam}

    def second(self, dp, lam):
        return -lam * dp

    def to_lambda(self, dp, p2):
        return -(dp * p2)

    def through_norm(self, dy, unit, size):
        return (dy - unit * (dy * unit).mean(-1, keepdims=True)) / size


DIFFERENTIAL_MISTAKES = tuple(
    (type(name, (Differential,), {step: f}), names)
    for name, names, step, f in (
        ("SignOfLambda", "out", "combine", lambda self, p1, p2, lam: p1 + lam * p2),
        ("SecondWithoutScale", "out", "scale_of",
         lambda self, D, which: F(1) if which == 2 else F(D**-0.5)),
        ("LambdaOfTheFirstHead", "out", "beside",
         lambda self, lam: lam if lam.ndim == 0 else lam[:1, None, None]),
        ("NormOverQueries", "out", "size",
         lambda self, y, eps: np.sqrt((y * y).mean(-2, keepdims=True) + F(eps))),
        ("NormWithoutEps", "out", "size",
         lambda self, y, eps: np.sqrt((y * y).mean(-1, keepdims=True)) + F(eps)),
        ("NoLambdaInTheGradient", "dq2 dk2", "second", lambda self, dp, lam: -dp),
        ("SignOfTheGradient", "dlam", "to_lambda", lambda self, dp, p2: dp * p2),
        ("NormIsAConstant", "dq1 dk1 dq2 dk2 dv dlam", "through_norm",
         lambda self, dy, unit, size: dy / size),
    )
)  # fmt: skip
