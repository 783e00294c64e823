"""Imports inside npattn/torch: no circle, delayed imports included."""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.test_layers import ROOT, imported


def graph(sources):
    """Module → modules among `sources` that it imports anywhere; a package is its __init__."""

    def module(name):
        while name and name not in sources:
            name = name.rpartition(".")[0]
        return name

    arrows = {}
    for name, (file, source) in sources.items():
        arrows[name] = {module(other) for other in imported(file, source)} - {name, ""}
    return arrows


def modules_of(folder):
    sources = {}
    for path in (ROOT / folder).rglob("*.py"):
        file = path.relative_to(ROOT).as_posix()
        parts = [p for p in Path(file).with_suffix("").parts if p != "__init__"]
        sources[".".join(["npattn", *parts])] = (file, path.read_text())
    # Every module imports the package above it; only what is below counts.
    sources.pop(f"npattn.{folder}")
    return sources


def test_no_circle():
    TopologicalSorter(graph(modules_of("torch"))).prepare()


def test_a_delayed_circle_is_seen():
    sources = {
        "npattn.torch.a": ("torch/a.py", "def f():\n    from npattn.torch import b"),
        "npattn.torch.b": ("torch/b.py", "import npattn.torch.a"),
    }
    with pytest.raises(CycleError):
        TopologicalSorter(graph(sources)).prepare()
