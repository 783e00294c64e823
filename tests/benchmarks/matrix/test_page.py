"""The page of a matrix: a cell for each rule and run, filters, comparison, and nothing loaded."""

import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest

import benchmarks.matrix.page as module
from benchmarks.matrix.cells import STATES
from benchmarks.matrix.page import page
from benchmarks.matrix.result import Matrix, Row, Run, list_rules
from npattn.testing import check
from npattn.testing.levels import LEVELS
from npattn.testing.report.page import STYLE
from npattn.testing.rules import PROPERTIES
from npattn.testing.targets import TARGETS
from npattn.testing.targets.numpy import flash
from tests.benchmarks.matrix.made_up import make_matrix
from tests.benchmarks.matrix.test_details import unpack
from tests.browser import PATH

TARGET_COUNT, RULE_COUNT = 7, 13
FULL = 60 * 2 * 80
"""Cells of the page that must be below `MOST`: targets × dtypes × rules."""
ON_H200 = {"device": "H200"}
SHARE = 0.1
"""Failures among its cells."""
NEWER = {"page-ids"}
"""Rules that were not asked yet when the committed page was made."""
COMMITTED = Path(__file__).parents[3] / "docs" / "_static" / "matrix.html"
"""The page of the known targets, which the documentation shows."""


@pytest.fixture(scope="module")
def matrix():
    return make_matrix(TARGET_COUNT, RULE_COUNT)


@pytest.fixture(scope="module")
def text(matrix):
    return page(matrix)


@pytest.fixture(scope="module")
def real():
    def f(q, k, v):
        return flash(q, k, v) * np.float32(np.nan)

    only = ["agreement-o", "views"]
    report = check(f, examples=1, only=only[:1], framework="numpy").as_dict()
    runs = (
        Run("numpy.naive", "float32", "done", "", 0.5, report),
        Run("numpy.flash", "float32", "not run", "was not asked"),
    )
    targets = tuple(Row.of(TARGETS[run.target], {"npattn": "3", "numpy": "2"}) for run in runs)
    return Matrix({"examples": 1}, list_rules(only, runs), targets, runs)


def data_of(text, name):
    return json.loads(re.search(f'id="{name}">(.*?)</script>', text)[1])


def test_every_rule_of_every_run_has_a_cell(text, matrix):
    levels = {rule["level"] for rule in matrix["rules"]}
    judged = [run for run in matrix["runs"] if run["report"]]
    assert len(judged) < len(matrix["runs"]) == 2 * TARGET_COUNT
    assert text.count("<td class=") == len(judged) * (RULE_COUNT + len(levels)) + len(
        matrix["runs"]
    ) - len(judged)
    assert text.count("<tr data-dtype=") == len(matrix["runs"])
    assert len(re.findall(r'data-section="8, 13"', text)) == RULE_COUNT
    places = [text.index(f'data-level="{level}"') for level in LEVELS]
    assert places == sorted(places)


def test_cells_have_symbols_and_ratios(real):
    text = page(real.as_dict())
    row = text[text.index('<tr data-dtype="float32"') :].partition("</tr>")[0]
    cells = re.findall(r'<td class="?(\w)( sum)?"?(?: data-c=(\d+))?>([^<]*)<?', row)
    states = {state.key: state.symbol for state in STATES.values()}
    assert all(states[key] == symbol for key, _, _, symbol in cells)
    assert [key for key, whole, _, _ in cells if not whole] == ["f", "e"]
    (outcome,) = real.runs[0].report["outcomes"]
    assert [data_of(text, "causes")[int(c)] for _, _, c, _ in cells if c] == [outcome["diagnosis"]]
    assert row.count("<i>∞</i>") == 1
    assert "<i>1/1</i>" in row


def test_real_page_names_target_project_version_and_words(real, tmp_path):
    real.to_html(tmp_path / "matrix.html")
    text = unescape((tmp_path / "matrix.html").read_text("utf-8"))
    parts = ("0 of the 1 that ran", '<span class="stick">npattn</span>', ">npattn 3</span>")
    for part in (*parts, real.targets[0].words, "○ not run: was not asked"):
        assert part in text
    block = unpack(re.search('id="block-0">(.*?)</script>', text)[1])
    details = unescape(block["cells"][0][0])
    assert real.runs[0].report["causes"][0]["text"] in details
    assert details.count('<table class="map"') == 3
    assert "npattn.Problem(" in details


def test_projects_that_did_not_run_come_last():
    matrix = make_matrix(targets=7)  # of three projects
    for run in matrix["runs"]:
        if run["target"].startswith("project0"):
            run |= {"state": "not run", "why": "needs CUDA", "report": None}
    projects = re.findall(r'<tbody class="project" data-project="(\w+)"', page(matrix))
    assert projects == ["project1", "project2", "project0"]


def test_page_loads_nothing_and_escapes_texts(text):
    assert not re.search(r"\b(?:src=|href=(?!.\.\./index.html)|@import|url\(|fetch\()", text)
    assert "http" not in text
    assert "<script>throw" not in text
    assert "&lt;script&gt;throw" in text
    assert r"\x1b[2J\ud800" in text


def test_causes_are_written_once(text):
    causes = data_of(text, "causes")
    assert len(causes) == len(set(causes)) == 3
    assert all(text.count(json.dumps(cause)) == 1 for cause in causes)


def test_page_of_many_targets_is_small():
    """Of 60 targets in 2 dtypes by 80 rules, a tenth failing: what grows, scaled from 2 targets."""
    nothing = len(page(make_matrix(0, 79)).encode())
    some = len(page(make_matrix(2, 79, share=SHARE)).encode())
    assert nothing + (some - nothing) * FULL / (4 * 79) < module.MOST


def test_page_with_too_much_shows_less_of_each_failure(matrix, text, monkeypatch):
    monkeypatch.setattr(module, "MOST", len(text.encode()) - 1)
    less = page(matrix)
    assert len(less.encode()) < len(text.encode())
    blocks = [unpack(x) for x in re.findall(r'id="block-\d+">(.*?)</script>', less)]
    assert len(blocks) == TARGET_COUNT
    assert all(cell.count("<figure>") <= 1 for x in blocks for row in x["cells"] for cell in row)
    monkeypatch.setattr(module, "MOST", 0)
    assert "<figure>" not in "".join(
        cell
        for x in re.findall(r'id="block-\d+">(.*?)</script>', page(matrix))
        for row in unpack(x)["cells"]
        for cell in row
    )


# --- colours --------------------------------------------------------------------------------------


def luminance(colour):
    """Relative luminance, as WCAG 2 defines it."""
    digits = colour * 2 if len(colour) == 3 else colour
    shares = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_their_ground(text, scheme):
    """The contrast is at least 4.5, as WCAG 2 asks at level AA."""
    style = text[text.index("<style>") : text.index("</style>")]
    colours = {}
    for block in re.findall(r":root \{(.*?)\}", style, re.S)[: 4 if scheme == "dark" else None]:
        found = dict(re.findall(r"--([\w-]+): #(\w+)", block))
        colours |= {n: x for n, x in found.items() if scheme == "dark" or n not in colours}
    letters = {rule for rule in colours if f"{rule}-ink" in colours}
    assert letters == {"p", "f", "w", "d", "c", "r", "l"}
    for letter in letters:
        assert contrast(colours[letter], colours[f"{letter}-ink"]) >= 4.5, letter
    for ink in ("ink", "dim", "hover"):
        for ground in ("paper", "soft"):
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)


def test_every_state_has_a_colour():
    style = module.resources.files("benchmarks.matrix").joinpath("page.css").read_text("utf-8")
    lines = [line for line in style.splitlines() if "background: var(--" in line]
    for state in STATES.values():
        assert any(re.search(rf"\.{state.key}\b", line) for line in lines), state.name
    assert "--paper" in STYLE


def test_committed_page_is_small_and_loads_nothing():
    text = COMMITTED.read_text("utf-8")
    assert len(text.encode()) < module.MOST
    assert not re.search(r"<[^>]+\b(?:src=|href=(?!.\.\./index.html))|@import|url\(|fetch\(", text)
    names = set(re.findall(r'data-target="([\w.@-]+)"', text))
    assert names <= set(TARGETS)
    assert len(names) >= 60
    assert {name for name in PROPERTIES if name not in text} <= NEWER


# --- in a browser ---------------------------------------------------------------------------------

STEPS = """
  const wait = async (ready) => { while (!ready()) await new Promise((go) => setTimeout(go, 20)); };
  const title = byId('panel-title');
  const shownRows = () => rows.filter((row) => row.tr.offsetParent).length;
  const press = (key) => document.activeElement.dispatchEvent(
    new KeyboardEvent('keydown', { key, bubbles: true }));
  const change = (name, value) => {
    const field = byId(name);
    if (field.type === 'checkbox') field.checked = value; else field.value = value;
    field.dispatchEvent(new Event('input', { bubbles: true }));
  };
  const seen = { fits: document.documentElement.scrollWidth <= innerWidth };
  if (folded.size) {
    seen.folded = document.querySelectorAll('.levels [aria-expanded="false"]').length;
    seen.summaries = rows[0].cells.filter((cell) => cell.offsetParent).length;
    for (const level of [...folded]) fold(level);
  }

  const failing = document.querySelector('td[data-c]');
  failing.click();
  await wait(() => panel.open);
  seen.clicked = title.textContent;
  seen.cause = byId('panel-body').textContent.includes(CAUSES[failing.dataset.c]);
  seen.maps = document.querySelector('#panel .map').getBoundingClientRect().height;
  seen.script = document.querySelector('#panel .copy + pre').textContent.includes('import numpy');
  seen.hash = location.hash;
  byId('after').click();
  await wait(() => title.textContent !== seen.clicked);
  const next = opened;
  panel.close();
  await wait(() => document.activeElement === next);
  press('Enter');
  await wait(() => panel.open);
  seen.entered = title.textContent !== seen.clicked && location.hash.includes('rule-number');
  panel.close();
  await wait(() => !location.hash);
  for (const key of ['Home', 'ArrowRight', 'ArrowRight']) press(key);
  seen.place = rows.find((x) => x.cells.includes(document.activeElement))
    .cells.indexOf(document.activeElement) === shownColumns[2].i;
  seen.stops = grid.querySelectorAll('[tabindex="0"]').length;
  seen.label = failing.getAttribute('aria-label');

  change('project', rows[0].project);
  seen.project = shownRows() === rows.filter((row) => row.project === rows[0].project).length;
  change('project', '');
  change('dtype', 'float64');
  seen.dtype = shownRows() === rows.length / 2;
  change('dtype', '');
  change('level', 'edges');
  seen.level = shownColumns.every((column) => column.level === 'edges') && shownColumns.length;
  change('level', '');
  change('rule', 'number-1');
  seen.rule = shownColumns.map((column) => column.rule).every((name) => name.includes('number-1'));
  change('rule', '');
  const before = shownColumns.length;
  change('target', rows[0].target);
  change('only', true);
  seen.only = 0 < shownColumns.length && shownColumns.length < before
    && shownColumns.every((column) => stateOf(rows[0], column) !== stateOf(rows[1], column));
  change('target', '');
  change('only', false);

  change('compare', 'project0.target0');
  change('with', 'project1.target5');
  seen.compared = location.hash;
  seen.words = byId('differences').textContent;
  seen.lines = document.querySelectorAll('#differences tbody tr').length;
  const expected = differences('project0.target0', 'project1.target5');
  seen.expected = expected.length;
  seen.rows = shownRows();
  return seen;
"""


@pytest.mark.skipif(PATH is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [360, 1100])
def test_browser_opens_filters_and_compares(text, browser, width):
    page = browser.open(text, width=width)
    seen = page.run(STEPS)
    assert page.complaints == []
    assert seen.pop("folded", 6) == seen.pop("summaries", 6) == 6
    assert seen.pop("fits")
    assert seen.pop("maps") > 5
    assert seen.pop("hash").startswith("#project0.target0/float64/rule-number-")
    assert seen.pop("compared") == "#compare/project0.target0/project1.target5"
    words = seen.pop("words")
    assert "Only project0.target0: leaves hidden keys out of the softmax." in words
    assert "Only project1.target5: adds −1e9 to hidden scores." in words
    assert "project1.target5 breaks, and project0.target0 does not: rule-number-" in words
    assert seen.pop("lines") == seen.pop("expected") > 1
    assert seen.pop("rows") == 4
    assert seen.pop("stops") == 1
    assert re.match(
        r"project0\.target0 float64, rule-number-\d+: .* tolerance\)", seen.pop("label")
    )
    assert all(seen.values()), seen


@pytest.mark.skipif(PATH is None, reason="needs Chromium")
def test_address_opens_a_cell(text, browser):
    page = browser.open(text, dark=True, fragment="#project0.target0/float64/rule-number-5")
    look = "while (!panel.open) await new Promise((go) => setTimeout(go, 20));"
    assert page.run(f"{look} return byId('panel-title').textContent") == (
        "project0.target0 float64: rule-number-5"
    )
    assert page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 28)"
    assert page.complaints == []


@pytest.fixture
def on_two_devices(matrix):
    """The same on an H200 too; the runs on the CPU are those of a file of an earlier version."""
    return {**matrix, "runs": [run | more for run in matrix["runs"] for more in ({}, ON_H200)]}


def test_rows_name_their_device(on_two_devices):
    text = page(on_two_devices)
    assert text.count('data-device="CPU"') == text.count('data-device="H200"') == 2 * TARGET_COUNT
    assert '<th scope="row">float32 H200 <b' in text


@pytest.mark.skipif(PATH is None, reason="needs Chromium")
def test_browser_filters_by_device(on_two_devices, browser):
    fragment = "#project0.target0/float64%20H200/rule-number-5"
    shown = browser.open(page(on_two_devices), fragment=fragment)
    seen = shown.run("""
      while (!panel.open) await new Promise((go) => setTimeout(go, 20));
      byId('device').value = 'H200';
      byId('device').dispatchEvent(new Event('input', { bubbles: true }));
      const left = rows.filter((row) => row.tr.offsetParent);
      const devices = [...new Set(left.map((row) => row.device))];
      return [byId('panel-title').textContent, left.length, devices];
    """)
    assert seen == ["project0.target0 float64 H200: rule-number-5", 2 * TARGET_COUNT, ["H200"]]
    assert shown.complaints == []


@pytest.mark.skipif(PATH is None, reason="needs Chromium")
def test_committed_page_opens(browser):
    page = browser.open(COMMITTED.read_text("utf-8"), fragment="#torch.sdpa/float32/scale-of-query")
    seen = page.run("""
      while (!panel.open) await new Promise((go) => setTimeout(go, 20));
      return [byId('panel-title').textContent, panel.querySelectorAll('svg').length];
    """)
    assert seen[0] == "torch.sdpa float32: scale-of-query"
    assert seen[1] >= 3
    assert page.complaints == []
