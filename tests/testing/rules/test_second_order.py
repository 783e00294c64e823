"""The rule double-backward: right second derivatives pass, wrong ones fail, others are said."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn.torch  # noqa: E402
from npattn.conventions import Conventions  # noqa: E402
from npattn.errors import OptionError  # noqa: E402
from npattn.testing import check  # noqa: E402
from npattn.testing.rules import PROPERTIES, RULES  # noqa: E402
from npattn.testing.targets.numpy import flash, flash_backward  # noqa: E402
from npattn.testing.worker.remote import Remote  # noqa: E402

NAME = "double-backward"


def ask(f, **options):
    """The outcome of the rule in float32 and float64."""
    settings = {"framework": "torch", "examples": 12, "shrink": False, "diagnosis": False}
    settings |= {"dtypes": ("float32", "float64"), "only": [NAME]} | options
    outcomes = check(f, **settings).outcomes
    return [o for o in outcomes if o.rule == NAME]


def scores(q, k, scale, softcap, bias, mask, causal):
    s = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if bias is None else s + bias
    T, S = s.shape[-2:]
    visible = torch.ones(T, S, dtype=torch.bool)
    if causal:
        visible = torch.arange(S) <= torch.arange(T)[:, None] + S - T
    visible = visible if mask is None else visible & mask
    return torch.where(visible, s, -torch.inf)


def textbook(
    q, k, v, mask=None, causal=False, bias=None, scale=None, softcap=None, sinks=None,
    dropout_mask=None, dropout_rate=0.0, return_lse=False,
):  # fmt: skip
    """Attention in operations that autograd differentiates as often as one likes."""
    k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    s = scores(q, k, scale, softcap, bias, mask, causal)
    m = s.amax(-1, keepdim=True)
    m = m if sinks is None else torch.maximum(m, sinks[:, None, None])
    m = torch.where(m == -torch.inf, 0, m).detach()
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True)
    total = total if sinks is None else total + torch.exp(sinks[:, None, None] - m)
    p = e / torch.where(total == 0, 1, total)
    w = p if dropout_mask is None else p * dropout_mask / (1 - dropout_rate)
    return (w @ v, (m + total.log())[..., 0]) if return_lse else w @ v


# What the backward below takes for a constant, or nothing.
KEPT = ("nothing", "weights", "mean", "dp", "key", "value", "cotangent")


def make(kept, factor=1.0):
    """Attention with a backward of its own, which takes something for a constant.

    It multiplies dk by a factor.
    """

    def keep(name, x):
        return x.detach() if name == kept else x

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v

        @staticmethod
        def backward(ctx, do):
            q, k, v = ctx.saved_tensors
            q, k, v, do = q, keep("key", k), keep("value", v), keep("cotangent", do)
            scale = 1 / math.sqrt(q.shape[-1])
            p = keep("weights", torch.softmax(scale * q @ k.mT, -1))
            dp = keep("dp", do @ v.mT)
            ds = p * (dp - keep("mean", (p * dp).sum(-1, keepdim=True)))
            return scale * ds @ k, factor * scale * ds.mT @ q, p.mT @ do

    def attend(q, k, v):
        k, v = (x.expand(*q.shape[:-2], *x.shape[-2:]) for x in (k, v))
        return Own.apply(q, k, v)

    attend.__name__ = f"keeps_{kept}"
    return attend


@pytest.mark.thorough
def test_a_mistake_of_first_derivatives_does_not_explain_the_second():
    f = make("weights", factor=1.001)
    options = {"framework": "torch", "dtypes": "float64", "examples": 12, "sizes": SIZES}
    report = check(f, only=[NAME, "agreement-dk"], shrink=False, **options)
    steps = {rule.partition("[")[0]: cause.step for cause in report.causes for rule in cause.rules}
    assert steps == {"agreement-dk": "dk", NAME: ""}


SIZES = {"B": (1, 2), "D": (2, 8), "T": (2, 5), "S": (3, 7)}


@pytest.mark.thorough
@pytest.mark.parametrize("f", [textbook, npattn.torch.attention], ids=["textbook", "npattn"])
def test_right_second_derivatives_pass(f):
    for outcome in ask(f, conventions=Conventions(), examples=20):
        assert outcome.status == "passed", outcome.message
        assert outcome.examples
        assert 0 < outcome.worst <= 1


@pytest.mark.thorough
def test_conventions_rename_options():
    def hiding(q, k, v, mask=None, return_lse=False):
        mask = None if mask is None else ~mask
        if not return_lse:
            return textbook(q, k, v, mask)
        o, lse = textbook(q, k, v, mask, return_lse=True)
        return o, lse / math.log(2)

    conventions = Conventions(mask_true="hide", lse_base="2")
    assert [o.status for o in ask(hiding, conventions=conventions)] == ["passed"] * 2


@pytest.mark.parametrize("kept", KEPT)
def test_a_backward_that_takes_something_for_a_constant_fails(kept):
    """Its first derivatives are right: the rules on them pass."""
    names = [NAME, "agreement-dq", "agreement-dk", "agreement-dv"]
    report = check(make(kept), framework="torch", only=names, dtypes="float32", examples=12,
                   sizes=SIZES, shrink=False, diagnosis=False)  # fmt: skip
    status = {o.rule: o.status for o in report.outcomes}
    assert [status[name] for name in names[1:]] == ["passed"] * 3
    assert status[NAME] == ("passed" if kept == "nothing" else "failed")
    (outcome,) = (o for o in report.outcomes if o.rule == NAME)
    if kept != "nothing":
        assert outcome.worst > 1
        assert "second d" in outcome.message


def softcap_of_constant_slope(q, k, v, softcap=None, return_lse=False):
    """A cap whose slope is a constant: the one term that no other option shows."""

    class Cap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, s):
            ctx.slope = 1 - torch.tanh(s / softcap) ** 2
            return softcap * torch.tanh(s / softcap)

        @staticmethod
        def backward(ctx, ds):
            return ds * ctx.slope

    s = q @ k.mT / math.sqrt(q.shape[-1])
    s = s if softcap is None else Cap.apply(s)
    o = torch.softmax(s, -1) @ v
    return (o, torch.logsumexp(s, -1)) if return_lse else o


def test_a_softcap_with_a_constant_slope_fails():
    for outcome in ask(softcap_of_constant_slope, sizes=SIZES):
        assert outcome.status == "failed"


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx):
        return dx


class Unrecorded(torch.autograd.Function):
    """Its gradient is written by a kernel that autograd does not see."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return torch.from_numpy(dx.detach().numpy().copy())


def once(q, k, v):
    return Once.apply(textbook(q, k, v))


def unrecorded(q, k, v):
    q, k, v = (Unrecorded.apply(x) for x in (q, k, v))
    return textbook(q, k, v)


UNREACHED = "its gradients do not require grad: autograd cannot reach them"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("f", "reason", "isolate"),
    [
        (once, "its backward is marked once_differentiable", False),
        pytest.param(
            once, "its backward is marked once_differentiable", True, marks=pytest.mark.nightly
        ),
        (unrecorded, UNREACHED, False),
        pytest.param(unrecorded, UNREACHED, True, marks=pytest.mark.nightly),
    ],
)
def test_what_cannot_be_differentiated_twice_is_said(f, reason, isolate):
    for outcome in ask(f, isolate=isolate, dtypes="float32", sizes=SIZES):
        assert outcome.status == "not applicable"
        assert reason in outcome.message


@pytest.mark.thorough
def test_other_implementations_are_not_asked():
    (outcome,) = ask(textbook, dtypes="float16", examples=1, sizes=SIZES)
    assert outcome.status == "not applicable"
    assert "second derivatives in float16 is no smaller than they are" in outcome.message
    options = {"dtypes": "float32", "examples": 1, "sizes": SIZES}
    for outcome in ask(flash, backward=flash_backward, **options | {"framework": "numpy"}):
        assert "its backward is not recorded by a framework" in outcome.message
    for fields in ({"kv_head": "tile"}, {"bias": "before_scale"}):
        for outcome in ask(textbook, conventions=Conventions(**fields), **options):
            assert "conventions that move heads or bias are not translated" in outcome.message


def test_what_raises_is_an_error():
    def broken(q, k, v):
        o = textbook(q, k, v)
        o.register_hook(lambda do: do / {}["missing"] if torch.is_grad_enabled() else do)
        return o

    for outcome in ask(broken, dtypes="float32"):
        assert outcome.status == "error"
        assert "KeyError" in outcome.message


def test_it_is_asked_by_name_alone():
    assert NAME in RULES
    assert NAME not in PROPERTIES
    with pytest.raises(OptionError, match=r"'double' is not a rule, must be one of .*double-backw"):
        ask(textbook, only=["double"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("f", "status"),
    [
        pytest.param(textbook, "passed", marks=pytest.mark.nightly),
        (softcap_of_constant_slope, "failed"),
    ],
)
def test_a_worker_answers_the_same(f, status):
    options = {"sizes": SIZES, "dtypes": "float32", "examples": 6}
    (one,), (other,) = ask(f, **options), ask(f, **options, isolate=True)
    assert one.status == other.status == status
    assert math.isclose(one.worst, other.worst)


@pytest.mark.thorough
def test_an_old_worker_is_said(monkeypatch):
    monkeypatch.setattr(Remote, "abilities", frozenset({"views", "objects", "hold", "forms"}))
    (outcome,) = ask(once, isolate=True, dtypes="float32", examples=1, sizes=SIZES)
    assert outcome.status == "not applicable"
    assert "its worker differentiates no gradients" in outcome.message


@pytest.mark.nightly  # it compiles for each shape
@pytest.mark.parametrize("isolate", [False, True])
def test_jax_differentiates_twice(isolate):
    jax = pytest.importorskip("jax")

    def attend(q, k, v):
        s = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        return jax.nn.softmax(s, axis=-1) @ v

    options = {"framework": "jax", "examples": 2, "sizes": {"H": (2,), "K": (2,)} | SIZES}
    for outcome in ask(attend, **options, isolate=isolate):
        assert outcome.status == "passed", outcome.message


@pytest.mark.thorough
def test_layout_is_that_of_the_implementation():
    def attend(q, k, v):
        return textbook(*(x.transpose(-2, -3) for x in (q, k, v))).transpose(-2, -3)

    for outcome in ask(attend, layout="BTHD"):
        assert outcome.status == "passed", outcome.message


def test_numbers_are_not_small_beside_the_tolerance():
    """A tolerance above the results would pass anything."""
    from npattn.testing.bounds.rounding import Rounding
    from npattn.testing.bounds.second_order import second_order_bounds
    from tests.oracle.test_second_order import ALL
    from tests.oracle.test_second_order import make as make_case

    case = make_case(ALL)
    head = {n: np.asarray(x) for n, x in case.cotangents.items()}
    along = case.directions
    model = Rounding.choose(None, "float32", "input")
    allowed = second_order_bounds(
        case.problem, np.float32, model, head["dout"], head["dlse"], along
    )
    want = npattn.double_backward(case.fwd, head["dout"], head["dlse"],
                                  **{f"dd{n}": x for n, x in along.items()})  # fmt: skip
    for name in ("q", "k", "v", "bias", "sinks"):
        assert allowed[name].shape == getattr(want, name).shape
        assert 0 < allowed[name].max() < abs(getattr(want, name)).max() / 8
