"""Details of a cell and of a target as HTML, and how they are packed."""

import base64
import json
import re
import zlib

import pytest

from benchmarks.matrix.cells import cells_of
from benchmarks.matrix.details import Extent, cell_details, pack, target_details
from tests.benchmarks.matrix.made_up import HOSTILE, make_matrix


@pytest.fixture
def failing():
    """A run, its cell of a failure, and the outcome to change."""
    matrix = make_matrix(targets=1, rules=5, dtypes=("float32",), share=1)
    (run,) = matrix["runs"]
    cell = cells_of(run, matrix["rules"])[2]
    return run, cell, run["report"]["outcomes"][2]


def unpack(text):
    return json.loads(zlib.decompress(base64.b64decode(text)).decode("utf-8"))


def test_a_level_of_structure_shows_its_own_cause(failing):
    run, cell, outcome = failing
    [other] = [c for c in run["report"]["causes"] if f"{outcome['rule']}[float32]" in c["rules"]]
    run["report"]["causes"].append(other | {"name": outcome["diagnosis"], "text": "its own"})
    assert re.findall("<h3>Cause</h3><p>(.*?)</p>", cell_details(run, cell)) == ["its own"]


def test_failure_shows_cause_problem_maps_and_script(failing):
    run, cell, outcome = failing
    text = cell_details(run, cell)
    parts = [
        f"<h3>Cause</h3><p>{outcome['diagnosis']}</p>",
        "fails only where T ≠ S",
        "<code>--convention causal=top_left</code>",
        "got 1 &lt;/script&gt;",
        "<figure><figcaption>o at b = 1, h = 0",
        "<figure><figcaption>dq at b = 1, h = 0",
        "q float32 (2, 1, 5, 3)",
        "causal True",
        "Recipe(lead=(2,)",
        '<button type="button" class="copy">',
        "import numpy as np",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text.count("<td ") == 2 * 3 * 15
    assert HOSTILE[:9] not in text


def test_less_is_shown_where_there_is_less_room(failing):
    run, cell, outcome = failing
    short = cell_details(run, cell, Extent(1, len(outcome["script"]) - 1))
    assert short.count("<figure>") == 1
    assert "import numpy" not in short
    assert "npattn check project0.target0 --dtype float32 --only rule-number-2 --exam" in short
    assert f"its script of {len(outcome['script'])} characters" in short


def test_long_messages_are_cut(failing):
    run, cell, outcome = failing
    outcome["message"] = "\n".join(f"line {i}" for i in range(11))
    text = cell_details(run, cell)
    assert "line 5\n… and 5 more lines" in text
    assert "line 6" not in text


def test_failure_that_nothing_explains_says_so(failing):
    run, cell, outcome = failing
    run["report"]["causes"] = []
    run["report"]["not_promised"] = {outcome["rule"]: "the manual, page 7"}
    run["report"]["expected"] = {outcome["rule"]: "known"}
    outcome |= {"script": "", "problem": None, "recipe": None, "comparisons": []}
    text = cell_details(run, cell)
    assert "No known cause reproduces it." in text
    assert "Not promised: the manual, page 7" in text
    assert "Expected: known" in text
    assert not re.search("figure|Smallest|copy|<pre><code></code>", text)


def test_other_cells_say_what_was_tried(failing):
    run, _, outcome = failing
    outcome |= {"status": "passed", "worst": 0.25, "message": ""}
    rule = {"name": outcome["rule"], "level": outcome["level"]}
    text = cell_details(run, cells_of(run, [rule])[0])
    assert (
        text == "<p>20 problems were tried.</p><p>The largest error is 0.25 of its tolerance.</p>"
    )
    outcome |= {"status": "not applicable", "examples": 0, "message": "refuses K < H"}
    assert cell_details(run, cells_of(run, [rule])[0]) == "<p>refuses K &lt; H</p>"
    lost = {"state": "not run", "why": "needs CUDA", "report": None}
    assert cell_details(lost, cells_of(lost, [rule])[0]) == "<p>needs CUDA</p>"


def test_target_says_versions_causes_and_what_it_refuses(failing):
    run, _, _ = failing
    matrix = make_matrix(targets=1, rules=5)
    lost = {"dtype": "float64", "state": "not run", "why": "needs CUDA", "report": None}
    text = target_details(matrix["targets"][0], [run, lost])
    for part in ("Implementation number 0", "package0 1.20", "device cpu", "K &lt; H: refused"):
        assert part in text
    assert "<h4>Causes of failures</h4><ul><li>" in text
    assert text.endswith("<h3>float64</h3><p>not run: needs CUDA</p>")


def test_packed_details_come_out_as_they_were():
    content = {"cells": [["<p>½ ≠ ∞</p>", ""], []], "target": HOSTILE.replace("\ud800", "")}
    text = pack(content)
    assert unpack(text) == content
    assert re.fullmatch("[A-Za-z0-9+/=]+", text)
