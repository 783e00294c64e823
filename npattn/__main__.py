"""``python -m npattn`` and ``npattn``: the command line."""

from __future__ import annotations

from npattn.cli import cli


def main() -> None:
    """Run the command line; exit code 0 passed, 1 failed, 2 wrong usage or nothing tested."""
    cli(prog_name="npattn")


if __name__ == "__main__":
    main()
