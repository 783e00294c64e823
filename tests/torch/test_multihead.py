"""npattn.torch.MultiHeadAttention beside torch.nn.MultiheadAttention, in float64."""

import copy
import io
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.testing import assert_close  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import npattn.masks  # noqa: E402
from npattn.errors import DtypeError, OptionError, ShapeError  # noqa: E402
from npattn.positions import Rotary  # noqa: E402
from npattn.torch import MultiHeadAttention  # noqa: E402
from npattn.torch import attention as exact_attention  # noqa: E402
from tests.make import assert_same_bits  # noqa: E402

B, H, T, S, D, KDIM, VDIM = 2, 3, 5, 7, 4, 11, 13
EMBED = H * D

VARIANTS = {
    "plain": {},
    "without bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "other widths": {"kdim": KDIM, "vdim": VDIM, "add_bias_kv": True, "add_zero_attn": True},
    "batch first": {"batch_first": True},
}
BOTH = (nn.MultiheadAttention, MultiHeadAttention)


def make(kind, *, seed=0, embed=EMBED, heads=H, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    return kind(embed, heads, dtype=dtype, **options)


def normal(*shape, seed=1, dtype=torch.float64, **options):
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return torch.tensor(numbers, dtype=dtype, **options)


def inputs(module, *, batched=True, **options):
    sizes = ((T, EMBED), (S, module.kdim), (S, module.vdim))
    results = []
    for i, (n, width) in enumerate(sizes):
        x = normal(B, n, width, seed=i, **options)
        x = x if module.batch_first else x.transpose(0, 1).contiguous()
        results.append((x if batched else normal(n, width, seed=i, **options)).requires_grad_())
    return results


def triangle(dtype=torch.bool):
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    return later if dtype == torch.bool else torch.zeros(T, T, dtype=dtype).masked_fill(later, -9.0)


def gradients(module, given, **options):
    """out, weights and the gradients of all inputs and parameters from a loss of both."""
    out, weights = module(*given, **options)
    loss = (out * normal(*out.shape)).sum()
    if weights is not None:
        loss = loss + (weights * normal(*weights.shape)).sum()
    leaves = [*given, *module.parameters()]
    return out, weights, torch.autograd.grad(loss, leaves, allow_unused=True)


def both_agree(options, given, **call):
    expected = gradients(make(nn.MultiheadAttention, **options), given, **call)
    result = gradients(make(MultiHeadAttention, **options), given, **call)
    assert_close(result[0], expected[0])
    assert_close(result[1], expected[1])
    zero = torch.zeros(())
    one, other = ([zero if x is None else x for x in grads] for grads in (result[2], expected[2]))
    assert_close(one, other)


@pytest.mark.parametrize("variant", VARIANTS)
def test_initial_weights_of_a_seed_are_those_of_torch(variant):
    theirs, ours = (make(kind, **VARIANTS[variant]) for kind in BOTH)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert torch.rand(()) == (make(nn.MultiheadAttention, **VARIANTS[variant]), torch.rand(()))[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dict_loads_both_ways(variant):
    theirs = make(nn.MultiheadAttention, **VARIANTS[variant])
    ours = make(MultiHeadAttention, seed=2, **VARIANTS[variant])
    ours.load_state_dict(theirs.state_dict())
    back = make(nn.MultiheadAttention, seed=3, **VARIANTS[variant])
    back.load_state_dict(ours.state_dict())
    assert_close(back.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients_are_those_of_torch(variant, batched):
    options = VARIANTS[variant]
    both_agree(options, inputs(make(nn.MultiheadAttention, **options), batched=batched))


MASKS = {
    "padding": {"key_padding_mask": torch.arange(S) >= torch.tensor([[7], [3]])},
    "padding, added": {"key_padding_mask": normal(B, S)},
    "mask": {"attn_mask": torch.ones(T, S, dtype=torch.bool).triu(2)},
    "mask, added": {"attn_mask": normal(T, S)},
    "mask of a head": {"attn_mask": normal(B * H, T, S) > 1},
    "mask of a head, added": {"attn_mask": normal(B * H, T, S)},
    "both": {
        "key_padding_mask": torch.arange(S) >= torch.tensor([[7], [3]]),
        "attn_mask": torch.ones(T, S, dtype=torch.bool).triu(2),
    },
    "both, added": {"key_padding_mask": normal(B, S), "attn_mask": normal(B * H, T, S, seed=2)},
}


@pytest.mark.parametrize("variant", ["plain", "other widths"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_agree_with_torch(mask, variant):
    options = VARIANTS[variant]
    given = inputs(make(nn.MultiheadAttention, **options))
    both_agree(options, given, **MASKS[mask])
    both_agree(options, given, need_weights=False, **MASKS[mask])
    both_agree(options, given, average_attn_weights=False, **MASKS[mask])


def test_masks_without_a_batch_agree_with_torch():
    given = inputs(make(nn.MultiheadAttention), batched=False)
    both_agree({}, given, key_padding_mask=torch.arange(S) > 3)
    both_agree({}, given, attn_mask=normal(H, T, S), average_attn_weights=False)


def test_bool_and_float_masks_combine():
    given = inputs(make(nn.MultiheadAttention))
    hidden = torch.arange(S) >= torch.tensor([[7], [3]])
    added = torch.zeros(B, S, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    ours, mask = make(MultiHeadAttention), normal(T, S)
    result = gradients(ours, given, key_padding_mask=hidden, attn_mask=mask)
    expected = gradients(ours, given, key_padding_mask=added, attn_mask=mask)
    assert_close(result, expected)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_is_causal_requires_attn_mask(need_weights, padded):
    x = inputs(make(nn.MultiheadAttention))[0]
    padding = torch.zeros(B, T, dtype=torch.bool) if padded else None
    call = {"attn_mask": triangle(), "is_causal": True, "need_weights": need_weights}
    both_agree({}, [x] * 3, key_padding_mask=padding, **call)
    for module in (make(kind) for kind in BOTH):
        with pytest.raises((RuntimeError, OptionError), match="attn_mask"):
            module(x, x, x, is_causal=True)


def test_gradients_of_float_masks():
    padding, mask = normal(B, S, requires_grad=True), normal(B * H, T, S, requires_grad=True)
    results = []
    for kind in BOTH:
        module = make(kind)
        out, _ = module(*inputs(module), key_padding_mask=padding, attn_mask=mask)
        results.append(torch.autograd.grad((out * normal(*out.shape)).sum(), (padding, mask)))
    assert_close(*results)


def test_fully_masked_rows():
    given = inputs(make(nn.MultiheadAttention))
    call = {"key_padding_mask": torch.arange(S) >= torch.tensor([[7], [0]])}
    for need_weights in (True, False):
        module = make(MultiHeadAttention)
        nn.init.ones_(module.out_proj.bias)
        out, _, grads = gradients(module, given, need_weights=need_weights, **call)
        assert_close(out[:, 1], torch.ones(T, EMBED, dtype=torch.float64))
        assert all(x.isfinite().all() for x in grads if x is not None)
    theirs = make(nn.MultiheadAttention)(*given, **call)
    ours = make(MultiHeadAttention, empty_row="nan")(*given, **call)
    assert_close(ours, theirs, equal_nan=True)
    mean, _ = make(MultiHeadAttention, empty_row="mean")(*given, **call)
    equal, _ = make(MultiHeadAttention)(torch.zeros_like(given[0]), *given[1:])
    assert_close(mean[:, 1], equal[:, 1])


def test_attention_is_exact_between_narrow_projections():
    for dtype in (torch.float32, torch.bfloat16):
        module = make(MultiHeadAttention, dtype=dtype, batch_first=True)
        given = inputs(module, dtype=dtype)
        out, weights = module(*given)
        assert out.dtype == weights.dtype == dtype
        projected = zip(given, module.in_proj_weight.chunk(3), strict=True)
        q, k, v = ((x @ w.mT).unflatten(-1, (H, D)).transpose(1, 2) for x, w in projected)
        o = exact_attention(q, k, v).to(dtype)
        expected = nn.functional.linear(
            o.transpose(1, 2).flatten(-2), module.out_proj.weight, module.out_proj.bias
        )
        assert_close(out, expected)


def test_compute_dtype():
    narrow = make(MultiHeadAttention, compute_dtype=torch.float32)
    wide = make(MultiHeadAttention)
    given = inputs(wide)
    result, expected = narrow(*given)[0], wide(*given)[0]
    assert result.dtype == torch.float64
    assert (
        0
        < (result - expected).abs().max()
        < torch.finfo(torch.float32).eps * S * expected.abs().max()
    )


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_wrong_masks_are_refused_by_name(name):
    module = make(MultiHeadAttention)
    with pytest.raises(DtypeError, match=f"{name} is a Band, must be a tensor"):
        module(*inputs(module), **{name: npattn.masks.window(2, 0)})
    with pytest.raises(OptionError, match=f"{name} is on meta, must be on cpu as query"):
        module(*inputs(module), **{name: torch.ones(3, 5, device="meta")})


# --- dropout --------------------------------------------------------------------------------------


def test_dropout_is_seeded_and_only_in_training():
    module, exact = (make(MultiHeadAttention, dropout=p) for p in (0.5, 0.0))
    given = inputs(module)

    def run(seed):
        torch.manual_seed(seed)
        return module(*given, average_attn_weights=False)

    first, again, other = run(5), run(5), run(6)
    assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0], other[0])
    expected, p = exact(*given, average_attn_weights=False)
    keep = first[1] != 0
    assert 0 < keep.sum() < keep.numel()
    assert_close(first[1], torch.where(keep, 2 * p, 0))
    v = nn.functional.linear(
        given[2], *(x.chunk(3)[2] for x in (exact.in_proj_weight, exact.in_proj_bias))
    )
    o = first[1] @ v.transpose(0, 1).unflatten(-1, (H, D)).transpose(1, 2)
    assert_close(first[0], exact.out_proj(o.transpose(1, 2).flatten(-2)).transpose(0, 1))
    module.eval()
    assert_close(run(5)[0], expected)


def test_differentiable_weights_are_exact():
    module = make(MultiHeadAttention, dropout=0.1)  # 1 − 0.1 is no float32
    given = inputs(module)

    def run():
        torch.manual_seed(5)
        return module(*given, average_attn_weights=False)[1]

    with torch.no_grad():
        expected = run()
    assert_close(run().detach(), expected, rtol=2.0**-50, atol=0)


def test_dropout_of_everything_leaves_the_bias():
    module = make(MultiHeadAttention, dropout=1.0)
    nn.init.ones_(module.out_proj.bias)
    out, weights = module(*inputs(module))
    assert_close(out, torch.ones_like(out))
    assert not weights.any()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_with_dropout_gives_the_same_gradients(use_reentrant):
    module = make(MultiHeadAttention, dropout=0.5)
    results = []
    for around in (None, checkpoint):
        given = inputs(module)
        torch.manual_seed(7)
        if around is None:
            out, _ = module(*given)
        else:
            out, _ = around(module, *given, use_reentrant=use_reentrant)
        module.zero_grad()
        (out * normal(*out.shape)).sum().backward()
        results.append([x.grad for x in (*given, *module.parameters())])
    assert_close(results[0], results[1])


# --- training -------------------------------------------------------------------------------------


def losses(module, steps=5):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    results = []
    for step in range(steps):
        x, y = normal(T, B, EMBED, seed=step), normal(T, B, EMBED, seed=step + steps)
        loss = (module(x, x, x, attn_mask=triangle())[0] - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results.append(loss.detach())
    return torch.stack(results)


def test_training_losses_are_those_of_torch():
    theirs, ours = (losses(make(kind, add_bias_kv=True)) for kind in BOTH)
    assert_close(ours, theirs)
    assert ours[-1] != ours[0]


@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast_dtypes_are_those_of_torch(need_weights):
    results = []
    for kind in BOTH:
        module = make(kind, dtype=torch.float32)
        given = inputs(module, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = module(*given, need_weights=need_weights)
        out.float().sum().backward()
        results.append([out, *(x.grad for x in (*given, *module.parameters()))])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert ours.dtype == theirs.dtype
    assert results[1][0].dtype == torch.bfloat16
    expected = module.double()(*(x.double() for x in given))[0]
    theirs, ours = ((outs[0] - expected).norm() for outs in results)
    assert ours <= theirs


def test_autocast_does_not_reach_attention():
    module = make(MultiHeadAttention, dtype=torch.float32, batch_first=True)
    given = inputs(module, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(*given)
        projected = zip(
            given, module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True
        )
        q, k, v = (
            nn.functional.linear(*x).unflatten(-1, (H, D)).transpose(1, 2) for x in projected
        )
    o = exact_attention(q, k, v).bfloat16().transpose(1, 2).flatten(-2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module.out_proj(o)
    assert_close(out, expected, rtol=0, atol=0)


def train_one_of_two(rank, store, path):
    """One of two processes that share a batch: gradients after one backward."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2
    )
    module = DistributedDataParallel(make(MultiHeadAttention, seed=rank, batch_first=True))
    x = normal(2 * B, T, EMBED)[rank::2]
    module(x, x, x, need_weights=False)[0].square().mean().backward()
    torch.save([p.grad for p in module.parameters()], f"{path}.{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_distributed_gradients_equal_those_of_one_process(tmp_path):
    path = tmp_path / "gradients"
    torch.multiprocessing.spawn(train_one_of_two, (str(tmp_path / "store"), str(path)), nprocs=2)
    module = make(MultiHeadAttention, batch_first=True)  # the weights of rank 0 are everybody's
    x = normal(2 * B, T, EMBED)
    module(x, x, x, need_weights=False)[0].square().mean().backward()
    expected = [p.grad for p in module.parameters()]
    for rank in range(2):
        assert_close(torch.load(f"{path}.{rank}"), expected)


# --- heads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"kdim": KDIM, "vdim": VDIM, "add_bias_kv": True},
                                     {"bias": False}])  # fmt: skip
def test_pruning_a_head_equals_zeroing_its_output(options):
    whole = make(MultiHeadAttention, **options).eval()
    smaller = whole.prune([-1, 0])
    zeroed = copy.deepcopy(whole)
    with torch.no_grad():
        zeroed.out_proj.weight[:, :D] = 0
        zeroed.out_proj.weight[:, 2 * D :] = 0
    given = inputs(whole)
    assert_close(smaller(*given)[0], zeroed(*given)[0])
    assert (smaller.num_heads, smaller.head_dim, smaller.training) == (1, D, False)
    assert whole.num_heads == H
    loaded = MultiHeadAttention(EMBED, 1, head_dim=D, dtype=torch.float64, **options)
    loaded.load_state_dict(smaller.state_dict())
    assert_close(loaded(*given), smaller(*given), rtol=0, atol=0)


def test_pruning_agrees_with_numpy():
    mha = npattn.MultiHeadAttention.init(
        24, 6, seed=0, num_kv_heads=3, add_bias_kv=True, add_zero_attn=True
    )
    ours = MultiHeadAttention.from_numpy(mha)
    for heads in ([0, 2, 5], [1, 0, 3, 4], []):
        result, expected = ours.prune(heads).to_numpy(), mha.prune(heads)
        assert result.options == expected.options
        for name, array in expected.parameters.items():
            np.testing.assert_array_equal(getattr(result, name), array)
    with pytest.raises(OptionError, match="leave equally many"):
        ours.prune([0])
    with pytest.raises(OptionError, match="keep at least one"):
        ours.prune(range(6))


def test_shared_heads_agree_with_numpy():
    mha = npattn.MultiHeadAttention.init(12, 6, seed=0, num_kv_heads=2, key_size=7, value_in=5)
    x, key, value = normal(3, T, 12), normal(3, S, 7), normal(3, S, 5)
    out, weights = MultiHeadAttention.from_numpy(mha)(x, key, value, average_attn_weights=False)
    expected = mha.forward(x.numpy(), key.numpy(), value.numpy())
    assert_close(out, torch.tensor(expected.out))
    assert_close(weights, torch.tensor(expected.weights))


@pytest.mark.parametrize("norm", [None, "rms"])
def test_rotary_positions_agree_with_numpy(norm):
    mha = npattn.MultiHeadAttention.init(
        12, 4, seed=0, num_kv_heads=2, head_size=6, add_bias_kv=True, qk_norm=norm
    )
    ours, rope = MultiHeadAttention.from_numpy(mha), Rotary(base=50.0, size=4)
    x, key = normal(3, T, 12, requires_grad=True), normal(3, S, 12, requires_grad=True)
    out, weights = ours(x, key, key, average_attn_weights=False, rope=rope)
    fwd = mha.forward(x.detach().numpy(), key.detach().numpy(), rope=rope)
    assert_close(out, torch.tensor(fwd.out))
    assert_close(weights, torch.tensor(fwd.weights))
    dout = normal(*out.shape)
    out.backward(dout)
    grads = mha.backward(fwd, dout.numpy())
    assert_close(x.grad, torch.tensor(grads.query))
    assert_close(key.grad, torch.tensor(grads.key))
    rows = ours.in_proj_weight.grad.split([24, 12, 12])
    for weight, name in zip(rows, ("wq", "wk", "wv"), strict=True):
        assert_close(weight.T, torch.tensor(getattr(grads, name)))


def test_rotary_positions_keep_the_dtype_and_are_checked():
    module = make(MultiHeadAttention, dtype=torch.bfloat16)
    assert module(*inputs(module, dtype=torch.bfloat16), rope=Rotary())[0].dtype == torch.bfloat16
    with pytest.raises(OptionError, match=r"rope is 3, must be a npattn\.positions\.Rotary"):
        module(*inputs(module, dtype=torch.bfloat16), rope=3)
    with pytest.raises(OptionError, match="got positions of 5 queries for 7 keys"):
        module(*inputs(module, dtype=torch.bfloat16), rope=Rotary(positions=torch.arange(T)))


OWN = {
    "sizes of values and of the output": {"value_size": 5, "out_size": 11},
    "reshape": {"merge": "reshape"},
    "rms": {"qk_norm": "rms"},
    "layer": {"qk_norm": "layer", "norm_eps": 1e-3},
    "all": {"value_size": 5, "out_size": 11, "merge": "reshape", "qk_norm": "layer"},
}


def own_module(options):
    """Return a module of npattn, with norms that are not 1 and 0."""
    rng = np.random.default_rng(1)
    sizes = {n: x for n, x in options.items() if n in ("value_size", "out_size")}
    mha = npattn.MultiHeadAttention.init(12, 4, seed=0, num_kv_heads=2, add_bias_kv=True, **sizes)
    norms = {}
    if "qk_norm" in options:
        norms = {name: 1 + rng.standard_normal(3) / 4 for name in ("norm_q", "norm_k")}
    if options.get("qk_norm") == "layer":
        norms |= {name: rng.standard_normal(3) for name in ("norm_q_bias", "norm_k_bias")}
    return mha.replace(**{n: x for n, x in options.items() if n not in sizes}, **norms)


@pytest.mark.parametrize("kind", OWN)
def test_what_torch_has_not_agrees_with_numpy(kind):
    mha = own_module(OWN[kind])
    ours = MultiHeadAttention.from_numpy(mha)
    x, key = normal(3, T, 12), normal(3, S, 12)
    fwd = mha.forward(x.numpy(), key.numpy())
    out, weights = ours(x, key, key, average_attn_weights=False)
    assert_close(out, torch.tensor(fwd.out))
    assert_close(weights, torch.tensor(fwd.weights))
    dout = normal(*out.shape)
    out.backward(dout)
    grads = mha.backward(fwd, dout.numpy())
    assert_close(ours.out_proj.weight.grad.T, torch.tensor(grads.wo))
    for name in ("norm_q", "norm_k", "norm_q_bias", "norm_k_bias"):
        if getattr(mha, name) is not None:
            assert_close(getattr(ours, name).grad, torch.tensor(getattr(grads, name)))
    assert_same_bits(ours.to_numpy(), mha)
    if mha.merge == "reshape":
        with pytest.raises(OptionError, match="cannot prune heads"):
            ours.prune([0, 2])
        return
    pruned, exact = ours.prune([0, 2]).to_numpy(), mha.prune([0, 2])
    for name, array in exact.parameters.items():
        np.testing.assert_array_equal(getattr(pruned, name), array)


def test_norms_that_npattn_leaves_out_are_1_and_0():
    mha = npattn.MultiHeadAttention.init(12, 4, seed=0).replace(qk_norm="layer")
    x = normal(3, T, 12)
    assert_close(MultiHeadAttention.from_numpy(mha)(x, x, x)[0], torch.tensor(mha.forward(x).out))


@pytest.mark.parametrize("batch_first", [True, False])
def test_describe_is_that_of_numpy(batch_first):
    mha = npattn.MultiHeadAttention.init(12, 4, seed=0)
    ours = MultiHeadAttention.from_numpy(mha, batch_first=batch_first)
    x = normal(3, T, 12)
    given = x if batch_first else x.transpose(0, 1)
    assert str(ours.describe()) == str(mha.describe())
    assert str(ours.describe(given)) == str(mha.describe(x.numpy()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"merge": "add"}, "merge is 'add'"),
        ({"qk_norm": "max"}, "qk_norm is 'max'"),
        ({"norm_eps": -1}, "norm_eps is -1"),
        ({"value_head_dim": 0}, "value_head_dim is 0"),
        ({"out_dim": 1.5}, "out_dim is 1.5"),
    ],
)
def test_illegal_heads_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        MultiHeadAttention(12, 3, **options)


def test_pruned_module_trains():
    smaller = make(MultiHeadAttention).prune([1])
    assert all(p.requires_grad and p.is_leaf for p in smaller.parameters())
    assert losses(smaller).isfinite().all()


# --- in and out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_with_torch(variant):
    theirs = make(nn.MultiheadAttention, dropout=0.25, **VARIANTS[variant]).eval()
    theirs.out_proj.weight.requires_grad_(False)
    ours = MultiHeadAttention.from_torch(theirs)
    back = ours.to_torch()
    given = inputs(theirs)
    assert_close(ours(*given), theirs(*given))
    assert_close(back(*given), theirs(*given), rtol=0, atol=0)
    assert (back.dropout, back.training, back.batch_first) == (0.25, False, theirs.batch_first)
    assert not ours.out_proj.weight.requires_grad
    assert ours.out_proj.weight.data_ptr() != theirs.out_proj.weight.data_ptr()
    assert not back.out_proj.weight.requires_grad


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_round_trip_with_numpy_keeps_every_bit(dtype):
    mha = npattn.MultiHeadAttention.init(
        12, 3, seed=0, head_size=5, key_size=7, add_bias_kv=True, dtype=dtype
    )
    ours = MultiHeadAttention.from_numpy(mha, engine="dense")
    assert (ours.engine, ours.head_dim, ours.batch_first) == ("dense", 5, True)
    assert_same_bits(ours.to_numpy(), mha)


def test_unsupported_conversions_are_refused():
    shared = MultiHeadAttention(12, 6, num_kv_heads=2)
    with pytest.raises(OptionError, match="num_kv_heads is 2, must be 6"):
        shared.to_torch()
    with pytest.raises(OptionError, match="must add up to embed_dim 12"):
        MultiHeadAttention(12, 3).prune([0]).to_torch()
    own = {"value_head_dim": 5, "out_dim": 7, "merge": "reshape", "qk_norm": "rms"}
    for name, value in own.items():
        with pytest.raises(OptionError, match=f"{name} is {value!r}, must be"):
            MultiHeadAttention(12, 3, **{name: value}).to_torch()
    init = npattn.MultiHeadAttention.init
    plain = init(12, 3, seed=0)
    for mha, message in (
        (plain.replace(wo=None, bo=None), "wo is None"),
        (plain.replace(qk_norm="rms", norm_q_bias=np.ones(4)), "a bias beside qk_norm"),
        (plain.replace(bq=None), "only some of bq, bk, bv, bo"),
        (plain.replace(wq=plain.wq.astype(np.float32)), "must be float32 as wq"),
    ):
        with pytest.raises(OptionError, match=message):
            MultiHeadAttention.from_numpy(mha)
    with pytest.raises(OptionError, match=r"must be a torch\.nn\.MultiheadAttention"):
        MultiHeadAttention.from_torch(nn.Linear(2, 3))


def test_copies_and_files_hold_the_same_module():
    module = make(MultiHeadAttention, batch_first=True, add_bias_kv=True, empty_row="nan")
    given = inputs(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    others = (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(file, weights_only=False),
    )
    for other in others:
        assert repr(other) == repr(module)
        assert_close(other(*given), module(*given), rtol=0, atol=0)
    assert "empty_row='nan', " not in repr(make(MultiHeadAttention))
    assert "empty_row='nan'" in repr(module)


def test_module_converts_to_another_dtype():
    module = make(MultiHeadAttention, dtype=torch.float32)
    wide = copy.deepcopy(module).double()
    given = inputs(wide)
    assert_close(wide(*given)[0].float(), module(*(x.float() for x in given))[0])
    assert module.to(torch.bfloat16)(*(x.bfloat16() for x in given))[0].dtype == torch.bfloat16


def test_functional_call():
    module, other = (make(MultiHeadAttention, seed=seed) for seed in (0, 1))
    given = inputs(module)
    result = torch.func.functional_call(module, dict(other.named_parameters()), tuple(given))
    assert_close(result, other(*given), rtol=0, atol=0)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks, where a graph goes on
def test_torch_compile():
    module = make(MultiHeadAttention)
    given = inputs(module)
    compiled = torch.compile(module, backend="eager")
    for rope in (None, Rotary()):
        result, expected = (gradients(f, given, rope=rope) for f in (compiled, module))
        assert_close(result, expected)


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_layer_calls_it(training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(EMBED, H, 17, 0.0, batch_first=True, dtype=torch.float64)
    layer.train(training)
    other = copy.deepcopy(layer)
    other.self_attn = MultiHeadAttention.from_torch(layer.self_attn)
    calls = []
    other.self_attn.register_forward_hook(lambda *_: calls.append(1))
    x, hidden = normal(B, T, EMBED), torch.arange(T) >= torch.tensor([[5], [3]])
    with torch.inference_mode(not training):
        result = other(x, src_mask=triangle(), src_key_padding_mask=hidden)
        expected = layer(x, src_mask=triangle(), src_key_padding_mask=hidden)
    assert_close(result, expected)
    assert calls == [1]


def test_wrong_arguments_are_refused():
    for options, message in (
        ({"embed_dim": 13}, "embed_dim is 13, not a multiple of num_heads = 3"),
        ({"num_kv_heads": 2}, "num_kv_heads is 2, which does not divide num_heads = 3"),
        ({"dropout": 1.5}, "dropout is 1.5"),
        ({"engine": "flash"}, "engine is 'flash'"),
        ({"compute_dtype": torch.int8}, "compute_dtype is torch.int8"),
        ({"engine": "fused", "compute_dtype": torch.float64}, "must be None: the kernels"),
        ({"empty_row": "one"}, "empty_row is 'one'"),
    ):
        with pytest.raises(OptionError, match=message):
            MultiHeadAttention(**({"embed_dim": EMBED, "num_heads": H} | options))
    module = make(MultiHeadAttention)
    q, k, v = inputs(module)
    for error, given, call, message in (
        (ShapeError, (q, k[0], v), {}, "must all have rank 2, or all rank 3"),
        (ShapeError, (q[..., 1:], k, v), {}, "query has size 11, must have size 12"),
        (ShapeError, (q, k, v[1:]), {}, "must have 2 samples and the same length"),
        (ShapeError, (q, k, v), {"attn_mask": triangle()}, r"shape \(5, 5\), must have \(5, 7\)"),
        (DtypeError, (q, k, v), {"attn_mask": torch.ones(T, S).int()}, "must be bool"),
        (DtypeError, (q.detach().numpy(), k, v), {}, "query is a ndarray"),
    ):
        with pytest.raises(error, match=message):
            module(*given, **call)


def test_fused_engine_agrees_or_refuses():
    exact, fused = (make(MultiHeadAttention, engine=engine) for engine in ("auto", "fused"))
    given = inputs(exact)
    call = {"need_weights": False, "key_padding_mask": MASKS["padding"]["key_padding_mask"]}
    assert_close(gradients(fused, given, **call), gradients(exact, given, **call))
    x = given[0]
    call = {"need_weights": False, "attn_mask": triangle(), "is_causal": True}
    assert_close(gradients(fused, [x] * 3, **call), gradients(exact, [x] * 3, **call))
    with pytest.raises(OptionError, match="need_weights is True"):
        fused(*given)
    dropping = make(MultiHeadAttention, engine="fused", dropout=0.5)
    with pytest.raises(OptionError, match="take no dropout_mask"):
        dropping(*given, need_weights=False)
    assert dropping.eval()(*given, need_weights=False)[0].isfinite().all()
