"""Amounts in words: what is read of a fault, and the numbers that have a name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from npattn.mistakes.register import after, one_result
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis.amount import NUMBERS, describe, recognise
from npattn.testing.diagnosis.explore import Point
from npattn.testing.diagnosis.locate import Fault, locate
from npattn.testing.diagnosis.read import Quantity
from tests.testing.diagnosis.failures import evidence_of, trial_with
from tests.testing.diagnosis.test_locate import (
    BACKWARD,
    FORWARD,
    from_index,
    in_gradient,
    in_softmax,
    with_inputs,
)

BASE = Recipe(lead=(2,), H=3, K=3, T=5, S=11, D=7, E=13, seed=3)
PROBLEMS = [
    replace(BASE, **sizes, dropout=0.3).problem()
    for sizes in (
        {"H": 6, "scale": 0.37},
        {"lead": (3,), "H": 10, "K": 2, "S": 17, "D": 19, "scale": 0.23},
    )
]


def amount_of(steps, *recipes):
    trial, points = trial_with(**steps), []
    for recipe in recipes or (BASE, replace(BASE, D=17, T=3, seed=5)):
        evidence = evidence_of(trial, recipe)
        points.append(Point(recipe, evidence, locate(evidence)))
    return describe(points)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.broad
def test_a_number_is_named_by_what_it_is_on_every_problem(name):
    values = [(NUMBERS[name](p), p) for p in PROBLEMS]
    found = recognise(values)
    assert [NUMBERS[found](p) for p in PROBLEMS] == pytest.approx([x for x, _ in values])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1.37, 1.37), "1.37"),
        ((1.37, 2.5), ""),
        ((7**0.5, 7**0.5), "2.646"),  # √D of the first problem alone
        ((np.nan, np.inf), ""),
        ((np.nan, 2.0), "2"),
    ],
)
def test_other_numbers_are_printed(values, text):
    assert recognise(list(zip(values, PROBLEMS, strict=True))) == text


def rows_of_96(dq, *_):
    """Rows of 80 columns are stored, and read as rows of 96; D is 72."""
    stored = np.zeros((*dq.shape[:-2], dq.shape[-2] * 96))
    rows = stored[..., : dq.shape[-2] * 80].reshape(*dq.shape[:-1], 80)
    rows[..., : dq.shape[-1]] = dq
    return stored.reshape(*dq.shape[:-1], 96)[..., : dq.shape[-1]]


def mask_of_earlier_tile(up, c):
    """Queries of t ≥ 32 have the mask of t − 32."""
    visible = np.broadcast_to(up(c), (c.q.shape[-2], c.k.shape[-2]))
    t = np.arange(c.q.shape[-2])
    return visible[np.where(t >= 32, t - 32, t)]


def one_later(x):
    """Return rows that are one later, the first twice."""
    return np.concatenate([x[..., :1, :], x[..., :-1, :]], -2)


def count_tiles_twice(up, s, c, live):
    return up(s + np.log(1 + np.arange(s.shape[-1]) // 4), c, live)


def to_bfloat16(x):
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


AMOUNTS = [
    ("q·k × 1/scale", {"default_scale": lambda up, H, D: 1.0}),
    ("q·k × 1.1", {"product": after(lambda x: 1.1 * x)}),
    ("rows sum to 2", in_softmax(0, lambda p, *_: 2 * p)),
    ("rows sum to 1/S", in_softmax(0, lambda p, *_: p / p.shape[-1])),
    ("counted 2, 3 times", {"softmax": count_tiles_twice}),
    ("0", {"results": one_result(0, from_index(8, -1))}),
    ("× 1/scale", in_gradient(0, lambda dq, c, *_: dq * c.q.shape[-1] ** 0.5)),
    ("× the scale", in_gradient(1, lambda dk, c, *_: dk / c.q.shape[-1] ** 0.5)),
    ("δ is 0", {"delta": after(lambda x: 0 * x)}),
    ("δ × 2", {"delta": after(lambda x: 2 * x)}),
    ("by roundings to 16 bits", {"delta": after(to_bfloat16)}),
    ("", {"delta": after(lambda x: x + np.sin(999 * x))}),
    ("× log₂ e", {"lse": after(lambda x: x / np.log(2))}),
    ("off by 5.3", {"lse": after(lambda x: x + 5.3)}),
    ("× −1", in_gradient(2, lambda dv, *_: -dv)),
]


@pytest.mark.parametrize(("text", "steps"), AMOUNTS, ids=[row[0] or "none" for row in AMOUNTS])
@pytest.mark.broad
def test_amount(text, steps):
    assert amount_of(steps) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bias twice", "the bias × 2"),
        ("softcap left out", "the softcap is left out"),
        ("keys of another head", "query head h takes keys of key head (h − 1) % K, must be h // G"),
        (
            "values of another head",
            "query head h takes values of key head (h − 1) % K, must be h // G",
        ),
        ("mask ignored", "the mask is not applied"),
        ("last keys forgotten", "visible keys have weight 0"),
        ("mean where no key is", "the mean of all values, must be 0"),
        ("dropout without rate", "rows are × 1 − rate"),
        ("dropout ignored", "dropped weights are not 0"),
        ("NaN where no key is", "o is NaN or infinite"),
        ("dsinks", "× −1"),
        ("dbias", "× 2"),
    ],
)
@pytest.mark.broad
def test_amount_of_wrong_functions(name, text):
    _, _, options, steps = (FORWARD | BACKWARD)[name]
    assert amount_of(steps, replace(BASE, **options)) == text


def test_weights_that_underflow_are_of_no_mask():
    options, steps = FORWARD["mask ignored"][2:]
    recipes = [replace(BASE, **options, distribution=x) for x in ("normal", "saturated")]
    assert amount_of(steps, *recipes) == "the mask is not applied"


@pytest.mark.parametrize(
    ("steps", "sizes", "text"),
    [
        (
            in_gradient(0, rows_of_96),
            {"T": 13, "D": 72},
            "values of another place: rows of 80 are read as rows of 96",
        ),
        (
            {"visible": mask_of_earlier_tile},
            {"T": 67, "S": 71, "causal": True},
            "the mask is of query t − 32",
        ),
        ({"results": one_result(0, lambda o, c: np.roll(o, 1, -2))}, {"T": 2}, "of another row"),
        ({"delta": after(one_later)}, {"T": 29}, "δ of row t − 1"),
        ({"product": with_inputs(q=lambda c: one_later(c.q))}, {"T": 29}, "of row t − 1"),
    ],
    ids=["rows of 96", "mask of a tile", "o of a query", "δ of a query", "q of a query"],
)
@pytest.mark.broad
def test_another_place_is_named(steps, sizes, text):
    assert amount_of(steps, replace(BASE, **sizes)) == text


# --- faults that are made up ---


def fault_of(step, got, want=1.0, wrong=True, axes="bht", form="", **facts):
    got = np.full((1, 2, 5), got) if np.isscalar(got) else np.asarray(got, float)
    want = np.broadcast_to(np.asarray(want, float), got.shape)
    mask = np.broadcast_to(np.asarray(wrong, bool), got.shape).copy()
    quantity = Quantity("x", axes, got, want, np.full(got.shape, 1e-7), np.ones(got.shape, bool))
    return Fault(step, quantity, mask, mask | True, form=form, facts=facts)


def sums_of(total):
    got = np.full((1, 2, 5, 4), total / 4)
    fault = fault_of("p", got, 0.25, axes="bhts", form="rows", log=np.full((1, 2, 5), np.inf))
    rows = fault.wrong.any(-1)
    return replace(fault, wrong=rows, known=rows)


ROWS = np.arange(1.0, 11.0).reshape(1, 2, 5)
SHIFTED = {(0, 1, t): (0, 1, t - 2) for t in range(2, 5)}
MADE_UP = {
    "rows sum to 0": sums_of(0.0),
    "": replace(sums_of(1.003), step="precision"),  # of two denominators, close to each other
    "rows sum to e⁻²⁰, must be less": sums_of(np.exp(-20)),
    "dropped weights are not 0": fault_of("p", 0.5, form="dropout"),
    "other weights are dropped": fault_of("p", 0.5 * (np.arange(5) < 2), form="dropout"),
    "weights are not 0": fault_of("p", np.full((1, 1, 1, 3), 0.7), axes="bhts", form="empty rows"),
    "softcap": fault_of("s", 1.0, form="softcap", softcap=0.37),
    "the softcap is left out": fault_of("s", 1.0, form="softcap", softcap=1.0),
    "the bias is left out": fault_of("s", 1.0, form="bias", bias=-1.0),
    "of row t − 2": fault_of("s", 1.0, form="moved", moved=SHIFTED),
    "of head 0, another row": fault_of(
        "s", 1.0, form="moved", moved={(0, 1, 2): (0, 0, 4), (0, 2, 3): (0, 0, 1)}
    ),
    "keys of another sample": fault_of("s", 1.0, form="kv head", moved={(0, 1): (1, 1)}),
    "no key is seen": fault_of("visible", 0.0, form="rows of zeros"),
    "must be −∞": fault_of("lse", np.nan, -np.inf),
    "finite, must be −∞": fault_of("lse", 0.0, -np.inf),
    "× log₂ e": fault_of("lse", ROWS / np.log(2), ROWS),
    "off by 0.7": fault_of("lse", ROWS + 0.7, ROWS),
    "dlse is left out, or counted otherwise": fault_of("delta", 1.0, form="dlse"),
    "0": fault_of("ds", 0.0, form="zeros"),
    "hidden keys have a gradient": fault_of("ds", 1.0, form="extra"),
    "x is finite where it must be NaN": fault_of("nan", 1.0),
    "dout is not used": fault_of("dv", 1.0, form="constant", alone=True),
    "shape (2, 3), must be (1, 5)": fault_of(
        "dk", np.nan, form="shape", shapes=((2, 3), (1, 5)), unsummed=False
    ),
    "not summed over the axes that were broadcast, shape (2, 3), must be (1, 3)": fault_of(
        "dk", np.nan, form="shape", shapes=((2, 3), (1, 3)), unsummed=True
    ),
    "values of row t − 2": fault_of("o", np.roll(ROWS, 2, -1), ROWS, np.arange(5) >= 2),
    "0 in part": fault_of("dq", np.where(np.arange(5) < 4, 0, 7.3) * ROWS, ROWS**1.5 + 0.1),
    "depends on earlier calls": fault_of("state", 1.0, form="kept"),
}


@pytest.mark.parametrize("text", MADE_UP)
def test_forms_of_faults_have_their_words(text):
    problem = SimpleNamespace(problem=replace(BASE, E=11).problem())
    assert describe([Point(BASE, problem, MADE_UP[text])]) == text


@pytest.mark.parametrize(("others", "text"), [(1, "the bias is left out"), (2, "")])
def test_what_is_true_of_some_problems_is_not_said_of_all(others, text):
    problem = SimpleNamespace(problem=replace(BASE, E=11).problem())
    own, other = fault_of("s", 1.0, form="bias", bias=-1.0), fault_of("s", 1.0, form="content")
    points = [Point(BASE, problem, x) for x in [own] * 11 + [other] * others]
    assert describe(points) == text


def test_an_lse_of_another_row_has_its_source():
    problem = SimpleNamespace(problem=replace(BASE, E=11).problem())
    fault = fault_of("lse", np.roll(ROWS**2, 2, -1), ROWS**2, np.arange(5) >= 2)
    assert describe([Point(BASE, problem, fault)]) == "values of row t − 2"


def test_one_value_of_another_place_is_chance():
    problem = SimpleNamespace(problem=replace(BASE, E=11).problem())
    got = ROWS**2 + 0.3 * ROWS
    got[0, 0, 3] = ROWS[0, 0, 1] ** 2
    fault = fault_of("lse", got, ROWS**2)
    assert describe([Point(BASE, problem, fault)]) == ""


@pytest.mark.parametrize(
    ("bad", "read", "text"),
    [(2, 5, "the terms of some queries are × 2"), (2, 2, "× 2"), (11, 13, "× 2")],
)
def test_terms_of_some_queries_are_not_the_whole_gradient(bad, read, text):
    """Elements that were not read, and a row of one key whose dS is 0, are not said to be right.

    Of twelve rows one may be right by chance.
    """
    want = np.ones((1, 2, 13, 3)) * (np.arange(13) < 12)[:, None]
    known = (np.arange(13) < read)[:, None] & np.ones(want.shape, bool)
    wrong = (np.arange(13) < bad)[:, None] & np.ones(want.shape, bool)
    fault = fault_of("dk", np.where(wrong, 2 * want, want), want, wrong, axes="bhts")
    problem = SimpleNamespace(problem=replace(BASE, E=11).problem())
    assert describe([Point(BASE, problem, replace(fault, known=known))]) == text
