"""npattn.testing.cases.shapes: few whole shapes, for frameworks that compile for each."""

import itertools

import pytest

from npattn.testing.cases.shapes import SHAPES
from npattn.testing.cases.space import STRUCTURE, Space
from npattn.testing.cases.strategies import Pools

ALL = frozenset(STRUCTURE)


def shapes(space, **options):
    recipes = list(itertools.islice(Pools(space, **options).cases(0, 100), 200))
    return {(r.lead, r.H, r.K, r.T, r.S, r.D, r.E, r.broadcast) for r in recipes}


def test_few_shapes_carry_many_contents():
    few = shapes(Space(few_shapes=True), nonempty=True)
    assert len(few) == len(SHAPES) < len(shapes(Space(), nonempty=True))


def test_shapes_have_what_kernels_dispatch_on():
    few = shapes(Space(few_shapes=True), nonempty=True)
    have = {
        "one query": any(T == 1 < S for _, _, _, T, S, *_ in few),
        "T = S": any(T == S for _, _, _, T, S, *_ in few),
        "T > S": any(T > S for _, _, _, T, S, *_ in few),
        "over a tile": any(S > 64 for _, _, _, _, S, *_ in few),
        "T and S over a tile": any(T > 16 < S for _, _, _, T, S, *_ in few),
        "shared heads": any(1 < K < H for _, H, K, *_ in few),
        "one key/value head": any(1 == K < H for _, H, K, *_ in few),
        "B = H": any(lead == (H,) != (1,) for lead, H, *_ in few),
        "D % 8": any(D % 8 for *_, D, _, _ in few),
        "E = D": any(D == E for *_, D, E, _ in few),
        "ranks": {None if x is None else len(x) for x, *_ in few} == {None, 0, 1, 2},
        "broadcast": any(broadcast for *_, broadcast in few),
    }
    assert all(have.values()), have


def test_sizes_of_zero_are_those_of_one_shape():
    few = shapes(Space(few_shapes=True))
    zeros = [x for x in few if 0 in (*(x[0] or ()), *x[1:7])]
    assert zeros
    assert len(few) <= len(SHAPES) + len("BHTSDE")


@pytest.mark.parametrize("missing", ["K < H", "E != D", "T != S", "T > S", "D % 8", "broadcast"])
def test_shapes_keep_to_accepted_structure(missing):
    wrong = {
        "K < H": lambda lead, H, K, T, S, D, E, broadcast: K < H,
        "E != D": lambda lead, H, K, T, S, D, E, broadcast: E != D,
        "T != S": lambda lead, H, K, T, S, D, E, broadcast: T != S,
        "T > S": lambda lead, H, K, T, S, D, E, broadcast: T > S,
        "D % 8": lambda lead, H, K, T, S, D, E, broadcast: D % 8 or E % 8,
        "broadcast": lambda *shape: shape[-1],
    }[missing]
    few = shapes(Space(structure=ALL - {missing}, few_shapes=True), nonempty=True)
    assert few
    assert not any(wrong(*shape) for shape in few)


def test_sizes_of_the_user_and_of_a_rule_are_kept():
    few = shapes(Space(sizes={"D": (24, 40), "H": (12,)}, few_shapes=True), nonempty=True)
    assert {D for *_, D, _, _ in few} == {24, 40}
    assert {H for lead, H, *_ in few if lead is not None} == {12}
    forced = shapes(Space(few_shapes=True), force={"T": (19, 2)}, nonempty=True)
    assert {T for _, _, _, T, *_ in forced} == {19, 2}
    assert len(shapes(Space(few_shapes=True), force={"T": (9,)}, nonempty=True, shapes=1)) == 1


def test_ranks_that_are_refused_have_no_shape():
    lone = frozenset(STRUCTURE) - {"rank 2", "rank 3", "rank 5"}
    assert {len(lead) for lead, *_ in shapes(Space(structure=lone, few_shapes=True))} == {1}


def test_the_probe_and_sizes_of_zero_share_a_shape():
    base = Space(few_shapes=True).base()
    few = shapes(Space(few_shapes=True))
    plain = (base.lead, base.H, base.K, base.T, base.S, base.D, base.E, False)
    assert plain in few
    zeros = [x for x in few if 0 in (*(x[0] or ()), *x[1:7])]
    assert all(sum(a != b for a, b in zip(x, plain, strict=True)) <= 2 for x in zeros)
