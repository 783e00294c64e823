"""The page of a report: causes on top, failures folded, maps, scripts, and nothing from outside."""

import os
import re
from dataclasses import replace

import numpy as np
import pytest

from npattn import Conventions
from npattn.testing import Cause, Outcome, Report, check
from npattn.testing.report.green import read_limits
from npattn.testing.report.markup import safe_text
from npattn.testing.report.page import LONGEST
from npattn.testing.report.page import page as make_page
from npattn.testing.report.pair import two_digits
from npattn.testing.report.sensitivity import Sensitivity
from npattn.testing.report.words import MUST
from npattn.testing.targets.numpy import flash
from tests.browser import PATH

HOSTILE = "</details></script><script>throw 'run'</script>&\x1b[2J\ud800"


@pytest.fixture(scope="module")
def report():
    def f(q, k, v, mask=None):
        out = flash(q, k, v, mask)
        out[..., -1, :] = np.float32(np.nan)
        return out * np.float32(1.5)

    only = ["agreement-o", "empty-row", "views", "hidden-nan-v"]
    judged = check(f, examples=3, only=only, framework="numpy", diagnosis=False)
    meant = Conventions(causal="top_left")
    cause = Cause(f"o is 1.5 times too large {HOSTILE}", ("agreement-o[float32]",), step="o",
                  name="causal=top_left", passes_when="fails only where D > 1",
                  conventions=meant)  # fmt: skip
    return replace(judged, causes=(cause,), untested=(HOSTILE,), require=("values",))


@pytest.fixture(scope="module")
def page(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.to_html(path)
    return path.read_text("utf-8")


def test_cause_stands_above_its_failures(page):
    parts = [
        "<!doctype html>",
        '<meta name="viewport"',
        "FAILED: ",
        " by 1 cause",
        "o is 1.5 times too large",
        "fails only where D &gt; 1",
        "--convention causal=top_left",
        "got",
        "error / tolerance",
        '<details class="failure" open><summary><b>agreement-o[float32]</b>',
        '<button type="button" class="copy">',
        "import numpy as np",
        "<h2>Levels</h2>",
        f"Not tested {MUST}: 1",
    ]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)


def test_maps_have_the_numbers_and_indices_of_each_element(page, report):
    (outcome,) = (o for o in report.outcomes if o.rule == "agreement-o")
    excerpt = outcome.comparisons[0].excerpt
    part = excerpt.crop(8)
    figure = page[page.index("<figure>") : page.index("</figure>")]
    assert figure.count("<td") == 3 * part.got.size
    assert figure.count("background:#000") == np.isnan(part.got).sum() * 2  # in got, and the error
    got, want, ratio = re.findall(r'<table class="map">(.*?)</table>', figure, re.DOTALL)
    assert [re.search("<caption>(.*?)<", x)[1] for x in (got, want)] == ["got", "want"]
    assert "<caption>error / tolerance<" in ratio
    head, *rows = got.split("<tr>")[1:]
    assert head.startswith("<th>t \\ e<th>")
    columns, height = range(part.column, part.column + part.got.shape[1]), part.got.shape[0]
    assert head.split("<th>")[2:] == [str(j) for j in columns]
    indices = [re.match(r"<th>(\d+)", row)[1] for row in rows]
    assert indices == [str(i) for i in range(part.row, part.row + height)]
    assert f">{two_digits(float(part.want[0, 0]))}<" in want


def test_page_says_where_and_when_it_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("x = 1\n\n\ndef f(q, k, v):\n    return v\n")
    passed = Outcome("views", "15", "Views.", "float32", "passed")
    text = make_page(Report("mine.py:f", (passed,), (), {"versions": {"npattn": "7.11"}}))
    (made,) = re.findall('<p class="made">(.*?)</p>', text)
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC · mine.py, line 4 · npattn 7.11 · ", made)
    assert made.endswith(f"{os.cpu_count()} cores")


def test_green_page_is_calm_and_says_what_it_does_not_say():
    """What is optional has no red word; the limits stand in the page itself."""
    optional = Outcome(
        "same-bits", "1", "Bits.", "float32", "failed", level="reproducible", script_text="x" * 90
    )
    passed = Report("f", (Outcome("views", "15", "Views.", "float32", "passed"), optional), (), {})
    text = make_page(passed).split("</style>")[1]
    assert 'class="failed"' not in text
    assert 'class="failure"' not in text
    assert '<span class="none">failed (not required)</span>' in text
    assert "<summary>What a green report does not say</summary>" in text
    assert all(safe_text(limit.reach) in text for limit in read_limits())
    assert optional.script() not in text
    red = make_page(replace(passed, require=("reproducible",)))
    assert "What a green report does not say" not in red
    assert '<span class="failed">failed</span>' in red


def test_long_scripts_are_left_to_the_command():
    first, second = (
        Outcome(n, "1", "…", "float32", "failed", script_text=f"# {n}\n") for n in ("a", "b")
    )
    text = make_page(Report("f", (first, second), (), {}))
    assert "# a\n" in text
    assert "# b\n" not in text
    long = replace(first, script_text="#" * (LONGEST + 1))
    text = make_page(Report("f", (long,), (), {}))
    assert long.script() not in text
    assert "--script FILE" in text
    assert len(text) < 20_000


def test_page_loads_nothing_and_escapes_texts(page):
    assert not re.search(r"\b(?:src|href|@import|url\()", page)
    assert "http" not in page
    assert "<script>throw" not in page
    assert "&lt;script&gt;throw" in page
    assert r"\x1b[2J\ud800" in page
    assert "prefers-color-scheme: dark" in page


def test_page_of_a_passed_report_has_no_causes():
    passed = Outcome("views", "15", "Views.", "float32", "passed")
    text = make_page(Report("mine:f", (passed,), (), {}))
    assert "cause" not in text.split("</style>")[1].split("<script>")[0]
    assert "passed: 1 passed" in text


def test_page_of_a_passed_report_says_what_it_would_have_seen():
    seen = Sensitivity(judged=460, calls=1200, seconds=8.5)
    passed = Report("own", (Outcome("a", "1", "…", "float32", "passed"),), (), {}, sensitivity=seen)
    assert str(seen).replace("'", "&#x27;") in make_page(passed)
    failed = Report("own", (Outcome("a", "1", "…", "float32", "failed"),), (), {}, sensitivity=seen)
    assert "would have seen" not in make_page(failed)


def test_expected_and_suspect_are_shown():
    known = Outcome("views", "15", "Views.", "float32", "failed", message="slow")
    odd = Outcome("aggregate", "1", "Errors.", "float32", "suspect", message="rather far off")
    text = make_page(Report("f", (known, odd), (), {}, expected={"views": "as documented"}))
    assert "views[float32]: as documented" in text
    assert "rather far off" in text
    stale = make_page(Report("f", (odd,), (), {}, expected={"views": "as documented"}))
    assert "<details open><summary>Stale expectations: 1" in stale


def test_notebook_shows_a_fragment_of_the_page(page, report):
    """All that the page says, without its frame and its script; its style touches nothing else."""
    fragment = report._repr_html_()
    style, body = re.fullmatch(
        r'<div class="npattn-report"><style>(.*?)</style>\n(.*)</div>\n', fragment, re.DOTALL
    ).groups()
    assert not re.search(r"<!doctype|<html|<body|<main|<title>npattn|<script>|<button", fragment)
    said = page[page.index("<main>") + len("<main>") : page.index("</main>")]
    assert body.split() == re.sub("<button.*?</button>", "", said).split()
    assert style.count("{") == style.count("}")
    depth, outside = 0, ""
    for c in style:
        depth += {"{": 1, "}": -1}.get(c, 0)
        outside += c if depth == 0 else ""
    assert outside.split() == [".npattn-report", "}"]  # every rule is nested in this one
    assert not re.search(r"(?:^|[ ,}])(?::root|body|html)\b", style)


@pytest.mark.skipif(PATH is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [500, 1100])
def test_browser_renders_the_page_without_errors(page, browser, width):
    """The copy button works, no text is wider than the window, and the console stays empty."""
    opened = browser.open(page, width=width)
    fits, height, label = opened.run("""
      document.querySelectorAll('details').forEach(one => { one.open = true; });
      const button = document.querySelector('.copy');
      button.click();
      while (button.textContent === 'copy') await new Promise((go) => setTimeout(go, 20));
      return [document.documentElement.scrollWidth <= innerWidth,
        document.querySelector('.map').getBoundingClientRect().height, button.textContent];
    """)
    assert fits
    assert height > 5
    assert label in ("copied", "selected")
    assert opened.complaints == []


@pytest.mark.skipif(PATH is None, reason="needs Chromium")
def test_style_of_a_fragment_stays_within_it(report, browser):
    others = "<!doctype html><body><h1>mine</h1><p>mine</p>"
    look = """
      const looks = (one) => { const s = getComputedStyle(one);
        return [s.color, s.backgroundColor, s.font, s.margin]; };
      return [...document.querySelectorAll('body, body > h1, body > p')].map(looks);
    """
    before = browser.open(others, width=700).run(look)
    opened = browser.open(others + report._repr_html_(), width=700)
    assert opened.run(look) == before
    title, cause = opened.run("""
      const style = (one) => getComputedStyle(document.querySelector(one));
      return [style('.npattn-report h1').fontSize, style('.npattn-report .cause').borderLeftWidth];
    """)
    assert (title, cause) == ("20.8px", "4px")
    assert opened.complaints == []
