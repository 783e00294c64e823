"""Heat maps: values, hidden and wrong elements, labels, and no overlaps."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("matplotlib")  # the extra npattn[plot]

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

import npattn
from npattn import plot
from npattn.cli import cli
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.plot import maps
from npattn.plot.draw import CROSS
from npattn.plot.looks import FLAG, format_number

H, T, S = 3, 5, 7
WORDS = ["The", "quick", "brown", "fox", "jumps", "over", "the"]
LONG = [f"internationalisation-{i}" for i in range(13)]


def weights(*shape, seed=0):
    """Rows that sum to 1, none of them 0."""
    p = np.random.default_rng(seed).random(shape) + 0.01
    return p / p.sum(-1, keepdims=True)


def panels(figure):
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def scale_values(axes):
    """Return the values with a colour of the scale; others are masked."""
    return axes.images[0].get_array()


def crosses(axes):
    """Return (row, column) of each cross."""
    return sorted((int(y), int(x)) for c in axes.collections for x, y in c.get_offsets())


def numbers(axes):
    """Return the texts in the cells, by (row, column)."""
    return {(round(t.get_position()[1]), round(t.get_position()[0])): t for t in axes.texts}


def key(figure):
    """Return the words below the panels."""
    return [t.get_text() for legend in figure.legends for t in legend.get_texts()]


def labels(axis):
    return [t.get_text() for t in axis.get_ticklabels()]


def boxes(figure):
    """Return every text outside the cells, with its box in pixels."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    texts = [*figure.texts, *(t for legend in figure.legends for t in legend.get_texts())]
    if figure._suptitle is not None and figure._suptitle not in texts:
        texts.append(figure._suptitle)
    for axes in figure.axes:
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
            texts += [text for at, text in ticks if low <= at <= high]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_text()]


def overlaps(figure):
    """Return pairs of texts that touch, and texts that touch a panel or leave the figure."""
    texts, whole = boxes(figure), figure.bbox
    found = [(a, b) for (a, x), (b, y) in itertools.combinations(texts, 2) if x.overlaps(y)]
    for text, box in texts:
        found += [(text, "panel") for axes in figure.axes if box.overlaps(axes.bbox)]
        inside = whole.x0 <= box.x0 and box.x1 <= whole.x1
        if not (inside and whole.y0 <= box.y0 and box.y1 <= whole.y1):
            found.append((text, "outside"))
    return found


def luminance(colour):
    rgb = np.array(to_rgba(colour)[:3])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ (0.2126, 0.7152, 0.0722)


# --- values ---------------------------------------------------------------------------------------


def test_head_is_drawn_with_queries_downwards():
    p = weights(T, S)
    figure = plot.head(p, queries=WORDS[:T], keys=WORDS)
    (axes,) = panels(figure)
    assert isinstance(figure, Figure)
    np.testing.assert_array_equal(scale_values(axes), p)
    assert labels(axes.yaxis) == WORDS[:T]
    assert labels(axes.xaxis) == WORDS
    assert axes.get_ylim() == (T - 0.5, -0.5)
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("query", "key")


def test_argument_is_not_modified():
    p = weights(T, S)
    p[1, 2], p[3, 4] = 0, np.nan
    before = p.copy()
    plot.head(p)
    np.testing.assert_array_equal(p, before)


@pytest.mark.unmeasured
def test_heads_share_one_scale_from_0_to_largest_weight():
    p = weights(H, T, S)
    figure = plot.heads(p)
    assert [axes.get_title() for axes in panels(figure)] == ["head 0", "head 1", "head 2"]
    for axes, one in zip(panels(figure), p, strict=True):
        np.testing.assert_array_equal(scale_values(axes), one)
        assert axes.images[0].get_clim() == (0, p.max())


@pytest.mark.parametrize("count", [2, 5, 7, 11, 13, 17])
def test_lowest_panel_of_each_column_has_key_labels(count):
    figure = plot.heads(weights(count, 3, 2), keys=["a", "b"])
    columns = {}
    for axes in panels(figure):
        columns.setdefault(round(axes.get_position().x0, 6), []).append(axes)
    for column in columns.values():
        lowest = min(column, key=lambda axes: axes.get_position().y0)
        assert [axes for axes in column if labels(axes.xaxis)] == [lowest]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_tensors_that_require_grad(dtype):
    torch = pytest.importorskip("torch")
    p = torch.tensor(weights(H, T, S), dtype=torch.float32, requires_grad=True)
    p = p.to(getattr(torch, dtype))
    expected = p.detach().float().numpy()
    for draw in (plot.heads, plot.error):
        for axes, one in zip(panels(draw(p)), expected, strict=True):
            np.testing.assert_array_equal(scale_values(axes), one)
    np.testing.assert_array_equal(scale_values(panels(plot.head(p[0]))[0]), expected[0])


@pytest.mark.thorough
def test_sizes_of_masks_and_biases_come_from_labels():
    words = [f"w{i}" for i in range(10)]
    sliding = npattn.masks.sliding(2, 1)
    expected = sliding.to_array(10, 7)
    (axes,) = panels(plot.mask(sliding, queries=words, keys=words[:7]))
    np.testing.assert_array_equal(scale_values(axes).filled(0), expected)
    assert labels(axes.yaxis) == words
    (axes,) = panels(plot.mask(sliding, T=10, S=7))
    np.testing.assert_array_equal(scale_values(axes).filled(0), expected)
    one_row = npattn.masks.of(np.arange(7)[None] > 2)  # broadcasts over the queries
    (axes,) = panels(plot.mask(one_row, queries=words, keys=words[:7]))
    assert scale_values(axes).shape == (10, 7)
    alibi = npattn.biases.alibi(H)
    for h, axes in enumerate(panels(plot.heads(alibi, queries=words, keys=words[:7]))):
        np.testing.assert_array_equal(
            scale_values(axes).filled(0), np.ma.masked_equal(alibi.to_array(10, 7)[h], 0).filled(0)
        )


def test_sizes_that_a_mask_lacks_or_has_are_said():
    sliding, words = npattn.masks.sliding(2, 1), ["a", "b", "c"]
    with pytest.raises(OptionError, match="no T and S of its own: pass T= and S=, labels of both"):
        plot.mask(sliding)
    with pytest.raises(OptionError, match="no S of its own"):
        plot.mask(sliding, queries=words)
    with pytest.raises(OptionError, match="no T and S of its own: pass labels of both axes"):
        plot.heads(npattn.biases.alibi(H))
    with pytest.raises(ShapeError, match="queries has 3 labels, must have 5"):
        plot.mask(npattn.masks.causal(5), queries=words, keys=words)
    for mask in (npattn.masks.causal(5), np.ones((5, 5), bool)):
        with pytest.raises(ShapeError, match="T is 3, but mask has T = 5"):
            plot.mask(mask, T=3)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_narrow_dtypes(dtype):
    p = weights(T, S).astype(dtype)
    np.testing.assert_array_equal(scale_values(panels(plot.head(p))[0]), p.astype(float))


def test_negative_weight_extends_the_scale():
    p = weights(T, S)
    p[2, 3] = -0.25
    (axes,) = panels(plot.head(p))
    assert axes.images[0].get_clim() == (-0.25, p.max())


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_head_without_positive_weights(value):
    (axes,) = panels(plot.head(np.full((T, S), value)))
    assert scale_values(axes).mask.all()
    assert axes.images[0].get_clim() == (0, 1)


def test_mask_shows_visible_keys():
    visible = npattn.Problem(
        *(np.zeros((n, 2)) for n in (T, S, S)), causal="bottom_right", window=(1, None)
    ).visible
    figure = plot.mask(visible, title="window")
    (axes,) = panels(figure)
    np.testing.assert_array_equal(~scale_values(axes).mask, visible)
    assert key(figure) == ["may attend", "hidden"]
    assert len(figure.axes) == 1, "a mask needs no scale"


def test_mask_with_heads_has_one_panel_per_head():
    figure = plot.mask(np.random.default_rng(0).random((H, T, S)) < 0.5)
    assert len(panels(figure)) == H


def test_key_of_constant_mask_has_one_entry():
    assert key(plot.mask(np.ones((T, S), bool))) == ["may attend"]
    assert key(plot.mask(np.zeros((T, S), bool))) == ["hidden"]


# --- hidden and wrong elements --------------------------------------------------------------------


def test_exact_0_differs_from_tiny_weight():
    p = weights(T, S)
    p[1, 2], p[3, 4] = 0, 1e-30
    figure = plot.head(p)
    (axes,) = panels(figure)
    assert np.argwhere(scale_values(axes).mask).tolist() == [[1, 2]]
    assert axes.patch.get_hatch()
    assert key(figure) == ["0: hidden"]
    assert numbers(axes)[1, 2].get_text() == "0"
    assert numbers(axes)[3, 4].get_text() == "≈0"


def test_hidden_cell_is_hatched():
    p = np.full((T, S), 0.5)
    p[:, 3:] = 0
    figure = plot.head(p)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[::-1, :, :3].astype(int)
    box = panels(figure)[0].bbox
    middle = (box.x0 + box.x1) / 2
    seen, hidden = (
        pixels[int(box.y0) + 2 : int(box.y1) - 2, int(a) : int(b)].reshape(-1, 3)
        for a, b in ((box.x0 + 4, middle - 60), (middle + 60, box.x1 - 4))
    )
    assert np.ptp(seen, axis=1).max() > 100, "colours"
    assert np.ptp(hidden, axis=1).max() < 10, "greys only"
    assert len(np.unique(hidden, axis=0)) > 3, "with a hatch"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_have_a_cross(value):
    p = weights(T, S)
    p[1, 2] = value
    figure = plot.head(p)
    (axes,) = panels(figure)
    assert crosses(axes) == [(1, 2)]
    assert key(figure) == ["NaN or inf"]
    assert numbers(axes)[1, 2].get_text() == str(value).replace("nan", "NaN")
    assert np.isfinite(axes.images[0].get_clim()).all()


def test_errors_beyond_tolerance_have_a_cross():
    ratio = np.random.default_rng(0).random((T, S))
    ratio[0, 1], ratio[1, 2], ratio[2, 3], ratio[3, 4] = 1, np.nextafter(1, 2), np.inf, np.nan
    figure = plot.error(ratio)
    (axes,) = panels(figure)
    assert crosses(axes) == [(1, 2), (2, 3), (3, 4)]
    assert key(figure) == ["beyond 1: wrong"]
    assert axes.images[0].get_clim() == (0, 1)
    texts = [numbers(axes)[at].get_text() for at in ((0, 1), (1, 2), (2, 3), (3, 4))]
    assert texts == ["1.00", ">1", "inf", "NaN"]


def test_flag_colour_is_not_in_the_scale():
    scale = colormaps["viridis"](np.linspace(0, 1, 257))[:, :3]
    beyond = np.array(to_rgba(FLAG)[:3])
    assert np.linalg.norm(scale - beyond, axis=1).min() > 0.3


@pytest.mark.thorough
@pytest.mark.parametrize("n", [197, 1999])
def test_one_wrong_element_among_many_is_visible(n):
    ratio = np.zeros((n, n)) + 0.1
    ratio[17, 31] = 2
    figure = plot.error(ratio)
    (axes,) = panels(figure)
    assert crosses(axes) == [(17, 31)]
    (size,) = axes.collections[0].get_sizes()
    assert np.sqrt(size) >= CROSS


@pytest.mark.thorough
def test_crosses_of_many_wrong_elements_are_thinned():
    figure = plot.error(np.full((997, 991), 2.0))
    (axes,) = panels(figure)
    assert 1000 < len(crosses(axes)) < 20_000


def test_exact_0_among_errors_is_in_the_key():
    assert key(plot.error(np.zeros((T, S)))) == ["exactly 0"]


# --- numbers and labels ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0.0, "0"),
        (0.004, "≈0"),
        (-0.004, "≈0"),
        (0.125, "0.12"),
        (-0.25, "-0.25"),
        (9.99, "9.99"),
        (9.999, "10"),
        (999.4, "999"),
        (31000.0, "3e4"),
        (1e300, "1e300"),
        (np.inf, "inf"),
        (np.nan, "NaN"),
    ],
)
def test_format_number(x, text):
    assert format_number(x) == text


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_numbers_fit_into_cells():
    for p in (weights(T, S), weights(12, 11, 13), 1e5 * weights(H, 11, 13)):
        figure = plot.heads(p) if p.ndim == 3 else plot.head(p)
        renderer = FigureCanvasAgg(figure).get_renderer()
        for axes in panels(figure):
            cell = axes.bbox.width / p.shape[-1], axes.bbox.height / p.shape[-2]
            assert len(numbers(axes)) == p.shape[-1] * p.shape[-2]
            for (t, s), number in numbers(axes).items():
                box = number.get_window_extent(renderer)
                assert box.width < cell[0]
                assert box.height < cell[1]
                x, y = axes.transData.transform((s, t))
                np.testing.assert_allclose(
                    ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2), (x, y), atol=3
                )


def test_numbers_that_do_not_fit_are_omitted():
    for figure in (plot.heads(weights(2, 53, 59)), plot.head(weights(3, 101))):
        assert len(panels(figure)[0].texts) == 0


def test_numbers_contrast_with_cells():
    p = np.linspace(0.001, 1, T * S).reshape(T, S)
    (axes,) = panels(plot.head(p))
    image = axes.images[0]
    for at, number in numbers(axes).items():
        low, high = sorted(
            (luminance(number.get_color()), luminance(image.cmap(image.norm(p[at]))))
        )
        assert (high + 0.05) / (low + 0.05) > 4.5, at


def test_labels_are_thinned_evenly():
    texts = [f"t{i}" for i in range(197)]
    (axes,) = panels(plot.head(weights(197, 197), queries=texts, keys=texts))
    for axis in (axes.xaxis, axes.yaxis):
        at = axis.get_ticklocs()
        assert 10 < len(at) < 100
        assert len(set(np.diff(at))) == 1
        assert labels(axis) == [texts[int(i)] for i in at]


def test_tokens_are_shown_literally():
    tokens = ["$x$", "a_b", "\n", "  ", "\t<pad>", "é" * 31, ""]
    (axes,) = panels(plot.head(weights(T, S), keys=tokens))
    assert labels(axes.xaxis) == ["$x$", "a_b", "\\n", "␣␣", "\\t<pad>", "é" * 23 + "…", ""]
    assert not any(t.get_parse_math() for t in axes.get_xticklabels())


CASES = {
    "words": lambda: plot.head(weights(T, S), queries=WORDS[:T], keys=WORDS, title="one head"),
    "long": lambda: plot.head(weights(11, 13), queries=LONG[:11], keys=LONG),
    "positions": lambda: plot.head(weights(197, 199)),
    "oblong": lambda: plot.head(weights(2, 997)),
    "tall": lambda: plot.head(weights(997, 2), queries=[f"word {i}" for i in range(997)]),
    "one cell": lambda: plot.head(weights(1, 1), title="a title that is wider than the picture"),
    "heads": lambda: plot.heads(weights(12, 11, 13), queries=LONG[:11], keys=LONG, title="layer 7"),
    "five heads": lambda: plot.heads(weights(5, 11, 13), queries=LONG[:11], keys=LONG),
    "many heads": lambda: plot.heads(weights(31, 5, 3)),
    "narrow heads": lambda: plot.heads(weights(13, 43, 2)),
    "big heads": lambda: plot.heads(weights(4, 197, 197), title="two\nlines"),
    "mask": lambda: plot.mask(np.tri(17, 23, dtype=bool)),
    "error": lambda: plot.error(3 * weights(11, 13) * (weights(11, 13) > 0.05) * 5, title="o"),
    "errors": lambda: plot.error(np.full((2, 3, 1), np.nan), axes=("query", "value column")),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.broad
def test_no_text_overlaps_or_is_cut_off(name):
    figure = CASES[name]()
    assert overlaps(figure) == []
    assert labels(figure.axes[0].yaxis)


def test_overlaps_are_found():
    figure = CASES["words"]()
    figure.set_size_inches(1, 1)
    assert overlaps(figure)


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_figure_is_shown_by_notebooks_without_pyplot():
    figure = plot.head(weights(T, S))
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert getattr(figure, "number", None) is None, "pyplot does not know it"


@pytest.mark.thorough
def test_style_of_user_moves_nothing():
    import matplotlib

    plain = plot.heads(weights(H, T, S))
    style = {"axes.grid": True, "figure.constrained_layout.use": True, "image.origin": "lower"}
    with matplotlib.rc_context(style):
        styled = plot.heads(weights(H, T, S))
        assert overlaps(styled) == []
    for a, b in zip(plain.axes, styled.axes, strict=True):
        np.testing.assert_array_equal(a.get_position(), b.get_position())
    assert plain._repr_png_() == styled._repr_png_()


# --- illegal arguments ----------------------------------------------------------------------------


@pytest.mark.every
@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: plot.head(weights(H, T, S)), ShapeError, "pick one head, such as weights[0]"),
        (lambda: plot.head(weights(2, H, T, S)), ShapeError, "the batch, such as weights[0, 0]"),
        (lambda: plot.heads(weights(2, H, T, S)), ShapeError, "the batch, such as weights[0]"),
        (lambda: plot.heads(weights(T, S)), ShapeError, "with npattn.plot.head"),
        (lambda: plot.head(weights(S)), ShapeError, "has shape (7,), must be (T, S)"),
        (lambda: plot.head(np.zeros((0, S))), ShapeError, "no size of 0"),
        (lambda: plot.error(weights(2, H, T, S)), ShapeError, "ratio[0]"),
        (lambda: plot.mask(np.ones((2, H, T, S), bool)), ShapeError, "mask[0]"),
        (lambda: plot.head(np.ones((T, S), int)), DtypeError, "weights is int64"),
        (lambda: plot.head(np.ones((T, S), complex)), DtypeError, "real and floating"),
        (lambda: plot.head(np.ones((T, S), bool)), DtypeError, "draw it with npattn.plot.mask"),
        (lambda: plot.head([[1.0], [1.0, 2.0]]), DtypeError, "must be a NumPy array"),
        (lambda: plot.head(np.ma.ones((T, S))), DtypeError, "masked array"),
        (lambda: plot.mask(weights(T, S)), DtypeError, "mask is float64, must be bool"),
        (lambda: plot.error(-weights(T, S)), OptionError, "must be ≥ 0"),
        (lambda: plot.error(weights(T, S), axes="ab"), OptionError, "must be two words"),
        (lambda: plot.error(weights(T, S), axes=(1, 2)), OptionError, "axes has 1"),
        (lambda: plot.head(weights(T, S), keys=WORDS[:3]), ShapeError, "keys has 3 labels"),
        (lambda: plot.head(weights(T, S), queries="abcde"), OptionError, "queries is 'abcde'"),
        (lambda: plot.head(weights(T, S), queries=5), OptionError, "queries is 5"),
        (lambda: plot.head(weights(T, S), keys=range(S)), OptionError, "keys[0] is 0"),
        (lambda: plot.error(weights(T, S), rows=range(T)), OptionError, "rows[0] is 0"),
        (lambda: plot.head(weights(T, S), title=3), OptionError, "title is 3"),
    ],
)
def test_illegal_argument_raises(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert message in str(caught.value)


# --- npattn plot ----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Return a function that writes arrays into data.npz of the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(**arrays):
        np.savez("data.npz", **arrays)
        return "data.npz"

    return write


@pytest.fixture
def plot_calls(monkeypatch):
    """Record the calls of npattn.plot by npattn plot: (function, array, options), in order."""
    calls = []

    def spy(name, function):
        def call(array, **options):
            calls.append((name, array, options))
            return function(array, **options)

        return call

    for name in ("head", "heads", "mask", "error"):
        monkeypatch.setattr(maps, name, spy(name, getattr(maps, name)))
    return calls


def run(*words, code=0):
    result = CliRunner().invoke(cli, ["plot", *map(str, words)], terminal_width=300)
    assert result.exit_code == code, result.output + repr(result.exception)
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(("shape", "function"), [((T, S), "head"), ((H, T, S), "heads")])
def test_weights_in_a_file_are_drawn(file, plot_calls, shape, function):
    p = weights(*shape)
    name = file(weights=p, queries=np.array(WORDS[:T]), keys=np.array(WORDS))
    assert run(name, "--out", "fig.png") == "wrote fig.png"
    assert Path("fig.png").read_bytes().startswith(b"\x89PNG")
    ((used, array, options),) = plot_calls
    assert used == function
    np.testing.assert_array_equal(array, p)
    assert options == {"queries": WORDS[:T], "keys": WORDS, "title": None}


@pytest.mark.parametrize("ending", ["pdf", "svg", "PNG"])
def test_the_ending_of_out_is_its_format(file, ending):
    assert run(file(weights=weights(T, S)), "--out", f"fig.{ending}") == f"wrote fig.{ending}"
    assert os.path.getsize(f"fig.{ending}") > 1000


def test_one_head_and_one_sample_can_be_picked(file, plot_calls):
    p = weights(2, 3, H, T, S)
    run(file(weights=p), "--out", "fig.png", "--sample", 4, "--head", 1)
    ((used, array, options),) = plot_calls
    assert (used, options["title"]) == ("head", "head 1")
    np.testing.assert_array_equal(array, p[1, 1, 1])


@pytest.mark.thorough
def test_mask_and_error_in_file_are_drawn(file, plot_calls):
    run(file(mask=np.tri(T, S, dtype=bool)), "--out", "a.png")
    run(file(error=weights(T, S)), "--out", "b.png")
    run(file(error=weights(T, S), queries=np.array(WORDS[:T])), "--out", "c.png")
    assert [used for used, *_ in plot_calls] == ["mask", "error", "error"]
    assert [options["axes"] for *_, options in plot_calls[1:]] == [
        ("row", "column"),
        ("query", "column"),
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stored", "options"),
    [
        ({}, {}),
        ({"causal": "top_left"}, {"causal": "top_left"}),
        ({"mask": np.tri(T, S, dtype=bool)}, {"mask": np.tri(T, S, dtype=bool)}),
        ({"window": [2, 1]}, {"window": (2, 1)}),
        ({"window": [2, np.nan]}, {"window": (2, None)}),
        (
            {"scale": 0.5, "softcap": 3, "sinks": np.ones(H)},
            {"scale": 0.5, "softcap": 3, "sinks": np.ones(H)},
        ),
        ({"bias": weights(H, T, S)}, {"bias": weights(H, T, S)}),
    ],
    ids=["plain", "causal", "mask", "window", "open window", "numbers", "bias"],
)
@pytest.mark.broad
def test_oracle_weights_of_q_k_v_are_drawn(file, plot_calls, stored, options):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((H, n, 2)) for n in (T, S, S))
    run(file(q=q, k=k, v=v, **stored), "--out", "fig.png")
    ((used, array, _),) = plot_calls
    assert used == "heads"
    np.testing.assert_array_equal(array, npattn.forward(q, k, v, **options).weights)


Q, K, V = np.zeros((2, H, T, 2)), np.zeros((2, H, S, 2)), np.zeros((2, H, S, 2))


@pytest.mark.every
@pytest.mark.parametrize(
    ("arrays", "words", "message"),
    [
        ({}, (), "the file holds nothing, must hold weights"),
        ({"o": weights(T, S)}, (), "the file holds o, must hold weights"),
        ({"weights": weights(T, S), "mask": weights(T, S)}, (), "holds weights, mask"),
        ({"q": Q[0], "k": K[0]}, (), "the file holds q, k, must hold q, k, v"),
        ({"q": Q[0], "k": K[0], "v": V[0], "caussal": 1}, (), "caussal"),
        ({"q": Q[0], "k": K[0], "v": V[0], "window": [np.inf, 1]}, (), "window is (inf, "),
        ({"q": Q[0], "k": K[0], "v": V[0], "window": [1.5, 1]}, (), "window is "),
        ({"q": Q[0], "k": K[0], "v": V[0, :, :3]}, (), "v has 3 keys"),
        ({"q": Q, "k": K, "v": V}, (), "pick one of the batch with --sample"),
        ({"weights": weights(2, H, T, S)}, ("--sample", 2), "must be below 2"),
        ({"weights": weights(H, T, S)}, ("--sample", 0), "must have a batch"),
        ({"weights": weights(H, T, S)}, ("--head", H), "--head is 3, must be below 3"),
        ({"weights": weights(T, S)}, ("--head", 0), "must be (H, T, S) for --head"),
        ({"weights": np.ones((T, S), int)}, (), "weights is int64"),
        ({"weights": np.array([[None]])}, (), "cannot be read (Object arrays"),
        ({"weights": weights(T, S), "keys": np.arange(S)}, (), "keys[0] is 0"),
        ({"weights": weights(T, S), "keys": np.array("word")}, (), "keys is 'word'"),
    ],
)
def test_illegal_contents_of_file_are_wrong_usage(file, arrays, words, message):
    assert message in run(file(**arrays), "--out", "fig.png", *words, code=2)
    assert not os.path.exists("fig.png")


def test_damaged_file_is_wrong_usage(file):
    name = file(weights=weights(T, S))
    whole = Path(name).read_bytes()
    middle = bytearray(whole)
    middle[150] ^= 255
    for content in (b"", b"no zip", whole[: len(whole) // 2], bytes(middle)):
        Path(name).write_bytes(content)
        assert "must be an .npz that holds weights" in run(name, "--out", "fig.png", code=2)
    np.save("data.npy", weights(T, S))
    assert "data.npy is no .npz" in run("data.npy", "--out", "fig.png", code=2)
    assert not os.path.exists("fig.png")


def test_unwritable_picture_is_wrong_usage(file):
    name = file(weights=weights(T, S))
    assert "must end in one of" in run(name, "--out", "fig.xyz", code=2)
    assert "must end in one of" in run(name, "--out", "fig", code=2)
    assert "the folder of nowhere/fig.png does not" in run(name, "--out", "nowhere/fig.png", code=2)
    assert "does not exist" in run("nothing.npz", "--out", "fig.png", code=2)
    assert os.listdir() == ["data.npz"]


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_command_line_loads_matplotlib_only_to_draw():
    done = python("import sys, npattn.cli; print('matplotlib' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


@pytest.mark.thorough
def test_plot_does_not_load_pyplot():
    done = python("import sys, npattn.plot; print('matplotlib.pyplot' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


@pytest.mark.thorough
def test_missing_matplotlib_names_the_extra(file):
    block = "import sys; sys.modules['matplotlib'] = None; "
    done = python(block + "import npattn.plot")
    assert "MissingExtraError: npattn.plot needs matplotlib" in done.stderr
    assert "pip install 'npattn[plot]'" in done.stderr
    words = ["npattn", "plot", file(weights=weights(T, S)), "--out", "fig.png"]
    done = python(block + f"sys.argv = {words}; from npattn.__main__ import main; main()")
    assert done.returncode == 2
    assert "pip install 'npattn[plot]'" in done.stderr
    assert "Traceback" not in done.stderr
