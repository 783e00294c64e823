"""Questions to a trained model: the answers, and how a conversation ends."""

import dataclasses

import numpy as np
import pytest
from train import train
from train.interactive import HELP, SHADES, answer, converse, heat_map


@pytest.fixture(scope="module")
def run(few):
    from train import Settings

    return train(Settings(embed_dim=6, num_heads=3, epochs=20, batch_size=7, lr=2e-2), data=few)


def talk(run, data, *lines):
    said = []
    converse(run, data, lines, said.append)
    return said


def test_answer_has_prediction_probabilities_and_weights(run, few):
    probabilities = run.probabilities(few.test_x)[7]
    best = probabilities.argmax()
    few = few._replace(test_y=run.predict(few.test_x))
    text = answer(run, few, " 7 ")
    first, *rest = text.splitlines()
    assert (
        first == f"test image 7 is a {best}; predicted {best} ({100 * probabilities[best]:.1f} %)"
    )
    for digit, p in enumerate(probabilities):
        [line] = [line for line in rest if f"    {digit}  {100 * p:5.1f} %" in line]
        assert line.count("#") - line.partition(f" {digit} ")[0].count("#") == round(20 * p)
    weights = run.weights(few.test_x)[7].mean(0)
    assert (
        f"mean weights of 3 heads: queries downwards, keys to the right; @ is {weights.max():.2f}"
        in text
    )
    assert rest[-5:] == [
        f"{t:>3} {row}".rstrip() for t, row in enumerate(heat_map(weights, weights.max()))
    ]


def test_answer_for_one_head(run, few):
    weights = run.weights(few.test_x)[7]
    for head in range(3):
        text = answer(run, few, f"7 {head}")
        assert f"weights of head {head}: " in text
        assert text.splitlines()[0] == answer(run, few, "7").splitlines()[0]
        rows = [line[4:] for line in text.splitlines()[-5:]]
        shown = heat_map(weights[head], weights[head].max())
        assert rows == [row.rstrip() for row in shown]


def test_wrong_prediction_is_shown(run, few):
    predicted = run.predict(few.test_x)
    other = predicted.copy()
    other[[2, 7]] = (other[[2, 7]] + 1) % 4
    wrong = few._replace(test_y=other)
    first = answer(run, wrong, "7").splitlines()[0]
    assert first.startswith(f"test image 7 is a {other[7]}; predicted {predicted[7]} (")
    assert first.endswith(" %), wrong")
    assert answer(run, wrong, "wrong").splitlines() == [
        "2 of 10 test images are wrong",
        f"2:    {other[2]} read as {predicted[2]}    7:    {other[7]} read as {predicted[7]}",
    ]
    right = few._replace(test_y=predicted)
    assert answer(run, right, "wrong") == "all 10 test images are right"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("10", "there is no test image 10: they are 0 to 9"),
        ("7 3", "there is no head 3: they are 0 to 2"),
        ("-1", "'-1' is no command: type the number of a test image, or help"),
        ("7 1 1", "'7 1 1' is no command"),
        ("seven", "'seven' is no command"),
        ("²", "'²' is no command"),
        ("help me", "'help me' is no command"),
        ("help", HELP),
        ("HELP", HELP),
        ("", ""),
        ("  ", ""),
    ],
)
def test_other_lines(run, few, line, text):
    got = answer(run, few, line)
    assert got.startswith(text)
    assert bool(got) == bool(text)


def test_single_head_has_no_mean(few, small):
    one = train(dataclasses.replace(small, num_heads=1), data=few)
    assert "\nweights: queries downwards" in answer(one, few, "7")
    assert answer(one, few, "7 1") == "there is no head 1: it is 0"


@pytest.mark.parametrize("end", ["quit", "exit", " Q "])
def test_conversation_ends(run, few, end):
    said = talk(run, few, "7", "", "nonsense", end, "8")
    assert said[0] == "10 test images, 0 to 9; help lists the commands"
    assert [text.splitlines()[0] for text in said[1:]] == [
        answer(run, few, "7").splitlines()[0],
        "'nonsense' is no command: type the number of a test image, or help",
    ]
    assert talk(run, few, "7") == said[:2]


def test_heat_map_has_a_shade_for_each_tenth():
    values = np.array([[0.0, 0.19, 0.2, 0.21], [1.0, 1.81, 1.99, 2.0]])
    assert heat_map(values, 2.0) == ["    ....", "++@@@@@@"]
    assert heat_map(np.zeros((2, 3)), 0.0) == [6 * " "] * 2
    assert heat_map(-values, 2.0) == [8 * " "] * 2
    assert len(heat_map(np.zeros((1, 33)), 1.0)[0]) == 33
    assert len(SHADES) == 10
