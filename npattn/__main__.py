"""``python -m npattn`` and ``npattn``: the command line."""

import os
import sys

from npattn.cli import cli


def main() -> None:
    """Run the command line; exit code 0 passed, 1 failed, 2 wrong usage or nothing tested."""
    if "--untrusted" in sys.argv:  # neither this process nor those it starts import from there
        here = os.getcwd()
        sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
        os.environ["PYTHONSAFEPATH"] = "1"
    cli(prog_name="npattn")


if __name__ == "__main__":
    main()
