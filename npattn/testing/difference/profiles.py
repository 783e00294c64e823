"""Difference of two profiles: conventions, signatures, layouts, refusals and promises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from npattn.conventions import Conventions
from npattn.problem.meanings import MEANINGS
from npattn.problem.options import OPTIONS, RESULTS
from npattn.profiles import Profile
from npattn.testing.difference.record import ConventionDifference, Difference
from npattn.testing.difference.smallest import describe, differing, find_example


def diff_profiles(a: Profile, b: Profile, notes: Sequence[str] = ()) -> Difference:
    """Compare what two systems promise; nothing of them is run."""
    conventions = diff_conventions(a.conventions, b.conventions)
    others = (*_diff_signatures(a, b), *_diff_layouts(a, b), *_diff_lines(a, b))
    answer = (_count(conventions, others), *notes)
    names = [x.name if "@" in x.name else f"{x.name} {x.version}" for x in (a, b)]
    alike = not conventions and not others
    return Difference(names[0], names[1], "profiles", alike, answer, conventions, others)


def diff_conventions(
    a: Conventions, b: Conventions, able: frozenset[str] | None = None
) -> tuple[ConventionDifference, ...]:
    """Describe each convention that differs, with the smallest problem on which it shows.

    `able` are the options, structure and results that such a problem may need; None: any.
    """
    return tuple(
        ConventionDifference(
            topic, describe(topic, a), describe(topic, b), find_example(topic, a, b, able)
        )
        for topic in differing(a, b)
    )


def _count(conventions: Sequence[ConventionDifference], others: Sequence[str]) -> str:
    if not conventions:
        rest = "; what else differs is below" if others else ", and everything else"
        return f"They have the same conventions{rest}."
    count = "one convention" if len(conventions) == 1 else f"{len(conventions)} conventions"
    return f"They differ in {count}: {', '.join(one.topic for one in conventions)}."


def _diff_signatures(a: Profile, b: Profile) -> Iterator[str]:
    """Yield the options that only one takes, and those that the two name differently."""
    ours, theirs = _names(a), _names(b)
    for name, here, other in (("A", ours, theirs), ("B", theirs, ours)):
        alone = [x for x in here.items() if x[0] not in other]
        only = [x if x == its else f"{x} (as {its})" for x, its in alone]
        if only:
            yield f"only {name} takes: {', '.join(only)}"
    both = [n for n in ours if n in theirs and ours[n] != theirs[n]]
    if both:
        pairs = (f"{n} is {ours[n]} in A, {theirs[n]} in B" for n in both)
        yield f"other names: {'; '.join(pairs)}"


def _names(profile: Profile) -> dict[str, str]:
    """Return the options that a system takes, each with the parameter that carries it.

    A profile without a signature has the names of npattn.attention.
    """
    if not profile.signature:
        return {name: name for name in (*OPTIONS, *RESULTS)}
    names: dict[str, list[str]] = {}
    for name, means in profile.signature.items():
        for option in MEANINGS.get(means, ()):
            names.setdefault(option, []).append(name)
    return {option: " or ".join(spellings) for option, spellings in names.items()}


def _diff_layouts(a: Profile, b: Profile) -> Iterator[str]:
    if a.layout != b.layout:
        axes = (f"({', '.join(profile.layout)})" for profile in (a, b))
        yield "layout of q, k, v and o: {} in A, {} in B".format(*axes)


def _diff_lines(a: Profile, b: Profile) -> Iterator[str]:
    """Yield what only one refuses, or does not promise."""
    for name, here, other in (("A", a, b), ("B", b, a)):
        yield from (f"only {name} refuses {x}" for x in here.refuses if x not in other.refuses)
        for rule, source in here.promises.items():
            if rule not in other.promises:
                yield f"only {name} does not promise the rule {rule}: {source}"
