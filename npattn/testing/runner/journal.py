"""Journal of a check: a line of JSON for each step, written before it is taken.

Whoever ends the judge, the journal says what was being asked, and a check goes on from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from npattn.errors import OptionError
from npattn.testing.cases.asked import Asked
from npattn.testing.cases.recipe import Recipe
from npattn.testing.power import Power
from npattn.testing.report.outcome import Outcome
from npattn.testing.runner.search import Standing

VERSION = 3
SCALARS = (
    *("rule", "semantics", "about", "dtype", "status", "worst", "examples", "message", "level"),
    "kind",
)
"""Fields of an outcome that are written; a recipe makes the others again."""
Answer = Outcome | str | Standing


class Journal:
    """Steps of one check in a file.

    Attributes
    ----------
    path : Path
    command : dict
        Arguments of the command line that began it; empty for a check begun in Python.
    answers : dict
        By dtype and rule: the last answer in a file that is continued, as it was written.
    refused : dict
        By dtype: names of structure that was refused after the probe, with their lines.
    unanswered : str
        Step in which it ended; "" if it ended between two.
    """

    def __init__(self, path: str | os.PathLike[str], command: Mapping[str, Any] | None = None):
        self.path, self.command = Path(path).absolute(), dict(command or {})
        self.answers: dict[tuple[str, str], dict[str, Any]] = {}
        self.refused: dict[str, dict[str, str]] = {}
        self.unanswered = ""
        self._question: dict[str, Any] | None = None

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], command: Mapping[str, Any] | None = None
    ) -> Journal:
        """Return a new journal; nothing is written before `begin`.

        Raises OptionError if the file exists, or its folder does not.
        """
        check_is_new(path)
        return cls(path, command)

    @classmethod
    def resume(cls, path: str | os.PathLike[str]) -> Journal:
        """Return the journal of a check that ended early."""
        journal = cls(path)
        lines = read_lines(journal.path)
        if not lines or lines[0].get("journal") != VERSION:
            raise OptionError(
                f"{path} is no journal that this version of npattn can continue: begin a new one "
                "(journal, --journal)"
            )
        journal._question, journal.command = lines[0]["question"], lines[0]["command"]
        for entry in lines[1:]:
            if "answer" in entry:
                journal.answers[entry["dtype"], entry["answer"]] = entry
            elif "refused" in entry:
                journal.forget(entry["dtype"])
                names = journal.refused.setdefault(entry["dtype"], {})
                names[entry["refused"]] = entry["line"]
        journal.unanswered = _describe_step(lines)
        return journal

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"answers": {}}  # who gets it writes alone

    def begin(self, question: Mapping[str, Any]) -> None:
        """Write what is asked; in a journal that is continued, hold it against what was asked."""
        asked: dict[str, Any] = json.loads(json.dumps(question, default=str))
        if self._question is None:
            try:
                self.path.touch(exist_ok=False)
            except OSError as err:
                raise OptionError(f"journal {self.path} cannot be written: {err}") from err
            self.write({"journal": VERSION, "command": self.command, "question": asked})
            return
        before = self._question
        names = [n for n in before | asked if before.get(n) != asked.get(n)]
        if names:
            changes = (f"{n} was {before.get(n)!r}, is {asked.get(n)!r}" for n in names)
            raise OptionError(
                f"{self.path} is the journal of another check: {'; '.join(changes)}; ask the same, "
                "or begin a new one (journal, --journal)"
            )
        cut_last_line(self.path)

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append a line; several processes may write to one file."""
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(entry, default=str).encode() + b"\n")

    # --- entries ----------------------------------------------------------------------------------

    def note_end(self) -> None:
        """Write that nothing is left to ask."""
        self.write({"done": True})

    def note_recipe(self, dtype: str, rule: str, recipe: Recipe) -> None:
        """Write which problem a rule is about to try."""
        self.write({"dtype": dtype, "try": rule, "recipe": plain_recipe(recipe)})

    def note_request(self, message: Mapping[str, Any], shapes: Any) -> None:
        """Write which request is about to be sent to a worker."""
        calls = {name: message[name] for name in ("call", "calls") if name in message}
        self.write({"request": message.get("do"), **calls, "shapes": shapes})

    def note_refused(self, dtype: str, name: str, line: str) -> None:
        """Write that structure is refused: every rule is asked anew, without it."""
        self.forget(dtype)
        self.write({"dtype": dtype, "refused": name, "line": line})

    def forget(self, dtype: str) -> None:
        """Forget the answers that it was begun with for a dtype."""
        self.answers = {key: entry for key, entry in self.answers.items() if key[0] != dtype}

    def note_answer(self, dtype: str, rule: str, answer: Answer) -> None:
        """Write what came of a rule, or how far it has come."""
        entry: dict[str, Any] = {"dtype": dtype, "answer": rule}
        if isinstance(answer, str):
            entry["text"] = answer
        else:
            entry["standing" if isinstance(answer, Standing) else "outcome"] = entry_of(answer)
            sampled = answer.sampled if isinstance(answer, Outcome) else None
            entry |= {} if sampled is None else {"recipe": plain_recipe(sampled)}
        self.write(entry)


def entry_of(answer: Outcome | Standing) -> dict[str, Any]:
    """Return the values of an answer that are written, without what a recipe makes again."""
    standing = ("position", "tried", "left", "worst", "plain")
    names = SCALARS if isinstance(answer, Outcome) else standing
    values = {name: getattr(answer, name) for name in names}
    powers = {name: power.as_dict() for name, power in answer.powers.items()}
    return values | {
        "left_to": sorted(answer.left_to),
        "asked": answer.asked.as_dict(),
        "powers": powers,
    }


def answer_of(entry: Mapping[str, Any]) -> Answer:
    """Return an answer from its entry, without what a recipe has to make again."""
    if "text" in entry:
        return str(entry["text"])
    kind = Standing if "standing" in entry else Outcome
    values = entry["standing" if kind is Standing else "outcome"]
    fields = {
        "left_to": frozenset(values["left_to"]),
        "asked": Asked.from_dict(values["asked"]),
        "powers": {name: Power.from_dict(x) for name, x in values["powers"].items()},
    }
    return kind(**values | fields)


def recipe_of(entry: Mapping[str, Any]) -> Recipe | None:
    """Return the recipe of an entry, the failing one of an answer; None if it has none."""
    if "recipe" not in entry:
        return None
    values: dict[str, Any] = {
        n: tuple(x) if isinstance(x, list) else x for n, x in entry["recipe"].items()
    }
    return Recipe(**values)


def plain_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of a recipe that are not at their default."""
    values = {f.name: (getattr(recipe, f.name), f.default) for f in fields(recipe)}
    return {name: value for name, (value, default) in values.items() if value != default}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file, without a last line that was cut off."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise OptionError(f"{path} cannot be read: {err}") from err
    lines = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        with suppress(ValueError):
            lines.append(json.loads(line))
        if len(lines) < number or not isinstance(lines[-1], dict):
            raise OptionError(f"{path} is no journal: line {number} is no JSON object")
    return lines


def check_is_new(path: str | os.PathLike[str]) -> None:
    """Raise `OptionError` if a journal cannot be begun there: it exists, or its folder does not."""
    if Path(path).exists():
        raise OptionError(
            f"journal {path} exists: continue it (resume, --resume), or name another file"
        )
    if not Path(path).absolute().parent.is_dir():
        raise OptionError(f"the folder of {path} does not exist; create it first")


def cut_last_line(path: Path) -> None:
    """Remove what follows the last whole line: its writer ended within it."""
    data = path.read_bytes()
    os.truncate(path, data.rfind(b"\n") + 1)


def _describe_step(lines: list[dict[str, Any]]) -> str:
    """Describe the step that has no answer."""
    steps: Iterator[dict[str, Any]] = iter(reversed(lines))
    last = next(steps)
    asked = next((x for x in (last, *steps) if "try" in x or "answer" in x), {})
    if "try" in asked:
        return f"{asked['try']}[{asked['dtype']}] with {recipe_of(asked)!r}"
    return f"a request for {last['request']} of {last['shapes']}" if "request" in last else ""
