"""check_module: right modules pass, the cause of each mistake comes first, the report says all."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from npattn.errors import DtypeError, OptionError
from npattn.testing import check_module, compare_module
from npattn.testing.modules import ModuleCase, replay
from tests.testing.modules import broken, lessons

WORDS = {
    "width": "√(H·D) = √15, the whole width, instead of √D = √5",
    "merge": "heads are merged without moving the head axis back",
    "queries": "the softmax runs over queries instead of keys",
    "after": "the weights p are wrong: rows sum to less than 1",
    "key": "keys are projected by W_q.weight",
    "dropout": "dropout is active although .eval() was called",
}


@pytest.fixture(autouse=True)
def same_weights():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        yield


def statuses(report):
    return {o.rule: o.status for o in report.outcomes}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make",
    [
        lessons.Notebook,
        lessons.DropsReturned,
        lessons.HeadPerNumber,
        lambda: lessons.PerHead(moves=True).compute_attention,
        lessons.SingleHead,
        lessons.SmallHeads,
        lessons.RawWeights,
        lambda: nn.MultiheadAttention(14, 2, batch_first=True),  # even heads have a fast path
        lambda: nn.MultiheadAttention(15, 3, dropout=0.2),
        lambda: nn.MultiheadAttention(15, 5, batch_first=True, add_bias_kv=True, bias=False),
        lambda: nn.MultiheadAttention(15, 3, batch_first=True, add_zero_attn=True),
        lambda: nn.MultiheadAttention(15, 3, kdim=7, vdim=11, batch_first=True),
        lambda: nn.MultiheadAttention(15, 3, batch_first=True, dtype=torch.float64),
        lambda: nn.MultiheadAttention(15, 3, batch_first=True, dtype=torch.float16),
    ],
)
def test_right_modules_pass(make):
    report = check_module(make(), examples=11, budget=600)
    assert report.passed, report
    assert 0 < max(o.worst for o in report.outcomes) <= 1
    assert {"agreement-output", "agreement-inputs", "agreement-parameters"} <= {
        o.rule for o in report.outcomes if o.status == "passed" and o.examples > 5
    }


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", lessons.Notebook.mistakes)
def test_cause_of_each_mistake_comes_first(mistake):
    report = check_module(lessons.Notebook(mistake=mistake), examples=11, budget=600)
    assert not report.passed
    [cause] = report.causes
    assert WORDS[mistake] in cause.text
    assert cause.confirmed > 0
    failed = {o.id for o in report.outcomes if o.failed}
    assert set(cause.rules) == failed
    assert WORDS[mistake][:20] in str(report).splitlines()[1]


@pytest.mark.thorough
@pytest.mark.parametrize("make", broken.BROKEN)
def test_each_rule_fails_a_module_that_breaks_it(make):
    report = check_module(make(), examples=20, only=[*make.breaks, *make.leaves])
    expected = dict.fromkeys(make.breaks, "failed") | dict.fromkeys(make.leaves, "passed")
    assert statuses(report) == expected, report


@pytest.mark.parametrize(
    ("mistake", "right"),
    [
        ("after", {"agreement-output", "cross-attention", "train-mode"}),
        ("merge", {"agreement-weights", "eval-mode", "state-dict"}),
        ("dropout", {"agreement-weights"}),
    ],
)
def test_rules_that_a_mistake_leaves_right_pass(mistake, right):
    report = check_module(lessons.Notebook(mistake=mistake), examples=5, only=sorted(right))
    assert set(statuses(report).values()) == {"passed"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lessons.WholeWidth, "scores are divided by √(H·D) = √14, the whole width"),
        (lambda: lessons.PerHead().compute_attention, "heads are merged without moving"),
    ],
)
def test_lessons_with_a_mistake_are_told_which(make, words):
    report = check_module(make(), examples=3, only="agreement")
    assert not report.passed
    assert words in report.causes[0].text


@pytest.mark.thorough
def test_two_mistakes_are_named_together():
    class Two(lessons.Notebook):
        def __init__(self):
            super().__init__(mistake="merge")
            self.scale = 1

        def forward(self, query, key, value, mask=None):
            self.head_size, size = self.W_q.out_features, self.head_size
            q, k, v = (w(x).unflatten(-1, (3, size)).transpose(1, 2)
                       for w, x in zip((self.W_q, self.W_k, self.W_v), (query, key, value),
                                       strict=True))  # fmt: skip
            self.head_size = size
            weights = (q @ k.mT).softmax(-1)
            return self.W_o((weights @ v).reshape(query.shape)), weights

    report = check_module(Two(), examples=3, only="agreement")
    text = report.causes[0].text
    assert "scores are not divided by √D = √5" in text
    assert "heads are merged without moving the head axis back" in text


class DetachedLayer(nn.Linear):
    def forward(self, x):
        return functional.linear(x, self.weight.detach(), self.bias)


def test_a_detached_parameter_is_named():
    m = lessons.Notebook()
    m.W_k = DetachedLayer(15, 15)
    report = check_module(m, examples=3, only="agreement")
    assert [o.rule for o in report.outcomes if o.failed] == ["agreement-parameters"]
    [cause] = report.causes
    assert "no gradient reaches W_k.weight" in cause.text
    assert cause.where.startswith("backward:")


class Scales(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return 3 * dx


class TripleGradient(lessons.Notebook):
    def forward(self, query, key, value, mask=None):
        return super().forward(query, key, Scales.apply(value), mask)


def test_a_factor_of_a_gradient_is_named():
    report = check_module(TripleGradient(), examples=11, only="cross-attention")
    [cause] = report.causes
    assert "the gradient of value is 3 × what it should be" in cause.text


class Leaks(lessons.Notebook):
    """The first example of a batch is added to all queries, a thousandth of it."""

    def forward(self, query, key, value, mask=None):
        return super().forward(query + 0.001 * (query[:1] - query), key, value, mask)


def test_an_example_that_leaks_into_others_fails():
    report = check_module(Leaks(), examples=5, only="agreement-output")
    assert statuses(report) == {"agreement-output": "failed"}


class LosesBias(lessons.Notebook):
    """Its output bias is not loaded from a state dict."""

    def load_state_dict(self, state, strict=True, assign=False):
        state = {n: x for n, x in state.items() if n != "W_o.bias"}
        return super().load_state_dict(state, strict=False)


def test_a_state_dict_that_loses_a_parameter_fails():
    report = check_module(LosesBias(), examples=5, only="state-dict")
    assert statuses(report) == {"state-dict": "failed"}
    assert "after a round trip of its state dict: out[" in report.outcomes[0].message


class ForgetsRate(lessons.Notebook):
    """Dropout in training does not divide by 1 − rate."""

    def forward(self, query, key, value, mask=None):
        out, weights = super().forward(query, key, value, mask)
        bias = self.W_o.bias
        return (0.9 * (out - bias) + bias if self.training else out), weights


def test_dropout_without_rescaling_fails_in_training():
    report = check_module(ForgetsRate(), examples=5, only="train")
    assert statuses(report) == {"train-mode": "failed"}


class Float16Scores(lessons.Notebook):
    """Scores lose digits in every mode, more than autocast may."""

    def forward(self, query, key, value, mask=None):
        coarse = (32 * self.W_q.weight).round() / 32
        with torch.no_grad():
            before = self.W_q.weight.clone()
            self.W_q.weight.copy_(coarse)
        out = super().forward(query, key, value, mask)
        with torch.no_grad():
            self.W_q.weight.copy_(before)
        return out


@pytest.mark.thorough
def test_coarse_weights_fail_under_autocast_too():
    report = check_module(Float16Scores(), examples=30, only=["autocast", "eval"])
    assert statuses(report) == {"autocast": "failed", "eval-mode": "passed"}


class Shifts(lessons.Notebook):
    """A mask hides the key after the one that it names."""

    def forward(self, query, key, value, mask=None):
        mask = None if mask is None else torch.as_tensor(mask).roll(1, -1)
        return super().forward(query, key, value, mask)


def test_a_mask_that_no_cause_explains_is_red():
    report = check_module(Shifts(), examples=5, only=["mask", "agreement-output"])
    assert statuses(report) == {"mask": "failed", "agreement-output": "passed"}
    assert report.causes == ()
    [mask] = [o for o in report.outcomes if o.failed]
    assert [c.name for c in mask.comparisons[:2]] == ["weights", "out"]  # then the gradients
    assert "by no cause that is known" in str(report)


def test_a_mask_that_is_ignored_is_named():
    class Ignores(lessons.Notebook):
        def forward(self, query, key, value, mask=None):
            return super().forward(query, key, value)

    report = check_module(Ignores(), examples=5, only=["mask", "inside"])
    assert "the mask is wrong: " in report.causes[0].text
    assert "mask[float32]" in report.causes[0].rules


class Normed(lessons.Notebook):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(15)

    def forward(self, query, key, value, mask=None):
        return super().forward(self.norm(query), key, value, mask)


def test_a_norm_of_inputs_is_left_out_and_said():
    report = check_module(Normed(), examples=3, only="agreement-output")
    assert report.passed
    assert "norm not judged: replaced by the identity" in report.settings["reads"]
    x = np.ones((2, 5, 15), np.float32)
    with pytest.raises(OptionError, match=r"m has norm, .* torch.nn.Identity"):
        compare_module(Normed(), {"query": x, "key": x, "value": x}, x)


def test_other_parameters_are_named_where_nothing_fits():
    class Weighted(lessons.Notebook):
        def __init__(self):
            super().__init__()
            self.more = nn.Parameter(torch.full((15,), 2.0))

        def forward(self, query, key, value, mask=None):
            out, weights = super().forward(query, key, value, mask)
            return out * (1 + self.more.cos()), weights  # 1 of no value that is tried

    report = check_module(Weighted(), examples=3, only="agreement-output")
    assert "more, in no projection" in report.causes[0].text
    assert report.causes[0].step == ""


def test_a_mistake_is_not_laid_on_a_parameter_that_does_nothing():
    m = lessons.Notebook(mistake="merge")
    m.unused = nn.Parameter(torch.ones(15))
    report = check_module(m, examples=3, only="agreement-output")
    assert WORDS["merge"] in report.causes[0].text
    assert report.few == ()


def test_a_result_without_power_is_no_verdict_unless_it_is_accepted():
    m = nn.MultiheadAttention(15, 3, batch_first=True, dtype=torch.bfloat16)
    report = check_module(m, examples=11, only="agreement-inputs")
    assert report.reason == "not judged: dquery"
    assert check_module(m, examples=11, only="agreement-inputs", accept="dquery").passed


def test_too_little_time_asks_fewer_examples_and_says_so():
    rules = ["agreement-output", "inside"]
    report = check_module(lessons.HeadPerNumber(), examples=5, budget=1e-9, only=rules)
    assert report.passed
    assert max(o.examples for o in report.outcomes if o.rule == "agreement-output") == 3
    assert "2 of 5 examples in float32, for which there is no time (budget= gives more)" in (
        report.untested
    )
    wrong = lessons.Notebook(mistake="merge")  # two changes at a time are tried while there is time
    report = check_module(wrong, examples=5, budget=1e-9, only="agreement-output")
    assert (report.verdict, report.causes) == ("failed", ())
    with pytest.raises(OptionError, match="budget is 0"):
        check_module(lessons.HeadPerNumber(), budget=0)


def test_rules_that_do_not_apply_are_listed_and_may_have_to():
    report = check_module(lessons.HeadPerNumber(), examples=1, must=("mask", "agreement-output"))
    assert "cross-attention (it takes no keys of their own)" in report.untested
    assert "compile (only= names it)" in report.untested
    assert report.missing == ("mask",)
    assert not report.passed


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile calls torch.jit
def test_compiled_modules_are_judged_where_that_is_asked():
    assert check_module(lessons.Notebook(), only="compile").passed


def test_what_differs_when_it_is_compiled_fails(monkeypatch):
    def compile_wrong(function):
        return lambda **inputs: tuple(1.01 * x for x in function(**inputs))

    monkeypatch.setattr(torch, "compile", compile_wrong)
    report = check_module(lessons.Notebook(), only=["compile", "agreement-output"], examples=3)
    assert statuses(report) == {"agreement-output": "passed", "compile": "failed"}


def test_report_says_how_a_module_is_read():
    report = check_module(lessons.Notebook(), examples=3, only="mask")
    reads = report.settings["reads"]
    assert "wq = W_q.weight" in reads
    assert "3 heads of 5" in reads
    assert "mask (T, S), (1, 1, T, S)" in reads
    assert report.settings["conventions"] == {"hidden_fill": -1e9}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lessons.RawWeights, "attention_mask (T, S), (1, 1, T, S)"),
        (lessons.RawWeights, "True hides"),
        (lambda: lessons.PerHead(moves=True).compute_attention, "always causal"),
        (lambda: lessons.PerHead(moves=True).compute_attention, "packed per head [q | k | v]"),
        (lambda: nn.MultiheadAttention(15, 3), "key_padding_mask (B, S): True hides"),
    ],
)
def test_conventions_are_found(make, words):
    assert words in check_module(make(), examples=1, only="eval").settings["reads"]


def test_keys_of_another_length_are_refused_and_said():
    report = check_module(lessons.SmallHeads(), examples=5, only="cross")
    assert report.passed
    assert [line[:5] for line in report.refused] == ["S ≠ T"]


class Unscaled(lessons.Notebook):
    """As T5: no scale, and a bias of zeros is returned between output and weights."""

    def forward(self, query, mask=None):
        q, k, v = (self.split(w(query)) for w in (self.W_q, self.W_k, self.W_v))
        bias = torch.zeros(1, self.num_heads, *query.shape[1:2] * 2, dtype=query.dtype)
        bias = bias if mask is None else bias + mask
        weights = (q @ k.mT + bias).softmax(-1)
        return self.W_o((weights @ v).transpose(1, 2).flatten(2)), bias, weights


@pytest.mark.thorough
def test_another_scale_may_be_meant():
    report = check_module(Unscaled(), scale=1.0, examples=5)
    assert report.passed, report
    assert statuses(report)["agreement-weights"] == "passed"
    report = check_module(Unscaled(), examples=3, only="agreement-output")
    assert "scores are not divided by √D" in report.causes[0].text


class UnscaledAndRaises(Unscaled):
    """A module that raises for one query, which no scale explains."""

    def forward(self, x, mask=None):
        if x.shape[1] == 1:
            raise ValueError("boom")
        return super().forward(x, mask)


def test_what_raises_is_explained_by_no_step():
    report = check_module(UnscaledAndRaises(), examples=11)
    raised = {o.id for o in report.outcomes if o.status == "error"}
    assert raised
    of_scale = [c for c in report.causes if "√D" in c.text]
    assert not raised & {rule for c in of_scale for rule in c.rules}


def test_a_form_that_only_the_fast_path_takes_is_none():
    m = nn.MultiheadAttention(14, 2, batch_first=True)
    reads = check_module(m, examples=1, only="eval").settings["reads"]
    assert "attn_mask (T, S), (BH, T, S)" in reads


class OptionalContext(lessons.RawWeights):
    """It refuses a context, as a block that was not made for one."""

    def forward(self, x, encoder_hidden_states=None):
        if encoder_hidden_states is not None:
            raise ValueError("no context")
        return super().forward(x)


def test_a_context_that_is_refused_is_never_passed_again():
    report = check_module(OptionalContext(), examples=3)
    assert report.passed, report
    assert statuses(report)["cross-attention"] == "not applicable"
    assert [line.partition(":")[0] for line in report.refused] == ["S ≠ T", "keys of their own"]


def test_roles_and_heads_that_no_name_tells():
    roles = {"wq": "alpha", "wk": "beta", "wv": "gamma", "wo": "delta"}
    report = check_module(lessons.OddNames(), roles=roles, num_heads=6, examples=3)
    assert report.passed, report
    assert "6 heads of 2, 2 of keys" in report.settings["reads"]


def test_the_module_itself_is_left_alone():
    m = lessons.Notebook().train()
    before = {n: x.clone() for n, x in m.state_dict().items()}
    state = torch.random.get_rng_state()
    check_module(m, examples=3)
    assert m.training
    assert all(p.grad is None for p in m.parameters())
    assert all(torch.equal(x, before[n]) for n, x in m.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.thorough
def test_a_failure_is_shrunk_and_replayed(tmp_path):
    m = lessons.Notebook(mistake="merge")
    report = check_module(m, examples=11, only="agreement-output")
    assert report.outcomes[0].recipe == "ModuleCase(T=2)"
    assert "TODO: import your module here" in report.script()
    [comparison] = replay(m, ModuleCase(T=2), "agreement-output")
    assert str(comparison) in report.outcomes[0].message
    report.to_json(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["outcomes"][0]["recipe"]["line"] == "ModuleCase(T=2)"
    assert written["causes"][0]["step"] == "o"


@pytest.mark.thorough
def test_a_cause_is_said_once_for_all_dtypes():
    m = lessons.Notebook(mistake="merge")
    report = check_module(m, dtypes=("float32", "float64"), examples=3, only="agreement-output")
    [cause] = report.causes
    assert cause.rules == ("agreement-output[float32]", "agreement-output[float64]")


def test_a_module_that_raises_is_an_error():
    class Raises(lessons.Notebook):
        def forward(self, query, key, value, mask=None):
            if query.shape[1] == 3:
                raise ValueError("three")
            return super().forward(query, key, value, mask)

    report = check_module(Raises(), sizes={"T": (3,)}, examples=2, only="agreement-output")
    assert report.outcomes[0].status == "error"
    assert "ValueError: three" in report.outcomes[0].message


@pytest.mark.thorough
def test_an_output_of_a_wrong_shape_fails_every_agreement():
    class Flat(lessons.Notebook):
        def forward(self, query, key, value, mask=None):
            out, weights = super().forward(query, key, value, mask)
            return out.flatten(1), weights

    report = check_module(Flat(), examples=2, only="agreement")
    assert set(statuses(report).values()) == {"failed"}
    assert "out has shape" in report.outcomes[0].message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"only": "agrement"}, "'agrement' is not a rule of modules"),
        ({"sizes": {"D": (3,)}}, "sizes has 'D', must have B, T or S"),
        ({"roles": {"wx": "W_q"}}, "roles has 'wx'"),
        ({"roles": {"wq": "w"}}, "must name one of W_q.weight"),
        ({"num_heads": 4}, "num_heads is 4, must divide the width 15"),
        ({"examples": 0}, "examples"),
    ],
)
def test_illegal_arguments_are_errors(arguments, words):
    with pytest.raises(OptionError, match=words):
        check_module(lessons.Notebook(), **arguments)


def test_an_unknown_dtype_is_an_error():
    with pytest.raises(DtypeError, match="dtypes has 'fp32', must be among float64, float32"):
        check_module(lessons.Notebook(), dtypes=("fp32",))


@pytest.mark.parametrize(
    ("m", "words"),
    [
        (lambda q, k, v: q, "must be a torch.nn.Module"),
        (nn.Linear(3, 3), "found no projection wk, wq, wv"),
        (nn.Sequential(), "takes no input|0 dtypes"),
    ],
)
def test_what_is_no_module_of_attention_is_an_error(m, words):
    with pytest.raises(OptionError, match=words):
        check_module(m)


def test_arguments_that_it_cannot_fill_in_are_an_error():
    class Turns(lessons.Notebook):
        def forward(self, x, position_embeddings):
            return super().forward(x, x, x)

    with pytest.raises(OptionError, match="requires position_embeddings"):
        check_module(Turns())


def test_random_numbers_of_the_caller_are_left_alone():
    class Noisy(lessons.Notebook):
        def forward(self, query, key, value, mask=None):
            return super().forward(functional.dropout(query, 0.1, True), key, value, mask)

    x = torch.ones(2, 3, 15)
    before = torch.get_rng_state()
    m = Noisy().eval()
    after = torch.get_rng_state()
    with np.errstate(all="ignore"):
        compare_module(m, x.numpy(), x.numpy())
    assert not torch.equal(before, after)  # its weights were drawn
    assert torch.equal(after, torch.get_rng_state())
