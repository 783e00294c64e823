"""A small attention classifier of handwritten digits, trained with npattn's own gradients.

    x (B, T, n) rows or pixels of an image as tokens    h (B, T, d)    y (B,) digits

    h = x We + be + pos
    h = h + attention(norm(h))                     npattn.MultiHeadAttention
    h = h + relu(norm(h) W1 + b1) W2 + b2
    logits = mean over T of norm(h) · Wc + bc      loss: cross entropy, mean over B

Everything random comes from the seed, and each epoch's order from (seed, epoch): a run that is
killed and resumed has the same losses to the bit.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npattn.arrays import Array
from npattn.errors import MissingExtraError, OptionError
from npattn.multihead import MultiHeadAttention, MultiHeadForward
from npattn.projections import NormResiduals, linear, linear_backward, normalise, normalise_backward
from npattn.weights.files import write_whole

__all__ = ["Data", "Run", "Settings", "digits", "forward", "loss_and_gradients", "train"]

ATTENTION = ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo")
EPS = 1e-5
BETA1, BETA2, ADAM_EPS = 0.9, 0.999, 1e-8
DECAY = 0.5
"""Weight decay of the projections: by lr × this per step."""
TEST_SHARE = 5  # one image in five is for the test
FORMAT = 1

Parameters = dict[str, Array]


@dataclass(frozen=True)
class Settings:
    """Settings of a run, checked when made.

    Parameters
    ----------
    tokens : {"rows", "pixels"}
        Parts of the image that are tokens.
    embed_dim, num_heads : int
        embed_dim is a multiple of num_heads.
    epochs, batch_size : int
    lr : float
        Adam's step, which falls to 0 along half a cosine.
    seed : int
    """

    tokens: str = "rows"
    embed_dim: int = 32
    num_heads: int = 4
    epochs: int = 40
    batch_size: int = 64
    lr: float = 4e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens not in ("rows", "pixels"):
            raise OptionError(f'tokens is {self.tokens!r}, must be "rows" or "pixels"')
        for name in ("embed_dim", "num_heads", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}, must be 1 or more")
        if self.embed_dim % self.num_heads:
            raise OptionError(
                f"embed_dim is {self.embed_dim}, must be a multiple of the {self.num_heads} heads"
            )
        if not 0 < self.lr < np.inf:
            raise OptionError(f"lr is {self.lr}, must be a finite number > 0")
        if self.seed < 0:
            raise OptionError(f"seed is {self.seed}, must be 0 or more")


class Data(NamedTuple):
    """Images as tokens, and their digits."""

    x: Array  # (N, T, n) between 0 and 1
    y: Array  # (N,)
    test_x: Array
    test_y: Array


def digits(tokens: str = "rows") -> Data:
    """Load scikit-learn's 1797 handwritten digits of 8×8 pixels, a fifth of them for the test."""
    try:
        # Optional, slow to load, and without types.
        from sklearn.datasets import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
            load_digits,
        )
    except ImportError as err:
        raise MissingExtraError(
            "npattn train needs scikit-learn for its images: pip install 'npattn[train]'"
        ) from err
    dataset = load_digits()
    images = dataset.images / 16.0
    x = images if tokens == "rows" else images.reshape(len(images), 64, 1)
    order = np.random.default_rng(0).permutation(len(x))  # the same split for every seed
    test, rest = np.split(order, [len(x) // TEST_SHARE])
    return Data(x[rest], dataset.target[rest], x[test], dataset.target[test])


# --- the model ------------------------------------------------------------------------------------


def random_parameters(settings: Settings, T: int, n: int, classes: int = 10) -> Parameters:
    """Sample the parameters of the model."""
    rng, d = np.random.default_rng([settings.seed, 0]), settings.embed_dim
    mha = MultiHeadAttention.init(d, settings.num_heads, seed=settings.seed)

    def weight(rows: int, columns: int) -> Array:
        return np.asarray(rng.standard_normal((rows, columns)) / np.sqrt(rows))

    return {
        "we": weight(n, d), "be": np.zeros(d), "pos": 0.1 * rng.standard_normal((T, d)),
        "g1": np.ones(d), "c1": np.zeros(d), **mha.parameters,
        "g2": np.ones(d), "c2": np.zeros(d),
        "w1": weight(d, 4 * d), "b1": np.zeros(4 * d), "w2": weight(4 * d, d), "b2": np.zeros(d),
        "g3": np.ones(d), "c3": np.zeros(d), "wc": weight(d, classes), "bc": np.zeros(classes),
    }  # fmt: skip


class ModelSteps(NamedTuple):
    """Logits, and the intermediate results that the gradients need."""

    n1: NormResiduals
    attention: MultiHeadForward
    n2: NormResiduals
    inner: Array  # before relu
    n3: NormResiduals
    pooled: Array
    logits: Array


def forward(p: Parameters, num_heads: int, x: Array) -> ModelSteps:
    """Compute the logits of images (B, T, n)."""
    h = linear(x, p["we"], p["be"]) + p["pos"]
    n1 = normalise(h, "layer", p["g1"], p["c1"], EPS)
    attention = _attention(p, num_heads).forward(n1.y)
    h = h + attention.out
    n2 = normalise(h, "layer", p["g2"], p["c2"], EPS)
    inner = linear(n2.y, p["w1"], p["b1"])
    h = h + linear(np.maximum(inner, 0), p["w2"], p["b2"])
    n3 = normalise(h, "layer", p["g3"], p["c3"], EPS)
    pooled = n3.y.mean(-2)
    return ModelSteps(n1, attention, n2, inner, n3, pooled, linear(pooled, p["wc"], p["bc"]))


def _attention(p: Parameters, num_heads: int) -> MultiHeadAttention:
    arrays: dict[str, Any] = {name: p[name] for name in ATTENTION}
    return MultiHeadAttention(**arrays, num_heads=num_heads)


def loss_and_gradients(
    p: Parameters, num_heads: int, x: Array, y: Array
) -> tuple[float, Parameters, ModelSteps]:
    """Mean cross entropy, and its gradient in every parameter."""
    s, rows = forward(p, num_heads, x), np.arange(len(y))
    shifted = s.logits - s.logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    loss = float(-log_p[rows, y].mean())

    dlogits = np.exp(log_p)
    dlogits[rows, y] -= 1
    d: Parameters = {}
    dpooled, d["wc"], d["bc"] = linear_backward(dlogits / len(y), s.pooled, p["wc"])
    T = x.shape[-2]
    dy = np.broadcast_to(dpooled[:, None] / T, s.n3.y.shape)
    dh, d["g3"], d["c3"] = normalise_backward(dy, s.n3, "layer", p["g3"])
    drelu, d["w2"], d["b2"] = linear_backward(dh, np.maximum(s.inner, 0), p["w2"])
    dn2, d["w1"], d["b1"] = linear_backward(np.where(s.inner > 0, drelu, 0), s.n2.y, p["w1"])
    more, d["g2"], d["c2"] = normalise_backward(dn2, s.n2, "layer", p["g2"])
    dh = dh + more
    grads = s.attention.module.backward(s.attention, dh)
    d |= {name: getattr(grads, name) for name in ATTENTION}
    more, d["g1"], d["c1"] = normalise_backward(grads.query, s.n1, "layer", p["g1"])
    dh = dh + more
    d["pos"] = dh.sum(0)
    _, d["we"], d["be"] = linear_backward(dh, x, p["we"])
    return loss, {name: d[name] for name in p}, s


def decays(name: str, x: Array) -> bool:
    """Return True for projections, the parameters with weight decay."""
    return x.ndim == 2 and name != "pos"


class Adam:
    """Kingma and Ba 2015, algorithm 1, with the decay of Loshchilov and Hutter 2019."""

    def __init__(self, p: Parameters) -> None:
        self.m = {name: np.zeros_like(x) for name, x in p.items()}
        self.v = {name: np.zeros_like(x) for name, x in p.items()}
        self.step = 0

    def update(self, p: Parameters, d: Parameters, lr: float) -> Parameters:
        self.step += 1
        rise, spread = 1 - BETA1**self.step, 1 - BETA2**self.step
        updated = {}
        for name, x in p.items():
            self.m[name] = BETA1 * self.m[name] + (1 - BETA1) * d[name]
            self.v[name] = BETA2 * self.v[name] + (1 - BETA2) * d[name] ** 2
            size = np.sqrt(self.v[name]) / np.sqrt(spread) + ADAM_EPS
            shrunk = x * (1 - lr * DECAY) if decays(name, x) else x
            updated[name] = shrunk - lr / rise * self.m[name] / size
        return updated


# --- a run ----------------------------------------------------------------------------------------


@dataclass
class Run:
    """State of a run.

    Attributes
    ----------
    settings : Settings
    parameters : dict
    losses : list of float
        One per step.
    accuracies : list of float
        On the test images, after every epoch.
    """

    settings: Settings
    parameters: Parameters
    adam: Adam
    losses: list[float]
    accuracies: list[float]

    @property
    def epoch(self) -> int:
        return len(self.accuracies)

    @property
    def attention(self) -> MultiHeadAttention:
        """The trained module."""
        return _attention(self.parameters, self.settings.num_heads)

    def weights(self, x: Array) -> Array:
        """Compute the weights of the heads on images: (B, H, T, T)."""
        return forward(self.parameters, self.settings.num_heads, x).attention.weights

    def accuracy(self, x: Array, y: Array) -> float:
        logits = forward(self.parameters, self.settings.num_heads, x).logits
        return float((logits.argmax(-1) == y).mean())

    def save(self, path: str | Path) -> None:
        """Write one file; an existing one is replaced by a complete one or stays."""
        arrays: dict[str, Any] = {f"p.{n}": x for n, x in self.parameters.items()}
        arrays |= {f"m.{n}": x for n, x in self.adam.m.items()}
        arrays |= {f"v.{n}": x for n, x in self.adam.v.items()}
        arrays |= {"losses": self.losses, "accuracies": self.accuracies, "step": self.adam.step}
        arrays["settings"] = json.dumps({"format": FORMAT, **asdict(self.settings)})
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        write_whole(Path(path), buffer.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Read a saved run.

        Raises
        ------
        OptionError
            If the file is not a complete checkpoint of this version.
        """
        try:
            with np.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False) as file:
                values = json.loads(str(file["settings"]))
                if values.pop("format") != FORMAT or set(values) != {
                    f.name for f in fields(Settings)
                }:
                    raise OptionError(f"{path} is a checkpoint of another version of npattn train")
                arrays = {name: file[name] for name in file.files}
            p, m, v = (
                {n[2:]: x for n, x in arrays.items() if n.startswith(f"{kind}.")} for kind in "pmv"
            )
            adam = Adam(p)
            adam.m, adam.v, adam.step = m, v, int(arrays["step"])
            settings = Settings(**values)
            return cls(settings, p, adam, arrays["losses"].tolist(), arrays["accuracies"].tolist())
        except (ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as err:
            if isinstance(err, OptionError):
                raise
            raise OptionError(f"{path} is no checkpoint of npattn train ({err})") from err


Progress = Callable[[int, int, float, float | None], None]


def train(
    settings: Settings | None = None,
    *,
    data: Data | None = None,
    checkpoint: str | Path | None = None,
    progress: Progress | None = None,
    max_steps: int | None = None,
) -> Run:
    """Train a classifier, from the start or from a checkpoint.

    Parameters
    ----------
    settings : Settings, optional
    data : Data, optional
        Default: `digits`.
    checkpoint : path, optional
        Read if it exists, written after every epoch.
    progress : callable, optional
        Called with (step, steps, loss, test accuracy or None) after every step.
    max_steps : int, optional
        Stop after so many steps, even within an epoch, which then is not saved.

    Returns
    -------
    Run

    Raises
    ------
    OptionError
        If the file is no checkpoint, or one of other settings.
    MissingExtraError
        If data is None and scikit-learn is not installed.
    """
    settings = settings or Settings()
    data = digits(settings.tokens) if data is None else data
    run = _resume_or_start(settings, data, checkpoint)
    size = settings.batch_size
    batches = -(-len(data.x) // size)
    steps = settings.epochs * batches
    while run.epoch < settings.epochs:
        order = np.random.default_rng([settings.seed, 1, run.epoch]).permutation(len(data.x))
        for start in range(0, len(data.x), size):
            batch = order[start : start + size]
            lr = settings.lr * (1 + np.cos(np.pi * run.adam.step / steps)) / 2
            loss, grads, _ = loss_and_gradients(
                run.parameters, settings.num_heads, data.x[batch], data.y[batch]
            )
            run.parameters = run.adam.update(run.parameters, grads, float(lr))
            run.losses.append(loss)
            if run.adam.step == max_steps:
                return run
            if progress is not None:
                progress(run.adam.step, steps, loss, run.accuracies[-1] if run.accuracies else None)
        run.accuracies.append(run.accuracy(data.test_x, data.test_y))
        if checkpoint is not None:
            run.save(checkpoint)
    return run


def _resume_or_start(settings: Settings, data: Data, checkpoint: str | Path | None) -> Run:
    if checkpoint is not None and Path(checkpoint).exists():
        run = Run.load(checkpoint)
        if run.settings != settings:
            differences = [
                f"{f.name} {getattr(run.settings, f.name)}, not {getattr(settings, f.name)}"
                for f in fields(Settings)
                if getattr(run.settings, f.name) != getattr(settings, f.name)
            ]
            raise OptionError(
                f"{checkpoint} is of a run with {', '.join(differences)}; pass the same settings "
                "to resume it, or another file"
            )
        return run
    classes = int(max(data.y.max(), data.test_y.max())) + 1
    p = random_parameters(settings, data.x.shape[1], data.x.shape[2], classes)
    return Run(settings, p, Adam(p), [], [])
