"""An implementation that lives in a worker, called as one that lives here.

Arrays stay NumPy arrays on this side; layouts, conventions and renames are translated here. Arrays
that a rule passes itself (``inputs=``) have a counterpart in the worker for as long as they exist:
what changes on one side is written to the other, so that rules on memory see the same as with a
function of this process.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import Crash, ImplementationError, ResultError, TimedOut, refuse
from npattn.testing.adapters.child import NumPy, Tensor, contents
from npattn.testing.adapters.frameworks import (
    Framework,
    array_of,
    describe_view,
    is_plain,
    name_dtype,
    span,
    tensor_of,
    try_frameworks,
)
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.adapters.request import CallRequest, refuse_count
from npattn.testing.adapters.untrusted import Untrusted
from npattn.testing.cases.options import SCORE_MODS
from npattn.testing.worker.confinement import protect_judge
from npattn.testing.worker.description import Stub
from npattn.testing.worker.fatal_kinds import GivenUp
from npattn.testing.worker.supervisor import Worker
from npattn.testing.worker.values import (
    OF_ALL,
    Held,
    HeldItem,
    NoArray,
    answer_bytes,
    find_garbage,
    places,
    plain,
    raise_errors,
    value_of,
)

EAGER_SECONDS, COMPILE_SECONDS = 10.0, 120.0
"""Time for a call, and for the first call of a shape where the framework compiles."""


# --- values on this side --------------------------------------------------------------------------


@dataclass
class Counterpart:
    """Array of the worker that has the contents of one of this side."""

    key: str
    generation: int
    mine: weakref.ref[Array]
    contents: bytes


class Frames(Framework):
    """NumPy arrays on this side, arrays of the worker's framework on the other."""

    def __init__(self, remote: Remote) -> None:
        description = remote.worker.description
        super().__init__(NumPy())
        self.remote = remote
        self.name = str(description["framework"])
        self.differentiates = description["gradients"] == "autograd"
        self.compiles = bool(description.get("compiles"))
        self.immutable = self.name == "jax"
        self.sets_threads = bool(description.get("threads"))
        self.composes = "forms" in description.get("abilities", ()) and self.name != "numpy"
        self.count: int | None = None

    def one_thread(self) -> AbstractContextManager[None]:
        return self._with_threads(1) if self.sets_threads else nullcontext()

    def threads(self, count: int) -> AbstractContextManager[None] | None:
        return self._with_threads(count) if self.sets_threads else None

    @contextmanager
    def _with_threads(self, count: int) -> Iterator[None]:
        before, self.count = self.count, count
        try:
            yield
        finally:
            self.count = before

    def give(self, array: Array) -> Any:
        return array

    def take(self, value: Any) -> Array:
        if isinstance(value, HeldItem):
            value = self.remote.read(value)
        if isinstance(value, NoArray):
            raise value.error
        if value is None:
            raise ResultError(f"returned None among its results, must be arrays of {self.name}")
        return np.array(value)


# --- the implementation ---------------------------------------------------------------------------


class Remote(Implementation):
    """A callable under test, in a worker.

    Arguments are those of `Implementation`; what the worker's target says itself must not be said
    again. Raises OptionError as `Implementation` does, and if the worker cannot be started, or its
    target cannot be used.
    """

    is_isolated = True

    def __init__(self, worker: Worker, **arguments: Any) -> None:
        self.worker = worker
        # called with each request and the shapes of its arrays, before it is sent
        self.watch: Callable[[Mapping[str, Any], Any], object] | None = None
        description = worker.description or worker.start()
        settings = dict(description.get("settings") or {})
        refused = [n for n in settings if arguments.get(n) is not None]
        if refused:
            raise OptionError(
                f"got {', '.join(refused)} beside an Implementation: pass it to "
                "Implementation(f, ...) there"
            )
        conventions = settings.pop("conventions", None)
        backward = description.get("backward")
        arguments = {"name": description["name"], **arguments, **settings}
        super().__init__(
            Stub(description["parameters"], str(description["name"])),
            backward=None if backward is None else Stub(backward),
            framework=Frames(self),
            **arguments,
        )
        if conventions is not None:
            self.conventions = Conventions(**conventions)
        self.first_result = None if self.packing else worker.first_result
        self.note_error_state(bool(description.get("error_state")))
        self._forget()
        if "unfound" in description:
            self._try_frameworks(description["unfound"])

    def _try_frameworks(self, errors: Any) -> None:
        """Find a framework whose arrays it takes, by calls with what it needs besides q, k, v."""
        worker, inner = self.worker, self._tiny_call

        def call(name: str) -> str:
            assert inner is not None
            worker.settings["framework"] = name
            worker.start()
            inner(Frames(self))
            return name

        with find_garbage():
            errors = {str(name): str(text) for name, text in errors.items()}
        try_frameworks(self.name, errors, None if inner is None else call)
        worker.close()  # its first call is one that is judged
        if self.storage is not None:
            self.storage = replace(self.storage, few_shapes=self.framework.compiles)

    def _forget(self) -> None:
        """Set the state of a worker that was sent nothing yet, by its abilities and settings."""
        self._keys = itertools.count(1)
        self._counterparts: dict[int, Counterpart] = {}
        self._dropped: list[str] = []
        self._shapes: set[Any] = set()
        self._work: Callable[[], object] | None = None
        self.given_up = GivenUp()
        self.keeps_arrays = {"objects", "hold"} <= self.abilities
        self.takes_threads = "channels" in self.abilities
        self.versions = self.worker.description.get("versions", {})
        self.environment = self.worker.environment
        if self.worker.settings.get("fresh"):
            self.untrusted = Untrusted(self.worker.close, self.worker.age)
            protect_judge()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without those that hold only in this process."""
        of_process = {"framework", "given_up", "untrusted"}
        of_process |= {"_keys", "_counterparts", "_dropped", "_shapes", "_work"}
        return {name: x for name, x in vars(self).items() if name not in of_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.framework = Frames(self)
        self._forget()

    @property
    def abilities(self) -> frozenset[str]:
        """Requests beyond the plain ones that the worker understands."""
        return frozenset(self.worker.description.get("abilities", ()))

    @contextmanager
    def while_answering(self, work: Callable[[], object] | None) -> Iterator[None]:
        """Return a context in which `work` is done while the worker answers the next request."""
        self._work = work
        try:
            yield
        finally:
            self._work = None

    @property
    def source(self) -> str:
        """Hash of the files of its functions, where the worker says it."""
        return str(self.worker.description.get("source", ""))

    @property
    def given_up_lines(self) -> list[str]:
        """Kinds of problems that are not asked again, a line each."""
        return self.given_up.lines

    @property
    def given_up_kinds(self) -> dict[str, str]:
        """Kinds of problems that are not asked again, with the reason."""
        return self.given_up.reasons

    def add_given_up(self, kinds: Mapping[str, str]) -> None:
        """Add kinds that the worker of another process is not asked again."""
        reasons = self.given_up.reasons
        reasons |= {name: reason for name, reason in kinds.items() if name not in reasons}

    def on(self, device: str) -> None:
        """Put the arrays of later calls on a device of the framework."""
        self.worker.settings["device"] = self.device = device
        self.worker.start()

    def request(self, problem: Problem | None, keeps: bool = False) -> SentRequest:
        """Return a request for calls, to which arrays are added."""
        return SentRequest(self, problem, keeps)

    # --- what the worker keeps ---

    def seconds(self, shape: Any) -> float:
        """Return the time that a call of this shape may take."""
        if self.worker.limits.timeout is not None:
            return self.worker.limits.timeout
        if not self.framework.compiles or shape in self._shapes:
            return EAGER_SECONDS
        self._shapes.add(shape)
        return COMPILE_SECONDS

    def hold(self, most: int) -> Held:
        """Return a key for results of at most `most` bytes that the worker is asked to keep."""
        held = Held(f"result {next(self._keys)}", self.worker.begin(), most)
        weakref.finalize(held, self._dropped.append, held.key)
        return held

    def counterpart(self, array: Array) -> tuple[Counterpart, bool]:
        """Return the array of the worker that stands for one of here, and if it is a new one."""
        kept, generation = self._counterparts.get(id(array)), self.worker.begin()
        if kept and kept.mine() is array and kept.generation == generation:
            return kept, False
        key = f"array {next(self._keys)}"
        made = Counterpart(key, generation, weakref.ref(array), array.tobytes())
        self._counterparts[id(array)] = made
        weakref.finalize(array, self._drop, id(array), key)
        return made, True

    def _drop(self, number: int, key: str) -> None:
        kept = self._counterparts.get(number)
        if kept is not None and kept.key == key:
            del self._counterparts[number]
        self._dropped.append(key)

    def changes(self) -> dict[str, Array]:
        """Return the arrays whose contents have changed here since the worker had them."""
        changed = {}
        for counterpart in list(self._counterparts.values()):
            array = counterpart.mine()
            if array is None or counterpart.generation != self.worker.generation:
                continue
            contents = array.tobytes()
            if contents != counterpart.contents:
                counterpart.contents, changed[counterpart.key] = contents, array
        return changed

    def send(
        self,
        message: dict[str, Any],
        tensors: dict[str, Tensor],
        shape: Any = None,
        most: int = OF_ALL,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Send a request, with what changed here; write what changed there. Raise its errors.

        Its answer has at most `most` bytes.
        """
        writes = self.changes() if self._counterparts else {}
        if writes:
            message["write"] = {key: f"write {key}" for key in writes}
            tensors |= {f"write {key}": tensor_of(array) for key, array in writes.items()}
        if self._dropped:
            message["drop"], self._dropped[:] = list(self._dropped), []
        assert isinstance(self.framework, Frames)
        if self.framework.count is not None:
            message["threads"] = self.framework.count
        work, self._work = self._work, None
        answer, out = self.worker.request(message, tensors, self.seconds(shape), work, most)
        if answer.get("changed"):
            with find_garbage():
                self._write_changes(answer["changed"], out)
        return answer, out

    def _write_changes(self, changed: Mapping[str, str], out: Mapping[str, Tensor]) -> None:
        """Write to the arrays of here what their counterparts hold."""
        for key, name in changed.items():
            for counterpart in self._counterparts.values():
                array = counterpart.mine()
                if counterpart.key == key and array is not None and array.flags.writeable:
                    array[...] = array_of(out[name]).reshape(array.shape)
                    counterpart.contents = array.tobytes()

    def read(self, place: HeldItem) -> Any:
        """Return results that the worker keeps."""
        if place.held.generation != self.worker.generation:
            raise Crash("crashed: the process that kept its result has ended")
        answer, out = self.send(
            {"do": "read", "of": place.held.key, "again": True}, {}, most=place.held.most
        )
        raise_errors(answer, {})
        item: Any = place.item
        with find_garbage():
            value = value_of(answer["value"], out)
            return value[item] if isinstance(value, (tuple, dict)) else value


class SentRequest(CallRequest):
    """One call, or several with the same arrays: what goes to the worker and what comes back."""

    reading = staticmethod(find_garbage)

    def __init__(self, f: Any, problem: Problem | None, keeps: bool = False) -> None:
        super().__init__(f, problem, keeps)
        self.remote: Remote = f
        self.formed: dict[str, Array] = {}  # those that an argument is made of
        self.entries: dict[str, dict[str, Any]] = {}
        self.tensors: dict[str, Tensor] = {}
        self.buffers: dict[int, str] = {}
        self.roots: list[Array] = []

    def add_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Add arrays by npattn's names; those of a rule get a counterpart in the worker."""
        for name, array in arrays.items():
            self.arrays[name] = array
            if not self.keeps:
                self.entries[name] = self._lay_out(name, array)
                continue
            counterpart, new = self.remote.counterpart(array)
            made = self._lay_out(name, array) if new else {}
            self.entries[name] = {"object": counterpart.key, **made}

    def _lay_out(self, name: str, array: Array) -> dict[str, Any]:
        """Return where the worker finds an array, of any shape: a tensor, or a view of a buffer."""
        root: Any = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        if (root is array and is_plain(array)) or "views" not in self.remote.abilities:
            if not array.flags.c_contiguous:
                raise ImplementationError("its worker takes no views")
            self.tensors[name] = tensor_of(array)
            return {"tensor": name}
        flat = root.transpose(sorted(range(root.ndim), key=lambda axis: -root.strides[axis]))
        if not flat.flags.c_contiguous or flat.dtype != array.dtype:
            root = flat = span(array)
        buffer = self.buffers.setdefault(id(root), f"buffer {len(self.buffers)}")
        self.roots.append(root)  # no other may get its id
        self.tensors[buffer] = Tensor(name_dtype(flat), (flat.size,), contents(flat))
        return {"tensor": buffer, **describe_view(array, root)}

    # --- what is asked ---

    def forward(self, calls: Sequence[tuple[str, ...]], hold: bool = False) -> list[Any]:
        """Return what the function returned in each call, in one request if the worker can."""
        if hold or len(calls) == 1 or "calls" not in self.remote.abilities:
            return super().forward(calls, hold)
        forms = [self._call(returns) for returns in calls]
        values: list[Any] = self.send({"do": "forward", "calls": forms}, {"": "raised"})
        return values

    def autograd_twice(self, second: Mapping[str, Any]) -> dict[str, Any]:
        """Return the gradients of Σ second · gradients, as the worker's framework finds them."""
        if "twice" not in self.remote.abilities:
            raise refuse("its worker differentiates no gradients")
        return super().autograd_twice(second)

    def _counted_call(self, returns: tuple[str, ...]) -> dict[str, Any]:
        request = super()._counted_call(returns)
        if "counts" not in self.remote.abilities:
            del request["results"]
        return request

    def encode(self, value: Any) -> Any:
        """Return an argument as JSON."""
        if isinstance(value, np.ndarray):
            name = next((n for n, x in self.formed.items() if x is value), None)
            if name is None:
                name = f"argument {len(self.arrays) + len(self.formed)}"
                self.formed[name] = value
                self.entries[name] = self._lay_out(name, np.asarray(value, order="C"))
            return {"array": name}
        if isinstance(value, SimpleNamespace):
            return {"module": {n: plain(x) for n, x in vars(value).items()}}
        if callable(value):
            return {"score_mod": next(n for n, mod in SCORE_MODS.items() if mod is value)}
        return plain(value)

    def send(self, message: dict[str, Any], prefixes: Mapping[str, str], hold: bool = False) -> Any:
        """Send a message; return the value, or with `hold` places of what is kept."""
        if hold:
            if "hold" not in self.remote.abilities:
                raise ImplementationError("its worker keeps no results")
            held = self._held = self.remote.hold(self._answer_bytes(message))
            answer, _ = self._exchange(message | {"hold": held.key}, prefixes)
            with find_garbage():
                return places(answer["value"], held)
        answer, out = self._exchange(message, prefixes)
        if message.get("overwrite"):
            return answer
        with find_garbage():
            if "calls" in message:
                return [value_of(answer["values"][n], out) for n in range(len(message["calls"]))]
            return value_of(answer["value"], out)

    def _answer_bytes(self, message: dict[str, Any]) -> int:
        shapes = {name: array.shape for name, array in (self.arrays | self.formed).items()}
        return answer_bytes(shapes, len(message.get("calls", ())))

    def keep(self, results: Any) -> Any:
        """Return the key of the results that were kept last."""
        return self._held.key

    def fetch(self, value: Any) -> Any:
        """Return results with those read that the worker keeps."""
        if isinstance(value, tuple):
            return tuple(map(self.fetch, value))
        if isinstance(value, dict):
            return {name: self.fetch(x) for name, x in value.items()}
        return self.remote.read(value) if isinstance(value, HeldItem) else value

    def _exchange(
        self, message: dict[str, Any], prefixes: Mapping[str, str]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Send a request with the arrays; raise what the implementation raised."""
        message["arrays"] = self.entries
        if self.problem is not None:
            self.remote.given_up.check(self.problem)
            message["dtype"] = name_dtype(self.problem.q)
        shapes = (message["do"], *((name, array.shape) for name, array in self.arrays.items()))
        if self.remote.watch is not None:
            self.remote.watch(message, dict(shapes[1:]))
        try:
            most = self._answer_bytes(message)
            answer, out = self.remote.send(message, dict(self.tensors), shapes, most)
        except (Crash, TimedOut) as err:
            if self.problem is not None:
                self.remote.given_up.note_end(self.problem, err)
            raise
        if self.problem is not None:
            self.remote.given_up.note_answer(self.problem)
        if self.keeps:
            self._forget_contents()
        if "returned" in answer:
            with find_garbage():
                count = int(answer["returned"])
                refuse_count(self.remote.signature, count, self.returns)
        raise_errors(answer, prefixes)
        self.remote.note_error_state(bool(answer.get("error_state")))
        return answer, out

    def _forget_contents(self) -> None:
        """Leave out of later requests what the worker keeps."""
        kept = {name: {"object": e["object"]} for name, e in self.entries.items() if "object" in e}
        self.entries |= kept
        needed = {e.get("tensor") for e in self.entries.values()}
        self.tensors = {name: x for name, x in self.tensors.items() if name in needed}
