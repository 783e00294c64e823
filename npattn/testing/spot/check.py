"""spot_check: an output of any length, compared with the exact one in a sample of its rows.

The oracle itself costs T · S; a row of it costs S. So a few rows, drawn at random, are computed
exactly and compared within their tolerance, and the result tells what may have been missed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from numpy.typing import ArrayLike

from npattn.conventions import Conventions, check_conventions
from npattn.problem import Problem
from npattn.problem.checks import check_integer
from npattn.problem.options import Alignment, ScoreMod, Window
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.spot.evaluation import SampledRows
from npattn.testing.spot.result import SpotCheck


def spot_check(
    out: ArrayLike,
    lse: ArrayLike | None,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    mask: Any = None,
    *,
    causal: bool | Alignment = False,
    window: Window | None = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: ArrayLike | None = None,
    dropout_mask: Any = None,
    dropout_rate: float = 0.0,
    conventions: Conventions | None = None,
    rounding: Rounding | str | None = None,
    dout: ArrayLike | None = None,
    dlse: ArrayLike | None = None,
    dq: ArrayLike | None = None,
    dk: ArrayLike | None = None,
    dv: ArrayLike | None = None,
    samples: int = 256,
    seed: int = 0,
    accept: Collection[str] = (),
) -> SpotCheck:
    """Compare an output of any length with the exact one, in rows drawn at random.

    Each sampled row is computed in float64 from all of its keys, and compared within the tolerance
    of `compare`. The arrays may be memory-mapped: of q, k, v only a few keys at a time are
    converted, and no array of the size of the scores is made. It takes time in proportion to
    samples · S for the rows, and to samples · T · H / K for keys; memory grows with neither T nor S
    but for four bytes a score of the rows that are evaluated together.

    Parameters
    ----------
    out : array (..., H, T, E)
        The output of the implementation, in its dtype.
    lse : array (..., H, T), or None
        Its lse. None: not checked.
    q, k, v, mask, causal, window, bias, scale, softcap, score_mod, sinks, dropout_mask, \
dropout_rate, conventions
        The problem, as for `npattn.attention`, with the arrays as the implementation had them. A
        mask of `npattn.masks`, or a bias of `npattn.biases`, is evaluated a few keys at a time.
    rounding : Rounding or str, optional
        What the implementation rounds, or "upcast", "fused", "eager". Default:
        ``Rounding.undeclared`` for the dtype of q.
    dout, dlse : array, optional
        The cotangents of out and lse, shaped like them.
    dq, dk, dv : array, optional
        Gradients of the implementation, shaped like q, k, v. They need dout; dk and dv need lse
        too. dq is checked in the same rows; dk and dv in `samples` keys, which are drawn apart.
    samples : int, default 256
        Number of rows, and of keys; all, if there are no more. Without replacement, each row as
        likely as any other.
    seed : int, default 0
    accept : collection of str
        Results that need no verdict, among o, lse, dq, dk, dv. One that could be twice as large
        unseen in half of the elements leaves no verdict, else.

    Returns
    -------
    SpotCheck
        ``verdict``, ``passed``, ``worst``, ``failures``, ``miss_probability(share)``; ``str()``
        gives a report.

    Raises
    ------
    ShapeError
        If an array has the wrong shape, or a gradient is summed over leading axes.
    DtypeError
        If an array is not floating, or complex.
    OptionError
        If an option is illegal, a gradient comes without the arrays that it needs, or no sampled
        query sees a key that dk and dv need. Wrong numbers never raise.

    Notes
    -----
    A gradient of one key sums over all queries, whose exact lse and out would cost T · S. So dk and
    dv are computed from the lse and out that are passed, on the assumption that these are right:
    that rows outside the sample are off by no more than the tolerance of the worst row in it. That
    much is added to the tolerance of dk and dv. If rows fail, read those first.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> from npattn.testing import spot_check
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((2, 3, 1000, 8), dtype=np.float32) for _ in range(3))
    >>> fwd = npattn.forward(q, k, v, causal=True, dtype=np.float32)
    >>> result = spot_check(fwd.out, fwd.lse, q, k, v, causal=True, samples=100)
    >>> result.passed
    True
    >>> round(result.miss_probability(0.03), 3)  # a defect in 3 % of the rows
    0.046
    """
    explicit = check_conventions(conventions)
    problem = Problem(
        cast(Any, q),
        cast(Any, k),
        cast(Any, v),
        mask,
        causal=causal,
        window=window,
        bias=bias,
        scale=scale,
        softcap=softcap,
        score_mod=score_mod,
        sinks=cast(Any, sinks),
        dropout_mask=dropout_mask,
        dropout_rate=dropout_rate,
        alignment=None if explicit is None else explicit.alignment,
    )
    evaluation = SampledRows(
        problem,
        conventions or Conventions(),
        Rounding.from_name(rounding) if isinstance(rounding, str) else rounding,
        {"o": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv},
        dout,
        dlse,
    )
    samples, seed = check_integer("samples", samples), check_integer("seed", seed, 0)
    return evaluation.check(samples, seed, tuple(accept))
