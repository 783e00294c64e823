"""Profile of a system: its conventions, signature, layout, refusals and promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from npattn.conventions import Conventions

__all__ = ["Profile"]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a system means, as its documentation or source of one version says.

    Attributes
    ----------
    name : str
        "torch.sdpa" is the newest version, "torch.sdpa@2.4" another.
    version : str
        Version of which all this was run or read.
    about : str
        What it is, in a line.
    conventions : Conventions
    signature : mapping
        Names of its parameters → what they mean here: an option, or "mask or bias".
    layout : {"BHTD", "BTHD"}
        Axes of its q, k, v and o.
    refuses : tuple of str
        What its documentation says that it does not take, a line each.
    promises : mapping
        Rule that it takes back → its documentation that says so (page, version). Every other rule
        of a required level is promised.
    """

    name: str
    version: str
    about: str
    conventions: Conventions = field(default_factory=Conventions)
    signature: Mapping[str, str] = field(default_factory=dict)
    layout: Literal["BHTD", "BTHD"] = "BHTD"
    refuses: tuple[str, ...] = ()
    promises: Mapping[str, str] = field(default_factory=dict)
