"""Context parallelism on real ranks: each holds a part of queries and keys, and merges by lse."""

import os

import numpy as np
import pytest

import npattn
from npattn.cache import merge, merge_backward

torch = pytest.importorskip("torch")

B, H, T, D, E = 2, 3, 8, 5, 7  # T queries and keys a rank
U = 2.0**-53


def whole(ranks):
    rng = np.random.default_rng(ranks)
    q, k = (rng.standard_normal((B, H, ranks * T, D)) for _ in range(2))
    return q, k, *(rng.standard_normal((B, H, ranks * T, E)) for _ in range(2))  # v and dout


def send_on(arrays, rank, ranks):
    """Give arrays to the next rank, and return those of the rank before."""
    taken = [torch.empty_like(x) for x in arrays]
    calls = [
        torch.distributed.P2POp(call, x, other % ranks)
        for call, xs, other in (
            (torch.distributed.isend, arrays, rank + 1),
            (torch.distributed.irecv, taken, rank - 1),
        )
        for x in xs
    ]
    for work in torch.distributed.batch_isend_irecv(calls):
        work.wait()
    return taken


def ring(q, k, v, dout, rank, ranks, visible):
    """Keys go round; then they go round again, and their gradients with them."""
    parts, here = [], [torch.tensor(x) for x in (k, v)]
    for step in range(ranks):
        owner = (rank - step) % ranks
        parts.append(npattn.forward(q, *(x.numpy() for x in here), visible(rank, owner)))
        here = send_on(here, rank, ranks)
    out, lse = merge([part.out for part in parts], [part.lse for part in parts])
    douts, dlses = merge_backward([p.out for p in parts], [p.lse for p in parts], dout)
    dq, sums = np.zeros_like(q), [torch.zeros_like(x) for x in here]
    for part, do, dl in zip(parts, douts, dlses, strict=True):
        grad = npattn.backward(part, do, dl)
        dq += grad.q
        sums = [x + torch.tensor(g) for x, g in zip(sums, (grad.k, grad.v), strict=True)]
        sums = send_on(sums, rank, ranks)
    return out, lse, dq, *(x.numpy() for x in sums)


def all_gather(q, k, v, dout, rank, ranks, visible):
    """Every rank has all keys; the gradients of a rank's keys are summed over the others."""
    keys = []
    for x in (k, v):
        every = [torch.empty(x.shape, dtype=torch.float64) for _ in range(ranks)]
        torch.distributed.all_gather(every, torch.tensor(x))
        keys.append([one.numpy() for one in every])
    parts = [
        npattn.forward(q, keys[0][other], keys[1][other], visible(rank, other))
        for other in range(ranks)
    ]
    outs, lses = [part.out for part in parts], [part.lse for part in parts]
    douts, dlses = merge_backward(outs, lses, dout)
    grads = [npattn.backward(p, do, dl) for p, do, dl in zip(parts, douts, dlses, strict=True)]
    sums = []
    for name in "kv":
        every = torch.tensor(np.stack([getattr(grad, name) for grad in grads]))
        torch.distributed.all_reduce(every)
        sums.append(every[rank].numpy())
    return *merge(outs, lses), sum(grad.q for grad in grads), *sums


def judge(rank, ranks, path, scheme, causal):
    """Run a scheme as one rank, and compare its part with the whole."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=ranks
    )
    q, k, v, dout = whole(ranks)
    own = np.s_[:, :, rank * T : (rank + 1) * T]

    def visible(of_q, of_k):
        t, s = (T * n + np.arange(T) for n in (of_q, of_k))
        return s <= t[:, None] if causal else np.ones((T, T), bool)

    got = scheme(*(x[own] for x in (q, k, v, dout)), rank, ranks, visible)
    fwd = npattn.forward(q, k, v, causal=causal)
    grads = npattn.backward(fwd, dout)
    wants = (fwd.out[own], fwd.lse[own], grads.q[own], grads.k[own], grads.v[own])
    for x, want in zip(got, wants, strict=True):
        assert np.allclose(x, want, rtol=0, atol=1e4 * U)
    torch.distributed.destroy_process_group()


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("scheme", "causal", "ranks"),
    [
        pytest.param(ring, True, 2, marks=NIGHTLY),
        pytest.param(ring, True, 4, marks=NIGHTLY),
        pytest.param(all_gather, False, 2, marks=NIGHTLY),
        pytest.param(all_gather, True, 4, marks=NIGHTLY),
    ],
)
def test_ranks_that_merge_are_the_whole(scheme, causal, ranks, tmp_path, monkeypatch):
    if not torch.distributed.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    root = os.path.dirname(os.path.dirname(npattn.__file__))
    monkeypatch.setenv("PYTHONPATH", root)
    torch.multiprocessing.spawn(judge, (ranks, tmp_path / "store", scheme, causal), ranks)


def test_a_rank_that_forgets_to_weigh_its_parts_is_seen():
    """The same comparison, without ranks: the mean of the parts in place of their merge."""
    q, k, v, _ = whole(2)
    parts = [npattn.forward(q, k[:, :, at], v[:, :, at]) for at in (np.s_[:T], np.s_[T:])]
    right, _ = merge([p.out for p in parts], [p.lse for p in parts])
    want = npattn.attention(q, k, v)
    assert np.allclose(right, want, rtol=0, atol=1e4 * U)
    assert not np.allclose(sum(p.out for p in parts) / 2, want, rtol=0, atol=1e4 * U)
