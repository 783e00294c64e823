"""The report as text: the causes first, a line for each level, and everything on request."""

from dataclasses import replace

import numpy as np
import pytest

from npattn import Conventions, Problem
from npattn.testing import Cause, Outcome, Report
from npattn.testing.cases.asked import MODELS, Asked
from npattn.testing.comparison import Comparison
from npattn.testing.excerpt import Excerpt
from npattn.testing.levels import LEVELS
from npattn.testing.report.pair import Pair, Reading
from npattn.testing.report.text import GREEN_LINES, RED_LINES, lines
from npattn.testing.report.words import CLOSE, LINK, MUST

SETTINGS = {
    "seed": 7,
    "examples": 3,
    "features": ("causal", "scale"),
    "conventions": {"causal": "top_left"},
    "versions": {"npattn": "0"},
    "behaves as": {"float32": "upcast: errors are 0.47 of those that it predicts"},
}


def problem(keys=3):
    return Problem(np.zeros((1, 2)), np.zeros((keys, 2)), np.zeros((keys, 5)))


def outcome(rule="agreement-o", status="passed", dtype="float32", **kwargs):
    return Outcome(rule, "1-10", f"{rule} holds.", dtype, status, **kwargs)


def failure(rule, keys=3, **kwargs):
    details = {
        "worst": 12.5,
        "message": f"o[0, 1]: got 1, want 2 ({rule})\nlse[0]: got 3\ndq[0]: got 4",
        "problem": problem(keys),
        "recipe": f"Recipe(S={keys}).problem()",
        "script_text": f"print({rule!r})",
    }
    return outcome(rule, "failed", **(details | kwargs))


def report(*outcomes, untested=(), settings=SETTINGS, **kwargs):
    return Report("mine:f", tuple(outcomes), tuple(untested), settings, **kwargs)


SCALE = Cause("dk is wrong everywhere: × √D",
              ("directional[float32]", "key-euler[float32]", "bias-shift[float32]"), "dk",
              "everywhere", "× √D", passes_when="fails only where D > 1")  # fmt: skip
FAILED = (failure("key-euler", 7), failure("directional", 5), failure("bias-shift", 11))


# --- causes ---------------------------------------------------------------------------------------


def test_causes_come_first_with_the_smallest_problem():
    text = str(report(*FAILED, outcome("views", level="conduct"), causes=(SCALE,)))
    assert text.splitlines()[:9] == [
        "FAILED: 3 rules, by 1 cause",
        "dk is wrong everywhere: × √D",
        "  fails only where D > 1",
        "  directional[float32] failed: o[0, 1]: got 1, want 2 (directional)",
        "    lse[0]: got 3",
        "    rule: directional holds. [semantics 1-10]",
        "    sampled as Recipe(S=5).problem()",
        "  also failed: key-euler, bias-shift",
        "",
    ]
    assert text.endswith("FAILED: 1 passed, 3 failed\n")


def test_pair_and_matrix_of_the_first_cause_are_shown():
    got, want = np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([[0.5, 0.5], [0.25, 0.75]])
    excerpt = Excerpt((0, 1), 0, 4, got, want, np.full((2, 2), 1e-6))
    reading = Reading("p", "bhts", excerpt, got != want, "Recipe(S=5).problem()")
    pair = Pair("fails with S = 5, passes with S = 4, all else equal", "Recipe(S=5)", "Recipe(S=4)")
    text = str(report(*FAILED, causes=(replace(SCALE, pair=pair, reading=reading),)))
    assert text.splitlines()[3:11] == [
        "  fails with S = 5, passes with S = 4, all else equal",
        "    fails  Recipe(S=5)",
        "    passes Recipe(S=4)",
        "  p at b = 0, h = 1 (* out of tolerance)",
        "           got           wanted",
        "         s = 4      5     s = 4      5",
        "  t = 0   0.5    0.5       0.5    0.5",
        "  t = 1     1*     0*     0.25*  0.75*",
    ]


def test_a_result_that_is_not_a_number_is_told_from_one_that_was_not_read():
    got, want = np.array([np.nan, np.nan, 3.0]), np.array([2.0, np.nan, 3.0])
    marks = np.array([True, False, False])
    reading = Reading(
        "lse", "t", Excerpt((), 0, 0, got[None], want[None], got[None]), marks[None], ""
    )
    assert [line.split() for line in reading.lines()[-1:]] == [["nan*", "–", "3", "2*", "–", "3"]]


@pytest.mark.parametrize("most", [1, 6, 12])
def test_feedback_fits_a_prompt(most):
    got = np.arange(16.0).reshape(8, 2)
    excerpt = Excerpt((0,), 0, 0, got, got + 1, np.full((8, 2), 1e-6))
    reading = Reading("lse", "bht", excerpt, got >= 0, "Recipe(T=8).problem()")
    pair = Pair("fails with T = 8, passes with T = 7, all else equal", "Recipe(T=8)", "Recipe(T=7)")
    judged = report(*FAILED, causes=(replace(SCALE, pair=pair, reading=reading),))
    told = judged.feedback(most).splitlines()
    assert len(told) <= most
    assert told[0] == "FAILED: 3 rules, by 1 cause"
    assert most < 12 or told[1] == SCALE.text
    assert most < 12 or "fails with T = 8, passes with T = 7, all else equal" in told
    assert most < 12 or "h = 1" in "\n".join(told)


def test_feedback_of_a_passed_report_is_its_verdict():
    assert report(outcome()).feedback() == "passed: 1 passed\n"


def test_agreement_is_shown_before_smaller_problems():
    text = str(report(failure("one-key", 1), failure("agreement-o", 9), failure("agreement-dk", 8)))
    assert text.splitlines()[1].startswith("  agreement-dk[float32] failed")


def test_failures_without_a_cause_are_counted_and_shown():
    more = failure("late-keys"), failure("empty-row", level="edges")
    text = str(report(*FAILED, *more, causes=(SCALE,)))
    assert text.startswith("FAILED: 5 rules, 3 of them by 1 cause\n")
    assert "late-keys[float32] failed" in text
    assert "empty-row[float32] failed" in text


def test_group_of_most_required_rules_comes_first():
    """An exception in one rule stands behind what nothing explains of three."""
    raised = outcome("views", "error", level="conduct", message="raised IndexError: tile")
    beside = [failure(f"nan-{i}", level="non-finite") for i in range(5)]
    causes = (
        Cause("it raises: IndexError: tile", (raised.id,), "refusal"),
        Cause("NaN reaches o", tuple(x.id for x in (FAILED[0], *beside)), "nan"),
        Cause("no step was found: o is out of tolerance", tuple(x.id for x in FAILED[1:])),
    )
    whole = report(raised, *beside, *FAILED, causes=causes)
    lines = str(whole).splitlines()
    places = [lines.index(causes[i].text) for i in (2, 0, 1)]
    assert places == sorted(places)
    assert whole.script() == "print('directional')"
    assert [g.cause for g in whole.groups(required=False)] == [causes[i] for i in (2, 1, 0)]


def test_every_group_shows_a_failure_with_its_numbers():
    rules = [failure(f"rule-{i}") for i in range(10)]
    causes = tuple(Cause(f"mistake {i}", (rules[2 * i].id, rules[2 * i + 1].id)) for i in range(5))
    text = str(report(*rules, causes=causes))
    for i in range(5):
        block = text.split(f"mistake {i}\n")[1]
        assert block.startswith(f"  rule-{2 * i}[float32]")
        assert "got 1, want 2" in block.split("\n")[0] + block.split("\n")[1]


def test_contrast_is_left_out_where_the_cause_says_it():
    same = replace(SCALE, where="D > 1", text="dk is wrong where D > 1: × √D")
    assert "fails only" not in str(report(*FAILED, causes=(same,)))
    assert "\n  fails only where D > 1\n" in str(report(*FAILED, causes=(SCALE,)))


def test_unexplained_cause_of_fewest_rules_is_printed_last():
    contrast = Cause("unexplained", ("late-keys[float32]",), passes_when="only S > 8")
    text = str(report(*FAILED, failure("late-keys"), causes=(contrast, SCALE)))
    assert text.startswith("FAILED: 4 rules, 3 of them by 1 cause\ndk is")
    assert "\nunexplained\n  only S > 8\n  late-keys[float32] failed" in text


def test_failures_without_any_cause_read_well():
    text = str(report(failure("agreement-o")))
    assert text.startswith(
        "FAILED: 1 rule, by no cause that is known\n  agreement-o[float32] failed"
    )


def test_convention_that_makes_it_pass_is_named():
    meant = Conventions(causal="top_left")
    cause = Cause("x", SCALE.rules, conventions=meant, name="causal=top_left")
    assert "\n  passes with --convention causal=top_left\n" in str(report(*FAILED, causes=(cause,)))


def test_causes_of_what_is_not_required_are_left_to_verbose():
    nan = replace(FAILED[0], level="non-finite")
    sound = report(nan, outcome(), causes=(SCALE,))
    assert sound.passed
    assert "dk is" not in str(sound)
    assert "dk is" in sound.text(verbose=True)


@pytest.mark.parametrize("causes", [0, 1, 2, 5, 9])
def test_short_report_fits(causes):
    rules = [f"rule-{i}" for i in range(60)]
    named = tuple(
        Cause(f"mistake {i}", tuple(f"{rule}[float32]" for rule in rules[5 * i : 5 * i + 5]))
        for i in range(causes)
    )
    refused = tuple(f"float32: {'a long reason ' * 20}{i}" for i in range(30))
    levels = [outcome(level, level=level) for level in LEVELS]
    whole = report(
        *map(failure, rules),
        *levels,
        untested=["gradients: none", *["much " * 40] * 9],
        refused=refused,
        causes=named,
        asked={"float32": Asked(dict.fromkeys("BHKGTSDE", (1, 4096)))},
        skipped={"float32": {name: f"reason {n % 3}" for n, name in enumerate(MODELS)}},
    )
    assert "gradients: none" in str(whole)
    assert len(str(whole).splitlines()) <= RED_LINES
    passed = replace(whole, outcomes=tuple(levels), causes=())
    assert passed.passed
    assert len(str(passed).splitlines()) <= GREEN_LINES


def test_plain_passed_report_is_short():
    levels = [outcome(level, level=level, worst=0.5) for level in LEVELS]
    text = str(report(*levels, untested=["window"], refused=["float32: B = 0: refused"]))
    assert len(text.splitlines()) <= GREEN_LINES


def test_recipe_line_is_never_wrapped():
    long = "Recipe(" + "x=1, " * 100 + ").problem()"
    assert long in str(report(failure("agreement-o", recipe=long)))


# --- the order ------------------------------------------------------------------------------------


def test_green_report_is_in_order_within_twelve_lines_of_eighty():
    """The report of an ordinary function: several levels, refusals, one rule that is optional."""
    untested = (
        "gradients: no backward= was given",
        "lse: no return_lse parameter",
        "options it does not have: mask, causal, window, bias, scale, softcap, score_mod, sinks",
    )
    whole = report(
        *(outcome(level, level=level, worst=0.29) for level in list(LEVELS)[:-1]),
        failure("same-bits-in-parts", level="reproducible"),
        untested=untested,
        refused=[
            f"float32: {name}: refused (raised ValueError: {'no ' * 40})"
            for name in (*"abcde", "reversed")  # a view is not the user's business
        ],
        asked={"float32": Asked(dict.fromkeys("BHKGTSDE", (1, 4096)))},
        skipped={"float32": dict.fromkeys(MODELS, "no window")},
    )
    text = [line.text for line in lines(whole, 80)]
    assert len(text) <= GREEN_LINES
    assert max(map(len, text)) <= 80
    assert text[0] == "passed; refused: a, b, c and 2 more"
    beginnings = ("passed;", "not tested", "kept: values 1", "reproducible:", "tested sizes: B")
    beginnings += ("npattn check mine:f", "precision: float32", LINK, "passed: 5 passed, 1 failed")
    found = [next(i for i, x in enumerate(text) if x.startswith(y)) for y in beginnings]
    assert found == sorted(found)
    assert found[-2:] == [len(text) - 2, len(text) - 1]


def test_red_report_is_in_order_and_links_to_no_green():
    got = np.ones((2, 2))
    reading = Reading("p", "bhts", Excerpt((0, 1), 0, 0, got, 2 * got, got), got > 0, "Recipe(S=5)")
    pair = Pair("fails with S = 5, passes with S = 4", "Recipe(S=5)", "Recipe(S=4)")
    whole = report(
        *FAILED,
        untested=["lse: none"],
        refused=["float32: K < H: refused (raised ValueError)"],
        causes=(replace(SCALE, pair=pair, reading=reading),),
        asked={"float32": Asked({"S": (2, 4096)})},
    )
    parts = ("FAILED: 3 rules, by 1 cause; refused: K < H\n", SCALE.text, pair.text, "  p at b = 0")
    parts += ("not tested", "values: 3 of 3", "tested sizes: S 2–4096\n", "--script", "FAILED: 3 f")
    places = [str(whole).index(part) for part in parts]
    assert places == sorted(places)
    assert LINK not in str(whole)
    assert "ValueError" not in str(whole)


# --- levels ---------------------------------------------------------------------------------------


def level_lines(*outcomes, **kwargs):
    text = [line.text for line in lines(report(*outcomes, **kwargs), 200)]
    return [x for x in text if x.partition(" ")[0].rstrip(":") in (*LEVELS, "kept")]


def test_passed_levels_are_one_line_in_their_order():
    absent = outcome("x", "not applicable", message="no x")
    many = [outcome(level, level=level, worst=0.388 / n) for n, level in enumerate(LEVELS, 1)]
    assert level_lines(*many[::-1], outcome("views"), absent) == [
        "kept: values 2, edges 1, conduct 1, non-finite 1, degenerate 1, reproducible 1, worst "
        "0.39 of the tolerance"
    ]
    assert level_lines(absent, many[1]) == ["kept: edges 1, worst 0.19 of the tolerance"]


def test_rule_that_came_close_is_named():
    assert level_lines(outcome(worst=CLOSE)) == [
        "values 1 passed, worst 0.9 of the tolerance, close: agreement-o"
    ]
    assert "close" not in level_lines(outcome(worst=0.99 * CLOSE))[0]


def test_level_that_is_not_required_fails_in_words():
    bad = [failure(f"nan-{i}", level="non-finite") for i in range(2)]
    sound = outcome("nan", level="non-finite", worst=0.5)
    assert level_lines(*bad, sound) == [
        "non-finite: 2 of 3 failed (not required): nan-0, nan-1; "
        "the others: worst 0.5 of the tolerance"
    ]
    assert report(*bad, sound).passed
    assert not report(*bad, sound, require=("non-finite",)).passed
    assert level_lines(*bad, require=("non-finite",)) == ["non-finite: 2 of 2 failed"]


def test_rule_named_by_only_is_required_whatever_its_level():
    bad = failure("nan-v", level="non-finite")
    assert not report(bad, require=("values", "nan-v")).passed


def test_expected_failure_passes_with_its_reason():
    known = report(*FAILED[:2], outcome(), expected={"key-euler[float32]": "as documented"})
    assert not known.passed
    assert level_lines(*known.outcomes, expected=known.expected) == [
        "values: 2 of 3 failed, 1 of them (expected): key-euler"
    ]
    known = replace(known, outcomes=known.outcomes[::2])
    assert known.passed
    assert "FAILED" not in str(known)
    assert "expected: key-euler[float32]: as documented" in str(known)
    assert str(known).endswith("passed: 1 passed, 1 failed (expected)\n")


def test_rule_that_a_system_takes_back_costs_nothing():
    papers = {"key-euler": "its manual, page 3"}
    known = report(FAILED[0], outcome(), taken_back=papers)
    assert known.passed
    assert "values: 1 of 2 failed (not promised): key-euler\n" in str(known)
    assert "\nnot promised: key-euler: its manual, page 3\n" in str(known)
    assert not replace(known, require=("values", "key-euler")).passed


@pytest.mark.parametrize(
    ("name", "why"),
    [("agreement-o", "did not fail"), ("agreement-x", "matches no rule that was checked")],
)
def test_stale_expectation_fails(name, why):
    stale = report(outcome(), expected={name: "it once failed"})
    assert not stale.passed
    assert f"expected failure {name} {why}: remove it" in str(stale)
    assert str(stale).endswith("FAILED: 1 passed, 1 expected failure stale\n")


def test_error_is_named_as_such():
    raised = outcome("views", "error", level="degenerate", message="raised ValueError: no")
    assert level_lines(raised) == ["degenerate: 1 of 1 failed (not required): views (error)"]


# --- the rest -------------------------------------------------------------------------------------


def test_settings_are_printed_as_words():
    text = str(report(outcome()))
    assert "seed 7; examples 3; features causal, scale; conventions causal='top_left'\n" in text
    assert "precision: float32 like upcast: errors are 0.47 of those that it predicts" in text
    plain = {"features": (), "conventions": {}}
    assert "features none; conventions default" in str(report(outcome(), settings=plain))


def test_refused_is_named_in_the_verdict_with_a_few_reasons():
    refused = tuple(f"float32: size {i}: refused (raised E{i})" for i in range(6))
    text = str(report(outcome(), untested=["lse: none", "sinks: none"], refused=refused))
    assert text.startswith("passed; refused: size 0, size 1, size 2 and 3 more\n")
    assert "\n  float32: size 0: refused (raised E0)\n" in text
    assert "E3" not in text
    assert f"\nnot tested {MUST}: lse: none; sinks: none\n" in text
    verbose = report(outcome(), refused=refused).text(verbose=True)
    assert all(line in verbose for line in refused)


def test_what_is_refused_is_named_once():
    lines = ("bfloat16: causal and T > S: refused (raised E)", "bfloat16: K < H: refused")
    known = report(outcome(), refused=lines, limits=("", "causal with T > S"))
    assert str(known).startswith("passed; refused: causal with T > S, K < H\n")


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("status", ["passed", "failed"])
def test_what_was_not_tested_is_said_of_every_report(status, verbose):
    sizes = Asked({"B": (1, 3), "S": (2, 4096)})
    skipped = {"D = E = 24": "no E ≠ D", "D = E = 48": "no E ≠ D", "B = 9": "rank 3"}
    known = report(outcome(status=status), asked={"float32": sizes}, skipped={"float32": skipped})
    text = known.text(verbose=verbose)
    assert verbose or f"not tested {MUST}: no option and no result is left out\n" in text
    assert "\ntested sizes: B 1–3, S 2–4096" in text
    count = "S 2–4096; 3 sizes of known models not (--verbose)\n"
    assert (count in text) == (status == "passed" and not verbose)
    names = (
        "\nnot tested, of the sizes of known models: D = E = 24, 48 (no E ≠ D); B = 9 (rank 3)\n"
    )
    assert (names in text) == verbose
    assert "of known models" not in str(replace(known, skipped={"float32": {}}))


def test_sizes_are_said_of_each_dtype_where_they_differ():
    asked = {"float32": Asked({"S": (2, 7)}), "float16": Asked({"S": (2, 5)})}
    text = str(report(outcome(), asked=asked))
    assert "\ntested sizes, float32: S 2–7\ntested sizes, float16: S 2–5\n" in text


@pytest.mark.parametrize(
    ("settings", "head"),
    [({"reference": "g"}, "not tested: lse"), ({"reads": "wq"}, "not tested (name it in must= to")],
)
def test_only_ways_that_exist_make_untested_parts_fail(settings, head):
    assert f"\n{head}" in str(report(outcome(), untested=["lse: none"], settings=settings))


def test_where_nothing_was_tested_every_reason_is_printed():
    refused = tuple(f"float32: size {i}: refused" for i in range(5))
    text = str(report(outcome(status="not applicable"), refused=refused))
    assert all(f"not tested: {line}" in text for line in refused)
    assert text.endswith("no verdict: nothing tested\n")


def test_way_to_a_script_is_named():
    assert "--script FILE, or report.script()" in str(report(*FAILED, causes=(SCALE,)))
    assert "--script" not in str(report(outcome()))
    assert report(*FAILED, causes=(SCALE,)).script() == "print('directional')"
    assert report(outcome()).script() == ""


def test_verbose_has_the_table_by_level_and_every_failure():
    others = (
        outcome("views", dtype="bfloat16", worst=0.25, level="conduct"),
        outcome("views", "not applicable", message="refuses [all] views", level="conduct"),
    )
    text = report(*others, *FAILED, causes=(SCALE,)).text(verbose=True)
    parts = [
        "FAILED: 3 rules, by 1 cause",
        "dk is",
        "  rule         §     bfloat16     float32",
        "values: 3 of 3 failed",
        "  key-euler    1-10               failed 12",
        "conduct 1 passed",
        "  views        1-10  passed 0.25  – refuses [all] views",
        "key-euler[float32] failed: o[0, 1]: got 1, want 2 (key-euler)",
        "  dq[0]: got 4",
        "  rule: key-euler holds. [semantics 1-10]",
        "  on Problem(",
        "  sampled as Recipe(S=7).problem()",
        "bias-shift[float32] failed",
        "FAILED: 1 passed, 3 failed",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_controls_of_messages_do_not_reach_the_terminal():
    message = "\x1b[2J\r\x00 \ud800 \u202e\nnext"
    raised = failure("agreement-o", message=message)
    for text in (str(report(raised)), report(raised).text(verbose=True)):
        assert r"\x1b[2J\r\x00 \ud800 \u202e" in text
        assert not set("\x1b\r\x00\ud800\u202e") & set(text)
        assert "    next\n" in text or "  next\n" in text


def test_nan_stands_for_a_ratio_that_is_none():
    worst = Comparison("o", np.inf, (0, 1), np.nan, 2.0, 1e-6, 3, 7)
    wrong = outcome("nan-query", "failed", worst=np.inf, comparisons=(worst,))
    (row,) = (x for x in report(wrong).text(verbose=True).splitlines() if "failed NaN" in x)
    assert row.startswith("  nan-query")
    finite = replace(wrong, comparisons=(replace(worst, got=5.0),))
    assert "NaN" not in report(finite).text(verbose=True)
