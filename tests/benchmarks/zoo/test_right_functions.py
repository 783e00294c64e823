"""Right functions that nobody trusts pass, whatever moments npattn chooses: no red by chance."""

import itertools
import subprocess
import sys

import pytest

from benchmarks.zoo.cheats import HONEST
from tests.confined import flags

SEEDS = (3, 5, 7, 11, 13)
WEIGH = {
    "einsum": 's = np.einsum("...td,...sd->...ts", q, k)',
    "matmul": "s = q @ k.swapaxes(-1, -2)",
    "loop": "s = np.stack([(q[..., t, None, :] * k).sum(-1) for t in range(q.shape[-2])], -2)"
    " if q.shape[-2] else q @ k.swapaxes(-1, -2)",
}
NORMALISE = {
    "divided": "o = (p @ v) / np.where(n == 0, 1, n)",
    "weights": "o = (p / np.where(n == 0, 1, n)) @ v",
}
OPTIONS = ("", "causal=False", "mask=None", "mask=None, causal=False", "scale=None", "bias=None",
           "scale=None, bias=None")  # fmt: skip
FUNCTION = '''
"""Attention."""

import numpy as np


def f(q, k, v, {options}):
    given = dict(causal=False, mask=None, scale=None, bias=None) | {{{passed}}}
    dtype, group = q.dtype, q.shape[-3] // k.shape[-3] if q.ndim > 2 and k.shape[-3] else 1
    q, k, v = (x.astype(float) for x in (q, k, v))
    k, v = (np.repeat(x, group, axis=-3) if group > 1 else x for x in (k, v))
    {weigh}
    default = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
    s = s * (default if given["scale"] is None else given["scale"])
    s = s if given["bias"] is None else s + given["bias"]
    T, S = s.shape[-2:]
    visible = np.tri(T, S, S - T, dtype=bool) if given["causal"] else np.ones((T, S), bool)
    visible = visible if given["mask"] is None else visible & given["mask"]
    s = np.where(visible, s, -np.inf)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.where(np.isneginf(s), 0, np.exp(s - np.where(np.isneginf(m), 0, m)))
    n = p.sum(-1, keepdims=True)
    if not np.isfinite(v).all():
        p, v = p[..., None], v[..., None, :, :]
        o = np.where(p == 0, 0, p * v).sum(-2) / np.where(n == 0, 1, n)
    else:
        {normalise}
    return o.astype(dtype)
'''


def write(folder):
    """Write each function to a file of its own; yield its spec and backward."""
    for one in HONEST.values():
        own = folder / one.name
        own.mkdir()
        yield one.write(own)
    for (name, weigh), (how, normalise), options in itertools.product(
        WEIGH.items(), NORMALISE.items(), OPTIONS
    ):
        names = [x.partition("=")[0].strip() for x in options.split(",") if x]
        own = folder / "_".join([name, how, *names])
        own.mkdir()
        passed = ", ".join(f'"{x}": {x}' for x in names)
        text = FUNCTION.format(options=options, passed=passed, weigh=weigh, normalise=normalise)
        (own / "f.py").write_text(text.replace("v, ):", "v):"))
        yield f"{own}/f.py:f", ""


def judge(spec, backward, seed):
    words = ["check", spec, *(["--backward", backward] if backward else []), *flags()]
    words += ["--must", "o", "--examples", "5", "--seed", str(seed), "-x"]
    code = "import sys; from npattn.__main__ import main; main()"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SEEDS)
def test_right_functions_are_never_red_by_chance(tmp_path, seed):
    functions = list(write(tmp_path))
    assert len(functions) >= 60
    done = {spec: judge(spec, backward, seed) for spec, backward in functions}
    assert {spec: one.stdout for spec, one in done.items() if one.returncode} == {}
