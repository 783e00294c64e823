"""Executor that judges units in this process, when it is waited for."""

from npattn.matrix.unit import Result, Unit, do_unit


class Inline:
    """Judge with `judge`; end as Ctrl-C does after `ends_after` units."""

    def __init__(self, judge=do_unit, ends_after=None, width=1):
        self.judge, self.ends_after, self.width = judge, ends_after, width
        self.units, self.done = [], []

    def submit(self, unit):
        self.units.append(Unit.from_text(unit.to_text()))

    def wait(self):
        if len(self.done) == self.ends_after:
            raise KeyboardInterrupt
        unit = self.units.pop(0)
        self.done.append(unit.key)
        return unit, Result.from_text(self.judge(unit).to_text())

    def running(self):
        return self.units[:1]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass
