"""The judge is judged: the zoo tells who was killed by what, and who cried wolf."""

import json
import math
from dataclasses import replace

import pytest

from npattn.errors import OptionError
from npattn.mistakes import base, base_backward
from npattn.testing.rules import PROPERTIES
from npattn.zoo.correct import CORRECT
from npattn.zoo.mutants import MUTANTS
from npattn.zoo.score import Row, Zoo, witness, zoo

FEW = ("scale-twice", "state-kept", "tf32")  # two mutants, one that is right
ASKED = {"empty-row", "agreement-o", "agreement-dq", "repeatable"}


@pytest.fixture(scope="module", autouse=True)
def few_rules():
    """What is right is asked few of the rules: test_correct.py asks it all of them."""
    few = replace(CORRECT["tf32"], breaks=tuple(set(PROPERTIES) - ASKED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CORRECT, "tf32", few)
        yield


@pytest.fixture(scope="module")
def small(few_rules):
    return zoo(only=FEW, rules="killers", examples=8)


def test_the_mutants_are_killed_and_what_is_right_is_not(small):
    rows = {row.name: row for row in small.rows}
    assert rows["scale-twice"].right
    assert "agreement-o" in rows["scale-twice"].found_by
    assert rows["state-kept"].right
    assert rows["tf32"].kind == "correct"
    assert rows["tf32"].statuses == dict.fromkeys(rows["tf32"].statuses, "passed")
    assert set(rows["tf32"].statuses) == ASKED
    assert small.passed
    assert small.verdict.startswith("2 of 2 mutants killed (100 %), 0 false alarms on 1 correct")


def test_every_rule_has_a_column_and_every_implementation_a_row(small):
    text = str(small)
    assert "  1 structure" in text or "  1 shape-dtype" in text or "agreement-o" in text
    for name in FEW:
        assert any(line.startswith(name) for line in text.splitlines())


def test_the_matrix_can_be_written(small, tmp_path):
    small.to_json(tmp_path / "zoo.json")
    whole = json.loads((tmp_path / "zoo.json").read_text())
    assert whole["passed"]
    assert {row["name"] for row in whole["rows"]} == {row.name for row in small.rows}
    assert all(row["right"] for row in whole["rows"])


def row(**words):
    return Row(**({"name": "x", "kind": "mutant", "family": "f", "statuses": {}} | words))


@pytest.mark.parametrize(
    ("status", "rule", "right"),
    [
        ("failed", "agreement-o", True),
        ("error", "agreement-o", False),  # a crash is no proof of the rule
        ("suspect", "agreement-o", False),
        ("passed", "agreement-o", False),
        ("failed", "agreement-dq", False),  # found, but not by the rule that it named
    ],
)
def test_a_mutant_is_killed_by_a_failure_of_a_rule_that_it_named(status, rule, right):
    assert row(statuses={rule: status}, wanted=("agreement-o",)).right == right


def test_a_suspicion_kills_where_the_mutant_names_the_aggregate():
    assert row(statuses={"aggregate": "suspect"}, wanted=("aggregate",)).right


@pytest.mark.parametrize("status", ["failed", "error", "suspect"])
def test_anything_found_in_what_is_right_is_a_false_alarm(status):
    alarmed = row(kind="correct", statuses={"views": status}, told="views: moved")
    whole = Zoo((alarmed,), 1.0)
    assert not whole.passed
    assert whole.false_alarms == [alarmed]
    assert "FALSE ALARM: views: moved" in str(whole)


def test_a_survivor_is_said_to_be_one():
    whole = Zoo((row(statuses={"agreement-o": "passed"}, wanted=("agreement-o",)),), 1.0)
    assert not whole.passed
    assert "SURVIVED: none of agreement-o failed" in str(whole)


def test_processes_find_what_one_finds(small):
    both = zoo(only=FEW, kind="mutant", rules="killers", examples=8, jobs=2)
    found, want = ([replace(r, seconds=0) for r in z.of("mutant")] for z in (both, small))
    assert found == want
    assert len(found) == 2


def test_progress_is_told_row_by_row():
    told = []
    zoo(only=["scale-twice"], rules="killers", examples=2, progress=lambda *x: told.append(x))
    assert told == [("scale-twice", 1, 1)]


@pytest.mark.parametrize("kind", ["mutant", "correct"])
def test_one_kind_can_be_had_alone(kind):
    found = zoo(only=["scale-twice", "tf32"], kind=kind, rules="killers", examples=1)
    assert [row.kind for row in found.rows] == [kind]


@pytest.mark.parametrize("words", [{"only": ["no-such-animal"]}, {"rules": "some"}, {"kind": "ox"}])
def test_what_is_not_in_the_zoo_is_an_error(words):
    with pytest.raises(OptionError, match=r"no-such-animal|some|ox"):
        zoo(**words)


def test_the_zoo_is_as_large_as_it_is_said_to_be():
    assert len(MUTANTS) >= 120
    assert len(CORRECT) >= 25


def test_a_witness_is_far_beyond_what_is_allowed():
    found = witness(MUTANTS["scale-twice"])
    assert found is not None
    assert found[1] > 10


def test_what_is_right_has_no_witness():
    right = replace(MUTANTS["scale-twice"], forward=base, backward=base_backward)
    assert witness(right, tries=40) is None


def test_a_crash_is_no_witness():
    def crashing(q, k, v):
        if q.shape[-2] > 2:
            raise FloatingPointError("more than two queries")
        return base(q, k, v)

    crashes = replace(MUTANTS["scale-twice"], forward=crashing, backward=None)
    assert witness(crashes, tries=9) is None


def test_a_witness_of_bits_is_beyond_any_multiple():
    found = witness(MUTANTS["input-changed"])
    assert found is not None
    assert found[1] == math.inf
