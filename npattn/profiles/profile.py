"""Profile of a system: its conventions, signature, layout, refusals and promises."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.problem.meanings import MEANINGS


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Meaning of a system's words, as its documentation or source of one version says.

    Attributes
    ----------
    name : str
        "onnx" is the newest version, "onnx@1.22" another.
    version : str
        Version of which all this was run or read.
    about : str
        What it is, in a line.
    conventions : Conventions
    signature : mapping
        Names of its parameters → what they mean here, one of
        `npattn.problem.meanings.MEANINGS`, or "". Those, and the others, keep their default.
    quantized : mapping
        Formats of 8 bits that it takes → names of its parameters for factors → what they mean;
        they keep their default where no format is asked.
    layout : {"BHTD", "BTHD"}
        Axes of its q, k, v and o.
    refuses : tuple of str
        What its documentation says that it does not take, a line each: names, a colon, words. A
        name is an option ("softcap"), options that are not taken together ("mask+causal") or
        structure that the judge probes ("K < H"), which is then not asked; others are words alone.
    promises : mapping
        Rule that it takes back → its documentation that says so (page, version). Every other rule
        of a required level is promised.

    Raises
    ------
    OptionError
        If the signature, or that of a format, has a meaning that is none of
        `npattn.problem.meanings.MEANINGS`.
    """

    name: str
    version: str
    about: str
    conventions: Conventions = field(default_factory=Conventions)
    signature: Mapping[str, str] = field(default_factory=dict)
    quantized: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    layout: Literal["BHTD", "BTHD"] = "BHTD"
    refuses: tuple[str, ...] = ()
    promises: Mapping[str, str] = field(default_factory=dict)

    @property
    def refused_names(self) -> frozenset[str]:
        """The names in `refuses`: options, options with "+" between them, or structure."""
        named = (line.split(": ")[0].split(", ") for line in self.refuses)
        return frozenset(name for names in named for name in names)

    def signature_in(self, quantized: str | None) -> Mapping[str, str]:
        """Return the signature, with the factors of a format of 8 bits if one is asked."""
        if quantized is None or not self.quantized:
            return self.signature
        if quantized not in self.quantized:
            raise OptionError(
                f"quantized is {quantized!r}, must be {', '.join(self.quantized)}: {self.name} "
                "takes no other format of 8 bits"
            )
        return {**self.signature, **self.quantized[quantized]}

    def __post_init__(self) -> None:
        every = (self.signature, *self.quantized.values())
        for theirs, ours in (pair for names in every for pair in names.items()):
            if ours and ours not in MEANINGS:
                raise OptionError(
                    f"signature of {self.name} reads {theirs} as {ours!r}, must be one of "
                    f"{', '.join(MEANINGS)}"
                )
