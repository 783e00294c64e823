"""Train a small attention classifier: python docs/examples/train --help."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # this folder is a package, not a place of modules
    from train.command import train_command

    train_command(prog_name="python docs/examples/train")
