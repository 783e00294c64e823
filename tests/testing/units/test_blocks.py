"""Checks in units of many examples."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

import npattn.testing.units.blocks as blocks
from npattn import Conventions
from npattn.cli import cli
from npattn.errors import OptionError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.targets import load_implementation
from npattn.testing.targets.numpy import flash
from npattn.testing.units.blocks import check_in_units
from npattn.testing.units.unit import Result, Unit, do_unit
from tests.testing.units.inline import Inline

RULES = ("agreement-o", "views")


def answer(unit, rule, status="passed"):
    outcome = {"rule": rule, "semantics": "1", "about": "", "dtype": unit.dtype, "status": status}
    outcome |= {"worst": 0.25, "examples": unit.examples, "message": "", "left_to": []}
    outcome |= {"asked": {"ranges": {"T": [5, 7]}, "models": []}, "powers": {}}
    outcome |= {"level": "values" if rule == "agreement-o" else "conduct"}
    return {"dtype": unit.dtype, "answer": rule, "outcome": outcome}


def passes(unit):
    return Result("done", answers=tuple(answer(unit, rule) for rule in unit.rules))


def fails_late(unit):
    """agreement-o fails in blocks 2, 3 and 5, counted from 0."""
    wrong = "failed" if unit.seed in (2, 3, 5) else "passed"
    statuses = {"agreement-o": wrong, "views": "passed"}
    return Result("done", answers=tuple(answer(unit, r, statuses[r]) for r in unit.rules))


PLAIN = {"calls": {}, "limits": {}, "conventions": Conventions(), "sizes": {}, "rounding": None}
PLAIN |= {"dtypes": ("float32",), "seed": 0}


class Shuffled(ThreadPoolExecutor):
    """Units are done in any order."""

    def submit(self, function, text):
        def answer():
            time.sleep(random.random() / 100)
            return fails_late(Unit.from_text(text)).to_text()

        return super().submit(answer)


def check(executor, examples=1000, width=1, **more):
    steps = []
    report = check_in_units(
        load_implementation("numpy.flash"),
        executor,
        width,
        **PLAIN | more,
        examples=examples,
        only=RULES,
        progress=lambda *step: steps.append(step),
        diagnosis=False,
    )
    return report, steps


def outcomes(report):
    return {o.rule: (o.status, o.examples) for o in report.outcomes}


@pytest.mark.thorough
def test_examples_are_shared_out():
    executor = Inline(passes)
    report, steps = check(executor, examples=501, width=2)
    assert outcomes(report) == dict.fromkeys(RULES, ("passed", 501))
    assert report.settings["examples"] == 501
    assert [key.split()[:3] for key in executor.done] == [
        ["numpy.flash", "float32", str(seed)] for seed in range(3)
    ]
    assert steps[-1] == ("", "0 units in work", 3, 3)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_order_of_units_changes_nothing(width):
    """The first block that fails ends a rule, however many were done at once."""
    with Shuffled(width) as executor:
        report, _ = check(executor, examples=7 * blocks.EXAMPLES, width=width)
    assert outcomes(report) == {
        "agreement-o": ("failed", 3 * blocks.EXAMPLES),
        "views": ("passed", 7 * blocks.EXAMPLES),
    }


def test_rules_that_failed_are_left_out_of_later_blocks():
    executor = Inline(fails_late)
    check(executor, examples=7 * blocks.EXAMPLES)
    asked = [key.split()[3:] for key in executor.done]
    assert asked[:3] == [list(RULES)] * 3
    assert asked[-1] == ["views"]


def test_a_lost_unit_is_missing():
    def judge(unit):
        return Result("crashed", "signal 9") if unit.seed == 1 else passes(unit)

    report, _ = check(Inline(judge), examples=3 * blocks.EXAMPLES)
    assert report.missing == ("examples of seed 1 in float32 (crashed: signal 9)",)
    assert not report.passed


@pytest.mark.thorough
def test_a_whole_check_in_units(monkeypatch):
    monkeypatch.setattr(blocks, "EXAMPLES", 3)
    report, _ = check(Inline(do_unit), examples=5, sizes={"D": (3, 7)})
    assert outcomes(report) == dict.fromkeys(RULES, ("passed", 5))


def test_functions_without_a_spec_are_refused():
    with pytest.raises(OptionError, match="a cluster needs a known name"):
        check_in_units(
            Implementation(flash, framework="numpy"),
            Inline(),
            1,
            **PLAIN,
            examples=2,
            only=None,
            progress=print,
        )


def run(*arguments):
    return CliRunner().invoke(cli, ["check", "numpy.flash", *arguments])


def test_the_command_refuses_what_units_cannot_do():
    done = run("--cluster", "local:1", "--budget", "3s", "-n", "2")
    assert done.exit_code == 2
    assert "got --budget, -n beside --cluster" in " ".join(done.stderr.split())


@pytest.mark.thorough
def test_the_command_asks_the_cluster(monkeypatch):
    @contextmanager
    def open_cluster(where):
        assert where == "local:3"
        yield Inline(passes), 3

    monkeypatch.setattr("npattn.cli.cluster.open_cluster", open_cluster)
    asked = ("--only", "views", "--examples", "401", "--sizes", "D=3,7")
    done = run("--cluster", "local:3", *asked)
    assert done.exit_code == 0, done.output
    assert "examples 401" in done.stdout
