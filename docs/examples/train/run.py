"""State of a run, its predictions, and the file that it is resumed from."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from npattn.errors import OptionError
from npattn.multihead import MultiHeadAttention
from npattn.problem.arrays import Array
from npattn.weights.files import write_whole
from train.adam import Adam
from train.model import Parameters, attention_module, forward, log_softmax
from train.precision import LossScale
from train.settings import Settings

FORMAT = 2


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
    loss_scale : LossScale
        1 unless the dtype is float16. Steps that overflowed are in losses, but not in adam.step.
    """

    settings: Settings
    parameters: Parameters
    adam: Adam
    losses: list[float]
    accuracies: list[float]
    loss_scale: LossScale = field(default_factory=LossScale)

    @property
    def epoch(self) -> int:
        return len(self.accuracies)

    @property
    def attention(self) -> MultiHeadAttention:
        """The trained module."""
        return attention_module(self.parameters, self.settings)

    @property
    def num_parameters(self) -> int:
        """Number of trained numbers."""
        return sum(x.size for x in self.parameters.values())

    def weights(self, x: Array) -> Array:
        """Compute the weights of the heads on images: (B, H, T, T)."""
        return forward(self.parameters, self.settings, x).attention.weights

    def probabilities(self, x: Array) -> Array:
        """Compute the probability of each digit on images: (B, 10)."""
        return np.exp(log_softmax(forward(self.parameters, self.settings, x).logits))

    def predict(self, x: Array) -> Array:
        """Return the most likely digit of each image: (B,)."""
        return np.asarray(forward(self.parameters, self.settings, x).logits.argmax(-1))

    def accuracy(self, x: Array, y: Array) -> float:
        """Share of the images whose digit is predicted."""
        return float((self.predict(x) == y).mean())

    def save(self, path: str | Path) -> None:
        """Write one file; an existing one is replaced by a complete one or stays."""
        arrays: dict[str, Any] = {f"p.{n}": x for n, x in self.parameters.items()}
        arrays |= {f"m.{n}": x for n, x in self.adam.m.items()}
        arrays |= {f"v.{n}": x for n, x in self.adam.v.items()}
        arrays |= {"losses": self.losses, "accuracies": self.accuracies, "step": self.adam.step}
        arrays["loss_scale"] = (self.loss_scale.scale, self.loss_scale.steps)
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
                    raise OptionError(f"{path} is a checkpoint of another version of npattn")
                arrays = {name: file[name] for name in file.files}
            p, m, v = (
                {n[2:]: x for n, x in arrays.items() if n.startswith(f"{kind}.")} for kind in "pmv"
            )
            adam = Adam(p)
            adam.m, adam.v, adam.step = m, v, int(arrays["step"])
            scale, steps = arrays["loss_scale"].tolist()
            losses, accuracies = (arrays[name].tolist() for name in ("losses", "accuracies"))
            loss_scale = LossScale(scale, int(steps))
            return cls(Settings(**values), p, adam, losses, accuracies, loss_scale)
        except (ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as err:
            if isinstance(err, OptionError):
                raise
            raise OptionError(f"{path} is no checkpoint of docs/examples/train ({err})") from err
