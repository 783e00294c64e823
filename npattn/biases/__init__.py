"""Biases: terms added to the scores, as small objects for ``bias=``.

    dense  alibi  relative      + composes them

An object is no (T, S) array: it holds its parameter (slopes, a table, an array), answers for a
rectangle of the scores (`Bias.tile`) or for the whole (`Bias.to_array`), and takes the gradient of
the scores back to its parameter (`Bias.gradient`). Arrays that it holds are neither copied nor
written to.
"""

from npattn.biases.bias import Bias, dense, of
from npattn.biases.distances import alibi, relative

__all__ = ["Bias", "alibi", "dense", "of", "relative"]
__dir__ = __all__.copy
