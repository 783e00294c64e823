"""The rules of docs/semantics.md as properties that an implementation has, or has not.

Each property is a function of a `Trial` and a `Recipe`; it raises `Violation` where the rule is
broken, and returns the largest error / allowed error that it saw (None: the recipe had nothing to
show). Where it can, it needs no reference beside the rule itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npattn.api import evaluate
from npattn.problem import Array, Problem, finfo
from npattn.testing.compare import Comparison, compare_arrays
from npattn.testing.recipe import Cotangents, Recipe
from npattn.testing.tolerance import bounds
from npattn.testing.trial import Trial, Violation

__all__ = ["PROPERTIES", "Property"]

HIDES = ("mask", "causal", "window")


Check = Callable[[Trial, Recipe], "float | None"]


@dataclass(frozen=True)
class Property:
    """A rule, what it needs, and its check.

    Attributes
    ----------
    rule : str
        What ``--only`` and reports call it.
    section : str
        Its numbers in docs/semantics.md.
    check : callable
        Its docstring states the rule, why it holds, and the bugs that break it.
    unless : callable
        Trial → why it does not apply, or None.
    draw : callable
        Trial → arguments of `Pools`.
    alters : bool
        It alters a problem and compares with the oracle: where the unaltered one is wrong too,
        that is the business of another rule.
    """

    rule: str
    section: str
    check: Check
    unless: Callable[[Trial], str | None] = lambda trial: None
    draw: Callable[[Trial], dict[str, Any]] = lambda trial: {}
    alters: bool = False

    @property
    def about(self) -> str:
        """The rule in a line."""
        return (self.check.__doc__ or "").strip().splitlines()[0]


PROPERTIES: dict[str, Property] = {}
"""Every property, by rule, in the order in which reports list them."""


def rule(
    name: str,
    section: str,
    *,
    unless: Callable[[Trial], str | None] = lambda trial: None,
    draw: Callable[[Trial], dict[str, Any]] = lambda trial: {},
    alters: bool = False,
) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        PROPERTIES[name] = Property(name, section, check, unless, draw, alters)
        return check

    return register


def _no_gradients(trial: Trial) -> str | None:
    return None if trial.gradients else "no backward"


def _no_lse(trial: Trial) -> str | None:
    return None if trial.implementation.returns_lse else "returns no lse"


def _nothing_hides(trial: Trial) -> str | None:
    hides = any(name in trial.space.features for name in HIDES)
    return None if hides else "has no mask, causal or window"


def _fills(trial: Trial) -> str | None:
    filled = trial.conventions.hidden_fill is not None
    return "hidden_fill lets hidden keys matter" if filled else None


def _first(*reasons: Callable[[Trial], str | None]) -> Callable[[Trial], str | None]:
    return lambda trial: next((r for r in (reason(trial) for reason in reasons) if r), None)


def _force_hiding(trial: Trial) -> dict[str, Any]:
    """Options of `recipes` with which something is hidden."""
    features = trial.space.features
    if "mask" in features:
        return {"force": {"mask": ("full", "padding", "left padding", "first tile", "matrix")}}
    if "causal" in features:
        return {"force": {"causal": True}}
    return {"force": {"window": ((1, 0), (0, 1), (2, 3))}}


# --- shape, dtype, agreement ---


@rule("shape-dtype", "13, 15")
def shape_and_dtype(trial: Trial, recipe: Recipe) -> float:
    """Results have the shape of what they belong to and a dtype that loses nothing.

    o, dq, dk, dv have the dtype of q, k, v; lse, dbias, dsinks any floating dtype not narrower
    than the smaller of float32 and that of the input. A gradient is shaped as its input, also
    where the input broadcasts. Broken by a bias gradient that is not reduced, o left in float32.
    """
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    lead = (*problem.lead, *(() if problem.headless else (problem.H,)))
    shapes = {
        "o": (*lead, problem.T, problem.E),
        "lse": (*lead, problem.T),
        "weights": (*lead, problem.T, problem.S),
        **{
            f"d{n}": getattr(getattr(problem, n), "shape", None)
            for n in ("q", "k", "v", "bias", "sinks")
        },
    }
    own = problem.q.dtype
    least = min(finfo(own).bits, 32)
    for name, array in trial.results(problem, cotangents):
        if array.shape != shapes[name]:
            text = f"{name} has shape {array.shape}, want {shapes[name]}"
            raise Violation(text, problem, cotangents, "shape")
        same = name in ("o", "dq", "dk", "dv")
        real = array.dtype.kind == "f" or array.dtype.name.startswith(("bfloat", "float"))
        if same and array.dtype != own:
            text = f"{name} has dtype {array.dtype}, want {own}, that of q, k, v"
            raise Violation(text, problem, cotangents, "shape")
        if not real or finfo(array.dtype).bits < least:
            text = f"{name} has dtype {array.dtype}, want a float of {least} bits or more"
            raise Violation(text, problem, cotangents, "shape")
    return 0.0


def _agreement(name: str) -> Check:
    def check(trial: Trial, recipe: Recipe) -> float | None:
        found = trial.agreement(recipe)
        if name not in found:
            return None
        problem = trial.problem(recipe)
        return trial.check({name: found[name]}, problem, trial.cotangents(recipe, problem))

    check.__doc__ = f"""{name} agrees with the oracle, element by element.

    The allowed error is derived from the rounding model. Gradients are taken of random
    cotangents on o and lse together, so that no term can hide behind another. Broken by nearly
    everything: a wrong scale, alignment, window, head, order of softcap, bias and mask; in
    gradients by a term of the Jacobian that is missing, not reduced, or of another mask.
    """
    return check


def _lacks(feature: str, gradient: str) -> Callable[[Trial], str | None]:
    def unless(trial: Trial) -> str | None:
        if feature not in trial.space.features:
            return f"has no {feature}"
        return None if gradient in trial.gradients else f"gives no {gradient}"

    return unless


rule("agreement-o", "1-10")(_agreement("o"))
rule("agreement-lse", "8, 11", unless=_no_lse)(_agreement("lse"))
rule(
    "agreement-weights",
    "8, 9",
    unless=lambda t: None if t.implementation.returns_weights else "returns no weights",
)(_agreement("weights"))
for _name in ("dq", "dk", "dv"):
    rule(f"agreement-{_name}", "13", unless=_no_gradients)(_agreement(_name))
rule(
    "agreement-dbias",
    "4, 13",
    unless=_lacks("bias", "dbias"),
    draw=lambda t: {
        "force": {
            "bias": (
                "full",
                "matrix",
                "heads",
                "keys",
                "one for all heads",
                "one a row",
                "one for all samples",
                "alibi",
            )
        }
    },
)(_agreement("dbias"))
rule(
    "agreement-dsinks",
    "8, 13",
    unless=_lacks("sinks", "dsinks"),
    draw=lambda t: {"force": {"sinks": True}},
)(_agreement("dsinks"))


# --- the softmax ---


@rule(
    "rows-sum-to-one",
    "8",
    draw=lambda t: {"forbid": frozenset({"sinks", "dropout_mask"}), "nonempty": True},
)
def rows_sum_to_one(trial: Trial, recipe: Recipe) -> float:
    """The weights of a row sum to 1, or to 0 where the query sees nothing.

    With v = 1 everywhere, o is the sum of the weights: no reference is needed. Broken by a softmax
    over the wrong axis, a mask after the softmax, keys counted twice, padding that gets weight.
    """
    problem = trial.problem(recipe)
    problem = problem.replace(v=np.ones_like(problem.v))
    fwd = evaluate(problem, trial.conventions)
    # What an empty row gives is a convention; every other row sums to 1 exactly.
    rows = (
        trial.empty(problem)
        if trial.conventions.hidden_fill is None
        else np.zeros(fwd.lse.shape, bool)
    )
    want = np.where(rows[..., None], fwd.out, 1.0)
    allowed = bounds(problem, problem.q.dtype, trial.rounding, conventions=trial.conventions)
    got = trial.implementation.forward(problem)
    cotangents = recipe.cotangents(problem, lse=False)
    if got["o"].shape != want.shape:
        raise Violation(f"o has shape {got['o'].shape}, want {want.shape}", problem, cotangents)
    found = {"o": compare_arrays("o with v = 1", got["o"], want, allowed["o"])}
    if "weights" in got:
        total = got["weights"].astype(float).sum(-1)
        room = allowed["weights"].sum(-1) + finfo(got["weights"].dtype).eps / 2
        sums = np.where(rows, fwd.weights.sum(-1), 1.0)
        found["weights"] = compare_arrays("sum of weights", total, sums, np.asarray(room))
    return trial.check(found, problem, cotangents)


def _draw_empty(trial: Trial) -> dict[str, Any]:
    if "mask" in trial.space.features:
        return {"force": {"mask": ("empty rows", "empty head")}, "nonempty": True}
    return {"force": {"causal": True, "T": (5, 7, 17), "S": (3, 2, 5)}, "nonempty": True}


def _no_empty_rows(trial: Trial) -> str | None:
    space = trial.space
    if "mask" in space.features:
        return None
    late = trial.conventions.causal == "bottom_right" and "T > S" in space.structure
    if "causal" in space.features and late and not set(space.sizes) & {"T", "S"}:
        return None
    return "nothing empties a row"


@rule("empty-row", "8, 10, 13", unless=_no_empty_rows, draw=_draw_empty)
def empty_row(trial: Trial, recipe: Recipe) -> float | None:
    """A query that sees nothing gives what the conventions say, and passes no gradient.

    By default o = 0 and lse = −inf (with a sink: lse = sink); the cotangent of its lse must be
    ignored, whatever it is. Broken by exp(−inf − −inf), by finite fill values that average all of
    v, by a finite running maximum, by kernels that skip the row and leave memory as it was.
    """
    problem = trial.problem(recipe)
    rows = trial.empty(problem)
    if not rows.any():
        return None
    # Not 0 on empty rows, and on them alone: what other rows pass is another rule's business.
    dout, dlse = recipe.cotangents(problem, lse=trial.takes_dlse)
    dout = np.where(rows[..., None], dout, np.zeros_like(dout))
    cotangents = Cotangents(dout, None if dlse is None else np.where(rows, dlse, 0 * dlse))
    want, allowed = trial.oracle(problem, cotangents)
    found: dict[str, Comparison] = {}
    for name, got in trial.results(problem, cotangents):
        if name not in want or got.shape != want[name].shape:
            continue
        limit = allowed[name]
        if name in ("o", "lse", "weights", "dq") and want[name].shape[: rows.ndim] == rows.shape:
            # This rule is about the empty rows; the others have their own.
            axes = (...,) + (None,) * (want[name].ndim - rows.ndim)
            limit = np.where(rows[axes], limit, np.inf)
        seen = compare_arrays(name, got, want[name], limit)
        if name == "lse" and problem.sinks is None:
            odd = rows & ~np.isfinite(want["lse"])  # −inf is not NaN here, nor +inf
            exact, kind = want["lse"][odd], got[odd].astype(float)
            if seen.passed and not np.array_equal(kind, exact, equal_nan=True):
                text = f"lse of a query that sees nothing is {kind.flat[0]}, want {exact.flat[0]}"
                raise Violation(text, problem, cotangents)
        if name not in found or seen.ratio > found[name].ratio:
            found[name] = seen
    return trial.check(found, problem, cotangents)


# --- what is hidden does not matter ---


def _hidden_keys(trial: Trial, recipe: Recipe, problem: Problem) -> tuple[Array, Array] | None:
    """Some keys that are hidden from some queries, (n,), and the rows that do see one of them."""
    visible = trial.visible(problem)
    if visible.size == 0:
        return None
    others = tuple(range(visible.ndim - 1))
    never, partly = ~visible.any(axis=others), ~visible.all(axis=others)
    rng = np.random.default_rng([recipe.seed, 7])
    if never.any() and rng.random() < 0.5:
        keys = np.flatnonzero(never)
    elif partly.any():
        keys = rng.choice(np.flatnonzero(partly), size=1)
    else:
        return None
    return keys, np.asarray(visible[..., keys].any(-1))


def _poisoned(problem: Problem, keys: Array, where: str, values: Array) -> Problem:
    k, v = problem.k.copy(), problem.v.copy()
    if "k" in where:
        k[..., keys, :] = np.resize(values, k.shape[-1]).astype(k.dtype)
    if "v" in where:
        v[..., keys, :] = np.resize(values[::-1], v.shape[-1]).astype(v.dtype)
    return problem.replace(k=k, v=v)


@rule("hidden-finite", "5, 10", unless=_first(_nothing_hides, _fills), draw=_force_hiding)
def hidden_finite(trial: Trial, recipe: Recipe) -> float | None:
    """Finite garbage at hidden keys and values changes no bit of the rows it is hidden from.

    Hidden positions leave the softmax, so nothing there is read into a result; whatever is
    multiplied by a weight of exactly 0 adds exactly 0. Gradients are compared with cotangents
    that are 0 on the rows which do see the garbage. Broken by additive masks of −1e4, by a row
    maximum over hidden scores, by an off-by-one window or causal edge.
    """
    problem = trial.problem(recipe)
    picked = _hidden_keys(trial, recipe, problem)
    if picked is None:
        return None
    keys, sees = picked
    if trial.conventions.empty_row == "mean":
        sees = sees | trial.empty(problem)  # such a row is the mean of all values, hidden ones too
    rng = np.random.default_rng([recipe.seed, 8])
    size = min(1e3, float(finfo(recipe.dtype).max) / 64)
    garbage = size * (1 + rng.random(7)) * rng.choice([-1, 1], 7)
    changed = _poisoned(problem, keys, str(rng.choice(["k", "v", "kv"])), garbage)
    dout, dlse = trial.cotangents(recipe, problem)
    quiet = Cotangents(
        np.where(sees[..., None], np.zeros_like(dout), dout),
        None if dlse is None else np.where(sees, np.zeros_like(dlse), dlse),
    )
    before = trial.results(problem, quiet)
    for (name, old), (_, new) in zip(before, trial.results(changed, quiet), strict=True):
        if name in ("o", "lse", "weights") and old.shape[: sees.ndim] == sees.shape:
            old, new = old[~sees], new[~sees]
        old, new = old.astype(np.float64), new.astype(np.float64)  # exact; and 0 is −0
        if old.shape != new.shape or not np.array_equal(old, new, equal_nan=True):
            with np.errstate(invalid="ignore"):
                gap = float(np.nanmax(abs(old - new), initial=0))
            text = (
                f"{name} moves by {gap:.3g} where finite garbage at key "
                f"{', '.join(map(str, keys[:4]))} is hidden"
            )
            raise Violation(text, changed, quiet, "moves", before=problem)
    return 0.0


def _negligible(trial: Trial, problem: Problem, keys: Array) -> bool:
    """Whether somebody sees one of these keys with a weight that may be stored as 0: an
    implementation may leave such a value out, or multiply it."""
    weights = evaluate(problem, trial.conventions).weights
    if problem.dropout_mask is not None:
        weights = weights * problem.dropout_mask
    least = max(float(finfo(problem.q.dtype).tiny), float(finfo(np.float32).tiny))
    return bool((trial.visible(problem)[..., keys] & (weights[..., keys] < least)).any())


def _hidden_nan(where: str) -> Check:
    named = {"k": "keys", "v": "values", "kv": "keys and values"}[where]

    def check(trial: Trial, recipe: Recipe) -> float | None:
        problem = trial.problem(recipe)
        picked = _hidden_keys(trial, recipe, problem)
        if picked is None:
            return None
        rng = np.random.default_rng([recipe.seed, 9])
        keys, sees = picked
        # At an inf that somebody does see nothing is required, so it is put where nobody looks.
        values = [np.nan] if sees.any() else [np.nan, np.inf, -np.inf]
        if "v" in where and _negligible(trial, problem, keys):
            return None
        poisoned = _poisoned(problem, keys, where, np.array([float(rng.choice(values))]))
        cotangents = trial.cotangents(recipe, poisoned)
        return trial.check(trial.against_oracle(poisoned, cotangents), poisoned, cotangents)

    check.__doc__ = f"""NaN and inf at hidden {named} change nothing, in o, lse and gradients.

    Hidden positions leave the softmax: they are not multiplied by 0, which would make NaN of
    them. A row that does see the NaN is non-finite, and so are its gradients; no other is.
    Broken by weights of 0 times v, by additive masks, by gradients masked after the product.
    """
    return check


for _where in ("k", "v", "kv"):
    rule(
        f"hidden-nan-{_where}",
        "10",
        unless=_first(_nothing_hides, _fills),
        draw=_force_hiding,
        alters=True,
    )(_hidden_nan(_where))


def _nan_query(trial: Trial, recipe: Recipe) -> tuple[Problem, Cotangents, Array]:
    """The problem with a NaN in one query, and where that query is: (..., H, T)."""
    problem = trial.problem(recipe)
    rng = np.random.default_rng([recipe.seed, 10])
    q = problem.q.copy()
    at = tuple(int(rng.integers(n)) for n in q.shape[:-1])
    q[(*at, int(rng.integers(q.shape[-1])))] = np.nan
    poisoned = problem.replace(q=q)
    return poisoned, trial.cotangents(recipe, poisoned), np.asarray(np.isnan(q).any(-1))


@rule("nan-query", "10", draw=lambda t: {"nonempty": True})
def nan_query(trial: Trial, recipe: Recipe) -> float:
    """A NaN query stays NaN: its o and lse are non-finite where it sees a key.

    A NaN says that something went wrong before; whoever turns it into a number hides that.
    Broken by nan_to_num after the softmax, by a maximum that skips NaN and finds an empty row.
    """
    poisoned, cotangents, rows = _nan_query(trial, recipe)
    want, allowed = trial.oracle(poisoned, cotangents)
    found: dict[str, Comparison] = {}
    for name, got in trial.results(poisoned, cotangents):
        if name in ("o", "lse") and got.shape == want[name].shape:
            here = rows[..., None] if name == "o" else rows
            stays = here & ~np.isfinite(want[name])
            limit = np.where(stays, allowed[name], np.inf)
            found[f"{name}{len(found)}"] = compare_arrays(name, got, want[name], limit)
    return trial.check(found, poisoned, cotangents)


@rule("nan-query-alone", "10", draw=lambda t: {"nonempty": True}, alters=True)
def nan_query_alone(trial: Trial, recipe: Recipe) -> float:
    """A NaN query reaches no other row, and no gradient of a key that it does not see.

    Neither does it reach its own row where it sees no key. Broken by weights of 0 times NaN: in
    the gradient of k, which multiplies dS by the query, and in that of v.
    """
    poisoned, cotangents, _ = _nan_query(trial, recipe)
    want, allowed = trial.oracle(poisoned, cotangents)
    limits = {n: np.where(np.isfinite(want[n]), x, np.inf) for n, x in allowed.items() if n in want}
    found = {
        str(i): compare_arrays(name, got, want[name], limits[name])
        for i, (name, got) in enumerate(trial.results(poisoned, cotangents))
        if name in want and got.shape == want[name].shape
    }
    return trial.check(found, poisoned, cotangents)


# --- memory ---


@rule("inputs-unchanged", "15")
def inputs_unchanged(trial: Trial, recipe: Recipe) -> float:
    """Nothing that was passed is written to, forward or backward.

    Broken by in-place scaling of q, by masks that are inverted in place.
    """
    f = trial.implementation
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    inputs = f.inputs(problem)
    before = {name: f.framework.take(x) for name, x in inputs.items()}
    f.forward(problem, inputs=inputs)
    if trial.gradients:
        f.gradients(problem, cotangents, inputs=inputs)
    for name, old in before.items():
        if old.tobytes() != f.framework.take(inputs[name]).tobytes():
            raise Violation(f"{name} was written to", problem, cotangents, "change")
    return 0.0


def _views(trial: Trial) -> tuple[str, ...]:
    from npattn.testing.recipe import VIEWS

    return tuple(view for view in VIEWS if view in trial.space.structure)


def repeated(trial: Trial, recipe: Recipe) -> tuple[Problem, Cotangents]:
    """The problem and its cotangents; for the expanded view k, v and dout repeat along an axis."""
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    if recipe.view != "expanded" or problem.k.ndim < 3:
        return problem, cotangents
    k, v, dout = (np.repeat(x[:1], len(x), axis=0) for x in (problem.k, problem.v, cotangents.dout))
    return problem.replace(k=k, v=v), Cotangents(dout, cotangents.dlse)


@rule(
    "views",
    "15",
    unless=lambda t: None if _views(t) else "refuses every view that is not contiguous",
    draw=lambda t: {"force": {"view": _views(t)}},
    alters=True,
)
def views(trial: Trial, recipe: Recipe) -> float:
    """How arrays lie in memory does not matter: transposed, stepped, expanded, reversed.

    Broken by kernels that assume strides, and by plans that are cached by shape alone.
    """
    problem, cotangents = repeated(trial, recipe)
    # A plan made for contiguous arrays must not be reused; and what is wrong there too is the
    # business of another rule.
    plain = trial.results(problem, cotangents)
    laid = trial.results(problem, cotangents, recipe.view)
    if all(_same_bits(x, y) for (_, x), (_, y) in zip(plain, laid, strict=True)):
        return 0.0
    found = trial.against_oracle(problem, cotangents, recipe.view)
    try:
        return trial.check(found, problem, cotangents)
    except Violation as err:
        err.view = recipe.view
        raise


def _same_bits(x: Array, y: Array) -> bool:
    return bool(x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes())


@rule("repeatable", "15")
def repeatable(trial: Trial, recipe: Recipe) -> float:
    """Two calls with the same problem give the same bits, whatever was called between them.

    Broken by races, by state that is kept between calls, by dropout that nobody asked for.
    """
    problem, other = trial.problem(recipe), trial.problem(replace(recipe, seed=recipe.seed + 1))
    cotangents = trial.cotangents(recipe, problem)
    first = trial.results(problem, cotangents)
    between = trial.cotangents(replace(recipe, seed=recipe.seed + 1), other)
    second = trial.results(other, between)
    same = {
        name
        for (name, x), (_, y) in zip(first, second, strict=True)
        if x.size and np.isfinite(x).all() and _same_bits(x, y)
    }
    # Other arrays, the same result: right only if they happen to have it. Where the first was
    # wrong already, that is the business of another rule.
    own = trial.against_oracle(problem, cotangents) if same else {}
    right = {name for name, c in own.items() if c.passed} & same
    if right:
        found = trial.against_oracle(other, between)
        trial.check({name: c for name, c in found.items() if name in right}, other, between)
    # A lone forward between them: what goes wrong every n-th call must not meet the same call.
    again = [*trial.implementation.forward(problem).items()]
    for (name, old), (_, new) in [
        *zip(first, again, strict=False),  # the gradients come later
        *zip(first, trial.results(problem, cotangents), strict=True),
    ]:
        if not _same_bits(old, new):
            gap = float(np.max(abs(old.astype(float) - new.astype(float)), initial=0))
            text = f"{name} differs by {gap:.3g} between two calls with the same arrays"
            raise Violation(text, problem, cotangents, "bits")
    return 0.0
