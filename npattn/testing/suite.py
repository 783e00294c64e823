"""Tests of every rule in pytest: `parametrize`, `Suite`, and a rule that is called in a test.

A function is judged when the first of its rules is called, once a run: processes of pytest-xdist
share the verdicts by a lock and a file in the temporary folder of the run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from npattn.errors import NpattnError, OptionError, optional_import
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.judging import OF_IMPLEMENTATION, check, name_rules
from npattn.testing.report.report import Report
from npattn.testing.report.verdicts import Verdict, rest_verdict, rule_verdict
from npattn.testing.settings import JUDGED, Settings, options
from npattn.testing.targets import TARGETS, load_implementation

with optional_import("npattn.testing.parametrize and Suite need", "pytest"):
    import pytest

FOLDER = pytest.StashKey[Path]()
"""Folder that all processes of a run share."""
WHOLE = "report"
"""Id of the test of what belongs to no rule."""
OF_FUNCTION = {
    name for name, (_, one) in options(Settings).items() if one.group == JUDGED and name != "dtypes"
} | {"expect"}
"""Settings that describe a function, which a known target has of its own."""
CLOSE = 0.85
"""Least likeness of a name that is taken for a misspelt setting: dtype is, name (rename) is not."""
NO_ARGUMENT = "is no argument of npattn.testing.check"
ENDED = (
    "the check was begun in this run and did not end: the function has crashed its process, or a "
    "time limit has ended the test; isolate=True judges it in a process of its own"
)

Test = TypeVar("Test", bound="Callable[..., Any]")


def parametrize(f: Callable[..., Any] | Implementation, **settings: Any) -> Callable[[Test], Test]:
    """Return a decorator: the test is called with each rule of `f`, as its argument ``rule``.

    Parameters
    ----------
    f : callable or Implementation
        As of `npattn.testing.check`. It is judged when the first rule is called, once a run.
    **settings
        Arguments of `npattn.testing.check`; ``progress`` is False by default. An illegal argument
        is a collection error.

    Returns
    -------
    callable
        Decorator of a test, a function or a method, that calls ``rule()``. It passes, or is
        skipped if the rule does not apply, with the reason; an expected failure (xfail) if the
        failure does not count; else it fails. ``rule.name`` and ``rule.dtype`` say which it is;
        the last, "report", fails for what belongs to no rule: nothing was tested, or
        a rule in ``must`` did not apply. So some test fails exactly if ``report.passed`` is
        False.

    Examples
    --------
    >>> import npattn.testing
    >>> from npattn.testing.targets.numpy import flash, flash_backward
    >>> @npattn.testing.parametrize(flash, backward=flash_backward, dtypes=["float16"])
    ... def test_rule(rule):
    ...     rule()
    """

    def decorate(test: Test) -> Test:
        return _mark(test, f, **settings)

    return decorate


def _mark(test: Test, *f: Any, **settings: Any) -> Test:
    """Mark a test, or a class of tests, for the plugin."""
    # By with_args, since a mark that is called with a function alone marks that.
    mark = pytest.mark.npattn.with_args(*f, **settings)
    marked: Test = pytest.mark.usefixtures("_npattn_plugin")(mark(test))
    return marked


class Suite:
    """Class of tests of an implementation: one for each rule and dtype, ``test_rule``.

    Attributes
    ----------
    implementation : callable or Implementation
        As the `f` of `parametrize`.
    dtypes, backward, conventions, examples, expect, ... : optional
        Every argument of `npattn.testing.check` may be an attribute.

    Examples
    --------
    >>> import npattn.testing
    >>> from npattn.testing.targets.numpy import naive
    >>> class TestNaive(npattn.testing.Suite):
    ...     implementation = naive
    ...     dtypes = ("float32", "float64")
    ...     expect = {"empty-row": "divides by 0"}
    """

    def __init_subclass__(cls) -> None:  # not Suite itself: the plugin may not be loaded yet
        _mark(cls)

    def test_rule(self, rule: Rule) -> None:
        """Pass if the rule holds."""
        rule()


@dataclass(frozen=True)
class Rule:
    """One rule in one dtype, which a test calls.

    Attributes
    ----------
    name : str
        Id of the rule, or "report".
    dtype : str
        "" for "report".
    judged : Judged
    """

    name: str
    dtype: str
    judged: Judged

    @property
    def id(self) -> str:
        return f"{self.name}-{self.dtype}".rstrip("-")

    @property
    def verdict(self) -> Verdict:
        """The verdict, for which the function is judged if it was not yet."""
        return self.judged.verdicts[self.id]

    def __call__(self) -> None:
        """Pass, or end the test: skipped, expected to fail, or failed."""
        self.judged.called.add(self.id)
        verdict = self.verdict
        first = verdict.text.partition("\n")[0]
        if verdict.status == "skipped":
            pytest.skip(first)
        if verdict.status == "xfailed":
            pytest.xfail(first)
        if verdict.status != "passed":  # or with --runxfail, where pytest.xfail does nothing
            pytest.fail(verdict.text, pytrace=False)
        print(verdict.text, end="")  # of the test of the whole report, for -rP


class Judged:
    """Implementation that a test judges, and the verdicts.

    Parameters
    ----------
    test : str
        Node id of the test function.
    f : callable or Implementation
    settings : Settings
    config : pytest.Config
    """

    def __init__(
        self,
        test: str,
        f: Callable[..., Any] | Implementation,
        settings: Settings,
        config: pytest.Config,
    ) -> None:
        self.test, self.f, self.settings, self.config = test, f, settings, config
        self.called: set[str] = set()  # ids of the rules that the test at work has called
        names = name_rules(settings.only, settings.sweep)
        self.rules = [Rule(name, dtype, self) for dtype in settings.dtypes for name in names]
        self.rules.append(Rule(WHOLE, "", self))

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """Verdicts by the ids of the rules: those of another process of this run, if it has any."""
        folder = self.config.stash[FOLDER] / "npattn"
        folder.mkdir(exist_ok=True)
        path = folder / hashlib.sha256(self.test.encode()).hexdigest()
        with path.with_suffix(".lock").open("a+") as lock:  # the end of its holder frees it
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                entries = json.loads(path.read_text("utf-8"))
                return {name: Verdict(**fields) for name, fields in entries.items()}
            lock.seek(0)
            if lock.read():
                return self._fail_all(ENDED)
            lock.write("begun")
            lock.flush()
            verdicts = self._judge()
            path.write_text(json.dumps({n: asdict(v) for n, v in verdicts.items()}), "utf-8")
        return verdicts

    def _fail_all(self, text: str) -> dict[str, Verdict]:
        return {rule.id: Verdict("failed", text) for rule in self.rules}

    def _judge(self) -> dict[str, Verdict]:
        """Return the verdict on each rule and on the whole; an exception fails all of them."""
        values = {name: getattr(self.settings, name) for name in options(Settings)}
        if values["progress"] is None:
            values["progress"] = False  # a bar would be in the output of a test
        try:
            report = check(self.f, **values)
        except NpattnError as err:
            return self._fail_all(str(err))
        except Exception as err:  # noqa: BLE001  each rule fails with it, instead of judging again
            return self._fail_all("".join(traceback.format_exception(err)))
        names = {rule.name for rule in self.rules}
        verdicts = {
            rule.id: rule_verdict(report, rule.name, rule.dtype, names) for rule in self.rules
        }
        rest = rest_verdict(report)
        verdicts[WHOLE] = replace(rest, text=f"{rest.text}\n{report}".lstrip())
        self._write(self.artifacts, report, verdicts)
        return verdicts

    @property
    def artifacts(self) -> Path:
        """Folder for the report and the scripts: ``--npattn-artifacts``, or that of the run."""
        folder = self.config.getoption("npattn_artifacts") or self.config.stash[FOLDER] / "npattn"
        return Path(folder) / re.sub(r"[^\w.-]+", "-", self.test)

    def _write(self, folder: Path, report: Report, verdicts: Mapping[str, Verdict]) -> None:
        """Write the report, and a script for each rule that fails."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.py"):  # of an earlier run
            old.unlink()
        report.to_html(folder / "report.html")
        report.to_json(folder / "report.json")
        for name, verdict in verdicts.items():
            if verdict.script:
                (folder / f"{name}.py").write_text(verdict.script, "utf-8")


# --- in the words of pytest -----------------------------------------------------------------------


def improve(report: pytest.TestReport, item: pytest.Function) -> None:
    """Show a verdict where the user wrote the test, without a frame of npattn, with its script.

    A test that passes, and has not called its rule, fails: it has tested nothing.
    """
    rule = getattr(item, "funcargs", {}).get("rule")
    if not isinstance(rule, Rule):
        return
    if report.when == "setup":
        rule.judged.called.discard(rule.id)
    if report.when == "call" and report.passed and rule.id not in rule.judged.called:
        report.outcome = "failed"
        report.longrepr = f"{item.name} never called its rule: call rule(), or skip the test"
        return
    if "verdicts" not in vars(rule.judged):
        return  # the test has ended before it called the rule
    path, line, _ = (item.getparent(pytest.Class) or item).reportinfo()
    place = str(path), (line or 0) + 1
    if hasattr(report, "wasxfail"):
        report.longrepr = rule.verdict.text
    elif report.skipped and isinstance(report.longrepr, tuple):
        report.longrepr = *place, report.longrepr[2]
    elif report.failed and rule.verdict.status != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None:
            crash.path, crash.lineno = place
        if rule.verdict.script:
            script = f"{rule.judged.artifacts / rule.id}.py"
            report.sections.append(("script that shows it", script))


# --- from a mark to tests -------------------------------------------------------------------------


def generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a marked test with its rules; what is not legal is an error of collection."""
    marked = any(mark.name == "npattn" for mark in metafunc.definition.own_markers)
    if not marked and "rule" not in metafunc.fixturenames:
        return  # another test of a class that is marked
    wrong = ""
    try:
        judged = _read(metafunc)
    except NpattnError as err:
        wrong = str(err)
    if wrong:  # not while the error is handled, for pytest would print both
        pytest.fail(wrong, pytrace=False)
    params = [pytest.param(rule, id=rule.id) for rule in judged.rules]
    metafunc.parametrize("rule", params)


def _read(metafunc: pytest.Metafunc) -> Judged:
    """Return what a marked test judges, options of the command line included."""
    test, config = metafunc.definition, metafunc.config
    marks = [mark for mark in test.iter_markers("npattn") if mark.args]
    target = config.getoption("npattn_target")
    if len(marks) > 1:
        raise OptionError(f"{test.name} is parametrized {len(marks)} times: once, please")
    if marks:
        f, keywords = marks[0].args[0], dict(marks[0].kwargs)
    else:
        f, keywords = _read_suite(metafunc.cls, target)
    for name in keywords:
        if name not in options(Settings):
            hint = get_close_matches(name, options(Settings), 1)
            more = f"; did you mean {hint[0]}?" if hint else ""
            raise OptionError(f"{name} {NO_ARGUMENT}{more}")
    dtypes = config.getoption("npattn_dtype")
    changes = {name: config.getoption(f"npattn_{name}") for name in ("examples", "seed")}
    changes["dtypes"] = dtypes
    keywords |= {name: value for name, value in changes.items() if value is not None}
    if target is not None:
        f, keywords = _load(target, keywords)
    settings = Settings(**keywords)
    if dtypes and settings.expect:
        reasons = {name: why for name, why in settings.expect.items() if _is_of(name, dtypes)}
        settings = replace(settings, expect=reasons)
    return Judged(test.nodeid, f, settings, config)


def _is_of(expected: str, dtypes: list[str]) -> bool:
    """Return True if an expected failure is of one of the dtypes."""
    _, bracket, dtype = expected.partition("[")
    return not bracket or dtype.removesuffix("]") in dtypes


def _read_suite(cls: Any, target: str | None) -> tuple[Any, dict[str, Any]]:
    """Return the implementation and the settings that a class has as attributes."""
    f = getattr(cls, "implementation", None)
    if f is None and target is None:
        raise OptionError(f"{cls.__name__} has no implementation: set implementation = f")
    names = [n for n in dir(cls) if n not in dir(Suite) and n != "implementation"]
    settings = options(Settings)
    for name in names:  # others are those of its own tests
        near = get_close_matches(name, settings, 1, CLOSE)
        if near and name not in settings and not callable(getattr(cls, name)):
            raise OptionError(f"{cls.__name__}.{name} {NO_ARGUMENT}; did you mean {near[0]}?")
    return f, {name: getattr(cls, name) for name in names if name in settings}


def _load(target: str, keywords: Mapping[str, Any]) -> tuple[Implementation, dict[str, Any]]:
    """Return a target of the command line, and the settings of a test as far as they are of it.

    A known target has its own description. Another is taken as the function of the test was, but
    without its backward, which belongs to that.
    """
    if target in TARGETS:
        rest = {name: value for name, value in keywords.items() if name not in OF_FUNCTION}
        return load_implementation(target), rest
    settings = {n: keywords[n] for n in OF_IMPLEMENTATION if n in keywords and n != "backward"}
    rest = {name: value for name, value in keywords.items() if name not in OF_IMPLEMENTATION}
    return load_implementation(target, **settings), rest
