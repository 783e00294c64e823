"""Names: profiles or implementations, and the ways out where a name is neither or both."""

import pytest

from npattn.errors import MissingExtraError, OptionError
from npattn.profiles import PROFILES
from npattn.testing import Implementation, diff
from npattn.testing.difference.diff import choose_kind, profile_of
from tests.testing.difference import kernels


@pytest.fixture
def runs(monkeypatch):
    """Choose which names run here."""

    def choose(*here):
        name = "npattn.testing.difference.diff._runs_here"
        monkeypatch.setattr(name, lambda name: name in here or ":" in name)

    return choose


def test_two_names_that_run_are_implementations(runs):
    runs("torch.sdpa", "onnxruntime", "numpy.flash")
    assert choose_kind("numpy.flash", "torch.sdpa", False) == ("implementations", ())
    kind, [note] = choose_kind("onnxruntime", "torch.sdpa", False)
    assert kind == "implementations"
    assert "--profiles" in note
    assert choose_kind("onnxruntime", "torch.sdpa", True) == ("profiles", ())


def test_a_profile_alone_makes_the_other_a_profile(runs):
    runs("torch.sdpa")
    kind, notes = choose_kind("torch.sdpa", "onnx@1.21", False)
    assert kind == "profiles"
    assert notes == ("Their profiles are compared, since onnx@1.21 is a profile alone.",)
    assert choose_kind("onnx", "onnx@1.22", False) == ("profiles", ())


def test_a_target_that_does_not_run_is_its_profile(runs):
    runs("torch.sdpa")
    kind, [note] = choose_kind("torch.sdpa", "jax.nn", False)
    assert kind == "profiles"
    assert note.startswith("Their profiles are compared, since jax.nn needs ")


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("numpy.flash", "flash_attn", "npattn check numpy.flash --like flash_attn.*--profiles"),
        ("flash_attn", "my.py:f", "npattn check my.py:f --like flash_attn judges it by that pro"),
        ("torch.spda", "onnx", "did you mean torch.sdpa"),
        ("qqqqq", "onnx", "is no name of a profile"),
        (":f", "onnx", "is no name of a profile"),
    ],
)
def test_names_that_do_not_go_together(runs, a, b, message):
    runs("numpy.flash")
    with pytest.raises(OptionError, match=message):
        choose_kind(a, b, False)


def test_a_target_without_its_package(runs):
    runs("numpy.flash")
    with pytest.raises(MissingExtraError, match=r"onnx.reference needs "):
        choose_kind("onnx.reference", "numpy.flash", False)


def test_profile_of_a_target():
    assert profile_of("onnx.reference") is PROFILES["onnx"]
    with pytest.raises(OptionError, match="has no profile"):
        choose_kind("onnx", "my.py:f", True)


def test_objects(runs):
    assert diff(PROFILES["onnx"], PROFILES["onnx@1.22"]).kind == "profiles"
    assert diff(PROFILES["onnx"], "onnx", profiles=True).alike
    for one, other in [(PROFILES["onnx"], kernels.right), (kernels.right, PROFILES["onnx"])]:
        with pytest.raises(OptionError, match="check"):
            diff(one, other)
    with pytest.raises(OptionError, match="check"):
        diff(Implementation(kernels.right), kernels.right, profiles=True)
