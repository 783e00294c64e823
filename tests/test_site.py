"""The site: a page for each rule, pictures with words, reports in colours, files of the root."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from pygments.token import Comment, Generic, Name

import npattn
from npattn.cli import cli
from npattn.cli.lists import count_all
from npattn.testing.rules import ON_REQUEST, RULES
from npattn.testing.targets import TARGETS
from tests.browser import PATH, Browser
from tests.pages import ROOT, block, load
from tests.printed import FIRST, printed_blocks

pytestmark = pytest.mark.unmeasured  # other tests run these lines

pytest.importorskip("matplotlib")
pictures, rule_pages = load("pictures"), load("rule_pages")
FIGURE = re.compile(r"^```\{figure\} \S*_static/pictures/(\w+)\.svg\n(.*?)^```", re.M | re.S)
FEWEST = 20  # pages with a picture


def figures():
    """Yield page, picture and words of each figure."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        for name, words in FIGURE.findall(path.read_text()):
            yield path, name, words


# --- a page for each rule -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("site") / "rules"
    rule_pages.write(path)
    return path


def test_every_rule_has_a_page_and_no_other_has(folder):
    assert set(RULES) | set(ON_REQUEST) < set(rule_pages.NAMES)
    assert {path.stem for path in folder.iterdir()} == set(rule_pages.NAMES)
    rule_pages.write(folder)  # anew, over the old ones
    assert len(list(folder.iterdir())) == len(rule_pages.NAMES)


@pytest.mark.parametrize("name", rule_pages.NAMES)
def test_a_page_of_a_rule_says_what_explain_prints(name, folder):
    text = (folder / f"{name}.md").read_text()
    one = rule_pages.find(name)
    printed = " ".join(CliRunner().invoke(cli, ["explain", name]).output.split())
    for words in (one.demand, one.why, one.bugs):
        assert words.strip() in text
        assert " ".join(words.split()) in printed
    assert text.startswith(f"# {name}\n")
    assert {"## Why", "## In the wild", "## Ask it alone"} <= set(text.splitlines())


def test_findings_on_pages_of_rules_lead_somewhere(folder):
    reports = re.findall(
        r"\.\./reports/([\w-]+)\.md", "".join(map(Path.read_text, folder.iterdir()))
    )
    assert len(reports) > 50
    assert {name for name in reports if not (ROOT / f"docs/reports/{name}.md").exists()} == set()


# --- pictures -------------------------------------------------------------------------------------


def test_many_pages_have_pictures_and_every_picture_has_a_page():
    assert {name for _, name, _ in figures()} == set(pictures.PICTURES)
    assert len({path for path, _, _ in figures()}) >= FEWEST


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_has_alternative_text_and_a_caption(name):
    for _, words in ((path, words) for path, other, words in figures() if other == name):
        alternative, caption = re.fullmatch(r":alt: (.+)\n\n(.+)\n", words).groups()
        assert len(alternative) > 20
        assert alternative.endswith(".")
        assert re.match(r"\S.*\.$", caption)
        assert alternative != caption


@pytest.mark.thorough
@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_drawn(name):
    axes = pictures.PICTURES[name]().axes
    assert axes
    assert all(ax.has_data() for ax in axes)


def test_panels_stand_below_each_other_for_a_narrow_screen(monkeypatch):
    monkeypatch.setattr(pictures.axes, "narrow", True)
    assert [ax.get_subplotspec().colspan.start for ax in pictures.first_check().axes] == [0, 0, 0]


# --- reports in colours ---------------------------------------------------------------------------


def tokens(text):
    return list(load("report_lexer").ReportLexer(stripnl=False).get_tokens(text))


def test_a_report_is_coloured_and_keeps_its_text():
    report = printed_blocks()["two-mistakes"]
    assert report[0] == FIRST
    made = tokens(report[1])
    assert "".join(text for _, text in made) == report[1]
    coloured = {text: kind for kind, text in made}
    assert coloured["FAILED"] is coloured["1.40448487"] is Generic.Error
    assert coloured["passed"] is coloured["-0.46361044"] is Generic.Inserted
    assert coloured[report[1].splitlines()[0]] is Generic.Heading


def test_words_that_contain_a_verdict_are_not_coloured():
    assert {kind for kind, text in tokens("unfailed surpassed\n") if text.strip()} == {
        kind for kind, text in tokens("abc\n") if text.strip()
    }


def test_a_command_is_told_from_its_comment():
    made = {text: kind for kind, text in tokens("$ npattn check a:b --only nan  # all\nok\n")}
    assert made["$ "] is Generic.Prompt
    assert made[" --only"] is Name.Attribute
    assert made[" # all"] is Comment
    assert made["ok"] is Generic.Inserted


# --- files of the root ----------------------------------------------------------------------------


@pytest.fixture
def conf(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return load("conf")


@pytest.mark.parametrize("page", ["readme", "contributing", "changelog"])
def test_a_file_of_the_root_is_a_page_whose_links_are_those_of_the_site(page, conf):
    seen, source = [], ["placeholder"]
    app = SimpleNamespace(env=SimpleNamespace(note_dependency=seen.append))
    conf.read_beside(app, page, source)
    assert seen == [str(ROOT / conf.ROOT_PAGES[page])]
    assert "](docs/" not in source[0]
    links = re.findall(r"\]\(([\w/.-]+\.md)", source[0])
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    conf.read_beside(app, "semantics", source := ["as it is"])
    assert source == ["as it is"]
    conf.read_beside(app, "positions", source := ["as it is"])
    assert source == ["```{index} ! RoPE\n```\n\nas it is"]
    assert [name for name in conf.SEARCHED if not (ROOT / f"docs/{name}.md").exists()] == []


# --- the first screen, and the search -------------------------------------------------------------


def test_home_has_the_kernel_of_the_readme_its_report_and_the_counts_of_help(conf):
    """One source for each: README, setup.cfg, and what `npattn --help` prints."""
    source = [(ROOT / "docs/index.md").read_text()]
    conf.read_beside(None, "index", source)
    readme, (home,) = (ROOT / "README.md").read_text(), source
    assert block("README.md", "python", "# my_kernel.py") in home
    assert printed_blocks()["my-kernel"][1] in home
    assert ".venv/bin/pip install -q -e ." in home
    assert f"version {npattn.__version__}" in home
    assert f"]({conf.address()})" in home
    assert count_all() in home
    assert count_all() in readme
    assert count_all() in " ".join(CliRunner().invoke(cli, ["list"]).output.split())
    assert [len(RULES), len(TARGETS)] == [int(n) for n in re.findall(r"\d+", count_all())[:2]]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The pages of text with their index, without pictures and lessons."""
    pytest.importorskip("myst_parser")
    folder = tmp_path_factory.mktemp("searched")
    docs = folder / "docs"
    for path in (ROOT / "docs").rglob("*.md"):
        if not {"_build", "rules", "lessons_built", "reports"} & {*path.parts}:
            copy = docs / path.relative_to(ROOT / "docs")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(path.read_text())
    (docs / "conf.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.pages import load\n"
        "own = load('conf')\n"
        "extensions, myst_enable_extensions = ['myst_parser', 'sphinx_design'], ['colon_fence']\n"
        "def setup(app): app.connect('source-read', own.read_beside)\n"
    )
    words = ["-m", "sphinx", "-q", "-b", "html", str(docs), str(folder / "html")]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return folder / "html"


@pytest.mark.thorough
@pytest.mark.skipif(PATH is None, reason="needs Chromium")
def test_search_finds_each_word_on_its_page_first(conf, built, tmp_path):
    browser, found, wanted = Browser(tmp_path), {}, {}
    try:
        page = browser.open("", width=1100)
        for name, words in conf.SEARCHED.items():
            for word in words.split(", "):
                page.events.clear()
                page.send("Page.navigate", url=f"{built.as_uri()}/search.html?q={quote(word)}")
                page.wait_for("Page.loadEventFired")
                found[word] = page.run("""
                  let first;
                  for (let n = 0; n < 400 && !first; n++) {
                    await new Promise((go) => setTimeout(go, 50));
                    first = document.querySelector('#search-results li a');
                  }
                  return first && first.getAttribute('href').split('.html')[0];
                """)
                wanted[word] = name
    finally:
        browser.close()
    assert {"off-by-one", "junit", "uint16", "guarantee", "dump", "CI"} < {*found}
    assert found == wanted
