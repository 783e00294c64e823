"""The pictures of the pages, drawn when the site is built.

Each function draws the picture of its name. Masks and weights are drawn by `npattn.plot`; numbers
come from npattn, or from a table of the page that shows them.
"""

import json
import re
from collections import Counter
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import npattn
from npattn import biases, masks, plot, positions
from npattn.testing.levels import LEVELS, REQUIRED
from npattn.testing.rules import PROPERTIES
from npattn.testing.tolerance import Rounding, allowed
from npattn.variants import differential, gathered, linear

DOCS = Path(__file__).parent
BLUE, RED, GREY = "#3b6ea5", "#c0392b", "#9aa4af"


def normal(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def axes(columns, rows=1, size=(3.3, 3)):
    if axes.narrow:  # below each other, or in two columns where they are many
        count = rows * columns
        columns, size = (2, (2.6, 3)) if count > 4 else (1, (min(size[0], 4), size[1]))
        rows = count // columns
    # A layout that is computed anew for each heat map takes ten times as long.
    figure = Figure(figsize=(columns * size[0], rows * size[1]))
    figure.subplots_adjust(wspace=0.35, hspace=0.6)
    return list(np.ravel(figure.subplots(rows, columns, squeeze=False)))


axes.narrow = False  # True while the pictures of a narrow screen are drawn


def maps(panels):
    """Draw masks (bool), weights, and what has both signs, each below its title."""
    columns = min(4, len(panels))
    places = axes(columns, -(-len(panels) // columns))
    for place, (title, array) in zip(places, panels.items(), strict=True):
        if array.dtype == bool or array.min() >= 0:
            draw = plot.mask if array.dtype == bool else plot.head
            draw(array, ax=place, title=title)
            continue
        limit = abs(array).max()
        image = place.imshow(array, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
        place.figure.colorbar(image, ax=place)
        place.set_yticks(range(len(array)))
        place.set_title(title, fontsize=10)
    return places[0].figure


def bars(words, parts):
    """Draw rows of one or more parts, {label: {name: number}}, behind each other."""
    names = list(next(iter(parts.values())))[::-1]
    [ax] = axes(1, size=(7, 1 + 0.3 * len(names)))
    left = np.zeros(len(names))
    for (label, values), colour in zip(parts.items(), (BLUE, GREY), strict=False):
        row = np.array([values[name] for name in names])
        shown = ax.barh(names, row, left=left, color=colour, label=label)
        ax.bar_label(shown, [n or "" for n in row], label_type="center", color="white")
        left += row
    ax.set_xlabel(words)
    ax.legend(frameon=False)
    return ax.figure


def lines(curves, ax=None, scale="log", **words):
    """Draw curves {label: (x, y)}."""
    [ax] = [ax] if ax else axes(1, size=(6.5, 3.4))
    for label, (x, y) in curves.items():
        ax.plot(x, y, marker="." if len(x) < 60 else "", label=label)
    ax.set(xscale="log", yscale=scale, **words)
    ax.legend(frameon=False, fontsize=8)
    ax.grid(alpha=0.3)
    return ax.figure


def rows(page, pattern):
    """Return what a pattern finds in the lines of a page."""
    return re.findall(pattern, (DOCS / page).read_text("utf-8"), re.M)


def home():
    q, k, v = normal((5, 8), (8, 8), (8, 8))
    kinds = ("bottom_right", "top_left")
    want, got = (npattn.forward(q, k, v, causal=kind).weights for kind in kinds)
    return maps({"exact": want, "the function": got, "difference": got - want})


def first_check():
    kinds = ("top_left", "bottom_right")
    got, want = (masks.causal(3, 5, alignment=kind).to_array() for kind in kinds)
    return maps({"np.tri: top left": got, "the default": want, "differ": got != want})


PARTS = {
    "FAILED": "the verdict, and what is refused",
    "the ": "the cause: which step is wrong, and where",
    "  fails": "the pair: the same problem fails and passes",
    "  p at": "the matrix: the first wrong quantity",
    "  agreement": "the rule that failed: got, want, allowed",
    "FAILED: 1 failed": "the verdict again",
}
"""Beginning of the first line of each part of the README's report → what it is."""


def reading():
    """The README's report, with a mark and a name at each of its parts."""
    text = (DOCS.parent / "README.md").read_text("utf-8")
    shown = re.search(r"npattn check my_kernel.py:attention -x\n(.*?)```", text, re.DOTALL)[1]
    lines, starts = shown.splitlines(), []
    for begin in PARTS:
        after = starts[-1] + 1 if starts else 0
        starts.append(next(i for i in range(after, len(lines)) if lines[i].startswith(begin)))
    width = 44 if axes.narrow else 84
    [ax] = axes(1, size=(4.4, 3.4) if axes.narrow else (10.5, 3.6))
    ax.set(xlim=(0, width if axes.narrow else 1.5 * width), ylim=(len(lines) + 6 * axes.narrow, -1))
    ax.set_axis_off()
    row = 0
    for i, line in enumerate(lines):
        if i in starts and axes.narrow:  # above the part; else beside it
            ax.text(0, row, [*PARTS.values()][starts.index(i)], size=7, color=RED)
            row += 1
        cut = line if len(line) <= width else f"{line[: width - 1]}…"
        ax.text(1, row, cut, family="monospace", size=7)
        if not axes.narrow:
            ends = [*starts[1:], len(lines)]
            part = next(n for n, end in enumerate(ends) if i < end)
            ax.plot([width, width], [row - 0.7, row + 0.2], color=(BLUE, RED)[part % 2], lw=3)
            if i in starts:
                ax.text(width + 1, row, [*PARTS.values()][part], size=9)
        row += 1
    ax.plot([0, 0], [-0.7, row - 0.8], color=GREY, lw=2)
    return ax.figure


def levels():
    counts = Counter(rule.level for rule in PROPERTIES.values())
    must = {level: counts[level] * (level in REQUIRED) for level in LEVELS}
    shown = {level: counts[level] - must[level] for level in LEVELS}
    return bars("rules", {"must pass": must, "shown": shown})


def adapting():
    lengths, pages = (4, 2, 3), ((2, 0), (4,), (1, 5))
    padded, slots = np.full((3, 5), 3), np.full((6, 2), 3)
    for b, n in enumerate(lengths):
        padded[b, :n] = b
        for i in range(n):
            slots[pages[b][i // 2], i % 2] = b
    packed = np.repeat(range(3), lengths)[None]
    titles = "padded, and a mask", "packed: offsets 0 4 6 9", "pages: [2 0] [4] [1 5]"
    places = axes(3, size=(3.4, 2))
    colours = ListedColormap(["#66c2a5", "#fc8d62", "#8da0cb", "#eeeeee"])
    for ax, array, title in zip(places, (padded, packed, slots), titles, strict=True):
        ax.pcolormesh(array[::-1], cmap=colours, vmin=0, vmax=3, edgecolor="white", linewidth=2)
        ax.set_title(title, fontsize=10)
        ax.set_axis_off()
        ax.set_aspect("equal")
    for n in range(6):
        places[2].text(-0.3, 5.5 - n, f"{n}", ha="right", va="center")
    return places[0].figure


def diff():
    a, b = masks.window(2, 0, alignment="bottom_right"), masks.window(1, 0, alignment="top_left")
    a, b = (mask.to_array(T=4, S=6) for mask in (a, b))
    return maps({"A: 2 before, bottom right": a, "B: 1 before, top left": b, "differ": a != b})


def spot():
    share = np.logspace(-4, -0.3, 60)
    curves = {f"{n} rows": (share, 1 - (1 - share) ** n) for n in (10, 100, 1000)}
    words = {"xlabel": "share of the rows that are wrong", "ylabel": "chance to see one"}
    return lines(curves, scale="linear", **words)


def semantics():
    q, k, v = normal((4, 8), (6, 8), (6, 8), seed=2)
    s = q @ k.T / np.sqrt(8)
    bias = biases.alibi([0.5]).to_array(T=4, S=6)[0]
    fwd = npattn.forward(q, k, v, causal="bottom_right", bias=bias)
    seen = np.broadcast_to(fwd.problem.visible, s.shape)
    panels = {"scale · q kᵀ [1]": s, "+ bias [4]": s + bias, "visible [5–7]": seen}
    return maps(panels | {"p [8]": fwd.weights})


def rules():
    path = DOCS.parent / "npattn" / "testing" / "rules" / "findings.json"
    known = json.loads(path.read_text("utf-8"))
    parts = {
        kind: Counter({r: sum(f["kind"] == kind for f in found) for r, found in known.items()})
        for kind in ("bug", "limit")
    }
    most = [name for name, _ in (parts["bug"] + parts["limit"]).most_common(12)]
    return bars("findings", {f"{k}s": {n: c[n] for n in most} for k, c in parts.items()})


def every_mask():
    layout = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]], dtype=bool)
    kinds = {
        "causal()": masks.causal(),
        "window(2, 1)": masks.window(2, 1),
        "sliding(2, 1)": masks.sliding(2, 1),
        "dilated(4, 0, 2)": masks.dilated(4, 0, 2),
        "strided(3)": masks.strided(3),
        "chunked(3)": masks.chunked(3),
        "global_tokens(1)": masks.global_tokens(1),
        "tree([−1, 0, 0, 1, …])": masks.tree([-1, 0, 0, 1, 1, 2, 2, 3, 3]),
        "lengths(6)": masks.lengths(6),
        "documents([0, 0, 0, 0, 1, …])": masks.documents([0] * 4 + [1] * 3 + [2] * 2),
        "prefix(4)": masks.prefix(4),
        "blocks(layout, 3)": masks.blocks(layout, 3),
    }
    arrays = {name: mask.to_array(T=9, S=9) for name, mask in kinds.items()}
    return maps({name: np.broadcast_to(array, (9, 9)) for name, array in arrays.items()})


def turns():
    left, right = axes(2, size=(4.4, 3))
    at = np.arange(64)
    for i in range(4):
        left.plot(np.cos(at * 10000 ** (-i / 8)), label=f"pair {i}")
    left.set(xlabel="position", ylabel="cos θ", title="rope: each pair at its own speed")
    left.legend(frameon=False, ncols=2)
    right.imshow(positions.sinusoidal(64, 32).T, aspect="auto", cmap="RdBu_r")
    right.set(xlabel="position", ylabel="feature", title="sinusoidal")
    return left.figure


def packed():
    documents = masks.documents([0] * 5 + [1] * 3 + [2] * 4)
    kinds = {"offsets 0, 5, 8, 12": documents, "causal in each": documents & masks.causal()}
    return maps({name: mask.to_array(T=12, S=12) for name, mask in kinds.items()})


def shared():
    panels = {}
    for name, K in (("MHA", 8), ("GQA", 2), ("MQA", 1)):
        panels[f"{name}: K = {K}"] = np.arange(K) == np.arange(8)[:, None] * K // 8
    figure = maps(panels)
    for ax in figure.axes:
        ax.set(xlabel="key/value head", ylabel="query head")
    return figure


def chosen():
    q, k = normal((8, 8), (12, 8))
    lists = gathered.top_k(q @ k.T, 4)
    return maps({"scores": q @ k.T, "the 4 best keys of each": gathered.index_mask(lists, 12)})


def decays():
    ones, eye = np.ones((1, 9, 1)), np.eye(9)[None]
    how = {"causal": True, "feature_map": "identity", "normalise": False, "scale": 1.0}
    logs = {f"decay {a:g}": np.full((1, 9, 1), np.log(a)) for a in (1, 0.75, 0.5)}
    made = {n: linear.forward(ones, ones, eye, log_decay=a, **how) for n, a in logs.items()}
    return maps({name: fwd.out[0] for name, fwd in made.items()})


def two_softmaxes():
    q1, q2, k1, k2 = normal((1, 5, 8), (1, 5, 8), (1, 7, 8), (1, 7, 8), seed=3)
    eye = np.eye(7)[None]
    first, second = (npattn.forward(q, k, eye).weights[0] for q, k in ((q1, k1), (q2, k2)))
    both = differential.forward(q1, k1, q2, k2, eye, lam=0.5).out[0]
    return maps({"P₁": first, "P₂": second, "P₁ − 0.5 P₂": both})


def digits():
    offsets, errors = np.logspace(0, 8, 9), []
    q, k, v = normal((16, 8), (16, 8), (16, 8))
    for offset in offsets:
        want = npattn.forward(q, k, v + offset, precision="extended").out
        errors.append(abs(npattn.forward(q, k, v + offset, engine="dense").out - want).max())
    curves = {"float64": errors, "extended, rounded once": np.spacing(offsets) / 2}
    words = {"xlabel": "size of the values", "ylabel": "largest error of o"}
    return lines({name: (offsets, y) for name, y in curves.items()}, **words)


def taylor():
    q, k, v, d = normal((5, 8), (7, 8), (7, 8), (5, 8))
    fwd, h = npattn.forward(q, k, v), np.logspace(-9, 0, 28)
    slope = np.vdot(npattn.backward(fwd, np.ones_like(fwd.out)).q, d)
    change = np.array([npattn.attention(q + x * d, k, v).sum() for x in h]) - fwd.out.sum()
    gaps = {"right gradient: falls as h²": slope, "one per cent off: as h": 1.01 * slope}
    curves = {name: (h, abs(change - h * g) + 1e-17) for name, g in gaps.items()}
    return lines(curves, xlabel="step h", ylabel="|f(x + h d) − f(x) − h g·d|")


def drawn():
    q, k, v = normal((3, 5, 8), (3, 5, 8), (3, 5, 8))
    words = ["The", "quick", "brown", "fox", "jumps"]
    places = axes(3, size=(4, 3)) if axes.narrow else None
    weights = npattn.forward(q, k, v, causal=True).weights
    return plot.heads(weights, queries=words, keys=words, ax=places)


def tolerance():
    q, k, v = (x.astype(np.float32) for x in normal((1, 64, 32), (1, 96, 32), (1, 96, 32)))
    p = np.exp(q @ k.swapaxes(-1, -2) * np.float32(32**-0.5))
    error = abs(p @ v / p.sum(-1, keepdims=True) - npattn.attention(q, k, v)).ravel()
    bound = allowed(npattn.Problem(q, k, v), np.float32, Rounding.upcast())["o"].ravel()
    left, right = axes(2, size=(4.4, 3))
    left.loglog(bound, np.maximum(error, 1e-10), ".", ms=2)
    left.loglog(bound, bound, color=RED, label="error = tolerance")
    left.set(xlabel="tolerance of an element of o", ylabel="its error")
    left.xaxis.set_minor_formatter("")
    left.legend(frameon=False, loc="lower right")
    right.hist(error / bound, bins=50, color=BLUE)
    right.axvline(1, color=RED)
    right.set(xlabel="error / tolerance", ylabel="elements")
    return left.figure


def diagnosis():
    q, k = normal((6, 8), (8, 8), seed=1)
    want = npattn.forward(q, k, np.eye(8)).weights
    got = np.exp(q @ k.T * np.where(np.arange(8) < 4, 8**-0.5, 1 / 8))
    got /= got.sum(-1, keepdims=True)
    ratio = np.log(got / want)
    ratio = np.where(np.arange(8) < 4, 0.0, ratio - ratio[:, :1])
    return maps({"read with v = I": got, "exact": want, "log of the ratio": ratio})


def detection():
    pattern = r"^\| normal \| bf16 \| 48 \| (.*) \|$"
    cells = [cell.split()[0] for cell in rows("detection.md", pattern)[0].split(" | ")]
    names = ["hard", "sharp", "aggregate", "any of them", "or in lse"]
    names += ["assert_close", "flash-attention", "atol"]
    found = dict(zip(names, map(int, cells), strict=False))
    ours = {name: n * (i < 5) for i, (name, n) in enumerate(found.items())}
    others = {name: n - ours[name] for name, n in found.items()}
    return bars("of 48 mistakes, in every draw", {"npattn": ours, "rules in use": others})


def performance():
    pattern = r"^(plain|causal)  +(float\d\d) +(1024|2048|4096) +([\d.]+) +([\d.]+) "
    curves = {}
    for case, dtype, T, *numbers in rows("performance.md", pattern)[:12]:
        curves.setdefault(f"{case} {dtype}", []).append((int(T), *map(float, numbers)))
    left, right = axes(2, size=(4.6, 3.2))
    table = {name: np.array(points).T for name, points in curves.items()}
    lines({n: (T, ms) for n, (T, ms, _) in table.items()}, left, xlabel="T = S", ylabel="ms")
    times = {n: (T, torch) for n, (T, _, torch) in table.items()}
    return lines(times, right, "linear", xlabel="T = S", ylabel="torch / npattn")


def jacobian():
    [p] = npattn.forward(*normal((1, 8), (7, 8), (7, 8), seed=4)).weights
    return maps({"p": p[None], "∂p/∂s = diag(p) − p pᵀ": np.diag(p) - np.outer(p, p)})


def tiled():
    visible = masks.window(9, 0).to_array(T=16, S=16)
    figure = maps({"a window of 9 keys before": visible})
    for t, s in np.ndindex(4, 4):
        part = visible[4 * t : 4 * t + 4, 4 * s : 4 * s + 4]
        colour = "#2ca02c" if part.all() else RED if part.any() else GREY
        place = (4 * s - 0.45, 4 * t - 0.45)
        figure.axes[0].add_patch(Rectangle(place, 3.9, 3.9, fill=False, ec=colour, lw=2.5))
    return figure


def matrix():
    lines_of = rows("_static/matrix.html", r'<tr data-dtype="[^"]*"><th scope="row">.*$')
    found = [re.findall(r'<td class="?(\w)(?! sum)', line) for line in lines_of]
    words = {"p": "passed", "f": "failed", "w": "not required", "d": "not promised"}
    words |= {"r": "refused", "l": "no such option", "x": "raised or crashed"}
    colours = ["#9bd0a8", RED, "#e8a09a", "#f0cf7a", "#c9ced6", "#eef0f2", "#4a1772"]
    number = {"c": 6, "t": 6} | {state: n for n, state in enumerate(words)}
    cells = [[number.get(state, 5) for state in row] for row in found]
    cells = [row for row in cells if len(row) == len(cells[0])]
    [ax] = axes(1, size=(9, 5))
    ax.imshow(
        cells, cmap=ListedColormap(colours), vmin=0, vmax=6, aspect="auto", interpolation="none"
    )
    for label, colour in zip(words.values(), colours, strict=True):
        ax.plot([], [], "s", color=colour, label=label)
    ax.set(xlabel="rules", ylabel=f"{len(cells)} targets and dtypes", xticks=[], yticks=[])
    columns = 2 if axes.narrow else 7
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.05)}
    ax.legend(**below, ncols=columns, frameon=False, fontsize=8)
    return ax.figure


def findings():
    parts, system = {"bug": Counter(), "limit": Counter()}, ""
    for title, kind in rows("findings.md", r"^## (\D+) \d|^\| (bug|limit) \|"):
        system = title or system
        if kind:
            parts[kind][system] += 1
    names = sorted(parts["bug"] | parts["limit"], key=lambda n: -parts["bug"][n])
    return bars("findings", {f"{k}s": {n: c[n] for n in names} for k, c in parts.items()})


PICTURES = {
    draw.__name__: draw
    for draw in (
        *(home, first_check, reading, levels, adapting, diff, spot),
        *(semantics, rules, every_mask, turns, packed, shared, chosen, decays),
        *(two_softmaxes, digits, taylor, drawn, tolerance, diagnosis, detection),
        *(performance, jacobian, tiled, matrix, findings),
    )
}


def write(folder):
    """Draw them all, and once more for narrow screens."""
    with matplotlib.rc_context({"svg.hashsalt": "npattn"}):
        for axes.narrow, place in ((True, folder / "narrow"), (False, folder)):
            place.mkdir(parents=True, exist_ok=True)
            for name, draw in PICTURES.items():
                path = place / f"{name}.svg"
                draw().savefig(path, bbox_inches="tight", metadata={"Date": None})
