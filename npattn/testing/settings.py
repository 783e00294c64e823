"""Settings of a check: each option once, for Python, the command line, journals and reports.

A field of `Settings` has a default and a `SettingOption`: group, flag, metavar, parser and words.
The signature and docstring of `npattn.testing.check`, ``npattn check --help``, the entry of a
journal, the settings in a report and the table in docs/options.md are made from them.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec

from npattn.conventions import Conventions, check_conventions
from npattn.errors import DtypeError, OptionError
from npattn.problem.checks import check_integer
from npattn.problem.options import FEATURES
from npattn.profiles import Profile
from npattn.quantization import FORMATS
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.levels import LEVELS, REQUIRED, check_levels
from npattn.testing.parsing import (
    parse_memory,
    parse_names,
    parse_pairs,
    parse_processes,
    parse_seconds,
    parse_seed,
    parse_sizes,
    parse_values,
    path_to_write,
    read_sizes,
)
from npattn.testing.report.expected import check_expected, read_expected
from npattn.testing.report.progress import Progress, check_progress
from npattn.testing.trial import GRADIENTS

if TYPE_CHECKING:
    from npattn.testing.report.report import Report
    from npattn.testing.runner.journal import Journal


EXAMPLES = 200
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
OTHER_WORDS = {
    "float64": "double fp64 f64",
    "float32": "float single fp32 f32",
    "float16": "half fp16 f16",
    "bfloat16": "bf16 bfloat",
    "float8_e4m3fn": "fp8 float8 e4m3 float8_e4m3 fp8_e4m3",
    "float8_e5m2": "e5m2 fp8_e5m2",
}
"""Other words for the dtypes."""
SHORT_DTYPES = {
    word: name for name, words in OTHER_WORDS.items() for word in [name, *words.split()]
}

JUDGED, AMOUNT, PASSES, WHERE, WRITTEN = GROUPS = (
    "What is judged",
    "How much",
    "What must pass",
    "Where it runs",
    "What is written",
)


@dataclass(frozen=True)
class SettingOption:
    """Words, flag and parser of an option, wherever it is given."""

    group: str  # one of `GROUPS`
    flags: tuple[str, ...]  # flags of the command; none for an argument of Python alone
    metavar: str | None
    kind: str  # its type in the docstring; "" for that of the field, or its choices
    # a sentence for ``--help``, the docstring and the page; other options stand in backticks
    help: str
    more: str = ""  # further sentences, for Python
    default: str = ""  # its default in words, if None stands for one
    choices: tuple[str, ...] = ()  # the only values
    least: int | None = None  # the least integer
    multiple: bool = False  # the flag may be given several times
    # text of the flag, or all its texts, → value of the argument
    parse: Callable[[Any], Any] | None = None
    # it is a file that will be written, or one that exists
    path: Literal["new", "old"] | None = None
    # value → what a report says among its settings, None for nothing
    report: Callable[[Any], Any] | None = None
    asked: bool = False  # answers depend on it, so that a journal has it


def option(
    value: Any, group: str, flags: str, kind: str, help: str, more: str = "", **details: Any
) -> Any:
    """Return a field of `Settings` with its `SettingOption`; `flags` are as "-x --flag NAME"."""
    words = flags.split()
    names = tuple(word for word in words if word.startswith("-"))
    metavar = words[-1] if len(words) > len(names) else None
    one = SettingOption(group, names, metavar, kind, help, more, **details)
    return field(default=value, metadata={"option": one})


# A row for each setting
# fmt: off
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of `npattn.testing.check`; what is not legal is an error here."""

    dtypes: Sequence[str] = option(("float32",), JUDGED, "--dtype DTYPE", "sequence of str",
        f"Dtype of q, k and v: {', '.join(DTYPES)}.",
        default="float32", multiple=True, asked=True)
    framework: str = option("auto", JUDGED, "--framework NAME", "",
        "Its arrays: numpy, torch or jax.",
        "It asks the function's module, its annotations and a tiny call.",
        choices=("auto", "numpy", "torch", "jax"))
    backward: Callable[..., Any] | None = option(None, JUDGED, "--backward FUNCTION", "callable",
        "Gradients of a NumPy function.",
        "It is called as ``backward(dout, q, k, v, *, out, lse, ...)``.")
    layout: str | None = option(None, JUDGED, "--layout", "",
        "Axes of q, k, v and o.",
        'dout and the gradients have the same axes; "BTHD" is for rank 4.',
        choices=("BHTD", "BTHD"), default="BHTD, or those of `like`")
    like: str | Profile | None = option(None, JUDGED, "--like PROFILE", "str or Profile",
        "Known system that it replaces (npattn list profiles).",
        "Signature, layout, conventions and refusals come from its profile. Rules that the "
        "system does not promise are not required.")
    conventions: Conventions | None = option(None, JUDGED, "--convention NAME=VALUE", "Conventions",
        "Convention of the function where systems disagree, as causal=top_left.",
        'Default: those of `like`, or of docs/semantics.md, with causal="top_left" for a parameter '
        "``is_causal``.",
        multiple=True)
    rename: Mapping[str, str] | None = option(None, JUDGED, "--rename THEIRS=OURS", "mapping",
        "What a parameter means, as cap=softcap.",
        'In Python ``{"cap": "softcap"}``.',
        multiple=True,
        parse=functools.partial(parse_pairs, flag="--rename", form="THEIRS=OURS: cap=softcap"))
    features: str | Iterable[str] | None = option(
        None, JUDGED, "--features NAMES", "str or iterable of str",
        "Its options and results, as mask,return_lse.",
        default="those in its signature", parse=parse_names)
    quantized: str | None = option(None, JUDGED, "--quantized FORMAT", "",
        "8-bit format of what has a factor: fp8, float8_e4m3fn, float8_e5m2, int8.",
        "The others have the tested dtype. For factors of blocks see `Implementation`.",
        choices=("fp8", *FORMATS))
    reference: Any = option(None, JUDGED, "--reference FUNCTION",
        "callable or (callable, backward)",
        "Right function to compare with.",
        "The tolerance follows from its steps. `backward` gives the gradients of a NumPy "
        "function. Details: docs/reference.md.")
    reference_framework: str = option("auto", JUDGED, "--reference-framework NAME", "",
        "Its arrays.",
        choices=("auto", "numpy", "torch", "jax"))
    inputs: Mapping[str, str] | None = option(None, JUDGED, "--inputs NAME=AXES", "mapping",
        'Axes of its arrays, as "x=B T C".',
        'In Python ``{"x": "B T C", "w": "C 3C"}``. Default: the arguments are q, k, v.',
        multiple=True,
        parse=functools.partial(parse_pairs, flag="--inputs", form="x='B T C'"))
    options: Mapping[str, Sequence[Any]] | None = option(
        None, JUDGED, "--options NAME=VALUES", "mapping",
        "Values of options, as causal=false,true.",
        'For use with `inputs`; the simplest value first. In Python ``{"causal": (False, True)}``.',
        multiple=True, parse=functools.partial(parse_values, flag="--options"))
    rounding: Rounding | str | None = option(None, JUDGED, "--rounding MODEL", "Rounding or str",
        "Rounding model: upcast, fused, eager, fp8, int8.",
        choices=("upcast", "fused", "eager", "fp8", "int8"),
        default="that of a known target, or the loosest")
    only: str | Iterable[str] | None = option(None, AMOUNT, "--only RULE", "str or iterable of str",
        "Rule, or the beginning of several; it is tried on all `examples`, and required.",
        '"robustness" adds notes on wrong input.',
        multiple=True, asked=True)
    sizes: Mapping[str, Sequence[int]] | None = option(None, AMOUNT, "--sizes D=64,128", "mapping",
        "Sizes to sample, of B H K T S D E in docs/semantics.md; T=64x: multiples; P: of a page.",
        'For a kernel that takes only these: ``{"D": (64, 128), "T": "64x"}``. For other letters '
        "the sizes of a known target stay.",
        multiple=True, parse=parse_sizes, asked=True)
    seed: int = option(0, AMOUNT, "--seed N|random", "int",
        "Seed of all random choices.",
        parse=parse_seed, report=int, asked=True)
    examples: int | None = option(None, AMOUNT, "--examples N", "int",
        "Problems that agreement rules try; other rules a tenth.",
        "A rule tries at least 20. The default is fewer where the smallest problem that is taken "
        "has more than 256 scores a head.",
        least=1, asked=True, default="200")
    budget: float | None = option(None, AMOUNT, "--budget TIME", "float",
        "Time (60s, 10m, 2h), a few examples of each rule first.",
        "In Python a number of seconds. After `examples` problems the check goes on with the next "
        "seeds while there is time. The report does not pass if a required rule could not be "
        "tested at all.",
        parse=parse_seconds, report=lambda seconds: f"{seconds:g} s")
    goes_on: bool = option(True, AMOUNT, "", "",
        "Spend all of the budget; False: end after `examples` problems.")
    sweep: int = option(0, AMOUNT, "--sweep N", "int",
        "Also judge N problems of every length up to 4096 on the device.",
        "They are sampled and computed there; a few very long ones are added. Only for torch "
        "functions.",
        least=0, report=lambda count: count or None)
    fail_fast: bool = option(False, AMOUNT, "-x --fail-fast", "",
        "Stop at the first failure that counts.",
        "A failure counts if its level is required and it is not expected. The report has the "
        "results so far.")
    shrink: bool = option(True, AMOUNT, "", "",
        "Search for the smallest failing problem.",
        asked=True)
    diagnosis: bool = option(True, AMOUNT, "", "",
        "Search for the causes of failures, for a second or two.")
    require: Iterable[str] | str = option(REQUIRED, PASSES, "--require LEVEL", "iterable of str",
        f"Must pass: {', '.join(LEVELS)}; all: every one but the last.",
        "Failures in other levels are only shown. docs/reading.md explains the levels.",
        choices=(*LEVELS, "all"), default=", ".join(REQUIRED), multiple=True)
    must: Iterable[str] = option((), PASSES, "--must NAMES", "iterable of str",
        "Options, results, gradients to test, as mask,lse,dk.",
        "Otherwise the report does not pass.",
        parse=parse_names)
    accept: Iterable[str] = option((), PASSES, "--accept RESULT", "iterable of str",
        'Result that may be "not judged", as dq or dq[float16].',
        "Without it, a result that could be twice as large unseen leaves a report without a "
        "verdict.",
        multiple=True)
    expect: Mapping[str, str] | None = option(None, PASSES, "--expect FILE", "mapping",
        'File of expected failures: "rule[dtype]" = "reason".',
        'In Python ``{"hidden-nan-v[float32]": "multiplies by 0"}``.',
        path="old", parse=read_expected)
    strict: bool = option(False, PASSES, "--strict", "",
        "Fail also if errors are too large together (suspect).")
    device: str | None = option(None, WHERE, "--device NAME", "str",
        "Device of the tensors, as cuda.")
    processes: int = option(1, WHERE, "-n --processes N|auto", "",
        "Processes that share the rules, or auto.",
        "Each has one thread, and the report is the same. They must be able to import `f`: a "
        "function of a module, or an Implementation with a `spec`.",
        parse=parse_processes)
    isolate: bool = option(False, WHERE, "", "",
        "Call `f` in a worker, a separate process: a crash then costs only one rule.",
        "Functions that cannot be imported need cloudpickle.")
    timeout: float | None = option(None, WHERE, "--timeout SECONDS", "float",
        "Seconds that a call in a worker may take.",
        default="10; 120 to compile")
    progress: Progress | bool | None = option(None, WRITTEN, "", "callable or bool",
        "Function that is called with ``(dtype, rule, done, total)``.",
        "True, or by default: a bar after two seconds, in a notebook or on the error stream of a "
        "terminal. False: none.")
    journal: str | os.PathLike[str] | Journal | None = option(
        None, WRITTEN, "--journal FILE", "path",
        "New file that records each step, to `resume` from.",
        "A step is written before it starts: after a crash the file says what was running.",
        path="new")
    resume: str | os.PathLike[str] | None = option(None, WRITTEN, "--resume FILE", "path",
        "Continue the check of a `journal`.",
        "Implementation and settings must be the same.",
        path="old")

    def __post_init__(self) -> None:
        for name in ("dtypes", "only", "must", "accept"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if self.budget is not None:
            check_budget(self.budget)
            if self.journal is not None or self.resume is not None:
                raise OptionError("got a journal beside budget, which ends in time: pass one")
        if self.journal is not None and self.resume is not None:
            raise OptionError("got journal beside resume, which goes on in its own file: pass one")
        refused = [name for name in ("inputs", "options") if getattr(self, name) is not None]
        if self.reference is None and refused:
            raise OptionError(f"got {refused[0]} without reference: pass the right function too")
        names = [SHORT_DTYPES.get(str(x).removeprefix("torch."), x) for x in self.dtypes]
        object.__setattr__(self, "dtypes", tuple(names))
        _check_dtypes(self.dtypes)
        if isinstance(self.sweep, bool) or not isinstance(self.sweep, int) or self.sweep < 0:
            raise OptionError(f"sweep is {self.sweep!r}, must be an integer ≥ 0: how many problems")
        for name, least in (("examples", 1), ("seed", 0), ("processes", 1)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_integer(name, value, least))
        _check_mapping("expect", self.expect, '{"nan-query": "why it fails"}')
        _check_mapping("sizes", self.sizes, '{"D": (64, 128)}')
        if self.sizes is not None:
            object.__setattr__(self, "sizes", read_sizes(self.sizes))
        for letter, values in (self.sizes or {}).items():
            if isinstance(values, Sequence) and values and not any(values):
                raise OptionError(
                    f"sizes has {letter}={values!r}, must have one ≥ 1: a size of 0 leaves nothing "
                    "to compare, and is tried beside others"
                )
        check_conventions(self.conventions)
        check_levels(self.require)
        check_expected(self.expect or {})
        results = ("o", "lse", "weights", "max_score", *GRADIENTS)
        legal = (*FEATURES, *results)
        for name in self.must:
            if name not in legal:
                raise OptionError(f"must has {name!r}, must be among {', '.join(legal)}")
        for name in self.accept if self.reference is None else ():
            if name.partition("[")[0] not in results:
                raise OptionError(f"accept has {name!r}, must be among {', '.join(results)}")
        check_progress(self.progress)

    def for_report(self) -> dict[str, Any]:
        """Return what a report says of them."""
        said = {
            name: None if (value := getattr(self, name)) is None else one.report(value)
            for name, (_, one) in options(Settings).items()
            if one.report is not None
        }
        return {name: value for name, value in said.items() if value is not None}

    def for_journal(self) -> dict[str, Any]:
        """Return what the answers depend on, for a journal."""
        return {name: getattr(self, name) for name, (_, x) in options(Settings).items() if x.asked}


@dataclass(frozen=True, kw_only=True)
class CommandSettings(Settings):
    """The same, and what the command line alone has."""

    module: bool = option(False, JUDGED, "--module", "",
        "A torch module, with its projections inside.")
    roles: Mapping[str, str] | None = option(None, JUDGED, "--role ROLE=NAME", "",
        "Projection of a `module`, as wq=to_q.",
        multiple=True,
        parse=functools.partial(parse_pairs, flag="--role", form="ROLE=NAME: wq=to_q"))
    num_heads: int | None = option(None, JUDGED, "--num-heads N", "",
        "Heads of a `module`, if nothing tells.",
        least=1)
    in_process: bool = option(False, WHERE, "--in-process", "",
        "Call TARGET in this process, without a worker.")
    worker: str | None = option(None, WHERE, "--worker COMMAND", "",
        "Program that speaks docs/protocol.md.")
    envs: str | None = option(None, WHERE, "--envs FOLDER", "",
        "Folder to install in what a known TARGET lacks.")
    memory: int | None = option(None, WHERE, "--memory SIZE", "",
        "Memory that the worker may use, as 500M or 4G.",
        parse=parse_memory)
    untrusted: bool = option(False, WHERE, "--untrusted", "",
        "For code that nobody has read: a confined worker, a random seed, `strict`, and `must` "
        "for every gradient and option in the signature.")
    unconfined: bool = option(False, WHERE, "--unconfined", "",
        "`untrusted` without walls: it can change the verdict.")
    cluster: str | None = option(None, WHERE, "--cluster WHERE", "",
        "Run on Dask: local:N, or a scheduler's address.")
    watch: bool = option(False, AMOUNT, "--watch", "",
        "Check again after each save, failed problems first.")
    ff: bool = option(False, AMOUNT, "--ff", "",
        "Ask first what failed in the last run with this flag.")
    no_config: bool = option(False, WHERE, "--no-config", "",
        "Ignore [tool.npattn] of pyproject.toml.")
    verbose: bool = option(False, WRITTEN, "--verbose", "",
        "Print the whole table and every failure.")
    format: str | None = option(None, WRITTEN, "--format FORM", "",
        "What is printed: text, github (with annotations and a summary), markdown or sarif.",
        choices=("text", "github", "markdown", "sarif"), default="text")
    json: Path | None = option(None, WRITTEN, "--json FILE", "",
        "Write the report to this file as JSON.",
        path="new", parse=path_to_write)
    html: Path | None = option(None, WRITTEN, "--html FILE", "",
        "Write the report to this file as a web page.",
        path="new", parse=path_to_write)
    script: Path | None = option(None, WRITTEN, "--script FILE", "",
        "Write a Python file that shows the first failure.",
        path="new", parse=path_to_write)


# fmt: on
def options(settings: type[Settings]) -> dict[str, tuple[Field[Any], SettingOption]]:
    """Return the field and the option of each setting, by name, in the order of the groups."""
    by_name = {f.name: (f, f.metadata["option"]) for f in fields(settings)}
    return dict(sorted(by_name.items(), key=lambda item: GROUPS.index(item[1][1].group)))


P = ParamSpec("P")
Judged = Callable[..., Any] | Implementation


def takes_settings(
    settings: Callable[P, Settings],
) -> Callable[[Callable[[Judged, Settings], Report]], Callable[Concatenate[Judged, P], Report]]:
    """Give a function of an implementation and settings an argument for each setting.

    Its docstring describes them before its results.
    """

    def decorate(
        judge: Callable[[Judged, Settings], Report],
    ) -> Callable[Concatenate[Judged, P], Report]:
        """Return a function of f and one keyword for each setting, documented and signed so."""

        def check(*args: Any, **kwargs: Any) -> Report:
            try:
                bound = signature.bind(*args, **kwargs).arguments
            except TypeError as err:
                raise TypeError(f"{judge.__name__}() {err}") from None
            try:
                return judge(bound.pop("f"), settings(**bound))  # type: ignore[call-arg]
            except KeyboardInterrupt as interrupt:  # nobody needs the frames of the judge
                raise interrupt.with_traceback(None) from None

        functools.update_wrapper(check, judge)
        del vars(check)["__wrapped__"]  # it has another signature
        first, *_ = inspect.signature(judge).parameters.values()
        signature_of_settings = inspect.signature(settings)
        signature = signature_of_settings.replace(
            parameters=[first, *signature_of_settings.parameters.values()]
        )
        vars(check)["__signature__"] = signature.replace(return_annotation="Report")
        before, returns, after = (judge.__doc__ or "").partition("    Returns\n")
        check.__doc__ = before.rstrip() + "\n" + _describe_in_python() + "\n" + returns + after
        return check

    return decorate


def _describe_in_python() -> str:
    """Return the settings as entries of a docstring."""
    lines = []
    for name, (spec, one) in options(Settings).items():
        kind = one.kind or "{" + ", ".join(f'"{x}"' for x in one.choices) + "}"
        kind = kind if kind != "{}" else str(spec.type)
        if spec.default in (None, ()) or one.default:
            kind += ", optional"
        elif spec.default is not False:
            kind += f", default {spec.default!r}"
        default = f"Default: {one.default}." if one.default else ""
        text = " ".join(x for x in (one.help, one.more, default) if x)
        indented = textwrap.fill(
            text, 96, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False
        )
        lines += [f"    {name} : {kind}", indented]
    return "\n".join(lines) + "\n"


def describe_flag(one: SettingOption, value: Any) -> str:
    """Return the help of a flag with its default; options in backticks become their flags."""
    flags = {n: x.flags[-1] for n, (_, x) in options(CommandSettings).items() if x.flags}
    default = one.default or ("" if value in (None, ()) or value is False else str(value))
    text = one.help + (f"  [default: {default}]" if default else "")
    return re.sub(r"`+(\w+)`+", lambda match: flags.get(match[1], match[1]), text)


def _check_dtypes(dtypes: Sequence[str]) -> None:
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise DtypeError(f"dtypes has {dtype!r}, must be among {', '.join(DTYPES)}")
    if not dtypes:
        raise OptionError("dtypes is empty, must have 1 or more")


def check_budget(budget: float) -> None:
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if not number or not 0 < budget < math.inf:
        raise OptionError(f"budget is {budget!r}, must be a number of seconds > 0")


def _check_mapping(name: str, value: Any, example: str) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise OptionError(f"{name} is {value!r}, must be a mapping, as in {example}")
