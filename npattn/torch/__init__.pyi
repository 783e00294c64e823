# Every public name of npattn.torch, once: the last are those of npattn.
import npattn as _npattn

from . import biases as biases
from . import cache as cache
from . import positions as positions
from . import quantization as quantization
from . import variants as variants
from .api import attention as attention
from .api import backward as backward
from .api import forward as forward
from .api import jvp as jvp
from .multihead import MultiHeadAttention as MultiHeadAttention
from .problem import Problem as Problem
from .second_order import double_backward as double_backward
from .second_order import hvp as hvp

Conventions = _npattn.Conventions
Forward = _npattn.Forward
Gradients = _npattn.Gradients
conventions = _npattn.conventions
errors = _npattn.errors
masks = _npattn.masks
plot = _npattn.plot
profiles = _npattn.profiles
testing = _npattn.testing
weights = _npattn.weights
