"""Dumps: reading files, the verdict, what would make a result right, and live recording."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import npattn
from npattn.errors import DtypeError, OptionError
from npattn.testing import compare_dump, record
from npattn.testing.dumps.read import read_dump

B, H, K, T, S, D, E = 2, 6, 3, 7, 13, 11, 5


def arrays(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = {"q": (B, H, T, D), "k": (B, K, S, D), "v": (B, K, S, E), "dout": (B, H, T, E)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def results(inputs, **options):
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    fwd = npattn.forward(q, k, v, **options)
    grads = npattn.backward(fwd, dout)
    found = {"o": fwd.out, "lse": fwd.lse, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    return {name: x.astype(q.dtype) for name, x in found.items()}


@pytest.fixture
def dump(tmp_path):
    """Write a right call with a causal mask, whose o may be changed."""

    def write(change=lambda found: None, name="call.npz", **options):
        inputs = arrays()
        found = results(inputs, **(options or {"causal": "top_left"}))
        change(found)
        np.savez(tmp_path / name, **inputs, **found)
        return tmp_path / name

    return write


def test_right_results_pass(dump):
    report = compare_dump(dump(), causal="top_left")
    assert report.verdict == "passed"
    assert report.passed
    assert [c.name for c in report.comparisons] == ["o", "lse", "dq", "dk", "dv"]
    assert str(report).endswith("call.npz: passed")


@pytest.mark.parametrize("name", ["o", "lse", "dq", "dk", "dv"])
def test_a_wrong_element_fails(dump, name):
    def spoil(found):
        found[name].flat[17] *= 1.01

    report = compare_dump(dump(spoil), causal="top_left")
    assert report.failed == (name,)
    assert report.verdict == "failed"
    assert not report.passes_with


def test_the_place_of_wrong_elements_is_said(dump):
    def spoil(found):
        found["o"][:, 1::2] *= 1.01

    report = compare_dump(dump(spoil), causal="top_left")
    assert report.places == {"o": "h % 2 = 1"}
    assert "wrong where h % 2 = 1 (of this problem)" in str(report)


@pytest.mark.parametrize(
    ("made", "judged", "change"),
    [
        ({"causal": "top_left"}, {"causal": "bottom_right"}, "--causal top_left"),
        ({"causal": "top_left"}, {}, "--causal top_left"),
        ({"scale": 1.0}, {}, "--scale 1"),
        ({"window": (4, 2)}, {"window": (3, 2)}, "--window 4,2"),
        ({"window": (3, 2)}, {"window": (4, 2)}, "--convention window=inclusive"),
        ({"conventions": npattn.Conventions(kv_head="tile")}, {}, "--convention kv_head=tile"),
        ({"conventions": npattn.Conventions(lse_base="2")}, {}, "--convention lse_base=2"),
    ],
)
def test_the_meaning_that_makes_it_right_is_named(dump, made, judged, change):
    report = compare_dump(dump(**made), **judged)
    assert report.verdict == "failed"
    assert change in report.passes_with
    assert f"passes with {change}" in str(report)
    assert ("causal" in str(report).partition("\n")[0]) == ("causal" in judged)


def test_many_scores_are_judged_by_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("npattn.testing.dumps.judge.WHOLE", B * H * T * S - 1)
    inputs = arrays()
    found = results(inputs)
    path = tmp_path / "long.npz"
    np.savez(path, **inputs, **found)
    report = compare_dump(path, samples=29)
    assert report.verdict == "passed"
    assert "checked 29 of 84 rows" in str(report)
    found["o"] *= np.float32(1.01)
    np.savez(path, **inputs, **found)
    assert "o" in compare_dump(path, samples=29).failed
    np.savez(path, **inputs, **results(inputs), weights=np.zeros((B, H, T, S), np.float32))
    report = compare_dump(path, samples=29)
    assert (report.verdict, report.reason) == ("no verdict", "not judged: weights")


def test_a_result_without_power_has_no_verdict(tmp_path):
    inputs = arrays()
    found = {name: np.full_like(x, np.nan) for name, x in inputs.items()}
    q, k, v = (found[name] for name in ("q", "k", "v"))
    np.savez(tmp_path / "nan.npz", q=q, k=k, v=v, o=npattn.forward(q, k, v).out)
    report = compare_dump(tmp_path / "nan.npz")
    assert (report.verdict, report.reason) == ("no verdict", "not judged: o")
    assert compare_dump(tmp_path / "nan.npz", accept=("o",)).passed


def test_other_names_and_layout(tmp_path):
    inputs = arrays()
    found = results(inputs)
    moved = {n: x.swapaxes(1, 2) for n, x in (inputs | found).items() if n != "lse"}
    names = {"q": "query", "k": "key", "v": "value", "o": "attn_out"}
    np.savez(
        tmp_path / "bthd.npz",
        softmax_lse=found["lse"],
        scratch=np.zeros(3),
        **{names.get(n, n): x for n, x in moved.items()},
    )
    rename = {"attn_out": "o", "scratch": ""}
    report = compare_dump(tmp_path / "bthd.npz", rename=rename, layout="BTHD")
    assert report.passed
    assert len(report.comparisons) == 5


def test_bfloat16_as_its_bits(tmp_path):
    inputs = arrays(dtype=ml_dtypes.bfloat16)
    found = results(inputs)
    bits = {name: x.view(np.uint16) for name, x in (inputs | found).items()}
    np.savez(tmp_path / "bits.npz", **bits)
    report = compare_dump(tmp_path / "bits.npz")
    assert report.problem.q.dtype == ml_dtypes.bfloat16
    assert report.passed


@pytest.mark.parametrize("kind", ["folder", "safetensors", "pt"])
def test_each_kind_of_file(tmp_path, kind):
    inputs = arrays()
    entries = inputs | results(inputs, window=(3, 2))
    path = tmp_path / f"dump.{kind}"
    if kind == "folder":
        path.mkdir()
        for name, x in entries.items():
            np.save(path / f"{name}.npy", x)
    elif kind == "safetensors":
        save_file({n: np.ascontiguousarray(x) for n, x in entries.items()}, path)
    else:
        torch.save({n: torch.tensor(x) for n, x in entries.items()}, path)
    assert compare_dump(path, window=(3, 2)).passed


def test_options_are_read_from_the_file(tmp_path):
    inputs = arrays()
    found = results(inputs, scale=0.3, window=(3, None), causal="top_left")
    options = {"scale": 0.3, "window": np.array([3.0, -1.0]), "causal": "top_left"}
    np.savez(tmp_path / "options.npz", **inputs, **found, **options)
    report = compare_dump(tmp_path / "options.npz")
    assert report.problem.window == (3, None)
    assert report.passed
    with pytest.raises(OptionError, match="got scale, which"):
        compare_dump(tmp_path / "options.npz", scale=0.3)


ERRORS = [
    ({"q": None}, "but no q"),
    ({"o": None, "lse": None, "dq": None, "dk": None, "dv": None}, "no result to judge"),
    ({"otput": np.zeros(3)}, "'otput', which is no name of attention"),
    ({"out": np.zeros(3)}, "has o twice"),
    ({"window": np.zeros(3)}, "window has 3 numbers"),
    ({"scale": np.zeros(2)}, r"scale has shape \(2,\)"),
    ({"dout": None}, "gradients need dout"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS)
def test_errors_say_what_to_do(tmp_path, change, message):
    inputs = arrays()
    entries = {**inputs, **results(inputs), **change}
    np.savez(tmp_path / "bad.npz", **{n: x for n, x in entries.items() if x is not None})
    with pytest.raises(OptionError, match=message):
        compare_dump(tmp_path / "bad.npz")


def test_more_errors(tmp_path, dump):
    with pytest.raises(OptionError, match="does not exist"):
        compare_dump(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(OptionError, match="cannot be read"):
        compare_dump(tmp_path / "text.npz")
    (tmp_path / "dump.txt").write_text("text")
    with pytest.raises(OptionError, match=r"must be an \.npz"):
        compare_dump(tmp_path / "dump.txt")
    with pytest.raises(OptionError, match="rename has 'x'"):
        compare_dump(dump(), rename={"x": "o"})
    with pytest.raises(OptionError, match="reads 'dq' as 'qd'"):
        compare_dump(dump(), rename={"dq": "qd"})
    with pytest.raises(OptionError, match="got score_mod, must be"):
        compare_dump(dump(), score_mod=abs)
    np.savez(tmp_path / "rank.npz", **{n: np.zeros((2, 3, 5)) for n in ("q", "k", "v", "o")})
    with pytest.raises(OptionError, match="rank 3"):
        compare_dump(tmp_path / "rank.npz", layout="BTHD")
    np.savez(tmp_path / "int.npz", **{n: np.zeros((2, 3), int) for n in ("q", "k", "v", "o")})
    with pytest.raises(DtypeError, match="q has dtype int64"):
        compare_dump(tmp_path / "int.npz")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(OptionError, match="holds a list"):
        compare_dump(tmp_path / "list.pt")


def test_json_and_html(dump, tmp_path):
    def spoil(found):
        found["o"][0, 0, 0, 0] = np.nan

    report = compare_dump(dump(spoil), causal="top_left")
    report.to_json(tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["verdict"] == "failed"
    assert content["results"]["o"]["wrong"] == 1
    report.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert '<table class="map">' in page
    assert "FAILED" in page


# --- record ---------------------------------------------------------------------------------------


def attend(query, key, value, is_causal=False, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recorded_call_has_its_gradients(tmp_path, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, n, D, dtype=dtype, requires_grad=True) for n in (T, S, S))
    recorded = record(attend, tmp_path / "dumps")
    out = recorded(q, k, v, is_causal=True)
    assert torch.equal(out, attend(q, k, v, is_causal=True))
    (out.float() ** 2).sum().backward()
    want = torch.autograd.grad((attend(q, k, v, is_causal=True).float() ** 2).sum(), q)[0]
    assert torch.equal(q.grad, want)
    report = compare_dump(tmp_path / "dumps" / "call-0.npz")
    assert {c.name for c in report.comparisons} == {"o", "dq", "dk", "dv"}
    assert report.problem.alignment == "top_left"  # as is_causal means
    assert report.passed


def test_a_recorded_function_of_arrays(tmp_path):
    def f(q, k, v, causal=False, window=None, note=None, **more):
        fwd = npattn.forward(q, k, v, causal=causal, window=window, **more)
        return fwd.out, fwd.lse

    inputs = arrays()
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    recorded = record(f, tmp_path, calls=2, skip=1)
    recorded(q, k, v)
    assert not list(tmp_path.iterdir())  # skipped
    with pytest.warns(RuntimeWarning, match="note is object"):
        recorded(q, k, v, causal="top_left", window=(3, None), note=object())
    recorded(q, k, v, scale=0.3)
    recorded(q, k, v)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["call-0.npz", "call-1.npz"]
    assert read_dump(tmp_path / "call-0.npz").options["window"] == (3, None)
    assert compare_dump(tmp_path / "call-0.npz").passed
    assert compare_dump(tmp_path / "call-1.npz").problem.scale == 0.3
    again = record(f, tmp_path)
    with pytest.raises(OptionError, match="exists: pass another folder"):
        again(q, k, v)


def test_a_result_that_is_no_array_is_an_error(tmp_path):
    with pytest.raises(OptionError, match="returned dict"):
        record(lambda q, k, v: {}, tmp_path)(*(np.zeros((2, 3)) for _ in range(3)))
