"""Functions that stand in for a known system: its names, layout, conventions and refusals."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from npattn import Conventions
from npattn.errors import OptionError
from npattn.profiles import PROFILES, Profile
from npattn.testing import Implementation, check
from npattn.testing.targets.numpy import flash

MINE = Profile(name="mine", version="1", about="a system of this test",
               conventions=Conventions(causal="top_left"),
               signature={"visible": "mask", "near": "window or −1", "with_lse": "return_lse"},
               layout="BTHD", refuses=("E != D: values as wide as keys", "float16"),
               promises={"agreement-o": "handbook of mine, page 3"})  # fmt: skip


def stand_in(q, k, v, visible=None, near=(-1, -1), other=3, with_lse=False):
    """Attention of `MINE`, wrong by a factor of two."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    window = None if near == (-1, -1) else tuple(None if n == -1 else n for n in near)
    out, lse = flash(q, k, v, mask=visible, window=window, return_lse=True)
    out = 2 * out.swapaxes(1, 2)
    return (out, lse) if with_lse else out


def test_profile_gives_names_layout_and_conventions():
    read = Implementation(stand_in, like=MINE, framework="numpy")
    assert read.features == {"mask", "window"}
    assert read.returns == ("return_lse",)
    assert (read.layout, read.conventions) == ("BTHD", MINE.conventions)
    assert read.untested == ("other",)


def test_explicit_arguments_win_over_profile():
    read = Implementation(
        stand_in, like=MINE, framework="numpy", layout="BHTD", rename={"other": "softcap"}
    )
    assert read.features == {"mask", "window", "softcap"}
    assert read.layout == "BHTD"


def test_opaque_function_has_signature_of_profile():
    class Opaque:
        __signature__ = 3

        def __call__(self, *arrays, **options):
            return stand_in(*arrays, **options)

    read = Implementation(Opaque(), like=MINE, framework="numpy")
    assert read.features == {"mask", "window"}


def test_unknown_system_is_an_error():
    with pytest.raises(OptionError, match=r"like is 'flash_atn', .*did you mean flash_attn\?"):
        Implementation(flash, like="flash_atn")


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_what_system_takes_back_is_not_required():
    report = check(
        stand_in, like=MINE, framework="numpy", examples=2, shrink=False, only=["agreement-o"]
    )
    assert report.taken_back == {"agreement-o": "handbook of mine, page 3"}
    assert not report.passed  # asked for by name
    assert replace(report, require=("values",)).passed
    assert not replace(report, require=("values",), taken_back={}).passed


@pytest.mark.thorough
def test_refused_structure_is_not_sampled():
    report = check(
        stand_in, like=MINE, framework="numpy", examples=5, shrink=False, only=["agreement-lse"]
    )
    assert "E != D: values as wide as keys (not promised by mine)" in report.refused
    assert "float16 (not promised by mine)" in report.refused

    widths = set()

    def watch(q, k, v, with_lse=False):
        widths.add(q.shape[-1] == v.shape[-1])
        return stand_in(q, k, v, with_lse=with_lse)

    check(watch, like=MINE, framework="numpy", examples=5, shrink=False, only=["agreement-lse"])
    assert widths == {True}


def test_conventions_given_win_over_those_of_names():
    def f(q, k, v, is_causal=False):
        return flash(q, k, v, causal=is_causal)

    arguments = {"framework": "numpy", "examples": 3, "only": ["agreement-o"]}
    arguments |= {"shrink": False, "diagnosis": False}
    implied, told = check(f, **arguments), check(f, conventions=Conventions(), **arguments)
    assert "is_causal as causal (top_left)" in implied.settings["reads"]
    assert not implied.passed  # flash aligns to the bottom right
    assert told.passed


def test_nothing_is_told_twice():
    with pytest.raises(OptionError, match="got like, rename beside an Implementation"):
        check(Implementation(flash), like="torch.sdpa", rename={"causal": "causal"})


def test_every_profile_can_be_stood_in_for():
    def f(q, k, v, **options):
        return np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)

    for name, profile in PROFILES.items():
        read = Implementation(f, like=name, framework="numpy")
        assert read.conventions == profile.conventions
        assert read.layout == profile.layout


def test_ranks_that_a_profile_refuses_are_never_asked():
    ranks = set()

    def watch(q, k, v):
        ranks.add(q.ndim)
        return flash(q, k, v)

    mine = Profile(name="mine", version="1", about="", refuses=("rank 2, rank 5: three or four",))
    arguments = {"framework": "numpy", "examples": 2, "shrink": False, "diagnosis": False}
    assert check(watch, like=mine, only=["agreement-o"], **arguments).passed
    assert ranks == {3, 4}


@pytest.mark.thorough
@pytest.mark.parametrize("refuses", ["mask+causal, bias+causal: not together", "causal: never"])
def test_options_that_a_profile_refuses_are_never_asked(refuses):
    seen = set()

    def together(q, k, v, mask=None, *, causal=False, bias=None):
        options = {"mask": mask is not None, "bias": bias is not None, "causal": causal}
        seen.update(combinations(sorted(n for n, on in options.items() if on), 2))
        seen.add(causal)
        return flash(q, k, v, mask, causal=causal, bias=bias)

    mine = Profile(name="mine", version="1", about="", refuses=(refuses,))
    report = check(together, like=mine, framework="numpy", examples=9, shrink=False,
                   diagnosis=False,
                   only=["agreement-o", "causal-as-mask", "padded-keys"])  # fmt: skip
    assert report.passed, str(report)
    assert seen - {False, True} == {("bias", "mask")}
    assert (True in seen) == ("+" in refuses)
    assert f"{refuses} (not promised by mine)" in report.refused


@pytest.mark.thorough
def test_torch_is_a_drop_in_for_itself():
    torch = pytest.importorskip("torch")
    report = check(
        torch.nn.functional.scaled_dot_product_attention,
        like="torch.sdpa",
        examples=2,
        sizes={"T": (5,), "S": (7,), "D": (11,), "E": (13,)},  # where no kernel takes both
        shrink=False,
        diagnosis=False,
        only=["agreement-o", "mask-as-bias"],
    )
    assert report.passed, str(report)


def test_layout_says_nothing_of_other_ranks():
    def heads_after_positions(q, k, v):
        if q.ndim < 3:
            raise NotImplementedError("no heads")
        return flash(*(x.swapaxes(-2, -3) for x in (q, k, v))).swapaxes(-2, -3)

    report = check(heads_after_positions, layout="BTHD", examples=2, shrink=False, diagnosis=False,
                   only=["agreement-o"])  # fmt: skip
    assert report.passed, str(report)
    assert "ranks other than 4: layout BTHD" in report.untested
