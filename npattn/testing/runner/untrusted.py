"""Extra questions to an implementation that nobody trusts, at moments that it cannot know.

Rules come in a random order, its process starts anew at a random moment of each round but the last,
and when all is done a fresh one is asked for agreement on a random number of other problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from npattn.testing.adapters.implementation import Implementation
from npattn.testing.report.outcome import Outcome
from npattn.testing.rules import RULES
from npattn.testing.runner.rounds import Round, round_sizes

TAIL = "\nin a fresh process, after it had passed: a random tail of other problems"


def plan_turns(work: Round, count: int) -> list[tuple[Sequence[str], bool]]:
    """Return the groups of rules of a round, and before which of them its process starts anew."""
    groups = work.groups()
    if work.judge.trial.implementation.untrusted is None or not groups:
        return [(names, False) for names in groups]
    random = _random(work, f"order {count}")
    shuffled = [random.sample(names, len(names)) for names in random.sample(groups, len(groups))]
    # The longest round is left whole, for who turns wrong late; and that rule makes the first calls
    # again, which in a fresh process are first ones once more.
    last = count == round_sizes(work.judge.examples)[-1]
    moments = [names for names in shuffled if "first-calls" not in names and not last]
    moment = random.choice(moments) if moments else None
    return [(names, names is moment) for names in shuffled]


def ask_tail(work: Round) -> None:
    """Ask what agreed once more, a random number of problems of another seed, in a fresh process.

    An outcome that passes counts these examples too.
    """
    untrusted = work.judge.trial.implementation.untrusted
    passed = {
        name: answer
        for name, answer in work.answers.items()
        if name.startswith("agreement-")
        and isinstance(answer, Outcome)
        and answer.status == "passed"
    }
    if untrusted is None or work.stopped or not passed:
        return
    untrusted.renew()
    random, examples = _random(work, "tail"), work.judge.examples
    judge = replace(
        work.judge,
        seed=random.getrandbits(64),
        examples=random.randint(1 + examples // 2, 1 + examples),
    )
    trial = judge.trial.fresh()
    for name, before in passed.items():
        with trial.implementation.framework.one_thread():
            after = judge.judge(RULES[name], trial, leaves=False)
        assert isinstance(after, Outcome)  # all its examples were asked
        if after.failed:
            after = replace(after, message=after.message + TAIL)
        work.record(name, before.merge(after))


def _random(work: Round, what: str) -> Random:
    judge = work.judge
    return Random(f"{what} {judge.trial.space.dtype} {judge.seed}")


def name_everything(implementation: Implementation) -> tuple[str, ...]:
    """Return the options that it names, and the gradients of what it takes: all must be tested."""
    options = [f"d{name}" for name in ("bias", "sinks", "gate") if name in implementation.features]
    return (*sorted(implementation.features), "dq", "dk", "dv", *options)
