"""``python -m npattn`` and ``npattn``: the command line, or which extra it needs."""

from __future__ import annotations

import sys

from npattn.errors import MissingExtraError


def main() -> None:
    """Run the command line; exit code 0 passed, 1 failed, 2 wrong usage or nothing tested."""
    try:
        from npattn.cli import cli
    except MissingExtraError as err:
        print(f"npattn: {err}", file=sys.stderr)
        sys.exit(2)
    cli(prog_name="npattn")


if __name__ == "__main__":
    main()
