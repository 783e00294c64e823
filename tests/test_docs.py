"""The pages in docs/ and CONTRIBUTING.md say what is true now."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import npattn
from npattn.cli import cli
from tests.pages import block, blocks, difference, load, run, same_line
from tests.printed import ADAPTING, EXAMPLES, FIRST, READING, make, printed_blocks, write

pytestmark = pytest.mark.unmeasured  # other tests run these lines

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


GENERATE = load("generate")


@pytest.mark.thorough
@pytest.mark.parametrize("page", [*GENERATE.PAGES, GENERATE.FINDINGS])
def test_generated_parts_are_current(page):
    current = GENERATE.update(page)
    assert (ROOT / page).read_text() == current, "run: python docs/generate.py --write"


def test_default_check_is_on_every_side_of_every_branch():
    page = GENERATE
    for name, part in page.PAGES["docs/branches.md"].items():
        rows = part().splitlines()
        assert len(rows) > 5, name
        assert [row for row in rows if f"| {page.NOBODY} |" in row] == [], name


@pytest.mark.thorough
def test_every_module_is_in_the_map_with_a_summary():
    files = [*(ROOT / "npattn").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    names = [p.name for p in files if p.name != "__init__.py" or p.parent.parent == ROOT]
    text = GENERATE.module_map()
    listed = re.findall(r"^ *- `(\w+\.py)` \S", text, re.M)
    assert sorted(listed) == sorted(names)
    rooms = {room for p in files for room in p.parents if ROOT in room.parents[1:]}
    rooms = [f"{room.name}/" for room in rooms]
    assert sorted(re.findall(r"^ *- \*\*`(\w+/)`\*\* \w", text, re.M)) == sorted(rooms)


@pytest.mark.thorough
def test_the_map_follows_the_layers():
    text = GENERATE.module_map()
    places = [text.index(f"`{name}` ") for name in ("errors.py", "problem.py", "dense.py")]
    assert places == sorted(places)
    places = [
        text.index(f"  - {name} ") for name in ("**`cases/`**", "`trial.py`", "**`runner/`**")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_and_modules_named_exist(page):
    text = page.read_text()
    paths = re.findall(r"`((?:npattn|tests|docs|benchmarks)/[\w/.]*)`", text)
    assert [p for p in paths if not (ROOT / p).exists()] == []
    modules = {*re.findall(r"\bnpattn(?:\.[a-z_]+)+", text)}
    contestants = {"npattn.dense", "npattn.tiled"}  # names in the tables of benchmarks.speed
    assert sorted(name for name in modules - contestants if not importable(name)) == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_outside_of_the_site_lead_somewhere(name):
    links = re.findall(r"\]\(([^):]*?)(?:#([\w-]+))?\)", (ROOT / name).read_text())
    assert links
    pages = [(ROOT / (page or name), anchor) for page, anchor in links]
    assert [page for page, _ in pages if not page.exists()] == []
    assert [x for x in pages if x[1] and x[1] not in anchors(x[0].read_text())] == []


def anchors(text):
    """Return the anchors of the headings of a page, as a hub and myst make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("name", "most"), [("CONTRIBUTING.md", 200), ("CHANGELOG.md", 60)])
def test_pages_for_people_stay_short(name, most):
    assert len((ROOT / name).read_text().splitlines()) <= most


def glossary():
    """Return the terms of the glossary, each with the page that defines it."""
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    entries = [line for line in lines if line.startswith("- ")]
    pattern = r"- \*\*(.+?)\*\*: .+\. \[[^]]+\]\((\w+\.md)(?:#[\w-]+)?\)"
    return [re.fullmatch(pattern, entry).groups() for entry in entries]


def test_glossary_is_short_and_has_one_meaning_for_each_term():
    terms = [term for term, _ in glossary()]
    assert 30 <= len(terms) <= 40
    assert len(set(terms)) == len(terms)


def test_terms_of_the_glossary_are_used_in_the_pages():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = " ".join(p.read_text() for p in pages if p.name not in ("glossary.md", "modules.md"))
    text = re.sub(r"\s+", " ", text).lower()
    assert [term for term, _ in glossary() if not re.search(rf"\b{term.lower()}", text)] == []


@pytest.mark.parametrize("page", sorted({page for _, page in glossary()}))
def test_pages_that_define_a_term_link_to_the_glossary(page):
    assert "(glossary.md)" in (ROOT / "docs" / page).read_text()


def importable(name):
    """True for a module, or an attribute of one."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        for part in parts[i:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


# --- examples, and what they print ----------------------------------------------------------------


def needs_torch():
    torch = pytest.importorskip("torch")
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the pages show PyTorch 2.13")


def assert_printed(name, printed):
    _, shown = printed_blocks()[name]
    assert difference(shown, printed) is None, f"run: python -m tests.printed {name}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["my-kernel", pytest.param("two-mistakes", marks=pytest.mark.nightly), "expected"]
)
def test_printed_report(name):
    assert_printed(name, make(name))


@pytest.mark.nightly
def test_printed_script():
    assert_printed("script", make("script"))


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_printed_fingerprint():
    needs_torch()
    command, _ = block(ADAPTING, "console", "npattn fingerprint").split("\n", 1)
    result = CliRunner().invoke(cli, command.split()[2:])
    assert result.exit_code == 0
    assert_printed("fingerprint", result.output)


@pytest.mark.thorough
def test_printed_difference_of_profiles():
    assert_printed("diff-profiles", make("diff-profiles"))


@pytest.mark.thorough
def test_printed_difference_of_kernels():
    shown, printed = printed_blocks()["diff-kernels"][1], make("diff-kernels")
    assert difference(shown.removesuffix("...\n"), printed.removesuffix("...\n")) is None


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.parametrize("name", ["train-interactive", "train-compare", "train-wrong"])
def test_printed_training(name):
    pytest.importorskip("sklearn")
    shown, printed = (
        re.sub(r"[\d.]+ s\b", "1 s", text) for text in (printed_blocks()[name][1], make(name))
    )
    assert difference(shown, printed) is None, f"run: python -m tests.printed {name}"


@pytest.mark.thorough
def test_training_example(tmp_path):
    pytest.importorskip("sklearn")
    [code], [shown] = blocks("docs/train.md", "python"), blocks("docs/train.md", "text")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    assert run("-W", "error", "-c", code, cwd=tmp_path) == shown


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["attend", "torch-sdpa"])
def test_printed_report_of_a_torch_function(name):
    needs_torch()
    assert_printed(name, make(name))


def test_every_printed_block_is_made_and_shown():
    assert set(printed_blocks()) == set(EXAMPLES)


def test_printed_block_is_rewritten(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.printed.ROOT", tmp_path)
    monkeypatch.setattr("tests.printed.PAGES", ("page.md",))
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- printed: x -->\n```console\n$ x\nold\nold\n$ echo $?\n0\n```\nb\n")
    write("x", "new  \n")
    assert "old" not in page.read_text()
    assert "```console\n$ x\nnew\n$ echo $?\n0\n```\nb\n" in page.read_text()


def test_checking_crash_dump(tmp_path):
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 3, 5, 8)).astype(np.float16) for _ in range(4))
    fwd = npattn.forward(q, k, v, causal="bottom_right")
    out, dq = fwd.out.astype(np.float16), npattn.backward(fwd, dout).q.astype(np.float16)
    out[1, 2, 4, 0] += np.float16(0.25)
    np.savez(tmp_path / "dump.npz", q=q, k=k, v=v, dout=dout, out=out, dq=dq)
    printed = run("-c", block(READING, "python", "dump.npz"), cwd=tmp_path)
    assert difference(block(READING, "text", "of 240 elements"), printed) is None


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("dk 13 failed 1.4e+05", "dk 13 failed 2.8e+05"),
        ("dk 13 passed 0.3", "dk 13 failed 0.3"),
        ("o[0, 1]: got nan", "o[0, 2]: got nan"),
        ("mask, window", "mask, bias"),
    ],
)
def test_another_line_is_seen(shown, printed):
    assert same_line(shown, shown)
    assert not same_line(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"), [("a\nc", "a\nb\nc"), ("a\n...\nc", "a\nb"), ("a", "a\nb"), ("a\nb", "a")]
)
def test_missing_lines_are_seen(shown, printed):
    assert difference(shown, printed) is not None
    assert difference("a\n...\nc\n...", "a\nb\nc\nd") is None


@pytest.mark.parametrize("page", [FIRST, ADAPTING, READING, "docs/options.md"])
def test_every_console_block_shows_a_command(page):
    shown = blocks(page, "console")
    assert shown
    assert all(text.startswith("$ ") for text in shown)


@pytest.mark.thorough
def test_torch_example():
    pytest.importorskip("torch")
    [code], [shown] = blocks("docs/torch.md", "python"), blocks("docs/torch.md", "text")
    assert run("-W", "error", "-c", code, cwd=ROOT) == shown


@pytest.mark.thorough
def test_plot_examples(tmp_path):
    pytest.importorskip("matplotlib")
    code = "".join(blocks("docs/plot.md", "python"))
    assert run("-c", f"{code}print('drawn')", cwd=tmp_path) == "drawn\n"


@pytest.mark.parametrize("page", ["attention", "conventions", "multihead", "tiled"])
def test_private_names_of_a_derivation_exist(page):
    text = (ROOT / "docs" / "derivations" / f"{page}.md").read_text()
    places = [ROOT / place for place in re.findall(r"`(npattn/[\w/]+(?:\.py|/))`", text)]
    sources = [
        path for place in places for path in (place.glob("*.py") if place.is_dir() else [place])
    ]
    code = "".join(path.read_text() for path in [*sources, ROOT / "npattn/engines/dense.py"])
    names = set(re.findall(r"`(_\w+)`", text))
    assert {name for name in names if not re.search(rf"\b{name}\b", code)} == set()


@pytest.mark.thorough
def test_names_of_the_tolerance_exist():
    text = (ROOT / "docs" / "tolerance.md").read_text()
    code = "".join(path.read_text() for path in (ROOT / "npattn").rglob("*.py"))
    # `a_b` may also be a formula: eta of s.
    names = set(re.findall(r"`(_?[A-Za-z]+(?:_[a-z]{2,})*)`", text))
    assert len(names) > 50
    assert {name for name in names if not re.search(rf"\b{name}\b", code)} == set()
