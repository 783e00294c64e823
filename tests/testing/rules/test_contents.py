"""Results that are not their caller's own fail; honest implementations that look alike pass."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.zoo.cheats.targets import buffers, caches, first_calls, graphs, honest, sharing
from npattn.testing import Implementation
from npattn.testing.rules import PROPERTIES
from npattn.testing.targets.numpy import flash
from npattn.testing.trial import Refusal, Violation
from tests.testing.rules.relations import trial_of

RULES = ("arrays-reused", "nearly-same-contents", "outputs-kept", "outputs-apart")


@pytest.fixture(autouse=True)
def _forget():
    """Clear what the functions of the zoo remember."""
    kept = (caches.RESULTS, caches.INPUTS, graphs.GRAPHS, buffers.RINGS, honest.KERNELS)
    for memory in (*kept, honest.RESULTS, first_calls.CALLS):
        memory.clear()


def trial(module, name, **space):
    backward = getattr(module, f"{name}_backward", None)
    f = Implementation(getattr(module, name), backward=backward, framework="numpy")
    made = trial_of(f=f, **space)
    made.gradients = made.gradients & {"dq", "dk", "dv"} if backward else frozenset()
    return made


def ask(made, rule, seed=0, examples=100):
    recipes = PROPERTIES[rule].recipes(made, seed, examples)
    return [PROPERTIES[rule].check(made, recipe) for recipe in recipes]


def violation(made, rule, seed=0, examples=100):
    with pytest.raises(Violation) as caught:
        ask(made, rule, seed, examples)
    return str(caught.value)


CAUGHT = (
    ("arrays-reused", caches, "cache_by_identity", "where the same objects hold other contents"),
    ("arrays-reused", caches, "cache_of_mask_objects", "same mask, bias, sinks or gate hold"),
    ("arrays-reused", graphs, "graph_on_live_pointers", "same objects hold other contents"),
    ("outputs-apart", sharing, "output_over_query", "o shares memory with q"),
    ("nearly-same-contents", caches, "cache_by_sum", "in another order"),
    ("nearly-same-contents", caches, "cache_by_corners", "one number of q differs"),
    ("nearly-same-contents", caches, "cache_by_query", "where only this differs: k holds"),
    ("nearly-same-contents", caches, "cache_by_query_and_key", "where only this differs: v holds"),
    ("outputs-kept", buffers, "ring_of_thirty_eight", "read after 39 other calls"),
    ("outputs-kept", buffers, "gradients_in_a_ring", "read after 39 other calls"),
    ("outputs-apart", sharing, "output_is_value", "o shares memory with v"),
    ("outputs-apart", sharing, "output_over_value", "o shares memory with v"),
    ("outputs-apart", sharing, "gradients_share_zeros", "dq shares memory with dk"),
    ("outputs-apart", sharing, "gradient_over_cotangent", "dq shares memory with dout"),
    ("outputs-apart", caches, "cache_that_is_shared", "after the caller wrote to the results"),
)


@pytest.mark.parametrize("seed", range(3))
def test_input_returned_as_result_fails_in_the_first_calls(seed):
    made = trial(sharing, "output_is_value")
    recipe, *_ = PROPERTIES["outputs-apart"].recipes(made, seed, 20)
    with pytest.raises(Violation, match="o shares memory with v"):
        PROPERTIES["outputs-apart"].check(made, recipe)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["cache_by_identity", "cache_of_mask_objects"])
def test_identity_of_either_kind_fails_where_there_are_few_options(name, seed):
    made = trial(caches, name)
    assert made.space.features == {"mask", "causal"}
    assert "hold other contents" in violation(made, "arrays-reused", seed)


@pytest.mark.parametrize("seed", range(8))
def test_masks_are_passed_again_whatever_is_drawn(seed):
    made = trial(caches, "cache_of_mask_objects")
    assert "same mask, bias, sinks or gate hold" in violation(
        made, "arrays-reused", seed, examples=5
    )


def test_no_mask_is_passed_that_is_refused():
    made = trial(caches, "cache_of_mask_objects", refused=frozenset({frozenset({"mask"})}))
    recipe = replace(made.space.base(), mask=None)
    assert PROPERTIES["arrays-reused"].check(made, recipe) < 1


@pytest.mark.parametrize(("rule", "module", "name", "message"), CAUGHT)
def test_cheat_of_the_rule_fails(rule, module, name, message):
    assert message in violation(trial(module, name), rule)


HONEST = (
    ("arrays-reused", "complete_memo"),
    ("arrays-reused", "memoised_causal_mask"),
    ("arrays-reused", "expression_evaluated_at_the_end"),
    ("nearly-same-contents", "complete_memo"),
    ("nearly-same-contents", "kernel_for_each_shape"),
    ("outputs-kept", "workspace_reused"),
    ("outputs-kept", "padded_output"),
    ("outputs-apart", "read_only_output"),
    ("outputs-apart", "transposed_output"),
    ("outputs-apart", "padded_output"),
    ("outputs-apart", "workspace_reused"),
    ("outputs-apart", "complete_memo"),
    ("outputs-apart", "gradients_in_one_buffer"),
)


@pytest.mark.parametrize(("rule", "name"), HONEST)
def test_honest_implementation_passes(rule, name):
    ratios = ask(trial(honest, name), rule)
    assert ratios
    assert max(ratio for ratio in ratios if ratio is not None) < 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_reference_passes(rule, dtype):
    ratios = ask(trial_of(dtype=dtype), rule)
    assert max(ratio for ratio in ratios if ratio is not None) < 1


def test_bias_known_by_its_object_fails():
    kept = {}

    def attention(q, k, v, bias=None):
        held = kept.setdefault(id(bias), (bias, None if bias is None else bias.copy()))
        return flash(q, k, v, bias=held[1])

    made = trial_of(f=Implementation(attention, framework="numpy"))
    made.gradients = frozenset()
    with pytest.raises(Violation, match="same mask, bias, sinks or gate hold"):
        PROPERTIES["arrays-reused"].check(made, replace(made.space.base(), bias="full"))


def refusals_of(made):
    problem = made.problem(made.space.base())
    return (Refusal(problem, None, "contiguous", "raised ValueError: no"),)


def test_refusal_that_is_no_longer_given_fails():
    turn = itertools.count()

    def refuses_at_first(q, k, v):
        if not next(turn):
            raise ValueError("no")
        return honest.attention(q, k, v)

    f = Implementation(refuses_at_first, framework="numpy")
    made = trial_of(f=f)
    made.gradients, made.refusals = frozenset(), refusals_of(made)
    check = PROPERTIES["refused-again"].check
    assert check(made, made.space.base()) == 0
    with pytest.raises(Violation, match="refuses sometimes: it raised ValueError: no first, and"):
        check(made, made.space.base())


def test_nothing_refused_leaves_nothing_to_ask():
    made = trial_of()
    assert PROPERTIES["refused-again"].unless(made) == "nothing was refused"


def test_results_that_are_always_wrong_are_not_called_stale():
    """lse does not depend on v: it has the same bits, and is wrong for another reason."""

    def add_one_to_lse(q, k, v, *, causal=False, return_lse=False):
        if not return_lse:
            return flash(q, k, v, causal=causal)
        o, lse = flash(q, k, v, causal=causal, return_lse=True)
        return o, lse + 1

    made = trial_of(f=Implementation(add_one_to_lse, framework="numpy"))
    made.gradients = frozenset()
    assert all(ratio < 1 for ratio in ask(made, "nearly-same-contents", examples=20))
