"""Wheels for a machine without a network: fetch them here, install them there.

python -m benchmarks.matrix.carry fetch                  # into .wheels/, which git ignores
python benchmarks/matrix/carry.py install site           # there: pip, without a network
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".wheels"
MOST = 64 * 2**20
"""Bytes of all wheels: what travels to a machine that is lent."""
PYTHON = "3.12"
GLIBC = (17, 24, 27, 28, 31, 34, 35, 39)
"""Minor versions N of the platforms manylinux_2_N, of which pip matches only those it is told."""
WHEELS: dict[str, Sequence[str]] = {
    "fla": ("fla-core==0.6.0",),
    "sageattention": ("sageattention==1.0.6",),
    "flash_attn_triton": ("flash-attn-triton==0.1.1",),
    "jvp_flash_attention": ("jvp-flash-attention==0.14.0",),
    "flag_gems": ("flag-gems==5.0.2", "sqlalchemy==2.0.48"),
    "flashinfer": ("flashinfer-python==0.5.3", "apache-tvm-ffi==0.1.15.post2"),
    "nvidia-cudnn-frontend": ("nvidia-cudnn-frontend==1.32.0",),
    "xformers": ("xformers==0.0.35",),
}
"""Packages by project, in the versions that were fetched last; what else they need is there."""
SHADOWS = ("flash_attn",)
"""Packages that flash-attn-triton brings beside its own: they would pass for flash-attn."""


def fetch(projects: Sequence[str] = ()) -> int:
    """Download the wheels of some projects, or of all; return their bytes.

    Raises SystemExit if pip cannot get one, or all are too large.
    """
    platforms = [f"manylinux_2_{n}_x86_64" for n in GLIBC]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    options = ["--no-deps", "--only-binary=:all:", "--pre", "--python-version", PYTHON]
    options += ["--implementation", "cp", *(f"--platform={name}" for name in platforms)]
    wanted = [one for name in projects or WHEELS for one in WHEELS[name]]
    FOLDER.mkdir(exist_ok=True)
    run("download", *options, "--dest", str(FOLDER), *wanted)
    sizes = {path.name: path.stat().st_size for path in FOLDER.glob("*.whl")}
    for name, size in sorted(sizes.items()):
        print(f"{size / 2**20:8.2f} MiB  {name}")
    total = sum(sizes.values())
    print(f"{total / 2**20:8.2f} MiB")
    if total > MOST:
        sys.exit(f"the wheels are larger than {MOST / 2**20:g} MiB: name fewer of {[*WHEELS]}")
    return total


def install(target: str) -> None:
    """Install the wheels that were carried into a folder, each by itself, without a network.

    A wheel that does not fit this Python is said, and left out.
    """
    for wheel in sorted(FOLDER.glob("*.whl")):
        options = ["--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", target]
        try:
            run("install", "--quiet", *options, str(wheel))
        except SystemExit as err:
            print(f"{wheel.name} is left out: {err}", file=sys.stderr)
    for name in SHADOWS:
        shutil.rmtree(Path(target, name), ignore_errors=True)


def run(command: str, *arguments: str) -> None:
    """Run pip.

    Raises SystemExit if it fails.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run([*pip, command, "--no-cache-dir", *arguments], check=False)
    if done.returncode != 0:
        sys.exit(f"pip {command} failed")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fetch", *projects]:
            fetch(projects)
        case ["install", target]:
            install(target)
        case _:
            sys.exit(__doc__)
