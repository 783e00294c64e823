"""A small attention classifier of handwritten digits, trained with npattn's own gradients."""

from npattn.train.compare import ModelComparison, compare
from npattn.train.data import Data, digits
from npattn.train.loop import train
from npattn.train.model import forward, loss_and_gradients
from npattn.train.run import Run
from npattn.train.settings import Settings

__all__ = [
    "Data",
    "ModelComparison",
    "Run",
    "Settings",
    "compare",
    "digits",
    "forward",
    "loss_and_gradients",
    "train",
]
