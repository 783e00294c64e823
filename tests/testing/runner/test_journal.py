"""The journal of a check: what it says of one that was ended, and how one goes on from it."""

import json
from dataclasses import replace

import pytest

from npattn.errors import OptionError
from npattn.testing import Implementation, check
from npattn.testing.cases.recipe import Recipe
from npattn.testing.report.outcome import Outcome
from npattn.testing.runner.journal import Journal, answer_of, recipe_of
from npattn.testing.runner.search import Standing
from npattn.testing.targets.numpy import naive
from npattn.testing.worker.connect import connect

RULES = ("agreement-o", "empty-row", "one-key")
FEW = {"only": RULES, "examples": 7, "shrink": False, "diagnosis": False}
RECIPE = Recipe(lead=(2, 3), T=5, window=(1, None), mask="random", dropout=0.25)


def wrong(q, k, v, mask=None):
    return naive(q, k, v, mask=mask) * 1.01


class Ended(BaseException):
    """Ends a check as a killed process does: nothing is done about it."""


def end_after(number):
    """Return a progress callback that ends a check."""
    steps = iter(range(number))

    def advance(*_):
        if next(steps, None) is None:
            raise Ended

    return advance


def entries_of(path):
    return list(map(json.loads, path.read_text().splitlines()))


def tried_rules(path):
    """Return the rules of the problems in a journal."""
    return [entry["try"] for entry in entries_of(path) if "try" in entry]


@pytest.mark.parametrize("f", [naive, wrong])
@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.broad
def test_a_check_goes_on_with_the_same_report(tmp_path, f, steps):
    whole, path = check(f, **FEW), tmp_path / "journal"
    with pytest.raises(Ended):
        check(f, **FEW, journal=path, progress=end_after(steps))
    before = len(tried_rules(path))
    report = check(f, **FEW, resume=path)
    assert report.text(verbose=True) == whole.text(verbose=True)
    assert len(tried_rules(path)) > before


def test_what_passed_is_not_asked_again(tmp_path):
    path = tmp_path / "journal"
    check(naive, **FEW, journal=path)
    before = tried_rules(path)
    assert {"agreement-o", "one-key"} <= set(before)
    check(naive, **FEW, resume=path)
    again = tried_rules(path)[len(before) :]
    assert set(again) <= {"empty-row"}  # with which every check begins


def test_what_failed_is_asked_once_more(tmp_path):
    path = tmp_path / "journal"
    check(wrong, **FEW, journal=path)
    before = len(tried_rules(path))
    report = check(wrong, **FEW, resume=path)
    assert "failed" in [o.status for o in report.outcomes if o.rule == "agreement-o"]
    assert tried_rules(path)[before:].count("agreement-o") == 1


def test_a_failure_that_does_not_come_again_is_searched_anew(tmp_path):
    path, calls = tmp_path / "journal", []

    def moody(q, k, v, mask=None):
        return naive(q, k, v, mask=mask) * (1.01 if calls else 1.0)

    calls.append(1)
    assert not check(moody, **FEW, journal=path).passed
    calls.clear()
    (agreement,) = [o for o in check(moody, **FEW, resume=path).outcomes if o.rule == RULES[0]]
    assert (agreement.status, agreement.examples) == ("passed", 7)


@pytest.mark.thorough
def test_processes_write_to_one_journal(tmp_path):
    path, few = tmp_path / "journal", FEW | {"only": ["agreement-o", "one-key"]}
    f = Implementation(naive, name="numpy.naive", spec="npattn.testing.targets.numpy:naive")
    report = check(f, **few, processes=2, journal=path)
    assert {"agreement-o", "one-key"} <= set(tried_rules(path))
    assert str(check(f, **few, processes=2, resume=path)) == str(report)


def test_requests_are_written_before_they_are_sent(tmp_path):
    path, dies = tmp_path / "journal", tmp_path / "dies.py"
    dies.write_text("import os\ndef f(q, k, v):\n    os._exit(3)\n")
    remote = connect(f"{dies}:f", framework="numpy")
    check(remote, only=["agreement-o"], examples=3, diagnosis=False, journal=path)
    requests = [e for e in entries_of(path) if "request" in e]
    assert requests[0]["request"] == "forward"
    assert set(requests[0]["shapes"]) == {"q", "k", "v"}
    assert Journal.resume(path).command == {}


def test_what_was_being_asked_is_told(tmp_path):
    path = tmp_path / "journal"
    journal = Journal.create(path)
    journal.begin({"seed": 5})
    assert Journal.resume(path).unanswered == ""
    journal.note_request({"do": "forward", "call": {}}, {"q": [2, 3]})
    assert Journal.resume(path).unanswered == "a request for forward of {'q': [2, 3]}"
    journal.note_recipe("float16", "agreement-o", RECIPE)
    journal.note_request({"do": "forward", "call": {}}, {"q": [2, 3]})
    assert Journal.resume(path).unanswered == f"agreement-o[float16] with {RECIPE!r}"
    journal.note_answer("float16", "agreement-o", Standing(position=3))
    assert Journal.resume(path).unanswered == ""
    journal.note_request({"do": "forward", "calls": [{}, {}]}, {"q": [2, 3]})  # of the diagnosis
    assert entries_of(path)[-1]["calls"] == [{}, {}]
    journal.note_end()
    assert Journal.resume(path).unanswered == ""


def test_a_check_that_ended_says_so_last(tmp_path):
    path = tmp_path / "journal"
    check(naive, **FEW, journal=path)
    assert entries_of(path)[-1] == {"done": True}
    assert Journal.resume(path).unanswered == ""
    with pytest.raises(Ended):
        check(naive, **FEW, journal=tmp_path / "cut", progress=end_after(3))
    assert {"done": True} not in entries_of(tmp_path / "cut")


def test_a_question_that_lacks_something_is_another(tmp_path):
    path = tmp_path / "journal"
    Journal.create(path).begin({"seed": 5, "sizes": {"D": [64]}})
    with pytest.raises(OptionError, match=r"sizes was .*, is None; ask the same, or begin a new"):
        Journal.resume(path).begin({"seed": 5})


def test_answers_are_read_as_they_were_written(tmp_path):
    journal = Journal.create(tmp_path / "journal")
    journal.begin({})
    standing = Standing(position=11, tried=7, left=2, left_to=frozenset({"dq"}), worst=0.3)
    passed = Outcome("one-key", "5", "…", "float32", "passed", worst=0.25, examples=7)
    failed = replace(passed, status="failed", worst=float("inf"), sampled=RECIPE)
    answers = {"a": standing, "b": "upcast", "one-key": passed, "c": failed}
    for name, answer in answers.items():
        journal.note_answer("float32", name, answer)
    known = Journal.resume(journal.path).answers
    found = {name: answer_of(entry) for (_, name), entry in known.items()}
    assert found == answers | {"c": replace(failed, sampled=None)}
    assert recipe_of(known["float32", "c"]) == RECIPE
    assert recipe_of(known["float32", "one-key"]) is None


def test_a_line_that_was_cut_is_removed(tmp_path):
    path = tmp_path / "journal"
    journal = Journal.create(path)
    journal.begin({"seed": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"try": "agree')
    again = Journal.resume(path)
    again.begin({"seed": 1})
    assert path.read_bytes() == whole


def test_another_question_is_wrong_usage(tmp_path):
    path = tmp_path / "journal"
    few = {"only": ["one-key"], "examples": 3, "diagnosis": False}
    check(naive, **few, journal=path)
    before = path.read_bytes()
    with pytest.raises(OptionError, match="another check: seed was 0, is 7"):
        check(naive, **few, seed=7, resume=path)
    with pytest.raises(OptionError, match="target was 'naive', is 'wrong'; source was"):
        check(wrong, **few, resume=path)
    with pytest.raises(OptionError, match="exists: continue it"):
        check(naive, **few, journal=path)
    assert path.read_bytes() == before


@pytest.mark.thorough
def test_a_worker_tells_another_file_from_the_first(tmp_path):
    (tmp_path / "own.py").write_text("def f(q, k, v):\n    return v\n")
    before = connect(f"{tmp_path}/own.py:f", framework="numpy").source
    assert connect(f"{tmp_path}/own.py:f", framework="numpy").source == before != ""
    (tmp_path / "own.py").write_text("def f(q, k, v):\n    return -v\n")
    assert connect(f"{tmp_path}/own.py:f", framework="numpy").source not in (before, "")


def test_wrong_usage_writes_nothing(tmp_path):
    with pytest.raises(OptionError, match="journal beside resume"):
        check(naive, journal=tmp_path / "a", resume=tmp_path / "a")
    with pytest.raises(OptionError, match="journal beside budget"):
        check(naive, journal=tmp_path / "a", budget=5)
    with pytest.raises(OptionError, match="is not a rule"):
        check(naive, journal=tmp_path / "a", only=["nonsense"])
    with pytest.raises(OptionError, match=r"folder of .* does not exist"):
        check(naive, journal=tmp_path / "none" / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        ("", "is no journal"),
        ("{}\n", "is no journal that this version"),
        ('{"journal": 0}\n', "is no journal that this version"),
        ("nonsense\n", "line 1 is no JSON"),
        ("[]\n", "line 1 is no JSON object"),
    ],
)
def test_what_is_no_journal_is_wrong_usage(tmp_path, text, reason):
    path = tmp_path / "journal"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match=reason):
        Journal.resume(path)
