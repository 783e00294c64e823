"""Modules as functions of q, k and v: what is read, what is judged, and what is never inferred."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from npattn.errors import OptionError
from npattn.positions import Frequencies, Rotary
from npattn.testing import check_module, compare_module
from npattn.testing.modules.pair import diff_modules
from tests.testing.modules import broken


class Attention(nn.Module):
    """Attention of one input, with what its options add."""

    num_heads = 3

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(12, 12) for _ in range(4))
        vars(self).update(options)

    def forward(self, x):
        return self.attend(x, None)

    def attend(self, x, mask):
        own = vars(self)
        x = x.transpose(0, 1) if own.get("tokens_first") else x
        q, k, v = (f(x).unflatten(-1, (3, 4)).transpose(1, 2)
                   for f in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        if "order" in own:  # pairs of neighbours as those of halves
            q, k = q[..., own["order"]], k[..., own["order"]]
        if own.get("turns"):
            q, k = turn(q, own["turns"]), turn(k, own["turns"])
        s = q @ k.mT * own.get("factor", 0.5)
        T = s.shape[-1]
        if mask is None and own.get("causal"):
            mask = torch.ones(T, T, dtype=torch.bool).tril(-own.get("beside", 0))
        if own.get("reach"):
            far = torch.arange(T)[:, None] - torch.arange(T)
            mask = (far >= 0) & (far < own["reach"])
        s = s if mask is None else s.masked_fill(~mask, own.get("fill", -torch.inf))
        o = self.o_proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
        o = o.transpose(0, 1) if own.get("tokens_first") else o
        return (o, s.detach()) if own.get("scores") else o


class Masked(Attention):
    def forward(self, x, mask=None):
        return self.attend(x, mask)


def turn(x, base):
    D = x.shape[-1]
    frequencies = base ** -(torch.arange(0, D, 2) / D)
    if D > 4:
        frequencies[D // 4 :] /= 4  # scaled, as by YaRN
    a = torch.outer(torch.arange(x.shape[-2]), frequencies).to(x.dtype)
    one, two = x.chunk(2, -1)
    return torch.cat((one * a.cos() - two * a.sin(), two * a.cos() + one * a.sin()), -1)


class Odd(Attention):
    """Attention with a part that no reference knows, and a factor that may be wrong."""

    def __init__(self, part, bias=True, **options):
        super().__init__(**options)
        self.part = part
        if part == "gate":
            self.gate = nn.Linear(12, 12, bias=bias)
        if part == "table":
            self.table = nn.Embedding(200, 3)
        for name, shape in {"gamma": (12,), "alpha": (1,), "sinks": (3,)}.items():
            if part == name:
                self.register_parameter(name, nn.Parameter(0.2 + torch.rand(shape)))
        if part == "slopes":
            self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125]))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (3, 4)).transpose(1, 2)
                   for f in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        s, at = q @ k.mT * vars(self).get("factor", 0.5), torch.arange(x.shape[1])
        if self.part == "table":
            s = s + self.table(at[:, None] - at + 100).permute(2, 0, 1)
        if self.part == "slopes":
            s = s - self.slopes[:, None, None] * (at[:, None] - at).abs()
        if self.part == "sinks":
            s = torch.cat((s, self.sinks[:, None, None].expand(len(x), 3, len(at), 1)), -1)
        o = (s.softmax(-1)[..., : len(at)] @ v).transpose(1, 2).flatten(2)
        y = self.o_proj(o * self.gate(x).sigmoid() if self.part == "gate" else o)
        return y * {"gamma": lambda: self.gamma, "alpha": lambda: self.alpha.tanh()}.get(
            self.part, lambda: 1.0)()  # fmt: skip


class HalfGradient(nn.Linear):
    def forward(self, x):
        return F.linear(x, (self.weight + self.weight.detach()) / 2, self.bias)


class Window(Attention):
    """It takes 16 tokens, and no other number."""

    def __init__(self, **options):
        super().__init__(**options)
        self.table = nn.Parameter(torch.randn(3, 16, 16))

    def attend(self, x, mask):
        q, k, v = (f(x).unflatten(-1, (3, 4)).transpose(1, 2)
                   for f in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        s = q @ k.mT * vars(self).get("factor", 0.5) + self.table
        return self.o_proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Shared(nn.Module):
    """Six query heads, three of keys in one layer."""

    def __init__(self, tiled=False):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.proj, self.tiled = nn.Linear(36, 72), nn.Linear(36, 36), tiled

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (-1, 6)).transpose(1, 2)
                   for y in self.qkv(x).split((36, 18, 18), -1))  # fmt: skip
        k, v = (y.repeat(1, 2, 1, 1) if self.tiled else y.repeat_interleave(2, 1) for y in (k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Masked(causal=True), "causal where no mask is given, the mask alone where one is"),
        (lambda: Attention(causal=True), "always causal"),
        (lambda: Attention(turns=100.0), "rotary, half, base 100 read, not checked"),
        (lambda: Attention(turns=100.0, rope_theta=100.0), "rotary, half, base 100;"),
        (lambda: Attention(turns=100.0, rope_theta=100.0, order=[0, 2, 1, 3]),
         "rotary, interleaved, base 100;"),
        (lambda: Attention(reach=3, sliding_window=3), "window 3 (the query counted)"),
        (lambda: Attention(reach=4, sliding_window=3), "window 3 (beside the query)"),
        (lambda: Attention(factor=0.6, scale=0.6), "scale 0.6 by its attribute"),
        (lambda: Attention(scores=True), "returns scores in place of weights"),
        (lambda: Attention(tokens_first=True), "inputs are (T, B, C)"),
        (Shared, "6 heads of 6, 3 of keys"),
    ],
)  # fmt: skip
def test_forms_that_are_read_pass_and_are_said(make, words):
    m = make()
    report = check_module(m, examples=3)
    assert report.passed, report
    assert words in report.settings["reads"]
    passed = {o.rule for o in report.outcomes if o.status == "passed"}
    assert "inside-agreement-o" in passed or "window" in words
    x = torch.randn(2, 5, m.q_proj.in_features if isinstance(m, Attention) else 36)
    y = m(x)
    y = y[0] if isinstance(y, tuple) else y
    assert all(c.passed for c in compare_module(m, x, y.detach(), num_heads=len(y) and None))


@pytest.mark.parametrize(
    ("m", "words"),
    [
        (Attention(reach=3), "passes with window=(2, 0)"),
        (Attention(factor=0.6), "passes with scale=0.6"),
        (Attention(factor=1.0, scale=1.0), "scores are not divided by √D = √4"),
        (Attention(turns=100.0, rope_theta=10000.0), "passes with rotary=100"),
    ],
)
def test_what_nothing_names_is_red_with_its_cure(m, words):
    report = check_module(m, examples=3, only="agreement-output")
    assert not report.passed
    assert words in report.causes[0].text


@pytest.mark.thorough
def test_heads_of_another_group_are_named_by_the_judge_of_functions():
    report = check_module(Shared(tiled=True), examples=3, num_heads=6)
    assert "h % K" in report.causes[0].text
    assert {o.id for o in report.outcomes if o.failed} <= set(report.causes[0].rules)


@pytest.mark.thorough
def test_a_diagonal_that_is_hidden_is_red():
    report = check_module(Attention(causal=True, beside=1), examples=3)
    assert not report.passed


def test_axes_of_packed_rows_that_roles_say_are_not_guessed():
    class Packed(nn.Module):
        num_heads = 3

        def __init__(self):
            super().__init__()
            self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).unbind(-2)
            o = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)))
            return self.proj(o.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    read = check_module(Packed(), examples=3, only="agreement-output")
    assert read.passed
    assert "packed per head" in read.settings["reads"]
    said = check_module(Packed(), examples=3, only="agreement-output", roles={"wqkv": "qkv: 3 H D"})
    assert not said.passed
    with pytest.raises(OptionError, match="has axes"):
        check_module(Packed(), roles={"wqkv": "qkv: D H 3"})


def test_masks_that_all_raise_in_float16_fail():
    class Fills(Attention):
        def forward(self, x, mask=None):
            if mask is not None:
                x = x + 0 * torch.zeros((), dtype=x.dtype).masked_fill(torch.tensor(True), -1e9)
            return self.attend(x, mask)

    report = check_module(Fills(), examples=3, only="mask", dtypes=("float16",))
    assert not report.passed


def test_a_factor_of_the_output_is_red_and_no_gate():
    class Half(Attention):
        def forward(self, x):
            return self.attend(x, None) / 2

    assert check_module(Half(), examples=3, only="agreement-output").verdict == "failed"


def test_what_no_reference_knows_is_named_and_no_verdict():
    class Gated(Attention):
        def forward(self, x):
            return self.attend(x, None) * x.sigmoid()

    report = check_module(Gated(), examples=3)
    assert report.verdict == "no verdict"
    assert "a gate or a norm" in report.reason


ODD = {
    "gate": ("a gate or a norm", "gate.weight, gate.bias"),
    "table": ("scores have a bias of positions", "table.weight"),
    "slopes": ("scores have a bias of positions", "slopes"),
    "sinks": ("a sink", "sinks"),
    "gamma": ("a factor of the output", "gamma"),
    "alpha": ("a factor of the output", "alpha"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("part", ODD)
def test_the_rest_is_judged_without_a_part_that_no_reference_knows(part):
    words, names = ODD[part]
    report = check_module(Odd(part), examples=3)
    assert report.verdict == "no verdict"
    first = str(report).splitlines()[0]
    assert words in first
    assert f"the rest without {names}; accept='{names.partition(',')[0]}'" in first
    passed = {o.rule for o in report.outcomes if o.status == "passed"}
    assert {"agreement-output", "agreement-parameters", "inside-agreement-dq"} <= passed
    assert len(passed) > 30
    assert check_module(Odd(part), examples=3, only="agreement", accept=names.split(", ")).passed


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["table", "sinks"])
def test_the_rest_is_red_where_it_is_wrong(part):
    report = check_module(Odd(part, factor=0.6), examples=3, only="agreement", accept=ODD[part][1])
    assert report.verdict == "failed"
    assert "passes with scale=0.6" in report.causes[0].text


def test_a_gate_without_a_bias_is_a_half():
    m = Odd("gate", bias=False)
    report = check_module(m, examples=3, only=["agreement", "inside"], accept="gate.weight")
    assert report.passed, report
    m.v_proj = HalfGradient(12, 12)
    report = check_module(m, examples=3, only="agreement")
    assert "the gradient of v_proj.weight is 0.5 ×" in report.causes[0].text


@pytest.mark.thorough
def test_a_module_of_one_length_is_judged_at_that_length():
    sizes = {"T": (16,)}
    report = check_module(Window(), examples=3, sizes=sizes)
    assert "the rest without table" in report.reason
    assert len([o for o in report.outcomes if o.status == "passed"]) > 25
    report = check_module(Window(factor=0.6), examples=3, sizes=sizes, only="agreement-output")
    assert "passes with scale=0.6" in report.causes[0].text
    with pytest.raises(OptionError, match="sizes= for one that takes other lengths"):
        check_module(Window())


@pytest.mark.thorough
def test_roundings_of_a_turn_do_not_reach_other_features():
    """A feature of 0 has a gradient of 0, and none of the roundings of its partner."""
    m = Attention(turns=100.0, rope_theta=100.0)
    report = check_module(m, examples=30, only=["inside"])
    assert report.passed, report
    assert max(o.worst for o in report.outcomes if o.rule == "inside-permute-keys") < 0.9


class Mixed(Attention):
    """The weights of its heads are mixed."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.rand(3, 3))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (3, 4)).transpose(1, 2)
                   for f in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        p = torch.einsum("bhts,hg->bgts", (q @ k.mT / 2).softmax(-1), self.mix)
        return self.o_proj((p @ v).transpose(1, 2).flatten(2))


def test_heads_that_are_mixed_are_judged_unmixed():
    report = check_module(Mixed(), examples=3, only=["agreement", "inside"])
    assert report.verdict == "no verdict"
    assert "heads are mixed; the rest without mix" in report.reason


class NormedHeads(Attention):
    """Queries and keys are normalised, with terms."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(4), nn.LayerNorm(4)
        for norm in (self.q_norm, self.k_norm):
            nn.init.normal_(norm.bias)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (3, 4)).transpose(1, 2)
                   for f in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        o = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.o_proj(o.transpose(1, 2).flatten(2))


def test_a_term_of_all_keys_has_a_gradient_of_zero():
    report = check_module(NormedHeads(), examples=5, only="agreement")
    assert report.passed, report
    assert "layer norm of q and k" in report.settings["reads"]


class Context(nn.Module):
    """Keys come from a context of another width; or from one that is ignored, or comes later."""

    num_heads = 2

    def __init__(self, width=6, use=lambda x, context: context):
        super().__init__()
        self.to_q, self.to_kv = nn.Linear(8, 8), nn.Linear(width, 16)
        self.to_out, self.use = nn.Linear(8, 8), use

    def forward(self, x, context=None, mask=None):
        context = x if context is None else self.use(x, context)
        if mask is not None and mask.shape[-1] != x.shape[1]:
            raise ValueError("a mask of queries")
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2)
                   for y in (self.to_q(x), *self.to_kv(context).chunk(2, -1)))  # fmt: skip
        s = q @ k.mT / 2
        s = s if mask is None else s.masked_fill(~mask[:, None, None], -1e9)
        return self.to_out((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_context_of_another_width_is_passed_and_masks_may_be_of_queries_alone():
    report = check_module(Context(), examples=5, only=["agreement", "cross", "padding"])
    assert report.passed, report
    assert any("where S ≠ T: raised ValueError: a mask of queries" in x for x in report.refused)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda x, context: x, "context has no effect: keys and values come from x"),
        (
            lambda x, context: torch.cat((x, context), 1),
            "keys of context come after those of x, which count too",
        ),
    ],
)
def test_another_use_of_a_context_is_named_first(use, words):
    report = check_module(Context(8, use), examples=5)
    assert report.verdict == "failed"
    assert report.causes[0].text == words
    assert {o.rule for o in report.outcomes if o.failed} <= {"cross-attention", "padding"}


def test_keys_that_matter_are_not_called_ignored():
    report = check_module(broken.ValuesOfKeys(), examples=3, only="cross-attention")
    assert report.verdict == "failed"
    assert not any("has no effect" in cause.text for cause in report.causes)


def test_a_mask_of_the_wrong_keys_is_judged_in_the_form_that_hides():
    """A bool would be added as a number; the form that hides as many keys is judged."""

    class Rolled(Attention):
        def forward(self, x, mask=None):
            s = self.q_proj(x) @ self.k_proj(x).mT / 12**0.5
            s = s if mask is None else s + mask.roll(1, -1)
            return self.o_proj(s.softmax(-1) @ self.v_proj(x))

    m = Rolled()
    m.num_heads = 1
    report = check_module(m, examples=3, only=["mask", "inside"])
    assert "0 or −inf is added" in report.settings["reads"]
    assert "key s has the mask of key (s − 1) % S" in report.causes[0].text


class Scaled(Attention):
    """Rotary positions of heads of 8, whose slow frequencies are scaled."""

    num_heads = 2

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2)
                   for f in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        o = F.scaled_dot_product_attention(turn(q, 50.0), turn(k, 50.0), v)
        return self.o_proj(o.transpose(1, 2).flatten(2))


@pytest.mark.thorough
def test_scaled_frequencies_are_named_and_judged_where_they_are_passed():
    report = check_module(Scaled(), examples=3, only="agreement")
    assert report.verdict == "no verdict"
    assert "rotary positions with scaled frequencies (rotary= says them)" in report.reason
    values = 50.0 ** (-np.arange(4) / 4) / [1, 1, 4, 4]
    rotary = Rotary(layout="half", frequencies=Frequencies(values, 1.0))
    report = check_module(Scaled(), examples=3, only="agreement", rotary=rotary)
    assert report.passed, report


def test_a_mask_that_hides_queries_too_is_named():
    class Padded(Attention):
        def forward(self, x, mask=None):
            if mask is None:
                return self.attend(x, None)
            return self.attend(x, mask[:, None, None]) * mask[..., None]

    report = check_module(Padded(), examples=3, only=["agreement-output", "mask", "padding"])
    assert {o.rule for o in report.outcomes if o.failed} == {"mask", "padding"}
    assert report.causes[0].text == "the mask sets the output of hidden tokens to 0 too, as queries"


def test_modules_are_compared_by_the_conventions_of_each():
    modules = Masked(), Masked(fill=-1e9)
    text = " ".join(str(diff_modules(("one", "other"), modules, examples=4)).split())
    assert "They follow different conventions: " in text


def test_latent_keys_are_a_sentence():
    class Latent(Attention):
        def __init__(self):
            super().__init__()
            self.down, self.k_proj = nn.Linear(12, 5), nn.Linear(5, 12)

        def forward(self, x):
            return self.down(x)

    with pytest.raises(OptionError, match=r"takes 5 channels, .* judge the function"):
        check_module(Latent())


def test_a_call_passes_what_else_a_module_needs():
    class Demands(Attention):
        def forward(self, x, positions):
            return self.attend(x + 0 * positions, None)

    with pytest.raises(OptionError, match="pass call=lambda m, x, mask"):
        check_module(Demands())
    report = check_module(
        Demands(), examples=3, only="agreement", call=lambda m, x: m(x, torch.zeros(12))
    )
    assert report.passed
    assert np.isfinite(max(o.worst for o in report.outcomes))
