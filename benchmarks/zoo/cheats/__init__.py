"""Cheats that a judge must catch, and honest implementations that look like them.

They are files of `benchmarks.zoo.cheats.targets`, which are read and never imported here: a cheat
runs in a process of its own.
"""

from benchmarks.zoo.cheats.cheat import Cheat
from benchmarks.zoo.cheats.register import CHEATS, HONEST
from benchmarks.zoo.cheats.run import Answer, judge, judge_all, table

__all__ = ["CHEATS", "HONEST", "Answer", "Cheat", "judge", "judge_all", "table"]
