"""Decide whether two names stand for profiles or for implementations."""

from __future__ import annotations

import difflib
from typing import Any

from npattn.errors import MissingExtraError, OptionError
from npattn.profiles import PROFILES, Profile
from npattn.testing.targets import TARGETS


def choose_kind(a: Any, b: Any, profiles: bool) -> tuple[str, tuple[str, ...]]:
    """Choose what two names or objects are compared as: "profiles" or "implementations".

    Names are the latter if both run here, unless `profiles` asks for the other. Notes say why,
    where a name stands for both.
    """
    if isinstance(a, str) and isinstance(b, str):
        return _choose_by_name(a, b, profiles)
    are_profiles = [isinstance(x, Profile) or (isinstance(x, str) and profiles) for x in (a, b)]
    if all(are_profiles):
        return "profiles", ()
    if profiles or any(are_profiles):
        raise OptionError("got a profile and an implementation: check(f, like=...) judges it by it")
    return "implementations", ()


def _choose_by_name(a: str, b: str, profiles: bool) -> tuple[str, tuple[str, ...]]:
    names = (a, b)
    for name in names:
        (profile_of if profiles else _check_name)(name)
    if profiles:
        return "profiles", ()
    if all(map(_runs_here, names)):
        both = all(name in PROFILES for name in names)
        note = f"{a} and {b} are run; --profiles compares their profiles."
        return "implementations", (note,) if both else ()
    if all(name in PROFILES for name in names):
        lacking = [n for n in names if not _runs_here(n)]
        why = "; ".join(
            f"{n} needs {TARGETS[n].lacks}" if n in TARGETS else f"{n} is a profile alone"
            for n in lacking
        )
        is_run = any(name in TARGETS for name in names)
        return "profiles", (f"Their profiles are compared, since {why}.",) if is_run else ()
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
