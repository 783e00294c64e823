"""What a type checker tells users of npattn: the gate runs mypy on it, where an ignore that ignores
nothing is an error.
"""

import numpy as np

import npattn
import npattn.testing
from npattn.testing import Cotangents, GradientReport, Report

q = k = v = np.ones((1, 2, 3))

fwd: npattn.Forward = npattn.forward(q, k, v, mask=npattn.masks.causal())
grads: npattn.Gradients = npattn.backward(fwd, np.ones_like(fwd.out))
problem = npattn.Problem(q, k, v)
cotangents: Cotangents = Cotangents(q, None)
report: Report = npattn.testing.check(print, examples=3)
gradients: GradientReport = npattn.testing.check_gradients(np.tanh, (q,))

print(npattn.atention)  # type: ignore[attr-defined]
print(npattn.testing.chekc)  # type: ignore[attr-defined]
npattn.testing.check(print, exmples=3)  # type: ignore[call-arg]
npattn.testing.check(print, examples="3")  # type: ignore[arg-type]
not_one: int = npattn.testing.check(print)  # type: ignore[assignment]
