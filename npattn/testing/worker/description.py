"""A worker's description of its target, which any program may have written."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.testing.adapters.child import VERSION
from npattn.testing.worker.values import GARBAGE

SETTINGS = {"rename", "layout", "features", "conventions", "like", "quantized", "rows"}


class Stub:
    """Stands for a callable of the worker: it has its parameters, and cannot be called here."""

    def __init__(self, parameters: list[list[Any]], name: str = "the target") -> None:
        self.__qualname__ = name
        self.__signature__ = inspect.Signature([_parameter(*p) for p in parameters])

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("it lives in the worker: Remote sends requests")


def _parameter(
    name: str, kind: str = "POSITIONAL_OR_KEYWORD", default: Any = (), annotation: str = ""
) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    return inspect.Parameter(
        str(name),
        getattr(inspect.Parameter, kind),
        default=default[0] if default else empty,
        annotation=annotation or empty,
    )


def _number(value: Any) -> Any:
    """Return a value of JSON, or the number that JSON lacks."""
    return float(value["number"]) if isinstance(value, Mapping) else value


def read_description(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer to `describe` with what it leaves out."""
    version = answer.get("version", VERSION)
    if version != VERSION:
        raise OptionError(
            f"the worker speaks version {version!r} of the protocol, must be {VERSION}"
        )
    backward = answer.get("backward")
    try:
        Stub(answer["parameters"])
        if backward is not None:
            Stub(backward)
        settings = dict(answer.get("settings") or {})
        if unknown := set(settings) - SETTINGS:
            raise ValueError(f"settings has {', '.join(sorted(unknown))}")
        if settings.get("conventions") is not None:
            told = settings["conventions"].items()
            settings["conventions"] = {n: _number(x) for n, x in told}
            Conventions(**settings["conventions"])
        gradients = answer.get("gradients", None if backward is None else "backward")
        allowed = ("backward",) if backward is not None else (None, "autograd")
        if gradients not in allowed:
            raise ValueError(f"gradients is {gradients!r}, and backward is {backward!r}")
        return {
            **answer,
            "name": str(answer.get("name") or "worker"),
            "framework": str(answer.get("framework") or "numpy"),
            "gradients": gradients,
            "backward": backward,
            "settings": settings,
            "source": str(answer.get("source") or ""),
            "files": [str(file) for file in answer.get("files") or ()],
            "abilities": [str(ability) for ability in answer.get("abilities") or ()],
            "versions": {str(n): str(x) for n, x in (answer.get("versions") or {}).items()},
        }
    except GARBAGE as err:
        reason = f"{type(err).__name__}: {err}"
        raise OptionError(f"the worker's description cannot be understood ({reason})") from None
