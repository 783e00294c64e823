"""A small attention classifier of handwritten digits, trained with npattn's own gradients."""

from train.compare import ModelComparison, compare
from train.data import Data, digits
from train.loop import train
from train.model import forward, loss_and_gradients
from train.run import Run
from train.settings import Settings

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
