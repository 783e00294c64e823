"""Settings of a check: one row for Python, the command line, reports and journals."""

import inspect
import re
from dataclasses import fields

import pytest

from npattn.cli.check import ALONE, check_command
from npattn.errors import NpattnError
from npattn.testing import check
from npattn.testing.settings import CommandSettings, Settings, options


def test_check_takes_and_describes_each_setting():
    f, *parameters = inspect.signature(check).parameters.values()
    assert f.name == "f"
    assert {p.name: p.default for p in parameters} == {x.name: x.default for x in fields(Settings)}
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
    described = check.__doc__.partition("Parameters")[2].partition("Returns")[0]
    assert re.findall(r"^    (\w+) : ", described, re.M) == ["f", *options(Settings)]
    assert max(map(len, check.__doc__.splitlines())) <= 100


def test_the_command_has_a_flag_for_each_setting_but_five():
    flags = {p.name for p in check_command.params}
    named = {name for name, (_, one) in options(CommandSettings).items() if one.flags}
    assert flags == {*named, "target"}
    missing = set(options(CommandSettings)) - flags
    assert missing == {"shrink", "diagnosis", "isolate", "progress", "goes_on"}
    assert set(ALONE) <= flags


def test_an_unknown_argument_is_an_error_of_check():
    with pytest.raises(TypeError, match=r"check\(\) got an unexpected keyword argument 'exampels'"):
        check(print, exampels=3)


def test_reports_and_journals_have_what_is_asked():
    settings = Settings(seed=3, budget=60, dtypes="float16")
    assert settings.for_report() == {"seed": 3, "budget": "60 s"}
    assert Settings(sweep=9).for_report() == {"seed": 0, "sweep": 9}
    asked = {"dtypes": ("float16",), "examples": None, "seed": 3, "shrink": True}
    assert settings.for_journal() == asked | {"sizes": None, "only": None}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": 3, "journal": "x"}, "got a journal beside budget"),
        ({"journal": "x", "resume": "y"}, "got journal beside resume"),
        ({"sweep": -1}, "sweep is -1, must be an integer ≥ 0"),
        ({"progress": 3}, "progress is 3, must be True, False or a function"),
        ({"dtypes": ["bf15"]}, "must be among float64"),
        ({"accept": ["out"]}, "accept has 'out', must be among o, lse"),
    ],
)
def test_what_is_not_legal_is_an_error(given, message):
    with pytest.raises(NpattnError, match=message):
        Settings(**given)


def test_other_words_for_dtypes_are_understood():
    names = ("bf16", "torch.float16", "f32", "double", "fp8")
    dtypes = Settings(dtypes=names).dtypes
    assert dtypes == ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn")
