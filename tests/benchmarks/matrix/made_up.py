"""A made-up matrix of any size: failures with arrays that no two have in common."""

import numpy as np

from benchmarks.matrix.cells import BAD
from npattn.testing.levels import LEVELS

STATUSES = ("passed", "passed", "passed", "failed", "not applicable", "suspect", *BAD)
CAUSES = (
    "causal and windows are aligned top-left: query t sees keys s ≤ t",
    "hidden positions are multiplied by 0 instead of left out: 0 · NaN is NaN",
    "dk is not multiplied by the scale",
)
HOSTILE = "</script><script>throw 'run'</script><b>&\x1b[2J\ud800"


def make_matrix(targets=5, rules=13, dtypes=("float64", "float32"), share=0.3, seed=0):
    """Return the JSON of a matrix; `share` of the cells of its reports are failures."""
    rng = np.random.default_rng(seed)
    columns = [_rule(i, level) for i, level in zip(range(rules), _levels(), strict=False)]
    names = [f"project{i // 3}.target{i}" for i in range(targets)]
    runs = [_run(rng, name, dtype, columns, share) for name in names for dtype in dtypes]
    for run, state in zip(runs[2::7], ("not run", "crashed", "timed out"), strict=False):
        run |= {"state": state, "why": f"needs CUDA {HOSTILE}", "report": None}
    return {
        "matrix": 1,
        "npattn": "0.1.0",
        "made": "2026-11-23",
        "settings": {"examples": 20, "seed": 0},
        "rules": columns,
        "targets": [_target(i, name) for i, name in enumerate(names)],
        "runs": runs,
    }


def _levels():
    while True:
        yield from LEVELS


def _rule(i, level):
    return {"name": f"rule-number-{i}", "level": level, "section": "8, 13", "about": f"Rule {i}."}


def _target(i, name):
    words = ("leaves hidden keys out of the softmax", "adds −1e9 to hidden scores")[i % 2]
    return {
        "name": name,
        "project": name.partition(".")[0],
        "about": f"Implementation number {i}",
        "versions": {"numpy": "2.4.6", f"package{i // 3}": f"1.{20 + i}"},
        "device": "cpu",
        "words": f"{words}; a query that sees nothing gives NaN; causal from the top left",
    }


def _run(rng, name, dtype, rules, share):
    outcomes = [_outcome(rng, rule, dtype, rng.random() < share) for rule in rules]
    failed = [o for o in outcomes if o["status"] in BAD]
    causes = [_cause(text, [o for o in failed if o["diagnosis"] == text]) for text in CAUSES]
    report = {
        "passed": not failed,
        "settings": {"seed": 0, "examples": 20},
        "untested": ["options it does not have: window, softcap, sinks"],
        "refused": [f"{dtype}: K < H: refused (raised ValueError: operands …)"],
        "not_promised": {rules[0]["name"]: "its documentation says so"},
        "expected": {rules[-1]["name"]: "callers have none"},
        "causes": [cause for cause in causes if cause["rules"]],
        "outcomes": outcomes,
    }
    run = {"target": name, "dtype": dtype, "state": "done", "why": "", "seconds": 17.0}
    return run | {"report": report}


def _cause(text, outcomes):
    return {
        "text": text,
        "name": "causal=top_left",
        "step": "visible",
        "where": "T ≠ S and causal",
        "amount": "",
        "rules": [f"{o['rule']}[{o['dtype']}]" for o in outcomes],
        "confirmed": 20,
        "passes_when": "fails only where T ≠ S",
        "conventions": {"causal": "top_left"},
    }


def _outcome(rng, rule, dtype, broken):
    good = ("passed", "passed", "passed", "not applicable", "suspect")
    status = str(rng.choice(BAD[:2] if broken else good))
    failed, tried = status in BAD, status != "not applicable"
    message = "refuses K < H" if rng.random() < 0.5 else "has no sinks"
    return {
        "rule": rule["name"],
        "semantics": rule["section"],
        "about": rule["about"],
        "level": rule["level"],
        "dtype": dtype,
        "status": status,
        "counts": failed and rule["level"] in ("values", "edges", "conduct"),
        "worst": float(10 ** rng.uniform(0, 9)) if failed else float(rng.random()) * tried,
        "examples": 20 * tried,
        "message": f"o[0]: got 1 {HOSTILE}" * failed if tried else message,
        "diagnosis": str(rng.choice(CAUSES)) if failed else None,
        "comparisons": [_comparison(rng, name) for name in ("o", "dq")] if failed else [],
        "problem": _problem(dtype) if failed else None,
        "recipe": {"line": "Recipe(lead=(2,), H=3, T=5, seed=7)", "changed": False, "fields": None}
        if failed
        else None,
        "script": _script(rng) if failed else "",
    }


def _comparison(rng, name):
    got, want = (rng.standard_normal((5, 3)).round(8).tolist() for _ in range(2))
    excerpt = {"lead": [1, 0], "row": 0, "column": 0, "got": got, "want": want}
    excerpt["allowed"] = np.full((5, 3), 1.3e-6).tolist()
    return {"name": name, "index": [1, 0, 0, 0], "wrong": 7, "size": 30, "excerpt": excerpt}


def _problem(dtype):
    shapes = {"q": [2, 1, 5, 3], "k": [2, 1, 7, 3], "v": [2, 1, 7, 2]}
    return {"shapes": shapes, "dtypes": dict.fromkeys(shapes, dtype), "options": {"causal": True}}


def _script(rng):
    """Return what a script holds: lines that are the same in all, and arrays that are not."""
    arrays = [rng.standard_normal(n).astype(np.float32).tolist() for n in (30, 42, 28)]
    lines = [
        f"{n} = np.array({x}, 'float32').reshape(2, 1, -1)"
        for n, x in zip("qkv", arrays, strict=True)
    ]
    same = [f"assert got[{i}] == want[{i}], 'the same line in every script'" for i in range(23)]
    return "\n".join(["import numpy as np", *lines, *same])
