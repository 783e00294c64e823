"""Functions on packed and paged sequences are judged as they are."""

import pytest

from npattn.testing import check
from tests.testing.sequence_kernels import KERNELS, MISTAKES, build

QUICK = {"examples": 7, "framework": "numpy", "shrink": False, "diagnosis": False}
ALONE = {
    "other-sequences": ("the last sequence is not computed", "an empty sequence ends the loop"),
    "unread-slots": ("hidden slots times 0", "the whole last page"),
}
"""Rules, and mistakes that they find by themselves."""
BROAD = ("packed", "page list", "a key of the sequence behind", "the whole last page")
"""A storage of keys of each kind, with mistakes in it; the others are judged at night."""


@pytest.mark.parametrize(
    "storage",
    [name if name in BROAD else pytest.param(name, marks=pytest.mark.nightly) for name in KERNELS],
)
def test_correct_functions_pass(storage):
    report = check(build(storage), **{**QUICK, "examples": 3}, require="all")
    assert report.passed, str(report)
    assert {o.rule: o.status for o in report.outcomes}["other-sequences"] == "passed"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_found(mistake):
    rules = ["agreement-o", "inputs-unchanged", *ALONE]
    report = check(build(mistake), **QUICK, only=rules, require="all", fail_fast=True)
    assert not report.passed


@pytest.mark.nightly
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_found_by_a_whole_check(mistake):
    assert not check(build(mistake), **QUICK, require="all", fail_fast=True).passed


@pytest.mark.parametrize(
    ("rule", "mistake"), [(rule, name) for rule, names in ALONE.items() for name in names]
)
def test_a_rule_finds_its_mistakes_alone(rule, mistake):
    report = check(build(mistake), **QUICK, only=[rule])
    (outcome,) = (o for o in report.outcomes if o.rule == rule)
    assert outcome.status == "failed"


CAUSES = {
    "the whole last page": "it reads slots that no sequence has",
    "the first row of the table for all": "it reads keys of another sequence",
    "a key of the sequence before": "it reads keys of another sequence",
    "the diagonal of the longest": "a sequence is right alone, and wrong where others are beside",
}


@pytest.mark.parametrize("mistake", CAUSES)
def test_a_cause_says_what_was_read(mistake):
    rules = ["agreement-o", "rows-sum-to-one", "other-sequences"]
    report = check(build(mistake), **{**QUICK, "diagnosis": True}, only=rules)
    assert report.causes[0].text.startswith(CAUSES[mistake])
    assert report.causes[0].kind == "storage"


def test_a_mistake_that_storage_does_not_explain_is_named_as_ever():
    right = build("packed")

    def f(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        return right(2 * q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)

    report = check(f, **{**QUICK, "diagnosis": True}, only=["agreement-o", "model-sizes"])
    assert {cause.kind for cause in report.causes} == {"factor"}


def test_the_script_shows_the_failure(tmp_path):
    import subprocess
    import sys

    (tmp_path / "kernels.py").write_text(
        "import numpy as np\n"
        "from npattn import cache\n\n\n"
        "def f(q, k, v, cache_seqlens, block_table):\n"
        "    lengths = np.minimum(cache_seqlens + 1, block_table.shape[1] * k.shape[1])\n"
        "    return cache.paged(q, k, v, block_table, lengths, dtype=q.dtype)\n"
    )
    target = f"{tmp_path / 'kernels.py'}:f"
    from npattn.testing.targets import load_implementation

    report = check(
        load_implementation(target, framework="numpy"),
        examples=5,
        only=["agreement-o"],
        sizes={"P": (3,)},
    )
    script = tmp_path / "show.py"
    script.write_text(report.script())
    assert "f.restrict({'P': (3,)})" in script.read_text()
    shown = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=120
    )
    assert "WRONG" in shown.stdout
