"""Colour maps, formats, sizes of figures, and axes of the user: by what is then in the picture."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")  # the extra npattn[plot]

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.figure import Figure

from npattn import plot
from npattn.errors import OptionError, ShapeError
from npattn.plot.looks import FLAG, luminance, read_colours
from tests.plot.test_maps import (
    LONG,
    WORDS,
    H,
    S,
    T,
    boxes,
    crosses,
    file,
    key,
    labels,
    numbers,
    overlaps,
    panels,
    plot_calls,
    run,
    scale_values,
    weights,
)

__all__ = ["file", "plot_calls"]  # fixtures


def causal(*shape):
    """Weights of which those above the diagonal are 0."""
    p = weights(*shape) * np.tri(*shape[-2:])
    return p / p.sum(-1, keepdims=True)


def ratios(*shape):
    """Errors of which some are 0 and some are beyond 1."""
    return 1.3 * np.random.default_rng(0).random(shape) * (weights(*shape) > 0.05)


DRAW = {
    "head": lambda **options: plot.head(causal(T, S), **options),
    "heads": lambda **options: plot.heads(causal(H, T, S), **options),
    "mask": lambda **options: plot.mask(np.tri(T, S, dtype=bool), **options),
    "error": lambda **options: plot.error(ratios(T, S), **options),
}
WITH_NUMBERS = [name for name in DRAW if name != "mask"]


def test_every_function_has_every_option():
    for name in DRAW:
        parameters = inspect.signature(getattr(plot, name)).parameters
        options = {"cmap", "figsize", "ax"} | ({"fmt"} if name in WITH_NUMBERS else set())
        assert options <= set(parameters)
        assert all(parameters[option].kind.name == "KEYWORD_ONLY" for option in options)


# --- cmap -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_NUMBERS)
@pytest.mark.parametrize("cmap", ["magma", "Blues"])
def test_cells_and_bar_have_the_colours(name, cmap):
    figure = DRAW[name](cmap=cmap)
    [bar] = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    points = np.linspace(0, 1, 17)
    for mapped in (panels(figure)[0].images[0], bar._colorbar):
        np.testing.assert_array_equal(mapped.cmap(points), colormaps[cmap](points))
    if name == "error":
        assert panels(figure)[0].images[0].cmap(np.inf) == to_rgba(FLAG)


def test_colour_map_is_also_an_object():
    own = ListedColormap(["red", "blue"])
    (axes,) = panels(plot.head(weights(T, S), cmap=own))
    assert axes.images[0].cmap is own


def test_default_is_viridis():
    for name in DRAW:
        assert inspect.signature(getattr(plot, name)).parameters["cmap"].default == "viridis"


@pytest.mark.parametrize("cmap", ["viridis", "Blues", "gray", "gray_r", "magma"])
def test_visible_keys_are_dark_in_any_colour_map(cmap):
    figure = plot.mask(np.tri(T, S, dtype=bool), cmap=cmap)
    (axes,) = panels(figure)
    colour = axes.images[0].cmap(0.5)
    ends = [tuple(colormaps[cmap](x)) for x in (0.25, 0.75)]
    assert tuple(colour) in ends
    assert luminance(colour) == min(map(luminance, ends))
    patch = figure.legends[0].get_patches()[0]
    assert patch.get_facecolor() == tuple(colour), "the key has the same"
    # 3 is what WCAG 2 asks of graphical objects, here against the white of hidden keys.
    assert 1.05 / (luminance(colour) + 0.05) > 3


@pytest.mark.parametrize("cmap", ["magma", "Blues", "coolwarm"])
def test_numbers_contrast_with_cells_of_any_colour_map(cmap):
    p = np.linspace(0.001, 1, T * S).reshape(T, S)
    (axes,) = panels(plot.head(p, cmap=cmap))
    image = axes.images[0]
    for at, number in numbers(axes).items():
        pair = (luminance(to_rgba(number.get_color())), luminance(image.cmap(image.norm(p[at]))))
        assert (max(pair) + 0.05) / (min(pair) + 0.05) > 4.5, at


@pytest.mark.parametrize("name", DRAW)
def test_unknown_colour_map_names_near_ones(name):
    with pytest.raises(OptionError, match=r"cmap is 'Virdis', no colour map .*mean viridis"):
        DRAW[name](cmap="Virdis")
    with pytest.raises(OptionError, match=r"cmap is 'magam', .*did you mean magma"):
        DRAW[name](cmap="magam")
    with pytest.raises(OptionError, match=r"cmap is 'xyzzy1', .*: try viridis"):
        DRAW[name](cmap="xyzzy1")
    with pytest.raises(OptionError, match=r"cmap is 7, must be the name of a colour map"):
        DRAW[name](cmap=7)


def test_colour_maps_that_errors_propose_exist():
    for proposed in ("viridis", "gray", "Blues", "magma"):
        assert read_colours(proposed).name == proposed


# --- fmt ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fmt"), [("head", ".1f"), ("head", ".0%"), ("heads", ".1e"), ("error", "+.2f")]
)
def test_numbers_have_the_format(name, fmt):
    figure = DRAW[name](fmt=fmt, figsize=(13, 9))
    for axes in panels(figure):
        values, wrong = axes.images[0].get_array(), crosses(axes)
        texts = numbers(axes)
        assert len(texts) == T * S
        for (t, s), number in texts.items():
            if (t, s) in wrong:
                continue
            x = float(values.data[t, s])
            assert number.get_text() == ("0" if x == 0 else format(x, fmt))


def test_wrong_elements_do_not_read_as_right_ones():
    ratio = np.full((2, 3), 0.5)
    ratio[0, 0], ratio[0, 1], ratio[1, 2] = np.nextafter(1, 2), np.nan, 1.25
    (axes,) = panels(plot.error(ratio, fmt=".1f"))
    texts = {at: number.get_text() for at, number in numbers(axes).items()}
    assert (texts[0, 0], texts[0, 1], texts[1, 2]) == (">1", "NaN", "1.2")


@pytest.mark.thorough
def test_percentages_are_on_the_bar_too():
    for fmt, ending in ((".0%", "%"), (".2f", "")):
        figure = DRAW["head"](fmt=fmt)
        FigureCanvasAgg(figure).draw()
        [bar] = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
        texts = [text for text in labels(bar.yaxis) if text]
        assert texts
        assert all(text.endswith("%") == bool(ending) for text in texts)
        assert "100%" in texts if ending else "1" in texts


@pytest.mark.parametrize(
    ("fmt", "message"),
    [
        ("%.2f", "fmt is '%.2f', must be a format of a float: did you mean '.2f'?"),
        ("{:.2f}", "did you mean '.2f'?"),
        ("d", "fmt is 'd', must be a format of a float, such as '.3f', '.1e' or '.0%'"),
        (".2q", "fmt is '.2q'"),
        (2, "fmt is 2, must be a format"),
    ],
)
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_illegal_format_raises(name, fmt, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        DRAW[name](fmt=fmt)


# --- figsize --------------------------------------------------------------------------------------

SIZED = {
    "words": lambda size: plot.head(
        causal(T, S), queries=WORDS[:T], keys=WORDS, title="one head", figsize=size
    ),
    "long": lambda size: plot.head(weights(11, 13), queries=LONG[:11], keys=LONG, figsize=size),
    "positions": lambda size: plot.head(weights(197, 199), figsize=size),
    "heads": lambda size: plot.heads(causal(5, 7, 7), keys=WORDS, title="layer", figsize=size),
    "mask": lambda size: plot.mask(np.tri(17, 23, dtype=bool), figsize=size),
    "error": lambda size: plot.error(ratios(11, 13), title="two\nlines", figsize=size),
}


@pytest.mark.parametrize("size", [(12, 4.5), (5, 9)])
@pytest.mark.parametrize("name", SIZED)
@pytest.mark.broad
def test_figure_has_the_size_and_nothing_overlaps(name, size):
    figure = SIZED[name](size)
    assert tuple(figure.get_size_inches()) == size
    assert overlaps(figure) == []
    # Panels, labels and bar use the width: what is left at the right is a gap.
    right = max(box.x1 for _, box in boxes(figure)) / figure.dpi
    right = max(right, *(axes.bbox.x1 / figure.dpi for axes in figure.axes))
    assert size[0] - right < 0.6


def test_larger_figure_has_larger_cells():
    small, large = (panels(SIZED["words"](size))[0].bbox for size in ((6, 5), (12, 10)))
    assert large.width > 1.9 * small.width
    assert large.height > 1.9 * small.height


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.broad
def test_smallest_size_is_named_and_works(name):
    with pytest.raises(OptionError, match="too small for the labels and the cells") as caught:
        SIZED[name]((0.5, 0.5))
    least = tuple(
        float(x) for x in re.findall(r"\((\d+\.\d), (\d+\.\d)\) inches", str(caught.value))[0]
    )
    assert overlaps(SIZED[name](least)) == []
    for shrunk in ((least[0] - 0.2, least[1]), (least[0], least[1] - 0.2)):
        with pytest.raises(OptionError, match="too small"):
            SIZED[name](shrunk)


@pytest.mark.parametrize("figsize", [5, "8,6", (8,), (8, 6, 4), (0, 6), (8, -1), (np.inf, 6), "86"])
@pytest.mark.parametrize("name", DRAW)
def test_illegal_size_raises(name, figsize):
    if figsize == "86":  # two characters are two numbers, and that is no size
        figsize = ("a", "b")
    with pytest.raises(OptionError, match=r"figsize is .*must be a width and a height in inches"):
        DRAW[name](figsize=figsize)


# --- ax -------------------------------------------------------------------------------------------


def subplots(rows, columns, **options):
    figure = Figure(figsize=(5 * columns, 4.5 * rows), **options)
    return figure, figure.subplots(rows, columns)


@pytest.mark.unmeasured
@pytest.mark.parametrize("layout", [None, "constrained", "tight"])
@pytest.mark.parametrize("name", [name for name in DRAW if name != "heads"])
def test_axes_of_the_user_are_drawn_in(name, layout):
    figure, (left, right) = subplots(1, 2, layout=layout)
    own = panels(DRAW[name](title="mine"))[0]
    before = right.get_position().bounds
    returned = DRAW[name](ax=left, title="mine")
    assert returned is figure
    np.testing.assert_array_equal(scale_values(left), scale_values(own))
    assert (left.get_xlabel(), left.get_ylabel()) == (own.get_xlabel(), own.get_ylabel())
    assert left.get_title() == "mine"
    assert labels(left.xaxis) == labels(own.xaxis)
    texts = {at: number.get_text() for at, number in numbers(left).items()}
    assert texts == {at: number.get_text() for at, number in numbers(own).items()}
    assert crosses(left) == crosses(own)
    words = [t.get_text() for t in left.get_legend().get_texts()]
    assert words == key(DRAW[name]())
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    assert len(bars) == (name != "mask")
    if bars:
        assert left.bbox.x1 < bars[0].bbox.x0 < right.bbox.x0, "the bar is beside its axes"
    assert not right.images
    if layout is None:
        assert right.get_position().bounds == before


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.parametrize("layout", ["constrained", "tight"])
def test_nothing_overlaps_in_axes_of_the_user(layout):
    figure, axes = subplots(1, 2, layout=layout)
    plot.head(causal(T, S), ax=axes[0], queries=WORDS[:T], keys=WORDS, title="weights")
    plot.error(ratios(T, S), ax=axes[1], title="error")
    figure.canvas = FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    legends = [legend for one in axes for legend in [one.get_legend()]]
    assert overlaps(figure) == []
    renderer = figure.canvas.get_renderer()
    for one, legend in zip(axes, legends, strict=True):
        box = legend.get_window_extent(renderer)
        assert one.bbox.y1 <= box.y0 + 1
        assert box.y1 <= one.title.get_window_extent(renderer).y0 + 1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1


@pytest.mark.thorough
def test_heads_have_axes_each_and_one_bar():
    figure, axes = subplots(1, H, layout="constrained")
    p = causal(H, T, S)
    assert plot.heads(p, ax=axes) is figure
    for h, one in enumerate(axes):
        np.testing.assert_array_equal(scale_values(one).filled(0), p[h])
        assert one.get_title() == f"head {h}"
        assert len(numbers(one)) == T * S
    [bar] = [one for one in figure.axes if one.get_label() == "<colorbar>"]
    assert bar.bbox.x0 > axes[-1].bbox.x1
    assert [one.get_legend() is not None for one in axes] == [True, False, False]
    assert len({one.title.get_window_extent().y0 for one in axes}) == 1, "names are in a line"


@pytest.mark.thorough
def test_axes_in_rows_and_lists():
    figure, axes = subplots(2, 2)
    plot.heads(causal(4, T, S), ax=axes)
    [bar] = [one for one in figure.axes if one.get_label() == "<colorbar>"]
    assert bar.bbox.y0 <= axes[1, 0].bbox.y0 + 1
    assert bar.bbox.y1 >= axes[0, 0].bbox.y1 - 1
    assert [one.get_title() for one in axes.flat] == [f"head {h}" for h in range(4)]
    _, axes = subplots(2, 2)
    plot.mask(np.ones((4, T, S), bool), ax=[axes[0], *axes[1]])
    assert all(len(one.images) == 1 for one in axes.flat)
    _, axes = subplots(1, 2)
    plot.error(ratios(2, T, S), ax=list(axes))
    assert axes[1].get_title() == "head 1"


def test_axes_in_part_of_a_figure():
    figure = Figure(figsize=(9, 4))
    part = figure.subfigures(1, 2)[0]
    assert plot.mask(np.tri(T, S, dtype=bool), ax=part.add_subplot()) is figure


def test_numbers_and_labels_fit_into_small_axes():
    figure = Figure(figsize=(9, 6))
    small = figure.add_axes((0.1, 0.1, 0.1, 0.15))
    plot.head(weights(53, 59), ax=small)
    assert not small.texts
    assert len(labels(small.xaxis)) < 12


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: plot.head(weights(T, S), ax=Figure()), OptionError, "ax is a Figure, must be"),
        (lambda: plot.head(weights(T, S), ax=7), OptionError, "ax is a int"),
        (lambda: plot.head(weights(T, S), ax=(Figure(), 1)), OptionError, "ax has a Figure"),
        (lambda: plot.head(weights(T, S), ax=Figure().add_subplot(projection="polar")), OptionError,
         "ax has polar axes"),
        (lambda: plot.heads(weights(H, T, S), ax=Figure().add_subplot()), ShapeError,
         "ax has 1 axes, must have 3, one each [3 heads]"),
        (lambda: plot.mask(np.ones((T, S), bool), ax=subplots(1, 2)[1]), ShapeError,
         "ax has 2 axes, must have 1, one each [1 head]"),
        (lambda: plot.heads(weights(2, T, S), ax=[Figure().add_subplot(), Figure().add_subplot()]),
         OptionError, "ax has axes of several figures"),
        (lambda: plot.heads(weights(2, T, S), ax=subplots(1, 2)[1], title="all"), OptionError,
         "title is 'all', which belongs to a figure"),
        (lambda: plot.head(weights(T, S), ax=Figure().add_subplot(), figsize=(8, 6)), OptionError,
         "got figsize and ax"),
    ],
)  # fmt: skip
def test_illegal_axes_raise(call, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        call()


# --- npattn plot ----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_command_passes_the_options(file, plot_calls):
    options = ("--cmap", "magma", "--fmt", ".0%", "--figsize", "8,6.5")
    for number, name in enumerate(("weights", "error")):
        run(file(**{name: causal(T, S)}), "--out", "fig.png", *options)
        passed = plot_calls[number][2]
        assert (passed["cmap"], passed["fmt"], passed["figsize"]) == ("magma", ".0%", (8.0, 6.5))
    run(file(mask=np.tri(T, S, dtype=bool)), "--out", "m.png", "--cmap", "gray", "--figsize", "5,4")
    assert plot_calls[2][2] == {"title": None, "cmap": "gray", "figsize": (5.0, 4.0)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--cmap", "virdis"),
            "cmap is 'virdis', no colour map of matplotlib: did you mean viridis",
        ),
        (("--fmt", "%d"), "fmt is '%d', must be a format of a float"),
        (("--figsize", "8x6"), "--figsize is '8x6', must look like 8,6"),
        (("--figsize", "8,6,4"), "--figsize is '8,6,4'"),
        (("--figsize", "0,6"), "figsize is (0.0, 6.0), must be a width and a height"),
        (("--figsize", "1,1"), "too small for the labels and the cells"),
    ],
)
def test_illegal_options_are_wrong_usage(file, options, message):
    assert message in run(file(weights=causal(T, S)), "--out", "fig.png", *options, code=2)
    assert not Path("fig.png").exists()


def test_mask_has_no_format(file):
    output = run(file(mask=np.ones((T, S), bool)), "--out", "m.png", "--fmt", ".2f", code=2)
    assert "--fmt is '.2f', but a mask has no numbers" in output
