"""Compare two modules: the functions of q, k and v inside of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from npattn.errors import OptionError
from npattn.testing.adapters.modules import TorchModule
from npattn.testing.difference.diff import diff
from npattn.testing.difference.record import Difference
from npattn.testing.modules.function import open_inside
from npattn.testing.modules.judge import begin
from npattn.testing.modules.named import Named
from npattn.testing.runner.schedule import ERRORS


def diff_modules(names: Sequence[str], modules: Sequence[Any], **settings: Any) -> Difference:
    """Compare two torch modules as `npattn.testing.diff` compares functions, in its settings.

    Their projections are set to selections for a while, so that their weights do not matter. The
    answer calls them by `names`.
    """
    with ExitStack() as stack, np.errstate(**ERRORS):
        found = []
        for name, m in zip(names, modules, strict=True):
            module = TorchModule(m, settings.get("dtype"))
            stack.enter_context(module.computing(settings.get("seed", 0)))
            inside = stack.enter_context(open_inside(begin(module, Named())))
            if isinstance(inside, str):
                raise OptionError(
                    f"{name} cannot be compared ({inside}): npattn check {name} --module"
                )
            inside.implementation.conventions = inside.conventions
            inside.implementation.name = name
            found.append(inside)
        one, two = found
        if one.sizes != two.sizes:
            raise OptionError(f"the modules have different heads: {one.sizes} and {two.sizes}")
        sizes = {letter: tuple(values) for letter, values in one.sizes.items()}
        return diff(one.implementation, two.implementation, sizes=sizes, **settings)
