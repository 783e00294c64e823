"""Frequencies of rotary positions, against their formulas and transformers' functions."""

import math

import numpy as np
import pytest

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.positions import Frequencies, dynamic_ntk, linear, llama3, longrope, ntk, plain, yarn

R, FACTOR, LENGTH = 34, 7.0, 4096
U32 = 2.0**-24


def test_plain_frequencies_are_powers_of_the_base():
    want = [500.0 ** (-2 * i / R) for i in range(R // 2)]
    assert np.allclose(plain(R, base=500.0).values, want, rtol=1e-15, atol=0)


def test_linear_frequencies_interpolate_positions():
    assert np.array_equal(linear(R, FACTOR).values, plain(R).values / FACTOR)


def test_ntk_keeps_the_fastest_pair_and_interpolates_the_slowest():
    stretched, usual = ntk(R, FACTOR).values, plain(R).values
    assert stretched[0] == usual[0] == 1
    assert np.isclose(stretched[-1], usual[-1] / FACTOR, rtol=1e-14)
    assert np.all(np.diff(usual / stretched) > 0)


def test_dynamic_frequencies_are_plain_up_to_the_trained_length():
    for length in (0, 5, LENGTH):
        got = dynamic_ntk(R, FACTOR, length=length, trained_length=LENGTH)
        assert np.array_equal(got.values, plain(R).values)
    longer = dynamic_ntk(R, FACTOR, length=2 * LENGTH, trained_length=LENGTH)
    assert np.array_equal(longer.values, ntk(R, 2 * FACTOR - (FACTOR - 1)).values)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_leaves_fast_pairs_and_divides_slow_ones(truncate):
    got = yarn(R, FACTOR, trained_length=LENGTH, truncate=truncate)
    usual = plain(R).values
    turns = LENGTH * usual / (2 * math.pi)
    ratio = got.values / usual
    reach = 10000 ** (2 / R) if truncate else 1  # a pair more on each side
    assert np.all(ratio[turns > 32 * reach] == 1)
    assert np.allclose(ratio[turns < 1 / reach], 1 / FACTOR, rtol=1e-15)
    assert np.all(np.diff(ratio) <= 2.0**-53)
    assert np.any((ratio < 1) & (ratio > 1 / FACTOR))
    assert got.amplitude == 0.1 * math.log(FACTOR) + 1


def test_the_ramp_of_yarn_begins_at_a_whole_pair_or_where_it_falls():
    first, last = (
        R * math.log(LENGTH / (turns * 2 * math.pi)) / (2 * math.log(10000)) for turns in (32, 1)
    )
    ends = {True: (math.floor(first), math.ceil(last)), False: (first, last)}
    for truncate, (a, b) in ends.items():
        ramp = np.clip((np.arange(R // 2) - a) / (b - a), 0, 1)
        want = plain(R).values * (1 - ramp + ramp / FACTOR)
        got = yarn(R, FACTOR, trained_length=LENGTH, truncate=truncate).values
        assert np.allclose(got, want, rtol=1e-14, atol=0)


def test_the_ramp_of_yarn_ends_within_the_features():
    """The slowest pair turns often in a long training, and the ramp would end beyond R."""
    length, fast = 10**9, 1e7
    first = math.floor(R * math.log(length / (fast * 2 * math.pi)) / (2 * math.log(10000)))
    ramp = np.clip((np.arange(R // 2) - first) / (R - 1 - first), 0, 1)
    got = yarn(R, FACTOR, trained_length=length, fast=fast).values
    assert ramp.any()
    assert np.allclose(got, plain(R).values * (1 - ramp + ramp / FACTOR), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("length", "base", "paper"),
    [(2, 1e4, "divides"), (8192, 1.001, "leaves"), (10**9, 2, "leaves")],
)
@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_refuses_where_paper_and_code_differ(length, base, paper, truncate):
    """All pairs turn often, or rarely: the ramp of the published code falls."""
    message = rf"every pair turns (less|more) .* YaRN's paper {paper} all frequencies"
    with pytest.raises(OptionError, match=message):
        yarn(R, FACTOR, trained_length=length, base=base, truncate=truncate)
    assert yarn(0, FACTOR, trained_length=length).values.shape == (0,)


def test_llama3_goes_by_the_number_of_turns():
    got, usual = llama3(R, 8.0), plain(R, base=500000.0).values
    turns = 8192 * usual / (2 * math.pi)
    assert np.array_equal(got.values[turns >= 4], usual[turns >= 4])
    assert np.allclose(got.values[turns <= 1], usual[turns <= 1] / 8, rtol=1e-15)
    kept = (turns - 1) / 3
    mixed = (turns < 4) & (turns > 1)
    assert mixed.any()
    want = usual * (kept + (1 - kept) / 8)
    assert np.allclose(got.values[mixed], want[mixed], rtol=1e-14)


def test_longrope_takes_the_divisors_of_its_length():
    short, long = np.linspace(1, 2, R // 2), np.linspace(3, 9, R // 2)
    options = {"short": short, "long": long, "trained_length": LENGTH, "factor": 32.0}
    for length, divisors in ((LENGTH, short), (LENGTH + 1, long)):
        got = longrope(R, length=length, **options)
        assert np.array_equal(got.values, plain(R).values / divisors)
        assert got.amplitude == math.sqrt(1 + math.log(32) / math.log(LENGTH))


@pytest.mark.parametrize("make", [yarn, longrope])
def test_amplitudes_are_1_without_stretching_and_may_be_given(make):
    ones = np.ones(R // 2)
    more = {"short": ones, "long": ones, "length": 3} if make is longrope else {}
    plain_one = make(R, factor=1.0, trained_length=LENGTH, **more)
    assert plain_one.amplitude == 1
    assert np.allclose(plain_one.values, plain(R).values, rtol=1e-15)
    assert make(R, factor=3.0, trained_length=LENGTH, amplitude=2.5, **more).amplitude == 2.5


TYPES = {
    "linear": ({}, lambda n: linear(n, FACTOR, base=5e5)),
    "dynamic": ({}, lambda n: dynamic_ntk(n, FACTOR, length=9999, trained_length=LENGTH, base=5e5)),
    "yarn": ({"beta_fast": 16.0, "beta_slow": 2.0},
             lambda n: yarn(n, FACTOR, trained_length=LENGTH, base=5e5, fast=16, slow=2)),
    "llama3": ({"low_freq_factor": 1.0, "high_freq_factor": 4.0},
               lambda n: llama3(n, FACTOR, trained_length=LENGTH, base=5e5)),
    "longrope": (
        {"short_factor": [1.5] * 17, "long_factor": list(np.linspace(1, 9, 17))},
        lambda n: longrope(
            n, short=np.full(17, 1.5), long=np.linspace(1, 9, 17), length=9999,
            trained_length=LENGTH, factor=FACTOR, base=5e5,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_frequencies_are_those_of_transformers(name):
    """They are computed in float32 there: a power, a product or two, a ramp."""
    pytest.importorskip("torch")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    more, make = TYPES[name]
    parameters = {"rope_type": name, "rope_theta": 5e5, "factor": FACTOR, **more}
    if name != "dynamic":
        parameters["original_max_position_embeddings"] = LENGTH
    config = LlamaConfig(
        hidden_size=3 * R, num_attention_heads=3, rope_parameters=parameters,
        max_position_embeddings=LENGTH if name == "dynamic" else int(LENGTH * FACTOR),
    )  # fmt: skip
    values, amplitude = utils.ROPE_INIT_FUNCTIONS[name](config, "cpu", seq_len=9999)
    got = make(R)
    assert np.allclose(got.values, values.double().numpy(), rtol=32 * U32, atol=0)
    assert amplitude == pytest.approx(got.amplitude, rel=4e-16)


def test_values_are_kept_from_changes():
    given = np.ones(3)
    frequencies = Frequencies(given)
    given[:] = 5
    assert np.array_equal(frequencies.values, np.ones(3))
    with pytest.raises(ValueError, match="read-only"):
        frequencies.values[0] = 2


@pytest.mark.every
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: plain(5), OptionError, "R is 5, must be even"),
        (lambda: plain(-2), OptionError, "R is -2, must be an integer ≥ 0"),
        (lambda: plain(4, base=0), OptionError, "base is 0, must be a positive and finite number"),
        (lambda: plain(4, base="e"), OptionError, "base is 'e', must be"),
        (lambda: plain(4, base=True), OptionError, "base is True, must be"),
        (lambda: linear(4, -1), OptionError, "factor is -1, must be a positive"),
        (lambda: ntk(2, 3), OptionError, "R is 2, must be an integer ≥ 4"),
        (lambda: yarn(4, 2, trained_length=0), OptionError, "trained_length is 0, must be"),
        (lambda: yarn(4, 2, trained_length=9, base=1), OptionError, "base is 1, must be another"),
        (lambda: llama3(4, low=4, high=4), OptionError, "high is 4.0, must be above low"),
        (
            lambda: longrope(4, short=[1.0], long=[1.0, 1.0], length=3, trained_length=9, factor=2),
            ShapeError,
            "short has shape (1,), must be (2,)",
        ),
        (lambda: yarn(4, 2, trained_length=9, fast=1, slow=2), OptionError, "must be below fast"),
        (lambda: yarn(4, 2, trained_length=9, truncate="no"), OptionError, "truncate is 'no'"),
        (lambda: ntk(4, 1e300), OptionError, "base is inf"),
        (
            lambda: longrope(
                4, short=[1.0, 1.0], long=[1.0, -1.0], length=3, trained_length=9, factor=2
            ),
            OptionError,
            "long has [1.0, -1.0], must be positive",
        ),
        (lambda: Frequencies(np.ones(2) * 1j), DtypeError, "values is complex128, must be real"),
        (lambda: Frequencies(np.ones((2, 2))), ShapeError, "must be (R/2,)"),
        (lambda: Frequencies(np.ones(2, int)), DtypeError, "must be floating"),
        (lambda: Frequencies(np.array([math.inf])), OptionError, "must be finite"),
        (lambda: Frequencies(np.ones(2), math.nan), OptionError, "amplitude is nan"),
    ],
)
def test_errors_name_the_way_out(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
