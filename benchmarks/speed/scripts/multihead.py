"""Processor time of multi-head attention and of a training step, beside torch's on one thread.

    python -m benchmarks.speed.scripts.multihead [SECONDS]

Rows are MultiHeadAttention (512 features, 8 heads) of both for B × T, forward and with all
gradients, and a step of docs/examples/train beside the same model in torch with AdamW. Parameters
are the same, and results agree to 1e-5 of the largest before any timing. Contestants take turns,
and the least time of each counts. `ratio` is torch's time divided by npattn's: above 1, npattn is
faster.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import nn
from train.adam import DECAY, Adam, decays
from train.model import ATTENTION, attention_module, loss_and_gradients, random_parameters
from train.settings import Settings

import npattn
from benchmarks.speed.clock import times_in_turns
from npattn.weights.torch import to_torch

EMBED, HEADS = 512, 8
SHAPES = ((8, 64), (4, 256), (1, 1024))
LEAST = 3
"""Rounds."""

Call = Callable[[], Any]


def attention(B: int, T: int, dtype: str) -> tuple[Call, Call, Call, Call]:
    """Forward, and forward with all gradients: npattn's, then torch's."""
    mha = npattn.MultiHeadAttention.init(EMBED, HEADS, seed=0)
    mha = mha.replace(**{n: x.astype(dtype) for n, x in mha.parameters.items()})
    rng = np.random.default_rng(0)
    x, dout = (rng.standard_normal((B, T, EMBED)).astype(dtype) for _ in range(2))
    module = to_torch(mha)
    tx, tdout = torch.tensor(x, requires_grad=True), torch.tensor(dout)

    def peer_forward() -> Any:
        with torch.no_grad():
            return module(tx, tx, tx, need_weights=False)[0]

    def peer_both() -> Any:
        tx.grad = None
        module.zero_grad()
        module(tx, tx, tx, need_weights=False)[0].backward(tdout)
        return tx.grad

    def forward() -> Any:
        return mha.forward(x, keep="inputs", dtype=dtype).out

    def both() -> Any:
        return mha.backward(mha.forward(x, dtype=dtype), dout).query

    scale = abs(peer_both()).max().item()
    np.testing.assert_allclose(forward(), peer_forward().numpy(), atol=1e-5)
    np.testing.assert_allclose(both(), peer_both().numpy(), atol=1e-5 * scale)
    return forward, both, peer_forward, peer_both


class Peer(nn.Module):
    """The model of `python docs/examples/train` in torch."""

    def __init__(self, p: dict[str, np.ndarray], settings: Settings) -> None:
        super().__init__()
        self.attention = to_torch(attention_module(p, settings))
        rest = {n: nn.Parameter(torch.tensor(x)) for n, x in p.items() if n not in ATTENTION}
        self.p = nn.ParameterDict(rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.p
        d = (p["we"].shape[1],)

        def norm(h: torch.Tensor, g: str, c: str) -> torch.Tensor:
            return nn.functional.layer_norm(h, d, p[g], p[c])

        h = x @ p["we"] + p["be"] + p["pos"]
        y = norm(h, "g1", "c1")
        h = h + self.attention(y, y, y, need_weights=False)[0]
        h = h + (norm(h, "g2", "c2") @ p["w1"] + p["b1"]).relu() @ p["w2"] + p["b2"]
        return norm(h, "g3", "c3").mean(-2) @ p["wc"] + p["bc"]


def training(dtype: str) -> tuple[Call, Call]:
    """A step of training: loss, gradients and update; npattn's, then torch's."""
    settings = Settings(dtype=dtype)
    T, n = 8, 8
    rng = np.random.default_rng(0)
    x = rng.standard_normal((settings.batch_size, T, n)).astype(dtype)
    y = rng.integers(0, 10, settings.batch_size)
    p = random_parameters(settings, T, n)
    adam, module = Adam(p), Peer(p, settings)
    tx, ty = torch.tensor(x), torch.tensor(y)
    groups: tuple[list[Any], list[Any]] = ([], [])
    for name, parameter in module.named_parameters():
        groups[decays(name.rpartition(".")[2], parameter)].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": g, "weight_decay": w} for g, w in zip(groups, (0.0, DECAY), strict=True)],
        lr=settings.lr,
    )

    def own() -> float:
        nonlocal p
        loss, gradients, _ = loss_and_gradients(p, settings, x, y)
        p = adam.update(p, gradients, settings.lr)
        return loss

    def peer() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(tx), ty)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        np.testing.assert_allclose(own(), peer(), rtol=1e-4)
    return own, peer


def main() -> None:
    budget = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    torch.set_num_threads(1)
    print("                                  ms: npattn    torch  ratio")
    for dtype, (B, T) in itertools.product(("float32", "float64"), SHAPES):
        forward, both, peer_forward, peer_both = attention(B, T, dtype)
        for name, own, peer in (("forward", forward, peer_forward), ("both", both, peer_both)):
            show(f"attention {B} × {T}, {name}", dtype, (own, peer), budget)
    for dtype in ("float32", "float64"):
        show("step of python docs/examples/train", dtype, training(dtype), budget)


def show(name: str, dtype: str, calls: tuple[Call, Call], budget: float) -> None:
    own, peer = map(min, times_in_turns(calls, LEAST, budget))
    print(f"{name:28} {dtype}  {1e3 * own:7.2f}  {1e3 * peer:7.2f}  {peer / own:5.2f}", flush=True)


if __name__ == "__main__":
    with threadpool_limits(1, user_api="blas"):
        main()
