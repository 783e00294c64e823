"""A problem's samples as sequences that are packed, in a cache or in pages."""

from dataclasses import replace

import numpy as np
import pytest

from npattn.errors import OptionError
from npattn.problem import Problem
from npattn.testing import Implementation, check
from npattn.testing.adapters.base import ImplementationError, ResultError
from npattn.testing.adapters.sequences import arrange
from npattn.testing.adapters.storage import Storage
from tests.testing.sequence_kernels import build

B, H, K, T, S, D, E = 3, 10, 5, 7, 11, 13, 17


def sample(lengths=None, **options):
    rng = np.random.default_rng(19)
    shapes = (B, H, T, D), (B, K, S, D), (B, K, S, E)
    if lengths is not None:
        options["mask"] = (np.arange(S) < np.array(lengths)[:, None])[:, None, None]
    return Problem(*map(rng.standard_normal, shapes), **options)


STORAGES = {
    "packed": Storage("packed", "packed", frozenset({"offsets of queries", "offsets of keys"})),
    "cache": Storage("batch", "cache", frozenset({"lengths of keys"})),
    "pages": Storage("batch", "pages", frozenset({"lengths of keys", "page table"})),
    "lengths": Storage("cache", "cache", frozenset({"lengths of queries", "lengths of keys"})),
    "lists": Storage(
        *("packed", "pages"),
        frozenset({"offsets of queries", "page offsets", "page list", "keys on last page"}),
    ),
}


def keys_of(storage, arrays, i, name):
    """The keys of sequence i, as an implementation finds them."""
    x = arrays[name]
    if storage.keys == "packed":
        first, last = arrays["offsets of keys"][i : i + 2]
        return x[first:last]
    if storage.keys == "cache":
        return x[i, : arrays["lengths of keys"][i]]
    P = x.shape[1]
    if "page table" in arrays:
        length = arrays["lengths of keys"][i]
        pages = arrays["page table"][i, : -(-length // P)]
    else:
        pages = arrays["page list"][slice(*arrays["page offsets"][i : i + 2])]
        length = max(len(pages) - 1, 0) * P + arrays["keys on last page"][i]
    return x[pages].reshape(-1, *x.shape[2:])[:length]


@pytest.mark.parametrize("seed", [0, 23, 29])
@pytest.mark.parametrize("name", STORAGES)
def test_every_sample_is_found_where_the_arrays_say(name, seed):
    storage = replace(STORAGES[name], seed=seed, least=0, page_size=3)
    lengths = (4, 0, 11)
    problem = sample(lengths)
    places = arrange(storage, problem)
    arrays = places.arrays(problem)
    found = [i for i, one in enumerate(places.sequences) if one.sample is not None]
    assert [places.sequences[i].sample for i in found] == [0, 1, 2]
    for b, i in enumerate(found):
        for name in "kv":
            own = getattr(problem, name)[b, :, : lengths[b]].swapaxes(0, 1)
            np.testing.assert_array_equal(keys_of(storage, arrays, i, name), own)
    q = arrays["q"]
    if storage.queries == "packed":
        first, last = arrays["offsets of queries"][found[0] : found[0] + 2]
        q = q[first:last][None]
    else:
        T = arrays.get("lengths of queries", [q.shape[1]] * (found[0] + 1))[found[0]]
        q = q[found][:, :T]
    np.testing.assert_array_equal(q[0], problem.q[0].swapaxes(0, 1))


@pytest.mark.parametrize("name", STORAGES)
def test_what_is_stored_comes_back(name):
    storage, problem = STORAGES[name], sample()
    places = arrange(storage, problem)
    arrays = places.arrays(problem)
    for result, stored, own in (("dq", "q", "q"), ("dk", "k", "k"), ("dv", "v", "v")):
        back = places.restore(result, arrays[stored], problem)
        np.testing.assert_array_equal(back, getattr(problem, own))
    o = np.zeros((B, H, T, E)) + np.arange(E)
    np.testing.assert_array_equal(places.restore("o", places.store_cotangent(o, 1.0), problem), o)
    lse = np.arange(B * H * T, dtype=float).reshape(B, H, T)
    for last in (False, True):
        places = arrange(replace(storage, lse_heads_last=last), problem)
        np.testing.assert_array_equal(
            places.restore("lse", places.store_lse(lse, 1.0), problem), lse
        )


def test_cotangents_behind_the_last_query_are_0():
    places = arrange(STORAGES["lengths"], sample())
    stored = places.store_cotangent(np.ones((B, H, T, E)), 1.0)
    lengths = [one.T for one in places.sequences]
    assert max(lengths) > min(lengths)
    for row, length in zip(stored, lengths, strict=True):
        assert (row[:length] != 0).all()
        assert (row[length:] == 0).all()


def test_frameworks_that_compile_meet_one_shape():
    storage = replace(STORAGES["lengths"], few_shapes=True, only={"T": (3, 5), "S": (4, 13)})
    shapes = {
        tuple(
            x.shape
            for x in arrange(replace(storage, seed=seed), sample()).arrays(sample()).values()
        )
        for seed in range(11)
    }
    assert len(shapes) == 1
    many = {
        arrange(replace(storage, seed=seed, few_shapes=False), sample()).arrays(sample())["q"].shape
        for seed in range(11)
    }
    assert len(many) > 1


def test_other_sequences_have_other_lengths_and_are_large():
    storage, problem = STORAGES["pages"], sample()
    places = arrange(storage, problem)
    beside = [one for one in places.sequences if one.sample is None]
    assert len(beside) == B + 1
    assert all(one.S != S for one in beside)
    v = places.arrays(problem)["v"]
    assert abs(v[places.spare]).min() >= 32 > abs(problem.v).max()
    nan = arrange(replace(storage, unread="nan"), problem).arrays(problem)["v"]
    assert np.isnan(nan[places.spare]).all()
    alone = arrange(replace(storage, beside=False), problem)
    assert [one.sample for one in alone.sequences] == [0, 1, 2]


def test_renewed_numbers_are_those_of_slots_or_of_sequences():
    storage, problem = STORAGES["cache"], sample()
    plain = arrange(storage, problem).arrays(problem)
    for renewed, changes in {"slots": True, "sequences": False}.items():
        other = arrange(replace(storage, renewed=renewed), problem).arrays(problem)
        length, row = plain["lengths of keys"][0], 0  # a sequence beside the first sample
        behind = plain["k"][row, length:], other["k"][row, length:]
        within = plain["k"][row, :length], other["k"][row, :length]
        assert np.array_equal(*behind) != changes
        assert np.array_equal(*within) == changes
        np.testing.assert_array_equal(plain["q"][1], other["q"][1])


def test_lengths_that_it_takes_are_kept_to():
    storage = replace(STORAGES["packed"], only={"T": (7, 14), "S": (11, 22)})
    assert {one.T for one in arrange(storage, sample()).sequences} <= {7, 14}
    assert {one.S for one in arrange(storage, sample()).sequences} <= {11, 22}


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Problem(np.ones((5, 3)), np.ones((7, 3)), np.ones((7, 3))), "arrays of 2 axes"),
        (sample(bias=np.zeros((T, S))), "a bias of sequences of other lengths"),
        (sample(mask=np.ones((T, S), bool)), "it takes lengths alone"),
        (sample((4, 5, 6), causal="bottom_right"), "hidden keys beside causal"),
        (Problem(np.ones((2, 1, 5, 3)), *np.ones((2, 1, 1, 7, 3))), "a sample of k and v for"),
    ],
)
def test_what_cannot_be_stored_is_refused(problem, message):
    with pytest.raises(ImplementationError, match=message) as raised:
        arrange(STORAGES["packed"], problem)
    assert raised.value.is_refusal


def test_results_of_other_shapes_are_none():
    problem = sample()
    places = arrange(STORAGES["packed"], problem)
    with pytest.raises(ResultError, match=r"o has shape \(3, 7, 10, 17\), must be \(\d+, 10, 17\)"):
        places.restore("o", np.ones((B, T, H, E)), problem)


def test_parameters_that_leave_the_places_open_are_an_error():
    def f(q, k, v, cu_seqlens_q, max_seqlen_q):
        return q

    def longest(q, k, v, max_seqlen):
        return q

    for one, names in ((f, "cu_seqlens_q, max_seqlen_q"), (longest, "max_seqlen")):
        with pytest.raises(OptionError, match=f"has {names}, which leaves open where each"):
            Implementation(one, framework="numpy")


def test_storages_of_keys_are_told_apart():
    def vllm(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None,
             block_table=None):  # fmt: skip
        return q

    def fa(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table=None):
        return q

    def fa_paged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table):
        return q

    found = [Implementation(f, framework="numpy").storage for f in (vllm, fa, fa_paged)]
    assert [one.keys for one in found] == ["pages", "packed", "pages"]
    assert "offsets of keys" not in found[0].takes
    assert "page table" not in found[1].takes
    assert {"offsets of keys", "page table"} <= found[2].takes


def test_a_page_size_is_asked_for_by_its_letter():
    sizes = set()

    def watch(q, k_cache, v_cache, cache_seqlens, block_table):
        sizes.add(k_cache.shape[1])
        return build("pages")(q, k_cache, v_cache, cache_seqlens, block_table)

    arguments = {"framework": "numpy", "examples": 2, "only": ["agreement-o"]}
    assert check(watch, sizes={"P": (5,)}, **arguments).passed
    assert sizes == {5}
    with pytest.raises(OptionError, match=r"P=\(5, 7\), must be one page size"):
        check(watch, sizes={"P": (5, 7)}, **arguments)
    with pytest.raises(OptionError, match="takes no pages"):
        check(build("packed"), sizes={"P": (5,)}, **arguments)


def test_a_layout_beside_sequences_is_an_error():
    with pytest.raises(OptionError, match=r"must be BTHD: .* takes q \(total, H, D\)"):
        Implementation(build("packed"), framework="numpy", layout="BHTD")
