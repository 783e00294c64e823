"""Diagnosis of the mutants: is the cause named, with and without the mutant among the candidates.

    python -m benchmarks.power.diagnosis --examples 6 --only window
    python -m benchmarks.power.diagnosis --every 6 --start 3
    python -m benchmarks.power.diagnosis --every 3 --reports

Each mutant is judged without shrinking, and its failures are diagnosed three times: with all
candidates; without the mutant and every mutant that shares its code (a base or derived class, or
one of the same module that replaces the same methods); and without any known mistake. A first
cause is right if it is about the part of attention that the mutant has wrong (`PARTS`): its own
name, or a convention, factor, step or other mistake of that part. It is wrong if it is about
another part. With `--reports` each mutant is checked as a user does it, with its contrasts, and the
lines of its report are counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from statistics import median

import click

from benchmarks.zoo.mutants import MUTANTS, Mutant
from npattn.conventions import Conventions
from npattn.mistakes import MISTAKES, Attention
from npattn.mistakes.online import Online
from npattn.testing import check
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.space import Space
from npattn.testing.diagnosis.causes import diagnose
from npattn.testing.report.cause import Cause
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.text import LINES
from npattn.testing.rules import PROPERTIES
from npattn.testing.runner.rounds import Judge
from npattn.testing.runner.schedule import InProcess
from npattn.testing.trial import Trial

Judged = list[tuple[Trial, list[Outcome]]]

HIDDEN = "NaN hidden empty empty_row hidden_fill hidden_add mask empty_row_bias"
GRADIENTS = "delta dlse dweights dout dk dq dv dbias dsinks broadcast gradient gradients tiled"
PARTS = {
    "NaN": HIDDEN,
    "mask": f"mask masks mask_true causal {HIDDEN}",
    "causal": f"causal diagonal masks mask window cache {HIDDEN}",
    "cache": "causal diagonal masks window keys cache state memory",
    "window": "window diagonal causal masks mask keys tiles",
    "empty row": f"{HIDDEN} lse_empty softmax sinks lse bias",
    "bias": f"bias dbias softcap empty_row_bias {HIDDEN}",
    "scale": "scale dk dq o softmax",
    "softcap": "softcap bias dbias sinks scale",
    "sinks": "sinks dsinks lse softmax keys heads",
    "dropout": "dropout dropout_at_rate_0 weights dweights delta lse",
    "heads": "heads kv_head sinks mask layout dk dv",
    "layout": "layout keys heads",
    "lse": "lse lse_base lse_empty softmax",
    "softmax": "softmax scale keys sinks lse online",
    "split keys": "keys lse lse_base sinks softmax split tiles delta",
    "online softmax": "softmax lse scale keys online sinks tiles",
    "tiles": "keys sizes tiles sinks causal window dropout tails mask diagonal softcap",
    "tails": "keys sizes tiles tails",
    "limits": "keys sizes limits tails bias",
    "sizes of 0": "sizes dk dv dq o",
    "tiled backward": f"{GRADIENTS} sizes keys heads",
    "gradient": f"{GRADIENTS} sinks heads scale bias weights",
    "dtype": "dtype dtypes precision dbias lse broadcast shape",
    "memory": "memory layout state cache dtype after bits calls change moves unsteady",
    "precision": f"precision dtype dtypes {HIDDEN} softmax scale",
}
"""Family of a mutant → topics of causes that are about the same part of attention."""


def shares_code(name: str) -> set[str]:
    """Return the mutants that share the code of one, itself included."""
    own, same = _class(name), {name}
    for other in MISTAKES:
        cls = _class(other)
        alike = own.__module__ == cls.__module__ and _methods(own) == _methods(cls)
        if alike or issubclass(own, cls) or issubclass(cls, own):
            same.add(other)
    return same


def _class(name: str) -> type:
    return type(MISTAKES[name].forward.__self__)  # type: ignore[attr-defined]


def _methods(cls: type) -> set[str]:
    bases = {Attention, Online, object}
    return {n for c in cls.__mro__ if c not in bases for n in vars(c) if not n.startswith("__")}


def judge(mutant: Mutant, examples: int) -> Judged:
    """Ask every rule of a mutant."""
    judged: Judged = []
    for dtype in mutant.dtypes:
        implementation = Implementation(
            mutant.forward, backward=mutant.backward, framework="numpy", name=mutant.name
        )
        given = mutant.rounding
        rounding = Rounding.from_name(given) if given else Rounding.undeclared(dtype)
        space = Space(features=implementation.features, dtype=dtype)
        trial = Trial(implementation, Conventions(), rounding, space)
        judge = Judge(trial, examples, 0, lambda *_: None, shrinks=False)
        work = judge.begin(list(PROPERTIES.values()))
        InProcess().ask(work)
        judged.append((work.judge.trial, work.outcomes()))
    return judged


def grade(mutant: Mutant, causes: Sequence[Cause]) -> str:
    """Grade the first cause: "own", "alike", "same part", "wrong" or "unexplained".

    "alike" is another name for the same results: the mutant is among those that nothing told from
    the one named.
    """
    if not causes or causes[0].kind in ("unexplained", "raised"):
        return "unexplained"
    first = causes[0]
    if first.name == mutant.name:
        return "own"
    if mutant.name in first.also:
        return "alike"
    parts = set(PARTS[mutant.family].split())
    return "same part" if topics(first) & parts else "wrong"


def topics(cause: Cause) -> set[str]:
    """Return the parts of attention that a cause is about."""
    if cause.kind == "mistake":
        family = MISTAKES[cause.name].family
        return {family.split()[0], family, *PARTS[family].split()[:1]}
    return set(cause.topic.replace(",", " ").split()) | {cause.name}


def is_bad(outcome: Outcome) -> bool:
    """Return True if an outcome has a cause: bits that differ are measured, and have none."""
    return outcome.status in ("failed", "error", "suspect") and outcome.level != "reproducible"


def is_partition(outcomes: Sequence[Outcome], causes: Sequence[Cause]) -> bool:
    """Return True if every bad outcome belongs to exactly one cause."""
    return sorted(o.id for o in outcomes if is_bad(o)) == sorted(
        rule for cause in causes for rule in cause.rules
    )


def count_lines(names: Sequence[str], examples: int) -> None:
    """Print how many lines the short report of each mutant has."""
    counts = []
    for name in names:
        mutant = MUTANTS[name]
        report = check(
            mutant.forward,
            backward=mutant.backward,
            framework="numpy",
            dtypes=mutant.dtypes,
            rounding=mutant.rounding,
            examples=examples,
            shrink=False,
        )
        counts.append(len(str(report).splitlines()))
        print(f"{name:40} {counts[-1]} lines, {len(report.causes)} causes", flush=True)
    short = sum(n <= LINES for n in counts) / len(counts)
    print(f"lines: median {median(counts)}, most {max(counts)}, at most {LINES} in {short:.0%}")


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--examples", default=6, show_default=True, help="Problems per rule.")
@click.option("--only", default="", help="Mutants whose name starts with this.")
@click.option("--every", default=1, show_default=True, help="Every n-th of them.")
@click.option("--start", default=0, show_default=True, help="The first of them.")
@click.option("--reports", is_flag=True, help="Count the lines of the reports instead.")
def main(examples: int, only: str, every: int, start: int, reports: bool) -> None:
    names = [n for n in MUTANTS if n.startswith(only)][start::every]
    if reports:
        count_lines(names, examples)
        return
    grades: dict[str, Counter[str]] = {x: Counter() for x in ("all", "without", "no mistakes")}
    counts, seconds, parted = [], [], True
    for name in names:
        judged = judge(MUTANTS[name], examples)
        if not any(is_bad(outcome) for _, outcomes in judged for outcome in outcomes):
            print(f"{name:40} not found with {examples} examples", flush=True)
            continue
        for kind, left_out in (
            ("all", set()),
            ("without", shares_code(name)),
            ("no mistakes", set(MISTAKES)),
        ):
            began = time.process_time()
            outcomes, causes = diagnose(judged, left_out, contrasts=0)
            parted &= is_partition(outcomes, causes)
            mark = grade(MUTANTS[name], causes)
            grades[kind][mark] += 1
            if kind == "all":
                counts.append(len(causes))
                seconds.append(time.process_time() - began)
            first = causes[0].text if causes else "nothing failed"
            print(f"{name:40} {kind:12} {mark:12} {len(causes)} {first[:70]}", flush=True)
    for kind, counter in grades.items():
        print(f"{kind}: {dict(counter)}")
    few = sum(n <= 2 for n in counts) / len(counts)
    print(f"causes: median {median(counts)}, at most 2 in {few:.0%}; each rule in one: {parted}")
    print(f"seconds: median {median(seconds):.1f}, most {max(seconds):.1f}")


if __name__ == "__main__":
    main()
