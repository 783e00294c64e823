"""Session: judge many candidates one after another, each in a fresh process and a limited time.

For programs that write kernels: a candidate is a file or source text, a verdict is plain data, and
nothing of one candidate is there when the next one is judged.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from npattn.errors import OptionError
from npattn.testing.judging import check
from npattn.testing.report.report import Report
from npattn.testing.runner.untrusted import name_everything
from npattn.testing.settings import Settings, options
from npattn.testing.targets import spec_of
from npattn.testing.worker.connect import connect
from npattn.testing.worker.supervisor import Limits, Spare

OF_WORKER = ("framework", "backward", "layout", "like", "rename", "features", "quantized")
"""Settings of how a candidate is called."""
NOT_HERE = (
    *("budget", "goes_on", "journal", "resume", "isolate", "processes", "progress", "sweep"),
    *("timeout", "reference", "inputs", "options"),
)
"""Settings of `check` that a session has its own answer to."""
LAST = 0.3
"""Share of the time that is kept for the problem that is being asked, and for the causes."""


class Session:
    """Judge candidates one after another, each within a time and in a process of its own.

    Parameters
    ----------
    seconds : float, default 10
        Time for a candidate, its start included. A required rule that was not reached by then
        leaves it without a verdict; what was found wrong by then counts.
    untrusted : bool, default True
        Confine each candidate, as ``npattn check --untrusted``; False for your own code.
    unconfined : bool, default False
        With `untrusted`, where the system cannot confine a process: only hide npattn.
    memory : int, optional
        Bytes that a candidate may have resident.
    **settings
        Of `npattn.testing.check`: dtypes, sizes, conventions, features, like, must, examples, ….
        `fail_fast` is True unless said; with `untrusted`, `strict` is too, the seed is random, and
        `must` has every option that the candidate names, and every gradient.

    Raises
    ------
    OptionError
        If a setting is unknown, or belongs to a single check.

    Examples
    --------
    >>> from npattn.testing import Session
    >>> source = '''
    ... import numpy as np
    ... def attention(q, k, v):
    ...     s = q @ k.swapaxes(-1, -2)
    ...     p = np.exp(s - s.max(-1, keepdims=True))
    ...     return p / p.sum(-1, keepdims=True) @ v
    ... '''
    >>> with Session(untrusted=False, examples=20, only=["agreement-o"]) as session:
    ...     report = session.judge(source)
    >>> report.verdict, report.causes[0].step
    ('failed', 's')
    """

    def __init__(
        self,
        *,
        seconds: float = 10.0,
        untrusted: bool = True,
        unconfined: bool = False,
        memory: int | None = None,
        **settings: Any,
    ) -> None:
        names = [name for name in options(Settings) if name not in NOT_HERE]
        for name in settings:
            if name not in names:
                raise OptionError(f"got {name}, must be a setting among {', '.join(names)}")
        if not seconds > 0:
            raise OptionError(f"seconds is {seconds!r}, must be > 0")
        self.seconds, self.memory = seconds, memory
        self.untrusted, self.unconfined = untrusted, unconfined
        self.calls = {n: settings.pop(n) for n in OF_WORKER if n in settings}
        seed = {"seed": secrets.randbits(64)} if untrusted else {}
        self.settings: dict[str, Any] = {"fail_fast": True, "strict": untrusted, **seed, **settings}
        Settings(**self.settings)  # what is not legal is an error now
        self.folder = Path(tempfile.mkdtemp(prefix="npattn-session-"))
        self.spare = Spare()

    def judge(self, candidate: str | Path, name: str | None = None) -> Report:
        """Judge one candidate.

        Parameters
        ----------
        candidate : str or path
            ``path/file.py:function``, a file with one function, or source text of several lines.
        name : str, optional
            The function in source text that has several.

        Returns
        -------
        Report
            ``report.verdict`` is "passed", "failed" or "no verdict" with ``report.reason``;
            ``report.as_dict()`` is plain data.

        Raises
        ------
        OptionError
            If the candidate cannot be imported, or cannot be called with q, k, v.
        """
        began = time.monotonic()
        if "\n" not in str(candidate):
            return self._check(_name(str(candidate), name), began)
        # Always the same file: a process that waits was started for it, and has not read it.
        try:
            self.folder.joinpath("candidate.py").write_text(str(candidate), "utf-8")
            return self._check(_name(str(self.folder / "candidate.py"), name), began, waits=True)
        finally:
            for path in self.folder.iterdir():  # compiled files too: the next may be as long
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _check(self, target: str, began: float, waits: bool = False) -> Report:
        """Judge a target in a worker that ends with the verdict, while another one starts."""
        deadline = began + self.seconds
        implementation = connect(
            target,
            limits=Limits(self.seconds, self.memory),
            untrusted=self.untrusted,
            unconfined=self.unconfined,
            spare=self.spare.take(target) if waits else None,
            **self.calls,
        )

        def stop_at_deadline(*_: object) -> None:
            if time.monotonic() > deadline:
                raise KeyboardInterrupt

        settings = dict(self.settings)
        if self.untrusted and not settings.get("must"):
            settings["must"] = name_everything(implementation)
        seconds = (deadline - time.monotonic()) * (1 - LAST)
        settings |= {"budget": max(seconds, 0.01), "goes_on": False, "progress": stop_at_deadline}
        try:
            if waits:
                self.spare.start(target, implementation.worker)
            return check(implementation, **settings)
        except KeyboardInterrupt as err:
            if time.monotonic() <= deadline or not hasattr(err, "report"):  # of the user
                raise
            report: Report = err.report
            return report
        finally:
            implementation.worker.close()

    def close(self) -> None:
        """End the process that waits, and remove what the session has written."""
        self.spare.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def judge(candidate: str | Path, name: str | None = None, **settings: Any) -> Report:
    """Judge one candidate, as `Session(**settings).judge(candidate, name)` does.

    Returns
    -------
    Report

    Raises
    ------
    OptionError
        As of `Session` and of its method.
    """
    with Session(**settings) as session:
        return session.judge(candidate, name)


def _name(path: str, name: str | None) -> str:
    """Return the spec of a candidate."""
    return spec_of(path) if name is None else f"{path}:{name}"
