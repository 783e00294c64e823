"""Units of work: plain data in, plain data out."""

import json
import math
from dataclasses import replace

import pytest

import npattn.testing.units.unit as units
from npattn.errors import MissingExtraError, OptionError
from npattn.testing.report.outcome import Outcome
from npattn.testing.rules import PROPERTIES
from npattn.testing.runner.merge import merge_answers
from npattn.testing.units.unit import Memory, Result, Unit, do_unit

RULES = ("agreement-o", "empty-row", "views")
FLASH = Unit(target="numpy.flash", dtype="float32", rules=RULES, examples=3)


def without_time(result):
    return replace(result, seconds=0)


@pytest.fixture(scope="module")
def whole():
    return without_time(do_unit(FLASH))


def test_a_unit_gives_the_report_of_a_check(whole):
    statuses = {o["rule"]: o["status"] for o in whole.report["outcomes"]}
    assert whole.state == "done"
    assert statuses == dict.fromkeys(RULES, "passed")


def report_from_answers(unit, parts):
    """Ask parts of the rules in units of their own, and make the report of their answers."""
    asked = [do_unit(replace(unit, rules=part, asks=True)) for part in parts]
    assert all(one.report is None for one in asked)
    answers = merge_answers([Result.from_text(one.to_text()).answers for one in asked])
    return without_time(do_unit(replace(unit, answers=answers)))


@pytest.mark.thorough
def test_a_report_from_answers_is_the_same(whole):
    assert report_from_answers(FLASH, [(rule,) for rule in RULES]) == whole


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["numpy.naive", "torch.sdpa", "torch.mha"])
def test_a_report_of_all_rules_from_answers_is_the_same(target):
    """Failures are found in one process, and shown, shrunk and explained in another."""
    unit = Unit(target=target, dtype="float32", examples=11)
    parts = [tuple(PROPERTIES)[i::3] for i in range(3)]
    assert report_from_answers(unit, parts) == without_time(do_unit(unit))


@pytest.mark.thorough
def test_answers_are_taken_and_not_asked_again():
    (entry,) = do_unit(replace(FLASH, rules=("views",), asks=True)).answers
    entry["outcome"]["examples"] = 7919
    report = do_unit(replace(FLASH, rules=("views",), answers=(entry,))).report
    assert [o["examples"] for o in report["outcomes"] if o["rule"] == "views"] == [7919]


def test_text_gives_the_unit_and_the_result_back():
    answer = {"dtype": "float32", "answer": "views", "worst": math.inf}
    unit = replace(FLASH, rules=None, answers=(answer,), timeout=0.5)
    assert Unit.from_text(unit.to_text()) == unit
    result = Result("done", answers=(answer,), report={"passed": True})
    assert Result.from_text(result.to_text()) == result


def test_other_versions_are_refused(monkeypatch):
    text = FLASH.to_text()
    monkeypatch.setattr(units.np, "__version__", "1.7")
    with pytest.raises(OptionError, match=r"numpy 1\.7 is here: install the same"):
        Unit.from_text(text)


def test_a_target_that_cannot_run_is_not_run():
    result = do_unit(replace(FLASH, target="nowhere_at_all:f"))
    assert result.state == "not run"
    assert "nowhere_at_all" in result.why
    assert result.report is None


def test_a_target_that_lacks_a_package_runs_in_its_environment(monkeypatch, tmp_path):
    chosen = []

    def choose(target, folder):
        chosen.append((target.name, folder))
        raise MissingExtraError("pip fails")

    monkeypatch.setattr(units, "choose_python", choose)
    result = do_unit(replace(FLASH, envs=str(tmp_path)))
    assert (result.state, result.why) == ("not run", "pip fails")
    assert chosen == [("numpy.flash", tmp_path)]


@pytest.mark.parametrize("knows", [True, False])
def test_an_interrupt_gives_what_is_known(knows, monkeypatch, whole):
    class Known:
        def as_dict(self):
            return whole.report

    def interrupt(*_, **__):
        err = KeyboardInterrupt()
        if knows:
            err.report = Known()
        raise err

    monkeypatch.setattr(units, "check", interrupt)
    result = do_unit(FLASH)
    assert result.state == "timed out"
    assert result.report == (whole.report if knows else None)


def test_a_memory_keeps_last_answers_alone():
    journal = Memory()
    journal.begin({"target": "x"})
    for examples in (5, 11):
        outcome = Outcome("views", "1", "", "float32", "passed", examples=examples)
        journal.write({"try": "views", "dtype": "float32", "recipe": {}})
        journal.note_answer("float32", "views", outcome)
    ((key, entry),) = journal.written.items()
    assert key == ("float32", "views")
    assert entry["outcome"]["examples"] == 11
    assert json.dumps(entry)
