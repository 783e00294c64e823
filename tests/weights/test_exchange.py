"""What conversions of all frameworks share, without any of them."""

import json
import sys

import pytest

from npattn.errors import MissingExtraError, OptionError
from npattn.weights import exchange


def test_a_package_is_the_one_that_is_imported(monkeypatch):
    assert exchange.loaded_package("json", "from_x") is json
    with pytest.raises(MissingExtraError, match=r"npattn\.weights\.from_x needs no_such"):
        exchange.loaded_package("no_such", "from_x")
    monkeypatch.delitem(sys.modules, "json")
    with pytest.raises(OptionError, match="an object of json, which is not imported"):
        exchange.loaded_package("json", "from_x")


def test_the_first_option_that_is_set_is_refused():
    exchange.refuse(("a", None, "no"), ("b", False, "no"))
    with pytest.raises(OptionError, match="b is 3, which MultiHeadAttention does not have: why"):
        exchange.refuse(("a", None, "no"), ("b", 3, "why"), ("c", 4, "no"))
