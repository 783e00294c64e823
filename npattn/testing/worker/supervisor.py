"""Start a worker, and anew after it ended; ask it what it holds."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npattn.errors import OptionError
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import Crash, ImplementationError
from npattn.testing.adapters.child import LARGEST, PRELOAD, Tensor
from npattn.testing.adapters.frameworks import array_of
from npattn.testing.adapters.load import ENDS_ITSELF
from npattn.testing.worker.connection import Connection, Limits
from npattn.testing.worker.description import read_description

__all__ = ["Limits", "Spare", "Worker"]

START_SECONDS = 120.0
"""Time to start and to import the target: compilers and frameworks take long."""


class Worker:
    """A process that answers requests; it is started when needed, and anew after it ended.

    Settings and tensors are added to the request `describe`, with which each process begins. Each
    description must list the abilities, where it is known what program it is. Without an
    environment it has that of this process; `spare` is a process that waits to be asked first.
    """

    def __init__(
        self,
        command: Sequence[str],
        limits: Limits,
        settings: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        environment: Mapping[str, str] | None = None,
        abilities: Sequence[str] = (),
        spare: Connection | None = None,
    ) -> None:
        self.command, self.limits, self.settings = tuple(command), limits, dict(settings)
        self.tensors, self.environment = dict(tensors or {}), environment
        self.abilities = frozenset(abilities)
        self.description: dict[str, Any] = {}  # empty before the first start
        self.generation = 0  # number of processes that were started
        self.is_confined = False  # its command is one of `npattn.testing.worker.confinement`
        # of the call by which the first process found out the framework, if it made one
        self.first_result: Array | None = None
        self.seclusion: object = None  # a folder that it needs
        self.spare = spare
        self._begin()

    def connect_spare(self) -> Connection:
        """Start a process that imports the framework and waits to be asked."""
        framework = self.description.get("framework", "numpy")
        environment = os.environ if self.environment is None else self.environment
        variables = {**environment, PRELOAD: framework}
        process = Connection(self.command, variables, self.limits.memory, confined=self.is_confined)
        process.seclusion = self.seclusion
        return process

    def _begin(self) -> None:
        self.connection: Connection | None = None
        self._starting, self._owner = threading.Lock(), threading.get_ident()

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("connection", "_starting", "_owner", "seclusion", "spare")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.seclusion = self.spare = None  # its folder is that of who made it
        self._begin()

    def start(self) -> dict[str, Any]:
        """Start a process and return its description of the target.

        With the setting `fresh` the first call of the process is never one that nobody judges.
        Raises OptionError if the command cannot be run, or the target cannot be used.
        """
        try:
            answer, tensors = self._describe(self.settings)
        except ImplementationError:  # its first call may end it, and does not have to be made
            try:
                answer, tensors = self._describe({**self.settings, "untried": True})
            except ImplementationError as err:
                raise OptionError(f"the target cannot be imported: {err}") from err
        if "usage" in answer:
            self.close()
            raise OptionError(str(answer["usage"]))
        if "raised" in answer:
            self.close()
            raised = answer["raised"]
            raised = raised if isinstance(raised, dict) else {}
            if raised.get("type") == "SystemExit":
                raise OptionError(f"its module {ENDS_ITSELF.format(raised.get('message'))}")
            place = f" ({raised['place']})" if raised.get("place") else ""
            words = f"{raised.get('type')}: {raised.get('message')}{place}"
            raise OptionError(f"the target cannot be imported: {words}")
        description = read_description(answer)
        if missing := self.abilities - set(description["abilities"]):
            self.close()
            raise OptionError(
                f"its worker lacks abilities that it has ({', '.join(sorted(missing))}): "
                "the target has changed it, and must leave its process as it is"
            )
        self.description = description
        self.settings["framework"] = self.description["framework"]  # later processes try nothing
        if answer.get("tried") and self.settings.get("fresh") and "unfound" not in answer:
            return self.start()
        if "tried" in tensors:
            self.first_result = array_of(tensors["tried"])
        return self.description

    def _start_again(self) -> None:
        try:
            self.start()
        except OptionError as err:
            if not self.description:
                raise
            raise Crash(f"crashed: its process cannot be started again ({err})") from None

    def _describe(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Start a process, and ask it what it holds."""
        self.close()
        self.generation += 1
        spare, self.spare = self.spare, None
        try:
            self.connection = spare or Connection(
                self.command, self.environment, self.limits.memory, confined=self.is_confined
            )
        except OSError as err:
            raise OptionError(f"the worker cannot be started: {err}") from err
        weakref.finalize(self, Connection.end, self.connection)
        answer = self.connection.describe(settings, self.tensors, START_SECONDS)
        self.connection.owner = self._owner  # another thread may have had to start it anew
        return answer

    def begin(self) -> int:
        """Start a process if none is running; return the number of the one that is.

        What a request refers to by that number is then in the process which answers it. Raises as
        `request` does.
        """
        with self._starting:
            if self.connection is None or self.connection.ended:
                self._start_again()
            return self.generation

    def age(self) -> tuple[int, float]:
        """Return the calls that the process has answered, and the seconds since it started."""
        if self.connection is None:
            return 0, 0.0
        return self.connection.answered, time.monotonic() - self.connection.began

    def close(self) -> None:
        """End the process, and all that it has started."""
        if self.connection is not None:
            self.connection.close()

    def request(
        self,
        message: dict[str, Any],
        tensors: Mapping[str, Tensor],
        seconds: float,
        work: Callable[[], object] | None = None,
        most: int = LARGEST,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the answer to a request, of at most `most` bytes; do `work` meanwhile.

        Raises Crash and TimedOut as `Connection.exchange` does, Crash too if its process cannot be
        started again, and OptionError if none was ever started, and none can be.
        """
        with self._starting:
            if self.connection is None or self.connection.ended:
                self._start_again()
            connection = self.connection
        assert connection is not None
        return connection.exchange(message, tensors, seconds, work, most)


class Spare:
    """Process that waits for its target while another one is judged: the next worker's first."""

    def __init__(self) -> None:
        self._waiting: tuple[str, Connection] | None = None

    def start(self, target: str, worker: Worker) -> None:
        """Start a process of a target in place of the one that waits; `worker` is one of it."""
        self.close()
        self._waiting = target, worker.connect_spare()

    def take(self, target: str) -> Connection | None:
        """Return the process if it waits for this target; it waits no more."""
        if self._waiting is None or self._waiting[0] != target:
            return None
        (_, process), self._waiting = self._waiting, None
        return process

    def close(self) -> None:
        """End the process that waits."""
        if self._waiting is not None:
            self._waiting[1].end()
            self._waiting = None
