"""Questions to a trained model, as text: a test image, its prediction and its attention weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from npattn.problem.arrays import Array
from train.data import Data
from train.run import Run

SHADES = " .:-=+*#%@"
"""From 0 to the largest value, in equal parts."""
BAR = 20  # characters of a probability of 1
ITEMS = 4  # a line, of wrong images
QUIT = ("quit", "exit", "q")
HELP = """\
N        test image N: the digits and their probabilities, and the mean weights of the heads
N HEAD   the weights of one head on test image N
wrong    test images that the model gets wrong
help     this text
quit     end; so do Ctrl-D and Ctrl-C"""


def converse(run: Run, data: Data, lines: Iterable[str], write: Callable[[str], None]) -> None:
    """Answer lines until one of them, or their end, ends it.

    Parameters
    ----------
    run : Run
    data : Data
        Its test images are those that lines ask for.
    lines : iterable of str
    write : callable
        Takes each answer.
    """
    write(f"{len(data.test_x)} test images, {_span(len(data.test_x))}; help lists the commands")
    for line in lines:
        if line.strip().lower() in QUIT:
            return
        if text := answer(run, data, line):
            write(text)


def answer(run: Run, data: Data, line: str) -> str:
    """Return the answer to one line; that to a wrong one says what may be typed.

    Parameters
    ----------
    run : Run
    data : Data
    line : str

    Returns
    -------
    str
        Empty for an empty line.
    """
    words = line.lower().split()
    if not words:
        return ""
    if words == ["help"]:
        return HELP
    if words == ["wrong"]:
        return _list_wrong(run, data)
    if len(words) > 2 or not all(word.isascii() and word.isdigit() for word in words):
        return f"{line.strip()!r} is no command: type the number of a test image, or help"
    image, *head = map(int, words)
    images, heads = len(data.test_x), run.settings.num_heads
    if image >= images:
        return f"there is no test image {image}: they are {_span(images)}"
    if head and head[0] >= heads:
        return f"there is no head {head[0]}: {'it is' if heads == 1 else 'they are'} {_span(heads)}"
    return _describe_image(run, data, image, *head)


def heat_map(values: Array, top: float) -> list[str]:
    """Lines of values (rows, columns) as characters, from a blank for 0 to @ for `top`."""
    level = np.floor(values / (top or 1.0) * len(SHADES)).astype(int)
    wide = 2 if values.shape[1] <= 32 else 1  # cells are then about as wide as high
    return [
        "".join(SHADES[min(i, len(SHADES) - 1)] * wide for i in row)
        for row in np.maximum(level, 0).tolist()
    ]


def _describe_image(run: Run, data: Data, image: int, head: int | None = None) -> str:
    x = data.test_x[image : image + 1]
    probabilities, digit = run.probabilities(x)[0], data.test_y[image]
    best = int(probabilities.argmax())
    lines = [
        f"test image {image} is a {digit}; predicted {best} ({100 * probabilities[best]:.1f} %)"
    ]
    lines[0] += "" if best == digit else ", wrong"
    weights = run.weights(x)[0]
    if head is not None:
        return "\n".join([*lines, "", *_describe_weights(weights[head], f"weights of head {head}")])
    rows = x[0] if x.shape[-1] > 1 else x.reshape(math.isqrt(x.size), -1)  # tokens are pixels
    picture = heat_map(rows, float(x.max()))
    bars = [f"{i}  {100 * p:5.1f} %  {'#' * round(BAR * p)}" for i, p in enumerate(probabilities)]
    blank, height = " " * len(picture[0]), max(len(picture), len(bars))
    picture += [blank] * (height - len(picture))
    bars += [""] * (height - len(bars))
    lines += ["", *(f"{a}    {b}".rstrip() for a, b in zip(picture, bars, strict=True)), ""]
    title = f"mean weights of {len(weights)} heads" if len(weights) > 1 else "weights"
    return "\n".join([*lines, *_describe_weights(weights.mean(0), title)])


def _describe_weights(weights: Array, title: str) -> list[str]:
    """Return the heat map of weights (T, T), with its positions and its scale."""
    T, top = len(weights), float(weights.max())
    rows = heat_map(weights, top)
    wide = len(rows[0]) // T
    columns = "".join(f"{key % 10:<{wide}}" for key in range(T))
    lines = [f"{title}: queries downwards, keys to the right; @ is {top:.2f}, a blank under"]
    lines[0] += f" {top / len(SHADES):.2f}"
    lines += [f"    {columns.rstrip()}"]
    return lines + [f"{query:>3} {row}".rstrip() for query, row in enumerate(rows)]


def _list_wrong(run: Run, data: Data) -> str:
    predicted = run.predict(data.test_x)
    wrong = np.flatnonzero(predicted != data.test_y).tolist()
    if not wrong:
        return f"all {len(predicted)} test images are right"
    items = [f"{f'{i}:':<5} {data.test_y[i]} read as {predicted[i]}" for i in wrong]
    lines = ["    ".join(items[i : i + ITEMS]) for i in range(0, len(items), ITEMS)]
    return "\n".join([f"{len(wrong)} of {len(predicted)} test images are wrong", *lines])


def _span(count: int) -> str:
    return "0" if count == 1 else f"0 to {count - 1}"
