"""Mistakes written from docs/semantics.md alone, by someone who had not seen the checks.

For every rule and every *Edge:* of it: a plausible programming error, as small as still breaks the
rule. They try the judge on bugs that it was not tuned to. Since the first run one mistake, which
crashed, was repaired, and six that the rules allow were dropped.
"""

from npattn.mistakes.blind import (  # noqa: F401  each module registers its own
    arrays,
    dropout,
    gradients,
    hidden,
    masks,
    scores,
    softmax,
)
