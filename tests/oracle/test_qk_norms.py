"""Norms of queries and keys: formulas, complex steps, and modules of transformers."""

import math

import numpy as np
import pytest

from npattn import MultiHeadAttention
from npattn.errors import OptionError, ShapeError
from npattn.multihead.projections import NORMS, normalise, normalise_backward
from npattn.testing.bounds.allowed import bounds
from npattn.testing.bounds.ulp import excess

B, T, H, K, D, E, IN = 2, 5, 6, 3, 7, 2, 11
U = 2.0**-53


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def shapes_of(kind, n):
    return {"projection": (n * D,)} if kind.endswith("projection") else {
        "shared": (D,), "head": (n, D), "number": (n, 1)
    }  # fmt: skip


CASES = [(kind, which) for kind in NORMS for which in (*shapes_of(kind, H), None)]


def formula(x, kind, w, b, eps):
    """Each row by itself, with math.fsum."""
    y = np.zeros_like(x)
    whole = kind.endswith("projection")
    for i in np.ndindex(*x.shape[:-3], x.shape[-2]):
        *lead, t = i
        heads = [range(x.shape[-3])] if whole else [[h] for h in range(x.shape[-3])]
        for group in heads:
            row = [float(x[(*lead, h, t, d)]) for h in group for d in range(x.shape[-1])]
            mean = math.fsum(row) / len(row) if kind.startswith("layer") else 0.0
            row = [z - mean for z in row]
            squares = math.fsum(z * z for z in row)
            size = math.sqrt(squares / len(row) + eps)
            size = max(math.sqrt(squares), eps) if kind == "l2" else size
            for at, z in enumerate(row):
                h, d = group[at // x.shape[-1]], at % x.shape[-1]
                factor, term = 1.0, 0.0
                if w is not None:
                    index = (h, d if w.shape[-1] > 1 else 0) if w.ndim == 2 else d
                    index = at if whole else index
                    factor, term = w[index], b[index]
                y[(*lead, h, t, d)] = z / size * factor + term
    return y


@pytest.mark.parametrize(("kind", "which"), CASES)
def test_norms_are_their_formulas(kind, which):
    x = normal(B, H, T, D)
    shape = None if which is None else shapes_of(kind, H)[which]
    w, b = (None, None) if which is None else (normal(*shape), normal(*shape, seed=1))
    got = normalise(x, kind, w, b, 0.25)
    want = formula(x, kind, w, b, 0.25)
    # Sums of H·D squares, a root, a quotient, a product, a sum; where a mean is taken off, by
    # numbers of the size of the largest.
    grow = 1 + abs(x).max() / got.size.min() if kind.startswith("layer") else 1
    sizes = abs(want) if b is None else abs(want) + 2 * abs(b).max()
    weight = 1 if w is None else abs(w).max()
    assert (abs(got.y - want) <= (H * D + 8) * U * grow * (sizes + weight)).all()


@pytest.mark.parametrize(("kind", "which"), CASES)
def test_gradients_are_those_of_complex_steps(kind, which):
    x, dy, h = normal(B, H, T, D), normal(B, H, T, D, seed=4), 1e-30
    shape = None if which is None else shapes_of(kind, H)[which]
    w, b = (None, None) if which is None else (normal(*shape), normal(*shape, seed=1))
    forward = normalise(x, kind, w, b, 0.25)
    grads = normalise_backward(dy, forward, kind, w)
    # Each gradient adds products of dy, unit and w, over at most all rows.
    biggest = abs(dy).max() * abs(forward.unit).max() ** 2 * (1 if w is None else abs(w).max())
    for i, (name, value) in enumerate((("x", x), ("w", w), ("b", b))):
        if value is None:
            continue
        direction = normal(*value.shape, seed=5)
        moved = {"x": x, "w": w, "b": b, name: value + 1j * h * direction}
        slope = (dy * normalise(moved["x"], kind, moved["w"], moved["b"], 0.25).y.imag).sum() / h
        got = (grads[i] * direction).sum()
        least = forward.size.min() if name == "x" else 1.0
        allowed = 8 * H * D * U * biggest / least * abs(direction).max() * dy.size
        assert abs(slope - got) <= allowed, name


def test_short_rows_of_l2_are_divided_by_eps():
    x = np.array([[[[3e-3, 4e-3], [3.0, 4.0], [0.0, 0.0]]]])
    forward = normalise(x, "l2", None, None, 0.01)
    assert np.allclose(forward.y, [[[[0.3, 0.4], [0.6, 0.8], [0, 0]]]], rtol=4 * U, atol=0)
    dx = normalise_backward(np.ones_like(x), forward, "l2", None)[0]
    assert np.array_equal(dx[0, 0, 0], [100.0, 100.0])  # nothing flows through eps
    assert np.array_equal(dx[0, 0, 2], [100.0, 100.0])


def module(kind, which, **options):
    more = {}
    if which is not None:
        names = ("norm_q", "norm_k", *(("norm_q_bias", "norm_k_bias") if "layer" in kind else ()))
        for i, name in enumerate(names):
            shape = shapes_of(kind, H if name.startswith("norm_q") else K)[which]
            more[name] = normal(*shape, seed=i)
    return MultiHeadAttention.init(
        IN, H, seed=3, num_kv_heads=K, head_size=D, value_size=E, qk_norm=kind, **more, **options
    )


@pytest.mark.parametrize(("kind", "which"), CASES)
def test_modules_pass_gradients_through_norms(kind, which):
    mha, x = module(kind, which), normal(B, T, IN)
    fwd = mha.forward(x, causal=True)
    dout, h = normal(*fwd.out.shape, seed=6), 1e-30
    grads = mha.backward(fwd, dout)
    for name in ("wq", "wk", *(n for n in mha.parameters if n.startswith("norm"))):
        value = getattr(mha, name)
        direction = normal(*value.shape, seed=7)
        moved = mha.replace(**{name: value + 1j * h * direction}).forward(x, causal=True)
        slope = (dout * moved.out.imag).sum() / h
        got = getattr(grads, name)
        assert got.shape == value.shape
        size = (abs(got) * abs(direction)).sum() + abs(dout).sum() * abs(fwd.out).max()
        assert abs(slope - (got * direction).sum()) <= 64 * H * D * IN * U * size, name


@pytest.mark.parametrize(("kind", "which"), CASES)
def test_heads_take_their_weights_along(kind, which):
    mha, x = module(kind, which), normal(B, T, IN)
    want = mha.forward(x)
    one = mha.unshared()
    # The same sums over repeated heads, in another order: twice the roundings of each.
    allowed = 8 * H * D * IN * U * (1 + abs(want.out).max())
    assert abs(one.forward(x).out - want.out).max() <= allowed
    if kind.endswith("projection"):
        with pytest.raises(OptionError, match="whose size is that of all heads"):
            one.prune([0])
        return
    pruned = one.prune([0, 4])
    zeroed = one.wo.reshape(H, E, -1).copy()
    zeroed[[0, 4]] = 0
    other = one.replace(wo=zeroed.reshape(one.wo.shape))
    assert abs(pruned.forward(x).out - other.forward(x).out).max() <= allowed


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("rms", {"norm_q": np.ones((H, D + 1))}, "must have shape (7,) or (6, 7) or (6, 1)"),
        ("rms", {"norm_k": np.ones((H, D))}, "norm_k has shape (6, 7), must have shape (7,) or"),
        ("rms_projection", {"norm_q": np.ones(D)}, "must have shape (42,) with qk_norm"),
        ("layer", {"norm_q": np.ones(D), "norm_q_bias": np.ones((H, D))}, "must have the shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(kind, change, words):
    with pytest.raises(ShapeError) as caught:
        module(kind, None).replace(**change)
    assert words in str(caught.value)


# --- modules of transformers ------------------------------------------------------------------


def modeling(name):
    pytest.importorskip("torch")
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def keep_results(torch_module, kept):
    def hook(_, inputs, out):
        inputs[0].retain_grad()
        out.retain_grad()
        kept.append((inputs[0], out))

    torch_module.register_forward_hook(hook)


@pytest.mark.filterwarnings("ignore")  # of packages that transformers imports
@pytest.mark.parametrize(
    ("system", "name", "kind", "which"),
    [
        ("qwen3", "Qwen3Attention", "rms", "shared"),
        ("olmo2", "Olmo2Attention", "rms_projection", "projection"),
        ("cohere", "CohereAttention", "layer", "head"),
    ],
)
def test_norms_of_transformers(system, name, kind, which):
    """Where the norm is, and what it does to queries and keys and their gradients.

    Their norms compute in float32, so each is compared by itself: a sum of n squares, a mean, a
    root and products, forward; sums of products of dy, the unit row and w, backward.
    """
    models = modeling(system)
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = getattr(models, f"{name.removesuffix('Attention')}Config")(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
        attn_implementation="eager", num_hidden_layers=1,
        **({"use_qk_norm": True} if system == "cohere" else {}),
    )  # fmt: skip
    theirs = getattr(models, name)(config, layer_idx=0)
    kept = []
    for norm in (theirs.q_norm, theirs.k_norm):
        torch.nn.init.normal_(norm.weight)
        keep_results(norm, kept)
    x = torch.randn(2, 5, 16)
    angles = (torch.ones(2, 5, 4), torch.zeros(2, 5, 4))  # no turn
    out, *_ = theirs(x, position_embeddings=angles, attention_mask=None)
    (out * torch.randn_like(out)).sum().backward()
    eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_eps
    arrays = {
        n: getattr(theirs, f"{n[1]}_proj").weight.detach().numpy().T for n in ("wq", "wk", "wv")
    }
    mha = MultiHeadAttention(
        **arrays, num_heads=4, num_kv_heads=2, qk_norm=kind, norm_eps=eps,
        norm_q=theirs.q_norm.weight.detach().numpy(), norm_k=theirs.k_norm.weight.detach().numpy(),
    )  # fmt: skip
    problem = mha.forward(x.numpy()).attention.problem
    u, per_head = 2.0**-24, which != "projection"
    for c, heads, (before, after) in zip("qk", (4, 2), kept, strict=True):

        def split(y, heads=heads):
            return y.detach().numpy().reshape(2, 5, heads, 4).swapaxes(1, 2).astype(np.float64)

        norm, w = getattr(theirs, f"{c}_norm"), getattr(mha, f"norm_{c}")
        assert w.shape == {"shared": (4,), "head": (heads, 4), "projection": (4 * heads,)}[which]
        forward = normalise(split(before), kind, w.astype(np.float64), None, eps)
        n = 4 if per_head else 4 * heads
        grow = 1 + abs(split(before)).max() / forward.size.min()
        beyond = (n + 12) * u * grow * (abs(forward.y) + abs(w).max())
        assert not (excess(split(after).astype(np.float32), forward.y) > beyond).any()
        # The module has the norm at the place where it is in ours: after the projection.
        ours = getattr(problem, c)
        sizes = abs(x.numpy().astype(np.float64)) @ abs(getattr(mha, f"w{c}").astype(np.float64))
        moved = 4 * 16 * u * sizes.max() / forward.size.min() * abs(w).max()
        assert abs(ours - split(after)).max() <= moved + beyond.max()
        dy = split(after.grad)
        dx, dw, _ = normalise_backward(dy, forward, kind, w.astype(np.float64))
        size = abs(dy).max() * abs(w).max() * (1 + abs(forward.unit).max()) ** 2 * grow
        assert abs(split(before.grad) - dx).max() <= (n + 16) * u * size / forward.size.min()
        rows = dy.size // w.size
        assert abs(norm.weight.grad.numpy() - dw).max() <= (rows + n + 12) * u * rows * size


@pytest.mark.filterwarnings("ignore")
def test_cosine_attention_of_swin():
    """Rows of length 1, and a factor for each head that is clamped at 100."""
    models = modeling("swinv2")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = models.Swinv2Config(qkv_bias=True)
    theirs = models.Swinv2SelfAttention(config, 12, 3, 2).double().eval()
    with torch.no_grad():
        theirs.logit_scale[:, 0, 0] = torch.tensor([0.5, 2.0, 6.0])  # the last is clamped
    x = torch.randn(5, 4, 12, dtype=torch.float64)
    got = theirs(x)[0].detach().numpy()
    table = theirs.continuous_position_bias_mlp(theirs.relative_coords_table).view(-1, 3)
    index = theirs.relative_position_index.view(-1)
    bias = 16 * torch.sigmoid(table[index].view(4, 4, 3).permute(2, 0, 1)).detach().numpy()
    numbers = theirs.logit_scale.detach().numpy()[:, 0]
    p = {n: y.detach().numpy() for n, y in theirs.named_parameters()}
    mha = MultiHeadAttention(
        p["query.weight"].T, p["key.weight"].T, p["value.weight"].T, num_heads=3,
        bq=p["query.bias"], bv=p["value.bias"], qk_norm="l2", norm_eps=1e-12,
        norm_q=np.exp(np.minimum(numbers, math.log(100))),
    )  # fmt: skip
    fwd = mha.forward(x.numpy(), bias=bias, scale=1.0)
    # q, k and v are sums of 13 terms, and rows divided by roots of sums of 4: errors of the scores
    # like those of longer dot products, up to 100 times larger by the factor. The bias is a number
    # of theirs, of up to 16, from two products and a sigmoid.
    allowed = bounds(fwd.attention.problem, np.float64)["o"]
    longer = 2 * (13 + 4 + 8) / (4 + 6)
    slack = 64 * U * (16 + 100) * abs(fwd.attention.problem.v).max()
    ours = fwd.attention.out
    split = got.reshape(5, 4, 3, 4).swapaxes(1, 2)
    assert (abs(split - ours) <= longer * allowed + slack).all()
    loose = mha.replace(norm_q=np.exp(numbers)).forward(x.numpy(), bias=bias, scale=1.0)
    assert abs(split - loose.attention.out).max() > 1e3 * slack


@pytest.mark.parametrize(
    ("mistake", "kind"),
    [("mean of all heads", "rms"), ("no mean", "layer"), ("heads alone", "rms_projection")],
)
def test_mistakes_are_seen(mistake, kind):
    x = normal(B, H, T, D)
    right = normalise(x, kind, None, None, 1e-6).y
    other = {"mean of all heads": "rms_projection", "no mean": "rms", "heads alone": "rms"}
    assert abs(normalise(x, other[mistake], None, None, 1e-6).y - right).max() > 0.01
