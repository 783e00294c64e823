"""Colours for printed reports and for what is typed before them: ``npattn-report``."""

from typing import ClassVar

from pygments.lexer import RegexLexer, bygroups
from pygments.token import Comment, Generic, Name, Text


class ReportLexer(RegexLexer):
    """Causes stand out, verdicts are red or green, origins of problems are pale."""

    name = "npattn report"
    aliases: ClassVar = ["npattn-report"]
    tokens: ClassVar = {
        "root": [
            (r"^\$ ", Generic.Prompt, "command"),
            (r"^FAILED: \d+ rules?, .*$", Generic.Heading),
            (r"^ *sampled as .*$", Comment),
            (r"\((?:not required|expected)\)|\[semantics [^\]]*\]", Comment),
            (r"\b(?:FAILED|WRONG|failed|crashed|timed out|suspect)\b", Generic.Error),
            (r"\b(?:passed|ok)\b", Generic.Inserted),
            (
                r"(got )(\S+)(, want )(\S+)(, allowed )",
                bygroups(Text, Generic.Error, Text, Generic.Inserted, Text),
            ),
            (r"\w+", Text),
            (r"[^\w\n]|\n", Text),
        ],
        "command": [
            (r"\n", Text, "#pop"),
            (r" #.*$", Comment),
            (r" --?[a-z][\w-]*", Name.Attribute),
            (r"[^\n]", Name),
        ],
    }
