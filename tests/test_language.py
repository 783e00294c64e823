"""The English of the code: names of functions, and how docstrings open."""

import ast
import re
from pathlib import Path

import pytest

import npattn

pytestmark = pytest.mark.unmeasured  # other tests run these lines

ROOT = Path(npattn.__file__).parent
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

# A bare participle says neither what a function does nor what it returns.
IRREGULAR = (
    "asked bought bound brought built chosen done drawn fed felt found given gone got gotten heard "
    "held hidden kept known laid led left lent lost made meant met moved paid run seen sent shown "
    "sold spent spoken struck taken taught thought thrown told understood won written said"
)
PARTICIPLE = re.compile(rf"_*({'|'.join(IRREGULAR.split())}|[a-z]+ed)$")
VERBS = {"bound", "embed", "feed", "left", "need", "run", "seed", "speed"}  # or nouns
# Names that users know: states of a report, presets of Rounding, masks of the literature,
# `unshared` of a module.
PUBLIC = {"chunked", "dilated", "failed", "fused", "paged", "passed", "strided", "tested"}
PUBLIC |= {"got", "judged", "undeclared", "unjudged", "unshared"}
OPENINGS = re.compile(r"(What|Of|Whether|Where|Which|That)\b")
MOST = 0.03


def nodes(source, kinds):
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def participles(source):
    names = [node.name for node in nodes(source, FUNCTION)]
    return [n for n in names if PARTICIPLE.match(n) and n.strip("_") not in VERBS | PUBLIC]


def docstrings(source):
    found = (ast.get_docstring(n) for n in nodes(source, FUNCTION | ast.ClassDef | ast.Module))
    return [text for text in found if text]


def sources():
    return {path.relative_to(ROOT): path.read_text() for path in ROOT.rglob("*.py")}


@pytest.mark.thorough
def test_no_function_is_named_by_a_bare_participle():
    named = {str(path): participles(source) for path, source in sources().items()}
    assert {path: names for path, names in named.items() if names} == {}


@pytest.mark.thorough
def test_docstrings_open_with_a_verb_or_a_noun():
    every = [text for source in sources().values() for text in docstrings(source)]
    odd = [text.splitlines()[0] for text in every if OPENINGS.match(text)]
    assert len(odd) <= MOST * len(every), "\n".join(odd)


def test_a_participle_and_an_opening_are_seen():
    source = 'def _told(x):\n    """What x says."""\n\n\ndef paged():\n    """Read pages."""'
    assert participles(source) == ["_told"]
    assert participles("async def drawn(): pass\ndef compared(): pass") == ["drawn", "compared"]
    assert [bool(OPENINGS.match(text)) for text in docstrings(source)] == [True, False]
