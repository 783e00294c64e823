"""The judge of modules: attention with its projections inside, (B, T, C) in and out."""

import lazy_loader  # type: ignore[import-untyped]

# Where a command only reads the names of the rules, nothing of the judge is loaded.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "case": ["ModuleCase"],
        "check": ["check_module", "replay"],
        "port": ["compare_module"],
    },
)
