"""Linear attention, pages and packed sequences beside the same arithmetic in plain NumPy.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.speed.scripts.variants

Prints the processor time of each, the median of seven turns, and how many times that of the plain
lines it is. These check nothing, know no option, and overflow where decays are strong.
"""

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.speed.clock import times_in_turns
from npattn import cache
from npattn.variants import linear

Call = Callable[[], object]
rng = np.random.default_rng(0)


def compare(name: str, plain: Call, ours: Call) -> None:
    floor, own = (1e3 * statistics.median(taken) for taken in times_in_turns((plain, ours), 7))
    print(f"{name:44s} {floor:8.1f} {own:8.1f} {own / floor:6.2f}", flush=True)


def softmax_rows(q: Any, k: Any, causal: bool = False) -> Any:
    s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    s = np.where(np.tri(*s.shape[-2:]) > 0, s, -np.inf) if causal else s
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def softmax_backward(q: Any, k: Any, v: Any, p: Any, do: Any) -> tuple[Any, Any, Any]:
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do


def compare_linear(per_feature: bool, T: int = 1024, H: int = 4, D: int = 64, C: int = 64) -> None:
    q, k, v, do = rng.standard_normal((4, H, T, D))
    g = -np.log1p(np.exp(rng.standard_normal((H, T, D if per_feature else 1)))) / 16
    tri, chunks = np.tri(C), [slice(a, a + C) for a in range(0, T, C)]

    def forward(keep: list[Any]) -> Any:
        state, o = np.zeros((H, D, D)), np.empty_like(v)
        for at in chunks:
            e = np.exp(g[:, at].cumsum(-2))
            qe, ke, last = D**-0.5 * q[:, at] * e, k[:, at] / e, e[:, -1, :, None]
            keep.append((e, qe, ke, state, last))
            o[:, at] = qe @ state + (qe @ ke.swapaxes(-1, -2) * tri) @ v[:, at]
            state = last * (state + ke.swapaxes(-1, -2) @ v[:, at])
        return o

    def backward(keep: list[Any]) -> Any:
        dq, dk, dv, dg = (np.empty_like(x) for x in (q, k, v, k))
        dS = np.zeros((H, D, D))
        for at, (e, qe, ke, state, last) in reversed([*zip(chunks, keep, strict=True)]):
            dS = last * dS
            dA = do[:, at] @ v[:, at].swapaxes(-1, -2) * tri
            A = qe @ ke.swapaxes(-1, -2) * tri
            dqe = do[:, at] @ state.swapaxes(-1, -2) + dA @ ke
            dke = dA.swapaxes(-1, -2) @ qe + v[:, at] @ dS.swapaxes(-1, -2)
            dv[:, at] = A.swapaxes(-1, -2) @ do[:, at] + ke @ dS
            dG = qe * dqe - ke * dke
            dG[:, -1] += ((state + ke.swapaxes(-1, -2) @ v[:, at]) * dS).sum(-1)
            dg[:, at] = dG[:, ::-1].cumsum(-2)[:, ::-1]
            dq[:, at], dk[:, at] = D**-0.5 * e * dqe, dke / e
            dS = dS + qe.swapaxes(-1, -2) @ do[:, at]
        return dq, dk, dv, dg

    options: dict[str, Any] = {"causal": True, "feature_map": "identity", "normalise": False}
    options |= {"log_decay": g, "form": "chunked"}
    fwd, kept = linear.forward(q, k, v, **options), list[Any]()
    assert np.allclose(fwd.out, forward(kept))
    assert np.allclose(linear.backward(fwd, do).k, backward(kept)[1])
    name = f"linear, chunks, a decay for each {'feature' if per_feature else 'key'}"
    compare(name, lambda: forward([]), lambda: linear.forward(q, k, v, **options))
    compare(f"{name}, backward", lambda: backward(kept), lambda: linear.backward(fwd, do))


def compare_pages(H: int, B: int = 8, S: int = 2048, P: int = 16, K: int = 8, D: int = 64) -> None:
    k_pages, v_pages = rng.standard_normal((2, B * S // P, P, K, D))
    q, do = rng.standard_normal((2, B, 1, H, D))
    table = rng.permutation(B * S // P).reshape(B, -1)
    lengths = rng.integers(S // 2, S + 1, B)

    def sample(b: int) -> tuple[Any, ...]:
        k, v = (x[table[b]].reshape(S, K, D)[: lengths[b]].swapaxes(0, 1)
                for x in (k_pages, v_pages))  # fmt: skip
        rows = q[b].reshape(K, H // K, D)
        return rows, k, v, softmax_rows(rows, k)

    def forward() -> Any:
        parts = [sample(b) for b in range(B)]
        return np.stack([(p @ v).reshape(1, H, D) for _, _, v, p in parts])

    def backward(parts: list[Any]) -> Any:
        dk_pages, dv_pages, dq = np.zeros_like(k_pages), np.zeros_like(v_pages), np.empty_like(q)
        for b, (rows, k, v, p) in enumerate(parts):
            one, dk, dv = softmax_backward(rows, k, v, p, do[b].reshape(K, H // K, D))
            s = np.arange(lengths[b])
            at = table[b, s // P], s % P
            dq[b] = one.reshape(1, H, D)
            dk_pages[at] += dk.swapaxes(0, 1)
            dv_pages[at] += dv.swapaxes(0, 1)
        return dq, dk_pages, dv_pages

    fwd, parts = cache.paged_forward(q, k_pages, v_pages, table, lengths), [*map(sample, range(B))]
    assert np.allclose(fwd.out, forward())
    assert np.allclose(cache.paged_backward(fwd, do).k, backward(parts)[1])
    name = f"pages, {H} / {K} heads, T = 1"
    compare(name, forward, lambda: cache.paged_forward(q, k_pages, v_pages, table, lengths))
    compare(f"{name}, backward", lambda: backward(parts), lambda: cache.paged_backward(fwd, do))


def compare_packed(causal: bool, N: int = 2000, H: int = 4, D: int = 32) -> None:
    bounds = np.concatenate([[0], rng.integers(1, 17, N).cumsum()])
    q, k, v, do = rng.standard_normal((4, bounds[-1], H, D))
    ends = [slice(a, b) for a, b in itertools.pairwise(bounds)]

    def sample(at: slice) -> tuple[Any, ...]:
        one = [x[at].swapaxes(0, 1) for x in (q, k, v)]
        return (*one, softmax_rows(one[0], one[1], causal))

    def forward() -> Any:
        o = np.empty_like(v)
        for at in ends:
            _, _, values, p = sample(at)
            o[at] = (p @ values).swapaxes(0, 1)
        return o

    def backward(parts: list[Any]) -> Any:
        grads = [np.empty_like(x) for x in (q, k, v)]
        for at, part in zip(ends, parts, strict=True):
            own = softmax_backward(*part, do=do[at].swapaxes(0, 1))
            for grad, d in zip(grads, own, strict=True):
                grad[at] = d.swapaxes(0, 1)
        return grads

    fwd, parts = cache.varlen_forward(q, k, v, bounds, causal=causal), [*map(sample, ends)]
    assert np.allclose(fwd.out, forward())
    assert np.allclose(cache.varlen_backward(fwd, do).k, backward(parts)[1])
    name = f"{N} sequences{', causal' if causal else ''}"
    compare(name, forward, lambda: cache.varlen_forward(q, k, v, bounds, causal=causal))
    compare(f"{name}, backward", lambda: backward(parts), lambda: cache.varlen_backward(fwd, do))


def main() -> None:
    print(f"{'ms of one processor':44s} {'plain':>8s} {'npattn':>8s} {'ratio':>6s}")
    for per_feature in (True, False):
        compare_linear(per_feature)
    for heads in (8, 32):
        compare_pages(heads)
    for causal in (False, True):
        compare_packed(causal)


if __name__ == "__main__":
    main()
