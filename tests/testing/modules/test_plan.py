"""The exact computation with a step replaced, against its own definition in NumPy."""

from dataclasses import replace

import numpy as np
import pytest

import npattn
from npattn.testing.modules.plan import CHANGES, HIDES_QUERIES, Inputs, Plan

B, T, S, WIDTH, H, D = 2, 5, 7, 15, 3, 5


def split(x):
    return x.reshape(*x.shape[:2], H, D).swapaxes(1, 2)


def softmax(s, axis=-1):
    e = np.exp(s - s.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def attend(
    mha, query, key, value, visible, *, scale=D**-0.5, axis=-1, merged=True, by=None, split_by=split
):  # fmt: skip
    """Return out and weights; `by` names the weights of queries, keys and values."""
    by = by or {"q": "q", "k": "k", "v": "v"}
    q, k, v = (
        split_by(x @ getattr(mha, "w" + by[n]) + getattr(mha, "b" + by[n]))
        for n, x in zip("qkv", (query, key, value), strict=True)
    )
    s = scale * q @ k.swapaxes(-1, -2)
    p = softmax(np.where(visible, s, -np.inf), axis)
    o = p @ v
    o = (o.swapaxes(1, 2) if merged else o).reshape(*query.shape[:2], -1)
    return o @ mha.wo + mha.bo, p


EXPECTED = {
    "√(H·D)": {"scale": WIDTH**-0.5},
    "are not divided by √D": {"scale": 1.0},
    "divided by D = ": {"scale": 1 / D},
    "multiplied by √D": {"scale": D**0.5},
    "√H = ": {"scale": H**-0.5},
    "heads are merged": {"merged": False},
    "move the head axis, and merged": {
        "merged": False, "split_by": lambda x: x.reshape(x.shape[0], H, -1, D)},
    "move the head axis": {"split_by": lambda x: x.reshape(x.shape[0], H, -1, D)},
    "softmax runs over queries": {"axis": -2},
    "keys are projected by {wq}": {"by": {"q": "q", "k": "q", "v": "v"}},
    "values are projected by {wk}": {"by": {"q": "q", "k": "k", "v": "k"}},
    "exchanged": {"by": {"q": "k", "k": "q", "v": "v"}},
}  # fmt: skip


@pytest.fixture
def plan():
    mha = npattn.MultiHeadAttention.init(WIDTH, H, seed=1)
    rng = np.random.default_rng(2)
    biases = {n: rng.standard_normal(WIDTH) for n in ("bq", "bk", "bv", "bo")}
    weights = {n: x for n, x in mha.parameters.items() if n.startswith("w")}
    return Plan(npattn.MultiHeadAttention(**weights, **biases, num_heads=H))


def inputs(masked=True):
    rng = np.random.default_rng(3)
    query, key, value = (rng.standard_normal((B, n, WIDTH)) for n in (T, S, S))
    visible = rng.random((B, 1, T, S)) < 0.7
    visible[..., 0] = visible[..., 0, :] = True  # neither a row nor a column is empty
    return Inputs(query, key, value, visible if masked else np.ones((1, 1, T, S), bool))


@pytest.mark.parametrize("words", EXPECTED)
def test_a_replaced_step_computes_what_its_text_says(plan, words):
    [change] = [c for c in CHANGES if words in c.text][:1]
    given = inputs()
    found = change.apply(plan).results(given, np.float64)
    out, weights = attend(plan.mha, *given, **EXPECTED[words])
    assert (abs(found.values["out"] - out) <= found.allowed["out"]).all()
    assert (abs(found.values["weights"] - weights) <= found.allowed["weights"]).all()
    right = plan.results(given, np.float64)
    assert (abs(right.values["out"] - out) > right.allowed["out"]).any()


def test_the_reference_is_the_module_itself(plan):
    given = inputs()
    out, weights = attend(plan.mha, *given)
    found = plan.results(given, np.float64)
    assert (abs(found.values["out"] - out) <= found.allowed["out"]).all()
    assert (abs(found.values["weights"] - weights) <= found.allowed["weights"]).all()


def test_changes_differ_from_each_other(plan):
    given = inputs()
    outs = []
    for change in CHANGES:
        changed = change.apply(plan)
        if changed is not None:
            outs.append((change.text, changed.results(given, np.float64).values["out"]))
    assert len(outs) == len(CHANGES)
    for i, (_, one) in enumerate(outs):
        same = [t for t, x in outs[i + 1 :] if x.shape == one.shape and np.allclose(x, one, 1e-6)]
        assert same == []


def test_a_mask_of_padding_may_set_outputs_to_zero(plan):
    given = inputs(masked=False)
    shown = np.ones((B, 1, 1, T), bool)
    shown[0, ..., 3:] = False
    given = given._replace(key=None, value=None, visible=shown)
    changed = HIDES_QUERIES.apply(plan)
    found, right = (p.results(given, np.float64).values for p in (changed, plan))
    assert (found["out"][0, 3:] == 0).all()
    assert np.array_equal(found["out"][0, :3], right["out"][0, :3])
    assert np.array_equal(found["out"][1], right["out"][1])
    assert np.array_equal(found["weights"], right["weights"])


@pytest.mark.parametrize("kind", ["merge", "split"])
def test_one_head_has_no_other_order(kind):
    plan = Plan(npattn.MultiHeadAttention.init(WIDTH, 1, seed=1))
    changes = [c for c in CHANGES if c.kind == kind]
    assert changes
    assert [c.apply(plan) for c in changes] == [None] * len(changes)


@pytest.mark.parametrize(
    ("kind", "mha"),
    [
        ("softmax", npattn.MultiHeadAttention.init(12, 6, num_kv_heads=2, seed=1)),
        (
            "residual",
            replace(npattn.MultiHeadAttention.init(11, 3, head_size=2, seed=1), wo=None, bo=None),
        ),
    ],
)
def test_a_step_that_does_not_fit_is_not_replaced(kind, mha):
    [change] = [c for c in CHANGES if c.kind == kind]
    assert change.apply(Plan(mha)) is None
    assert change.apply(Plan(npattn.MultiHeadAttention.init(12, 6, seed=1))) is not None


def test_a_causal_plan_hides_later_keys(plan):
    given = inputs(masked=False)._replace(key=None, value=None, visible=None)
    changed = Plan(plan.mha, causal=True)
    p = changed.results(given, np.float64).values["weights"]
    assert (np.triu(p, 1) == 0).all()
    assert (np.tril(p).sum(-1) > 0.999).all()


def test_dropout_keeps_what_it_is_told(plan):
    given = inputs(masked=False)
    kept = np.random.default_rng(4).random((B, H, T, S)) < 0.8
    found = plan.results(given, np.float64, (kept, 0.2))
    _, p = attend(plan.mha, *given)
    v = split(given.value @ plan.mha.wv + plan.mha.bv)
    o = (p * kept / 0.8) @ v
    out = o.swapaxes(1, 2).reshape(B, T, -1) @ plan.mha.wo + plan.mha.bo
    assert (abs(found.values["out"] - out) <= found.allowed["out"]).all()
