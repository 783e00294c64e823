"""Any machine: the fast tests on each Python and NumPy, and the packages without the tree.

``nox -f .ci/noxfile.py`` runs all; a Python that is not there is skipped, and said. ``-s package``
runs one.
"""

import tempfile
from pathlib import Path

import nox

nox.options.error_on_missing_interpreters = False

ROOT = Path(__file__).parents[1]
PINS = "constraints.txt"


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
@nox.parametrize("numpy", ["newest", "2.0"])
def tests(session: nox.Session, numpy: str) -> None:
    """Run the fast tests."""
    if numpy == "2.0" and session.python in ("3.13", "3.14"):
        session.skip("NumPy 2.0 has no wheel for it")
    session.chdir(ROOT)
    if numpy == "newest" and session.python == "3.11":
        session.install("-c", PINS, "-e", ".[all]")
    else:  # the pins belong to one Python and one NumPy
        chosen = "numpy" if numpy == "newest" else f"numpy=={numpy}.*"
        session.install("-e", ".[all]", chosen, "torch==2.13.0")
    session.run("pytest", "-n", "2", *session.posargs)


@nox.session
def package(session: nox.Session) -> None:
    """Build both packages, and judge with each in a folder that has nothing of the tree."""
    session.chdir(ROOT)
    session.install("build")
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as empty:
        session.run("python", "-m", "build", "--outdir", made, ".")
        files = sorted(Path(made).iterdir())
        assert [file.suffix for file in files] == [".whl", ".gz"], files
        for file in files:
            session.chdir(empty)
            session.install("--force-reinstall", "--no-deps", str(file))
            session.install(str(file))  # with what it needs
            session.run("npattn", "--version")
            session.run("npattn", "check", "--examples", "5")
            session.run("npattn", "check", "--examples", "5", "--html", "page.html")
            session.chdir(ROOT)
