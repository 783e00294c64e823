"""Functions on packed and paged sequences are judged as they are."""

import numpy as np
import pytest

from npattn.testing import check
from tests.testing.sequence_kernels import KERNELS, MISTAKES, build

QUICK = {"examples": 7, "framework": "numpy", "shrink": False, "diagnosis": False}
ALONE = {
    "other-sequences": ("the last sequence is not computed", "an empty sequence ends the loop"),
    "unread-slots": ("hidden slots times 0", "the whole last page"),
    "page-ids": ("page ids of 16 bits", "offsets of 16 bits"),
}
"""Rules, and mistakes that they find by themselves."""
BROAD = ("packed", "page list", "new keys", "combined pages")
"""A storage of keys of each kind, with mistakes in it; the others are judged at night."""


@pytest.mark.thorough
@pytest.mark.unmeasured
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
    few = {**QUICK, "examples": 20 if MISTAKES[mistake][0] == "new keys" else 7}  # of many ways
    report = check(build(mistake), **few, only=rules, require="all", fail_fast=True)
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
    "a new key a slot late": "it reads slots that no sequence has",
    "positions from 0": "it turns by positions that begin at 0",
    "positions of new keys from 0": "it turns new keys by positions that begin at 0",
    "positions of queries from 0": "it turns queries by positions that begin at 0",
    "all queries at the first position": "it turns all queries by the first position",
    "each query at its position": "it turns all queries by the first position with causal, or each",
    "halves are always paired": "it turns pairs of features i and i + R/2 where 2i and 2i + 1",
    "the other direction": "it turns by the negative angle",
    "values are turned too": "it is right without a rotary table, and wrong with one",
    "left padding is ignored": "it reads slots that no sequence has",
    "left padding moves the positions": "it turns by positions that leave the left padding out",
    "rows of the cache are ignored": "it reads keys of another sequence",
    "a mask by columns": "it reads a packed mask by columns",
    "the mask of the first sequence": "it reads the mask of another sequence",
    "parts behind the heads": "it reads its packed array with the parts behind the heads",
}


BRIEF = (
    *("the first row of the table for all", "a key of the sequence before"),
    *("the diagonal of the longest", "a mask by columns", "the mask of the first sequence"),
    *("positions of new keys from 0", "parts behind the heads"),
)
"""Mistakes that are named in a few seconds; the others are at night."""


@pytest.mark.parametrize(
    "mistake", [x if x in BRIEF else pytest.param(x, marks=pytest.mark.nightly) for x in CAUSES]
)
def test_a_cause_says_what_was_read(mistake):
    rules = ["agreement-o", "rows-sum-to-one", "other-sequences", "unread-slots"]
    report = check(build(mistake), **{**QUICK, "diagnosis": True}, only=rules)
    assert CAUSES[mistake] in report.causes[0].text


def test_a_wrong_page_is_one_cause_and_no_state():
    """Which sequence has the page differs by problem, and so it seems to by the call before."""
    rules = ["agreement-o", "unread-slots", "page-ids", "after-other-dtype"]
    report = check(build("the second page of a pair"), **QUICK | {"diagnosis": True}, only=rules)
    (cause,) = report.causes
    reads = ("it reads keys of another sequence", "it reads slots that no sequence has")
    assert all(text in cause.text for text in reads)
    assert {rule.partition("[")[0] for rule in cause.rules} >= {"agreement-o", "after-other-dtype"}


WRITTEN = (
    *("a new key a slot late", "new keys are left in the cache unturned"),
    *("the cache is not updated", "a slot behind the new keys is cleared"),
)


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", WRITTEN)
def test_the_cache_after_the_call_is_compared(mistake):
    report = check(build(mistake), **{**QUICK, "examples": 20}, only=["inputs-unchanged"])
    (outcome,) = (o for o in report.outcomes if o.rule == "inputs-unchanged")
    assert outcome.status == "failed"
    assert "is not the cache with new keys behind those of each sequence" in outcome.message


def test_onnxruntime_grows_a_cache_as_the_judge_reads_it():
    """Its GroupQueryAttention turns, appends and attends; the cache is copied back in place."""
    pytest.importorskip("onnxruntime")
    from npattn.testing.targets.onnxruntime import GQA_INPUTS, _session

    turned = []

    def gqa(q, k_cache, v_cache, cache_seqlens, k, v, rotary_cos=None, rotary_sin=None,
            rotary_interleaved=True, causal=False):  # fmt: skip
        assert q.shape[1] == k.shape[1] == 1  # one new token, for which causal changes nothing
        arrays = {"query": q, "key": k, "value": v}
        arrays = {name: x.reshape(len(x), 1, -1) for name, x in arrays.items()}
        arrays |= {"past_key": k_cache.swapaxes(1, 2), "past_value": v_cache.swapaxes(1, 2)}
        arrays |= {"seqlens_k": cache_seqlens, "total_sequence_length": max(cache_seqlens) + 1}
        if rotary_cos is not None:
            turned.append(rotary_interleaved)
            arrays |= {"cos_cache": rotary_cos, "sin_cache": rotary_sin}
        arrays = {name: np.array(x) for name, x in arrays.items()}
        session = _session(
            *("GroupQueryAttention", tuple(n if n in arrays else "" for n in GQA_INPUTS)),
            ("out", "keys", "values"),
            tuple((name, x.dtype, x.ndim) for name, x in arrays.items()),
            num_heads=q.shape[2],
            kv_num_heads=k.shape[2],
            do_rotary=int(rotary_cos is not None),
            rotary_interleaved=int(rotary_interleaved),
        )
        out, keys, values = session.run(None, arrays)
        for cache, new in ((k_cache, keys), (v_cache, values)):
            for b, n in enumerate(cache_seqlens):
                cache[b, n] = new[b, :, n]
        return out.reshape(q.shape)

    sizes = {"T": (1,), "S": (5, 3, 11), "D": (16, 32), "E": (16, 32)}
    rules = ["agreement-o", "inputs-unchanged", "other-sequences"]
    report = check(gqa, **QUICK, only=rules, sizes=sizes)
    assert report.passed, str(report)
    assert {*turned} == {False, True}


PLACES = "cache_seqlens, block_table, causal=False"
ORDERS = {
    "heads before slots": "k.swapaxes(1, 2), v.swapaxes(1, 2)",
    "packed k and v": "kv[:, 0], kv[:, 1]",
    "packed k and v by head": "kv[..., 0, :], kv[..., 1, :]",
    "packed k and v, one behind the other": "kv[0], kv[1]",
    "packed k and v, heads before slots": "kv[:, 0].swapaxes(1, 2), kv[:, 1].swapaxes(1, 2)",
}
"""Meanings of the second parameter, and how k and v are found."""


@pytest.mark.thorough
@pytest.mark.parametrize("meaning", ORDERS)
def test_pages_are_passed_as_they_are_asked_for(meaning):
    name = "kv" if "packed" in meaning else "k"
    rest = PLACES if name == "kv" else f"v, {PLACES}"
    scope = {"right": build("pages")}
    source = (
        f"lambda q, {name}, {rest}: right(q, {ORDERS[meaning]}, cache_seqlens, block_table, causal)"
    )
    f = eval(source, scope)  # a function for each meaning
    rules = ["agreement-o", "other-sequences", "unread-slots"]
    report = check(f, **QUICK, only=rules, rename={name: meaning})
    assert report.passed, str(report)
    assert {o.status for o in report.outcomes} == {"passed"}
    other = {**ORDERS, "heads before slots": "k, v"}[meaning].replace(".swapaxes(1, 2)", "")
    if other != ORDERS[meaning]:
        wrong = eval(source.replace(ORDERS[meaning], other), scope)
        arguments = {**QUICK, "diagnosis": True, "sizes": {"P": (4,), "H": (4,), "K": (4,)}}
        report = check(wrong, **arguments, only=rules, rename={name: meaning})
        assert report.causes[0].text.startswith("it reads pages (N, P, K, D) as (N, K, P, D)")


@pytest.mark.thorough
def test_hidden_keys_come_beside_causal():
    lengths = []

    def watch(q, k_cache, v_cache, cache_seqlens, causal=False):
        lengths.append((causal, tuple(cache_seqlens)))
        return build("cache")(q, k_cache, v_cache, cache_seqlens, causal)

    report = check(watch, **{**QUICK, "examples": 20}, only=["agreement-o"])
    assert report.passed, str(report)
    assert any(causal and len({*several}) > 3 for causal, several in lengths)


@pytest.mark.thorough
def test_a_mistake_that_storage_does_not_explain_is_named_as_ever():
    right = build("packed")

    def f(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        return right(2 * q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)

    report = check(f, **{**QUICK, "diagnosis": True}, only=["agreement-o", "model-sizes"])
    assert {cause.step for cause in report.causes} == {"s"}


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_right_pages_pass_with_large_ids_unless_pages_are_large():
    few = {**QUICK, "only": ["page-ids"]}
    for name, sizes, status in (
        ("pages", {}, "passed"),
        ("page list", {"P": (5,), "D": (8,), "E": (8,)}, "passed"),
        ("pages", {"P": (64,), "D": (64,)}, "not applicable"),
        ("packed", {}, "not applicable"),
    ):
        (outcome,) = (
            o for o in check(build(name), **few, sizes=sizes).outcomes if o.rule == "page-ids"
        )
        assert outcome.status == status, name
