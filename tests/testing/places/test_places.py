"""Places are asked of functions whose condition is known, and attacked before they are said."""

import random

import pytest

from npattn.testing.places import describe_clauses, find_clause, find_place

FEW = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 128, 129, 256, 257, 513)
BASE = {"B": 2, "G": 2, "K": 2, "T": 17, "S": 33, "D": 24, "E": 40}
OPTIONS = ("causal", "bias", "sinks", "window")
ALIGNMENTS = (False, "top_left", "bottom_right")

# The text that must be said, and the condition as a Python expression.
HIDDEN = {
    "S > 256": "S > 256",
    "S > 32": "S > 32",
    "T % 16 ≠ 0": "T % 16",
    "causal and D % 32 ≠ 0": "D % 32 and causal",
    "sinks": "sinks",
    "no sinks and B > 1": "not sinks and B > 1",
    "T > S": "T > S",
    "causal and S > T": "causal and T < S",
    "T ≠ S": "T != S",
    "D ≠ E": "D != E",
    "everywhere": "True",
    "T = 1": "T == 1",
    "S % 4 ≠ 0 or T % 4 ≠ 0": "T % 4 or S % 4",
    "causal or window": "window or causal",
    "bias and S % 16 ≠ 0 and D > 64": "S % 16 and D > 64 and bias",
    # not in the list from which the search was made
    "S = 64": "S == 64",
    "S % 64 = 1": "S % 64 == 1",
    "S % 128 > 64": "S % 128 > 64",
    "D in {96, 128}": "D in (96, 128)",
    "T > 64 and T % 64 ≠ 0": "T > 64 and T % 64",
    "T > S + 16": "T > S + 16",
    "S > 2·T": "S > 2 * T",
    "T + S > 100": "T + S > 100",
    "T·S > 1024": "T * S > 1024",
    "causal and T = S": "T == S and causal",
    "T = 1 or S > 256": "T == 1 or S > 256",
    "causal and T > S or E % 8 ≠ 0": "causal and T > S or E % 8",
}


def condition(expression):
    code = compile(expression, "condition", "eval")
    return lambda problem: bool(eval(code, {}, dict(problem)))


def sample(rng):
    sizes = {x: rng.choice(FEW) for x in BASE}
    return sizes | {name: rng.random() < 0.5 for name in OPTIONS}


def failing_sample(fails, seed):
    rng = random.Random(seed)
    return next(p for p in (sample(rng) for _ in range(10_000)) if fails(p))


@pytest.mark.parametrize("text", HIDDEN)
def test_hidden_conditions_are_found_to_the_letter(text):
    fails, asked = condition(HIDDEN[text]), []
    place = find_place(lambda p: asked.append(p) or fails(p), failing_sample(fails, 1), seconds=60)
    assert ({*place.text.split(" or ")}, place.held) == ({*text.split(" or ")}, True)
    assert place.questions == len(asked) == len({tuple(p.items()) for p in asked}) <= 300
    for atom in (atom for clause in place.clauses for atom in clause):
        assert [fails(p) for p in atom.pair] == [atom.holds(p) for p in atom.pair] == [True, False]
        changed = {x for x, n in atom.pair.failing.items() if atom.pair.passing[x] != n}
        assert changed == {atom.pair.name}


def test_the_nearest_pair_lies_at_the_exact_border():
    place = find_place(lambda p: p["S"] > 256, dict(BASE, S=513))
    assert str(place.pair) == "fails with S = 257, passes with S = 256, all else equal"


@pytest.mark.parametrize(
    ("text", "expression", "causal"),
    [
        ("causal = top_left and T ≠ S", "causal == 'top_left' and T != S", "top_left"),
        ("causal and S % 48 ≠ 0", "causal and S % 48", "bottom_right"),
        ("no causal and T > S", "not causal and T > S", False),
        ("causal ≠ top_left and S > 8", "causal != 'top_left' and S > 8", False),
    ],
)
def test_options_may_have_three_values(text, expression, causal):
    problem = dict(BASE, T=64, causal=causal)
    place = find_place(condition(expression), problem, choices={"causal": ALIGNMENTS}, seconds=60)
    assert (place.text, place.held) == (text, True)


@pytest.mark.parametrize(
    ("text", "failing"),
    [
        ("S > 256", {"S": 512}),
        ("S > T", {"T": 128, "S": 192}),
        ("T > S", {"T": 128, "S": 64}),  # as "S = 64", were what is redundant not dropped
    ],
)
def test_refused_problems_tell_nothing_and_are_hardly_asked(text, failing):
    """Only multiples of 64 and two sizes of a head are taken: the border is sought among them."""
    wrong, refused = condition(text), []

    def fails(p):
        if p["T"] % 64 or p["S"] % 64 or p["D"] not in (64, 128):
            refused.append(p)
            return None
        return wrong(p)

    place = find_place(fails, dict(BASE, T=64, D=64) | failing, seconds=60)
    assert (place.text, place.held) == (text, True)
    assert place.attacked >= 20
    assert len(refused) < place.questions / 2


def test_domains_are_kept():
    asked = []

    def fails(p):
        asked.append(p)
        return p["S"] > 1024

    steps = range(64, 2049, 64)
    domains = {"T": steps, "S": steps, "D": (64, 128)}
    place = find_place(fails, dict(BASE, T=64, S=1984, D=64), domains=domains, seconds=60)
    assert (place.text, place.held) == ("S > 1024", True)
    assert all(p["T"] % 64 == p["S"] % 64 == 0 and p["D"] in (64, 128) for p in asked)


def test_what_other_conditions_say_already_is_not_said():
    """No length is above the largest of three: T > S has no S of 192."""
    lengths = (64, 128, 192)
    domains = {"T": lengths, "S": lengths, "D": (64, 128)}
    for T, S in ((192, 64), (192, 128), (128, 64)):
        start = {"T": T, "S": S, "D": 64, "causal": True}
        place = find_place(lambda p: p["causal"] and p["T"] > p["S"], start, domains=domains)
        assert (place.text, place.held) == ("causal and T > S", True)


def test_long_domains_are_bisected():
    domains = {"S": range(1, 16_385)}
    for c in (4096, 5000):
        fails = condition(f"S > {c}")
        place = find_place(fails, dict(BASE, S=8192), domains=domains, seconds=60)
        assert (place.text, place.held) == (f"S > {c}", True)


def test_what_a_kernel_takes_is_a_clause():
    def takes(p):
        return p["D"] in (64, 128) and p["T"] % 64 == p["S"] % 64 == 0 and p["G"] == 1

    clause = find_clause(takes, dict(BASE, G=1, T=64, S=128, D=64, causal=False), seconds=60)
    assert describe_clauses([clause]) == "G = 1 and T % 64 = 0 and S % 64 = 0 and D in {64, 128}"


def test_no_condition_of_noise_holds():
    rng = random.Random(3)
    answers = {}

    def fails(p):
        return answers.setdefault(tuple(p.items()), rng.random() < 0.4)

    start = dict(BASE, causal=True)
    answers[tuple(start.items())] = True
    place = find_place(fails, start, seconds=60)
    assert not place.held
    assert all(answers[tuple(p.failing.items())] for p in place.pairs)
    assert not any(answers[tuple(p.passing.items())] for p in place.pairs)


def test_known_problems_must_agree():
    """A rare failure that no random problem meets is told by the run that met it."""
    fails = condition("S > 256 or T == 77")
    start = dict(BASE, S=513)
    assert find_place(fails, start, seconds=60).text == "S > 256"
    place = find_place(fails, start, known=[(dict(BASE, T=77), True)], seconds=60)
    assert (place.text, place.held) == ("S > 256 or T = 77", True)


@pytest.mark.parametrize("questions", [5, 20, 40])
def test_a_budget_that_is_spent_before_the_attack_holds_nothing(questions):
    place = find_place(condition("S > 256"), dict(BASE, S=513), questions=questions, seconds=60)
    assert not place.held
    assert place.questions == questions


def test_an_attack_of_some_problems_of_each_kind_is_enough():
    """All others agree: a longer budget asks more of the same."""
    place = find_place(condition("S > 256"), dict(BASE, S=513), questions=75, seconds=60)
    assert (place.text, place.held, place.questions) == ("S > 256", True, 75)
    assert place.attacked >= 18


@pytest.mark.parametrize("also", ["", " and S > 16"])
def test_options_that_fail_alone_are_told_apart(also):
    """From a problem with two of them neither passes without the other."""
    start = {"B": 2, "K": 1, "T": 2, "S": 19, "causal": False, "window": True, "mask": False}
    place = find_place(condition(f"(causal or window or mask){also}"), start, seconds=60)
    assert place.held
    assert {*place.text.split(" or ")} == {f"{x}{also}" for x in ("causal", "window", "mask")}


def test_seconds_are_a_budget():
    assert not find_place(condition("S > 256"), dict(BASE, S=513), seconds=0).questions


def test_the_same_seed_asks_the_same():
    def asked(seed):
        problems = []
        fails = condition("T % 4 or S % 4")
        find_place(lambda p: problems.append(p) or fails(p), dict(BASE), seed=seed, seconds=60)
        return problems

    assert asked(1) == asked(1) != asked(2)
