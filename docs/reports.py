"""Reports of the bugs in docs/findings.md, ready to send to the projects that have them.

``python docs/reports.py`` names the pages that are not current, ``--write`` writes docs/reports/.
A report is the entry of its finding without the names of rules, so that neither can drift.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
PAGE = DOCS / "findings.md"
REPORTS = DOCS / "reports"
TRACKERS = {
    "Flax": "google/flax",
    "Haiku": "google-deepmind/dm-haiku",
    "JAX": "jax-ml/jax",
    "Keras": "keras-team/keras",
    "MLX": "ml-explore/mlx",
    "ONNX": "onnx/onnx",
    "ONNX Runtime": "microsoft/onnxruntime",
    "OpenVINO": "openvinotoolkit/openvino",
    "PaddlePaddle": "PaddlePaddle/Paddle",
    "PyTorch": "pytorch/pytorch",
    "Transformers": "huggingface/transformers",
    "fla-core": "fla-org/flash-linear-attention",
    "neuralnetworknumpy": "Sendy45/NeuralNetworkFromScratch",
    "numpy-ml": "ddbourgin/numpy-ml",
    "sageattention": "thu-ml/SageAttention",
    "tinygrad": "tinygrad/tinygrad",
    "xllamacpp": "ggml-org/llama.cpp",
}
"""System → repository on GitHub whose tracker takes its reports."""

ASIDE = re.compile(r"\s*\([^()]*\b(?:npattn|judge|profile|rules?)\b[^()]*\)")
"""A sentence in parentheses that speaks of npattn, which a report leaves out."""

HEAD = "| kind | versions | rules | level | report |\n|---|---|---|---|---|\n"
ENTRY = re.compile(
    r"\n### (?P<title>[^\n]+)\n\n"
    + re.escape(HEAD)
    + r"\| (?P<kind>\w+) \| (?P<versions>[^|\n]+) \| "
    r"(?P<rules>[^|\n]+) \| (?P<level>[^|\n]+) \| (?P<report>[^|\n]+) \|\n\n(?P<text>[^#]+?)\n\n"
    r"```python\n(?P<script>.*?)```\n```text\n(?P<printed>.*?)```\n"
    r"```python proof\n(?P<proof>.*?)```\n",
    re.S,
)


class Finding(NamedTuple):
    """One entry of docs/findings.md."""

    system: str
    version: str
    title: str
    kind: str
    versions: str
    rules: str
    level: str
    report: str
    text: str
    script: str
    printed: str
    proof: str

    @property
    def slug(self) -> str:
        """Name of the report, without its suffix; empty where there is none."""
        name = re.fullmatch(r"\[([\w-]+)\]\(reports/\1\.md\)", self.report)
        return name[1] if name else ""


def preamble() -> str:
    """Lines that come before each proof."""
    found = re.search(r"^```python preamble\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return found[1] if found else ""


def findings() -> list[Finding]:
    """Entries of the page that have the form, in its order."""
    sections = re.findall(
        r"^## ([A-Za-z][\w -]*?) (\d+\.\d+),.*?\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S
    )
    return [
        Finding(system, version, **entry.groupdict())
        for system, version, text in sections
        for entry in ENTRY.finditer(text)
    ]


BODY = """# {title}

Report for {tracker}, made from [the finding](../findings.md) of that name: title and body follow.

**Title:** {system}: {title}

## What happens

{text}

## To reproduce

```python
{script}```

This prints, on a CPU,

```text
{printed}```

## What is expected

The numbers after "must be". They were computed apart from {system}, one query at a time in Python
floats, or with 50 digits: weights are the softmax over the visible keys alone, and an output is the
sum of their values times these weights. A key that a mask, causal or a bias of −inf hides is in no
sum.

## Versions

{versions}, on Linux x86-64.
"""


def report(finding: Finding) -> str:
    """Page of a report: where it goes, its title, and its body."""
    tracker, text = TRACKERS[finding.system], ASIDE.sub("", finding.text)
    return BODY.format(**finding._replace(text=text)._asdict(), tracker=tracker)


def index(bugs: list[Finding]) -> str:
    """Page that lists the reports."""
    rows = [
        f"| {bug.system} | [{bug.title}]({bug.slug}.md) | {TRACKERS[bug.system]} |" for bug in bugs
    ]
    return "\n".join(
        [
            "# Reports",
            "",
            "A report for each bug of [the findings](../findings.md): title, body and script, "
            "ready to send. `python docs/reports.py --write` makes them from that page.",
            "",
            "| system | report | tracker |",
            "|---|---|---|",
            *rows,
            "",
            "```{toctree}",
            ":hidden:",
            "",
            *(bug.slug for bug in bugs),
            "```",
            "",
        ]
    )


def pages() -> dict[str, str]:
    """Name of a file in docs/reports/ → its text."""
    bugs = [finding for finding in findings() if finding.kind == "bug"]
    return {f"{bug.slug}.md": report(bug) for bug in bugs} | {"index.md": index(bugs)}


def stale() -> list[str]:
    """Names of the files in docs/reports/ that are missing, changed, or no report of a bug."""
    wanted = pages()
    present = {path.name: path.read_text() for path in REPORTS.glob("*")}
    return sorted(n for n in wanted | present if wanted.get(n) != present.get(n))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/reports/")
    if not parser.parse_args().write:
        print(*stale(), sep="\n")
        return
    REPORTS.mkdir(exist_ok=True)
    wanted = pages()
    for name in stale():
        if name in wanted:
            (REPORTS / name).write_text(wanted[name])
        else:
            (REPORTS / name).unlink()


if __name__ == "__main__":
    main()
