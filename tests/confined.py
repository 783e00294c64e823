"""How tests judge untrusted code: confined where that can be had, else said to be unconfined."""

import subprocess
from functools import cache

from npattn.testing.worker.confinement import WAYS, Way

PLAIN = {
    "bwrap": "bwrap --unshare-user --unshare-pid --unshare-net --bind / / --proc /proc true",
    "namespaces": "unshare --user --map-root-user --pid --fork --net --mount --mount-proc true",
}
"""Commands that other programs confine: what works by them must work by npattn too."""


@cache
def why_not(way: Way) -> str | None:
    """Return why nothing is confined in this way here; None if it can be."""
    try:
        done = subprocess.run(PLAIN[way].split(), capture_output=True, text=True)
    except OSError as err:
        return str(err)
    return done.stderr.strip() if done.returncode else None


def _works() -> bool:
    return any(why_not(way) is None for way in WAYS)


def untrusted() -> dict[str, bool]:
    """Return arguments of `connect`."""
    return {"untrusted": True, "unconfined": not _works()}


def flags() -> list[str]:
    """Return flags of `npattn check`."""
    return ["--untrusted", *([] if _works() else ["--unconfined"])]
