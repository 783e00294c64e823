"""Meaning of each parameter of a callable, by its name here or in other libraries."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from npattn.errors import OptionError
from npattn.problem.foreign import FOREIGN
from npattn.problem.meanings import DESCALES, LATENT, LISTS, MEANINGS, PACKED, PLACES, STORED
from npattn.problem.options import FEATURES, RESULTS
from npattn.testing.adapters.child import STARRED, parameters, qualified_name


@dataclass(frozen=True)
class Signature:
    """Parameters of a callable."""

    features: frozenset[str]  # options among `FEATURES`, by npattn's names
    returns: tuple[str, ...]  # those of `RESULTS` that it has
    # parameters that keep their default; a colon parts the name from the reason
    untested: tuple[str, ...]
    # its parameter names → one of `MEANINGS`
    meanings: Mapping[str, str] = field(default_factory=dict)
    # its parameter names → the options and results that they carry, by npattn's names
    carries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # those of `meanings` without a default, which are always passed
    required: frozenset[str] = frozenset()
    module: bool = False  # True if a module stands before q, k, v
    top_left: bool = False  # True if the name of its parameter for `causal` implies that alignment
    # arrays that it takes first, by the names of a call: q, k, v, several of them in one, or the
    # parts of latent attention
    leading: tuple[str, ...] = ("q", "k", "v")
    # meaning of the parameter that has several of them, one of `PACKED`; "" if none has
    packed: str = ""
    heads_first: bool = False  # its pages have heads before slots
    # names of the four parameters in the place of q, k, v → their meanings among `LATENT`
    parts: Mapping[str, str] = field(default_factory=dict)
    # True if `causal` is a feature for which it has no parameter: it is never off
    always_causal: bool = False
    # options whose own default is not npattn's → that default
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        """npattn's names → those of the parameters that carry them."""
        return {name: theirs for theirs, ours in self.carries.items() for name in ours}

    @property
    def reads(self) -> tuple[str, ...]:
        """Phrases that say what parameters with names of their own are taken for."""
        phrases = ["module as one of Hugging Face's"] if self.module else []
        for theirs, ours in self.carries.items():
            meaning = self.meanings[theirs]
            words = " and ".join(name.removeprefix("return_") for name in ours)
            words = "K < H" if meaning == "shared heads" else words
            note = "top_left" if ours == ("causal",) and self.top_left else NOTES.get(meaning, "")
            if theirs != meaning and words:
                phrases.append(f"{theirs} as {words}{note and f' ({note})'}")
        phrases += [f"{ours} is {default} by default" for ours, default in self.defaults.items()]
        return tuple(phrases)


NOTES = {
    "key padding": "of keys, True hides",
    "offsets of keys": "lengths",
    "lengths of keys": "lengths",
    "lengths of queries": "lengths",
    "page offsets": "lengths",
    "need_weights": "returns a pair",
    "lse without gradient": "not differentiated",
    "lse (B, T, H) without gradient": "axes B, T, H, not differentiated",
    "window or −1": "−1 is unlimited",
}
"""Words that a report adds to the meaning of a parameter."""


def read_signature(
    f: Callable[..., Any],
    name: str,
    rename: Mapping[str, str],
    features: Iterable[str] | None,
    profile: Mapping[str, str] | None = None,
    quantized: bool = False,
) -> Signature:
    """Read the options that a callable has; errors call it `name`.

    `rename` has its parameter names → npattn's, or one of `MEANINGS`, and `profile` the same of the
    system that it stands in for, in which names that it lacks do not count. `features` are its
    options, if the signature cannot be read or names too many; `causal` without a parameter is
    always on. Where inputs are quantized, parameters for their factors are passed.
    """
    named = parameters(f)
    features = None if features is None else tuple(features)
    _check_names(f, named, rename, features)
    if not named and features is None and profile is None:
        raise OptionError(
            f"{name} has no readable signature: say which options it has with features= "
            "(() for none), or which system it stands in for with like="
        )
    renames: Mapping[str, str] = {**(profile or {}), **rename}
    first, module = next(iter(named), ""), False
    if _meaning(first, renames) == "module":
        named, module = {n: p for n, p in named.items() if n != first}, True
    renames = {theirs: ours for theirs, ours in renames.items() if ours != "module"}
    first_meanings = {theirs: _meaning(theirs, renames) for theirs in _positional(named)}
    packed, leading, parts = read_leading(first_meanings)
    heads_first = any(ours.endswith(HEADS_FIRST) for ours in renames.values())
    of_leading = (*PACKED, HEADS_FIRST)
    renames = {theirs: ours for theirs, ours in renames.items() if ours not in of_leading}
    rest = _optional(name, named, leading) if named else {}
    meanings = read_beside_places(_meanings(named, rest, renames))
    _check_needed(name, rest, meanings)
    absent = dict.fromkeys(_find_optional(STORED, rest, meanings, renames), PADDED)
    absent |= dict.fromkeys(_find_optional(LATENT, rest, meanings, renames), WHOLE)
    if not quantized:
        absent |= {n: PLAIN for n in rest if meanings.get(n) in DESCALES and n not in renames}
    meanings = {theirs: meaning for theirs, meaning in meanings.items() if theirs not in absent}
    carries = _carry(meanings, rest, renames, features)
    untested = _list_untested(rest, meanings | absent, carries)
    has = {ours for names in carries.values() for ours in names}
    has |= {"mask"} if set(LISTS) & {meanings[theirs] for theirs in carries} else set()
    always_causal = "causal" in (features or ()) and "causal" not in has
    starred = any(p.kind in STARRED for p in named.values())
    if features is not None:
        has = set(features)
    elif starred:
        untested.append(_STARS)
    if len(has & _DROPOUT.keys()) == 1:
        (name_,) = has & _DROPOUT.keys()
        has.remove(name_)
        untested.append(f"{name_}: {_DROPOUT[name_]}")
    causal = {ours: theirs for theirs, names in carries.items() for ours in names}.get("causal", "")
    return Signature(
        frozenset(has) & frozenset(FEATURES),
        tuple(n for n in RESULTS if n in has),
        tuple(untested),
        {theirs: meaning for theirs, meaning in meanings.items() if theirs in carries},
        carries,
        frozenset(n for n in carries if n in rest and _must_pass(rest[n], meanings[n])),
        module,
        causal not in renames and causal in FOREIGN and FOREIGN[causal].causal == "top_left",
        leading,
        packed,
        heads_first,
        parts,
        always_causal and bool(named) and not starred,
        {
            ours: rest[theirs].default
            for theirs, names in carries.items()
            for ours in names
            if theirs in rest and _differs(rest[theirs], meanings[theirs])
        },
    )


_STARS = "*args or **kwargs: say which options there are with features="
PADDED = "optional, and its arrays padded"
WHOLE = "optional, and q, k and v whole"
PLAIN = "a factor of quantized inputs, unless quantized= says in which format they are"
_OWN_DROPOUT = "its dropout has a generator of its own, and stays at rate 0"
_DROPOUT = {
    "dropout_rate": _OWN_DROPOUT,
    "dropout_mask": "no dropout_rate parameter, and a mask at rate 0 means different things",
}


def _find_optional(
    group: Collection[str],
    rest: Mapping[str, inspect.Parameter],
    meanings: Mapping[str, str],
    renames: Mapping[str, str],
) -> list[str]:
    """Return parameters of a group, if it can be called without any, and is not told otherwise.

    Then its arrays are padded, (B, H, T, D) or (B, T, H, D), and q, k and v are whole.
    """
    parameters = [n for n in rest if meanings.get(n) in group]
    free = all(rest[n].default is not inspect.Parameter.empty for n in parameters)
    return parameters if free and not any(n in renames for n in parameters) else []


def _check_names(
    f: Callable[..., Any],
    named: Mapping[str, inspect.Parameter],
    rename: Mapping[str, str],
    features: Iterable[str] | None,
) -> None:
    """Check that `rename` and `features` name existing parameters and options."""
    starred = any(p.kind is p.VAR_KEYWORD for p in named.values())
    absent = [theirs for theirs in rename if theirs not in named]
    if named and absent and not starred:
        raise OptionError(
            f"rename has {', '.join(absent)}, must be parameters of {qualified_name(f)} "
            f"({', '.join(named)}): rename={{theirs: ours}}"
        )
    legal = {"rename": tuple(MEANINGS), "features": (*FEATURES, *RESULTS)}
    arguments = {"rename": rename.values(), "features": features or ()}
    for argument, names in arguments.items():
        for ours in names:
            if ours not in legal[argument]:
                near = get_close_matches(ours, legal[argument], 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise OptionError(
                    f"{ours} is not a feature, must be one of {', '.join(legal[argument])}{hint}"
                )


def _positional(named: Mapping[str, inspect.Parameter]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [n for n, p in named.items() if p.kind in kinds]


def _optional(
    name: str, named: Mapping[str, inspect.Parameter], leading: tuple[str, ...]
) -> dict[str, inspect.Parameter]:
    """Return the parameters beside q, k, v, after checking that these are there."""
    positional, count = _positional(named), len(leading)
    starred = any(p.kind is p.VAR_POSITIONAL for p in named.values())
    if len(positional) < count and not starred:
        raise OptionError(
            f"{name} has {len(positional)} positional parameters, must have three: q, k, v"
        )
    return {n: p for n, p in named.items() if n not in positional[:count] and p.kind not in STARRED}


def _check_needed(
    name: str, rest: Mapping[str, inspect.Parameter], meanings: Mapping[str, str]
) -> None:
    """Check that everything that has no default has a meaning."""
    unknown = [n for n, p in rest.items() if p.default is p.empty and n not in meanings]
    if unknown:
        raise OptionError(
            f"{name} needs {', '.join(unknown)}, which the judge does not know: give it a "
            "default, wrap it, or say what it is with rename={theirs: ours}"
        )


def _meaning(theirs: str, renames: Mapping[str, str]) -> str:
    """Return the meaning of a parameter: as told, or by its name here or elsewhere."""
    if theirs in renames:
        return renames[theirs]
    if theirs in MEANINGS:
        return theirs
    return FOREIGN[theirs].meaning if theirs in FOREIGN else ""


def _meanings(
    named: Mapping[str, inspect.Parameter],
    rest: Mapping[str, inspect.Parameter],
    renames: Mapping[str, str],
) -> dict[str, str]:
    """Return the meanings of all parameters that have one; ``**kwargs`` takes those told."""
    pairs = {theirs: _meaning(theirs, renames) for theirs in rest}
    if not named or any(p.kind is p.VAR_KEYWORD for p in named.values()):
        pairs |= {theirs: renames[theirs] for theirs in renames if theirs not in rest}
    return {theirs: meaning for theirs, meaning in pairs.items() if meaning}


def _carry(
    meanings: Mapping[str, str],
    rest: Mapping[str, inspect.Parameter],
    renames: Mapping[str, str],
    features: tuple[str, ...] | None,
) -> dict[str, tuple[str, ...]]:
    """Give each option to one parameter: one that was told, one of its own name, or the first."""

    def rank(theirs: str) -> int:
        return 0 if theirs in renames else 1 if theirs in MEANINGS else 2

    taken: set[str] = set()
    carries: dict[str, tuple[str, ...]] = {}
    for theirs in sorted(meanings, key=rank):
        wanted = _by_annotation(MEANINGS[meanings[theirs]], rest.get(theirs))
        ours = tuple(n for n in wanted if n not in taken and (features is None or n in features))
        if ours or not wanted or meanings[theirs] in STORED:
            carries[theirs] = ours
        taken |= set(ours)
    return {theirs: carries[theirs] for theirs in meanings if theirs in carries}


def _must_pass(parameter: inspect.Parameter, meaning: str) -> bool:
    """Return True for a parameter without a default, or one whose default is not npattn's."""
    if meaning == "no dropout":
        return parameter.default not in (0, None)
    return parameter.default is parameter.empty or _differs(parameter, meaning)


def _differs(parameter: inspect.Parameter, meaning: str) -> bool:
    """Return True if left out a parameter means causal, a scale or a window of its own.

    A default that was read from source is text.
    """
    default = parameter.default
    if meaning == "causal":
        return default is True or default == "True"
    if meaning == "scale":
        return isinstance(default, (int, float)) and not isinstance(default, bool) and default != 0
    if meaning.startswith("window"):
        sides = default if isinstance(default, (tuple, list)) else ()
        return any(isinstance(n, int) and n >= 0 for n in sides)
    return False


def _by_annotation(
    options: tuple[str, ...], parameter: inspect.Parameter | None
) -> tuple[str, ...]:
    """Return the kind of mask that an annotation names, boolean or float; both if it names none."""
    if options != ("mask", "bias") or parameter is None:
        return options
    text = "" if parameter.annotation is parameter.empty else str(parameter.annotation).lower()
    boolean, real = ("bool" in text), bool(re.search(r"\bfloat", text))
    return options if boolean == real else options[:1] if boolean else options[1:]


def _list_untested(
    rest: Mapping[str, inspect.Parameter],
    meanings: Mapping[str, str],
    carries: Mapping[str, tuple[str, ...]],
) -> list[str]:
    """Return the parameters that keep their default, with reasons where they are known."""
    lines = []
    for theirs in rest:
        meaning = meanings.get(theirs, "")
        if meaning in (PADDED, WHOLE):
            ours = FOREIGN[theirs].meaning
            lines.append(f"{theirs}: {meaning}, unless rename={{{theirs!r}: {ours!r}}} says more")
        elif meaning in (PLAIN, "no dropout"):
            lines.append(f"{theirs}: {PLAIN if meaning == PLAIN else _OWN_DROPOUT}")
        elif theirs not in carries:
            lines.append(theirs)
    return lines


def read_backward(backward: Callable[..., Any] | None, forward: Signature) -> Signature:
    """Read the names that a backward has for the options of its forward.

    Options that it names nowhere are passed as to the forward.
    """
    renames, count = forward.meanings, 1 + len(forward.leading)
    named = dict([*parameters(backward).items()][count:])  # without dout, q, k, v
    meanings = {n: _meaning(n, renames) for n, p in named.items() if p.kind not in STARRED}
    meanings = {theirs: meaning for theirs, meaning in meanings.items() if meaning}
    carries = _carry(meanings, named, renames, tuple(forward.features))
    carried = {ours for names in carries.values() for ours in names}
    for theirs, names in forward.carries.items():
        rest = tuple(n for n in names if n in forward.features and n not in carried)
        if rest and theirs not in carries:
            carries[theirs], meanings[theirs] = rest, forward.meanings[theirs]
    return Signature(
        forward.features,
        (),
        (),
        {theirs: meanings[theirs] for theirs in carries},
        carries,
        frozenset(n for n in carries if n in named and _must_pass(named[n], meanings[n])),
        leading=forward.leading,
        packed=forward.packed,
    )


# --- meanings that depend on other parameters --------------------------------------------------

HEADS_FIRST = "heads before slots"
PARTS = dict(zip(LATENT, (LATENT[0], "q", "v", "k"), strict=True))
"""Meanings of the four parts of latent attention → names of the arrays of a call."""
PAIRS = (("new keys", "new values"), ("cosines", "sines"))
"""Meanings that come together, or not at all."""


def read_beside_places(meanings: Mapping[str, str]) -> dict[str, str]:
    """Return meanings without those that only functions on sequences have, where it is none.

    A mask is then no packed one. New keys need lengths of a cache, and a rotary table new keys.
    """
    has = {x.removesuffix(" of any number") for x in meanings.values()}
    if not has & {*PLACES}:
        plain = {n: "mask" if x == "packed mask" else x for n, x in meanings.items()}
        return {theirs: x for theirs, x in plain.items() if x not in STORED}
    without = {name for pair in PAIRS if not {*pair} <= has for name in pair}
    if "lengths of keys" not in has:
        without |= {*PAIRS[0], "left padding", "rows of the cache"}
    if without & {*PAIRS[0]}:
        without |= {*PAIRS[1]}
    without |= {"adjacent pairs"} if without & {*PAIRS[1]} else set()
    without |= {f"{name} of any number" for name in without}
    return {theirs: x for theirs, x in meanings.items() if x not in without}


def read_leading(meanings: Mapping[str, str]) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """Return the meaning of a packed array, the arrays that come first, and the parts of latents.

    They follow from the meanings of the positional parameters, in order. The first is "" where no
    array is packed, and the parts are empty where there are none.
    """
    first = dict(list(meanings.items())[: len(LATENT)])
    if {*first.values()} == {*LATENT}:
        return "", tuple(PARTS[meaning] for meaning in first.values()), first
    for place, meaning in enumerate(list(meanings.values())[:2]):
        if meaning in PACKED and len(PACKED[meaning]) == 3 - place:
            return meaning, (*"q"[:place], PACKED[meaning]), {}
    return "", ("q", "k", "v"), {}
