"""A module to judge: npattn check docs/examples/torch_module.py:mha --module [how-to/module.md]."""

from torch import nn

mha = nn.MultiheadAttention(12, 3, batch_first=True)
