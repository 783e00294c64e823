"""Results of an implementation that are judged where they are, on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npattn.errors import OptionError
from npattn.problem import Problem
from npattn.testing.adapters.base import catch_foreign
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.adapters.request import LEAVES, name_results

REFUSED = {
    "is_isolated": "sweep needs the implementation in this process, not in a worker",
    "storage": "sweep on a device needs (B, H, T, D): judge sequences without it",
    "packing": "sweep on a device needs q, k and v apart: judge without it",
    "quantized": "sweep on a device has no quantized inputs: judge them without it",
    "latent": "sweep on a device has no latent inputs or lists: leave it out",
    "key_lists": "sweep on a device has no latent inputs or lists: leave it out",
}
"""Attribute of an implementation → why a sweep refuses it."""


def results_on_device(
    f: Implementation,
    problem: Problem,
    inputs: Mapping[str, Any],
    cotangents: Mapping[str, Any] | None,
) -> list[tuple[str, Any]]:
    """Return every result as an array of the framework, left on its device.

    Nothing is copied, but for the layout.

    Parameters
    ----------
    f : Implementation
    problem : Problem
        For its options.
    inputs : mapping
        Arrays of the framework by npattn's names, laid out as npattn has them.
    cotangents : mapping or None
        Cotangents of o and, if it returns it, lse; None asks for no gradients.

    Returns
    -------
    list of (name, array)
        A name comes once for each way to call it.
    """
    for name, why in REFUSED.items():
        if getattr(f, name) not in (None, False):
            raise OptionError(why)
    request = f.request(problem)
    layout = f.arrangement
    laid_out = {n: layout.apply(n, x) for n, x in inputs.items()}
    request.add_inputs(laid_out, f.options(problem))
    if cotangents is not None:
        laid_out_cotangents = {n: layout.apply(n, x) for n, x in cotangents.items()}
        laid_out_cotangents |= (
            {"lse": layout.swap_lse(laid_out_cotangents["lse"])}
            if "lse" in laid_out_cotangents
            else {}
        )
        request.add_cotangents(laid_out_cotangents)
    lse = ("return_lse",) if f.returns_lse else ()
    (value,) = request.forward([()])
    pairs = [*name_results(f.signature, value, ()).items()]
    more: dict[str, Any] = {}
    if cotangents is not None:
        value, more = request.everything([n for n in LEAVES if n in laid_out])
        if f.backward is not None:
            more = f.name_gradients(more, laid_out)
        more |= {n: x for n, x in value.items() if n in ("o", "lse")}
    if lse and "lse" not in more:
        (value,) = request.forward([lse])
        more |= name_results(f.signature, value, lse)
    with catch_foreign("raised"):
        f.framework.finish()
    every = [*pairs, *more.items()]
    return [(n, layout.restore(n, x, problem, "attend")[n]) for n, x in every]
