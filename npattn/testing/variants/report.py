"""Report on an implementation of a variant: worst ratios, and the smallest failing problem."""

from __future__ import annotations

from dataclasses import dataclass, field

from npattn.testing.comparison import Comparison, short
from npattn.testing.reference.search import write_replay
from npattn.testing.variants.case import Case


@dataclass(frozen=True, eq=False)
class VariantReport:
    """Result of `check_variant`.

    Attributes
    ----------
    name, variant, dtype : str
    tried : int
        Number of problems, before one failed.
    seed : int
    worst : dict of str → float
        Largest error / tolerance of each result, over problems that passed.
    case : Case or None
        The smallest failing problem.
    comparisons : tuple of Comparison
        Its results.
    error : str
        The exception that the implementation raised there, if it did.
    untested : tuple of str
        Results and options that were not tested, with the reason.
    """

    name: str
    variant: str
    dtype: str
    tried: int
    seed: int
    worst: dict[str, float]
    case: Case | None
    comparisons: tuple[Comparison, ...]
    error: str
    untested: tuple[str, ...]
    call: str = field(repr=False)
    imports: tuple[str, ...] = field(repr=False)

    @property
    def passed(self) -> bool:
        """True if no problem failed."""
        return self.case is None

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the results that are out of tolerance in the smallest failing problem."""
        return tuple(c.name for c in self.comparisons if not c.passed)

    def __str__(self) -> str:
        head = f"{self.name} as {self.variant} attention, {self.dtype}: {self.tried} problems, "
        lines = [head + f"seed {self.seed}", "", "result             largest error / tolerance"]
        ratios = {n: short(x) for n, x in self.worst.items()} | dict.fromkeys(self.failed, "failed")
        lines += [f"{name:<18} {ratio}" for name, ratio in ratios.items()]
        lines += [f"not tested: {text}" for text in self.untested]
        if self.case is not None:
            lines += ["", f"smallest failing problem: {self.case!r}"]
            lines += [f"  {self.error}"] if self.error else []
            lines += [f"  {c}" for c in self.comparisons if not c.passed]
        return "\n".join(lines)

    def script(self) -> str:
        """Return a Python file that shows the failure; empty if none failed."""
        if self.case is None:
            return ""
        what = self.error or "\n".join(str(c) for c in self.comparisons if not c.passed)
        imports = "\n".join(self.imports)
        names = f"{type(self.case).__name__}, replay"
        return write_replay(
            f"{self.name} is wrong as {self.variant} attention.",
            what,
            f"from npattn.testing.variants import {names}\n\n{imports}\n",
            self.case,
            self.call,
        )
