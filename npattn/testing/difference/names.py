"""Decide whether two names stand for profiles or for implementations."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from npattn.errors import MissingExtraError, OptionError
from npattn.profiles import PROFILES, Profile
from npattn.testing.targets import TARGETS


def choose_kind(a: str, b: str, profiles: bool) -> tuple[str, tuple[str, ...]]:
    """Choose what two names are compared as: "profiles" or "implementations".

    The latter if both run here, unless `profiles` asks for the other. Notes say why, where a name
    stands for both.
    """
    names = (a, b)
    for name in names:
        _check_name(name)
    if profiles:
        for name in names:
            profile_of(name)
        return "profiles", ()
    if all(map(_runs_here, names)):
        both = [n for n in names if n in PROFILES]
        note = f"{' and '.join(both)} are run; --profiles compares their profiles."
        return "implementations", (note,) if len(both) == 2 else ()
    if all(name in PROFILES for name in names):
        return "profiles", tuple(_reasons(*names))
    for name in names:
        if name in TARGETS and name not in PROFILES and not _runs_here(name):
            raise MissingExtraError(f"{name} needs {TARGETS[name].lacks}")
    alone, other = sorted(names, key=_runs_here)
    more = f"; --profiles compares it with the profile of {other}" if other in TARGETS else ""
    raise OptionError(
        f"{alone} is a profile here, and {other} an implementation: "
        f"npattn check {other} --like {alone} judges it by that profile{more}"
    )


def profile_of(name: str) -> Profile:
    """Return the profile of this name, or that of the target."""
    if name in PROFILES:
        return PROFILES[name]
    if name in TARGETS:
        return TARGETS[name].profile
    raise OptionError(f"{name} has no profile, must be one of {', '.join(PROFILES)}")


def _check_name(name: str) -> None:
    if name in PROFILES or name in TARGETS or ":" in name.strip(":"):
        return
    near = difflib.get_close_matches(name, [*PROFILES, *TARGETS], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise OptionError(
        f"{name!r} is no name of a profile ({', '.join(PROFILES)}), none that npattn list shows, "
        f"and not module:function or path/file.py:function{hint}"
    )


def _runs_here(name: str) -> bool:
    return TARGETS[name].runs_here if name in TARGETS else name not in PROFILES


def _reasons(*names: str) -> Iterator[str]:
    """Say why two names that are profiles are not taken as implementations."""
    alone = [n for n in names if n not in TARGETS]
    lacking = [n for n in names if n in TARGETS and not _runs_here(n)]
    yield from (f"{n} does not run here: it needs {TARGETS[n].lacks}." for n in lacking)
    for name in {*names} - {*alone, *lacking}:
        why = f", for {alone[0]} is a profile alone." if alone else " too."
        yield f"{name} is taken as a profile{why}"
