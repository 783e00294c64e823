# Every public name of npattn, once: lazy_loader reads this, and loads a name when it is first used.
from . import biases as biases
from . import cache as cache
from . import conventions as conventions
from . import errors as errors
from . import masks as masks
from . import plot as plot
from . import positions as positions
from . import profiles as profiles
from . import quantization as quantization
from . import testing as testing
from . import torch as torch
from . import variants as variants
from . import weights as weights
from .conventions import Conventions as Conventions
from .multihead import MultiHeadAttention as MultiHeadAttention
from .oracle.api import attention as attention
from .oracle.api import backward as backward
from .oracle.api import forward as forward
from .oracle.api import jvp as jvp
from .oracle.second_order import double_backward as double_backward
from .oracle.second_order import hvp as hvp
from .problem import Forward as Forward
from .problem import Gradients as Gradients
from .problem import Problem as Problem

__version__: str
