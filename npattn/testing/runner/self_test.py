"""Self-test of a check: mistakes that are put into a result that passed must be found."""

from __future__ import annotations

from npattn.problem.arrays import Array
from npattn.testing.adapters.base import Results
from npattn.testing.power import find_unseen
from npattn.testing.rules import Property
from npattn.testing.trial import Trial, Violation, worst_by_name


def find_unseen_mistakes(trial: Trial, rule: Property) -> list[str]:
    """Return the mistakes in a result that a rule of agreement lets pass: [] unless npattn errs.

    The result is the first that passed among the calls that `trial` remembers, and each changed
    form of it takes the way of a result: compared by name, then judged by the rule.
    """
    name = rule.rule.removeprefix("agreement-").replace("-", "_")
    passed = trial.passed(name)
    if passed is None:
        return []
    recipe, result, exact, tolerance = passed
    again = trial.fresh()  # one memo for all changes: the problem is made once

    def fails(changed: Array) -> bool:
        results = Results(((name, changed),))
        found = worst_by_name(results, {name: exact}, {name: tolerance})
        again.memo["agreement", recipe] = found
        try:
            rule.check(again, recipe)
        except Violation:
            return True
        return False

    return find_unseen(result, exact, tolerance, fails)
