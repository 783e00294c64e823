"""Causes of sequences in a backward: what is read that belongs to another."""

from __future__ import annotations

import pytest

from npattn.testing import check


def attend_packed(beyond, delta_of):
    """Return attention over packed sequences whose backward is wrong in what it reads.

    Keys up to `beyond` behind the last take part, and the δ of a row is that of a later one.
    """
    torch = pytest.importorskip("torch")

    class Packed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, starts_q, starts_k):
            o = torch.zeros(*q.shape[:2], v.shape[-1])
            edges = (x.tolist() for x in (starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:]))
            ctx.parts = [*zip(*edges, strict=True)]
            for first, last, begin, end in ctx.parts:
                o[first:last] = torch.einsum(
                    "hts,she->the", weights(q[first:last], k[begin:end]), v[begin:end]
                )
            ctx.save_for_backward(q, k, v, o)
            return o

        @staticmethod
        def backward(ctx, do):
            q, k, v, o = ctx.saved_tensors
            dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
            delta = (do * o).sum(-1).roll(delta_of, 0)
            for first, last, begin, end in ctx.parts:
                t, s = slice(first, last), slice(begin, min(end + beyond, len(k)))
                p = weights(q[t], k[s])
                ds = p * (torch.einsum("the,she->hts", do[t], v[s]) - delta[t].T[..., None])
                ds = ds / q.shape[-1] ** 0.5
                dq[t] += torch.einsum("hts,shd->thd", ds, k[s])
                dk[s] += torch.einsum("hts,thd->shd", ds, q[t])
                dv[s] += torch.einsum("hts,the->she", p, do[t])
            return dq, dk, dv, None, None

    def weights(q, k):
        return torch.softmax(torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5, -1)

    def attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        assert q.dtype == torch.float32
        assert q.shape[1] == k.shape[1]
        return Packed.apply(q, k, v, cu_seqlens_q, cu_seqlens_k)

    return attention


RULES = ("agreement-o", "agreement-dq", "agreement-dk", "agreement-dv")


@pytest.mark.parametrize(
    ("beyond", "delta_of", "causes"),
    [
        (1, 0, [("visible", "in the backward it reads keys of another sequence")]),
        (0, 1, [("delta", "δ is wrong")]),
    ],
    ids=["keys of the next", "δ of the next"],
)
def test_what_a_backward_reads_of_another_sequence(beyond, delta_of, causes):
    report = check(attend_packed(beyond, delta_of), only=RULES, examples=7, dtypes="float32")
    found = [(c.step, c.text) for c in report.causes]
    assert [step for step, _ in found] == [step for step, _ in causes]
    assert found[0][1].startswith(causes[0][1])
