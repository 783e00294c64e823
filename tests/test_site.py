"""The site: a page for each rule, pictures with words, reports in colours, files of the root."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from pygments.token import Comment, Generic, Name

from npattn.cli import cli
from npattn.testing.rules import ON_REQUEST, RULES
from tests.pages import ROOT, load
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


@pytest.mark.parametrize("page", ["readme", "contributing", "changelog"])
def test_a_file_of_the_root_is_a_page_whose_links_are_those_of_the_site(page, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    seen, source = [], ["placeholder"]
    conf = load("conf")
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
