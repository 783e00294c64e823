"""Executor that judges units in this process, when they are submitted."""

from concurrent.futures import Executor, Future

from npattn.testing.units.unit import Unit, do_unit


class Inline(Executor):
    """Judge with `judge`; end as Ctrl-C does after `ends_after` units."""

    def __init__(self, judge=do_unit, ends_after=None):
        self.judge, self.ends_after, self.done = judge, ends_after, []

    def submit(self, function, text):
        unit, future = Unit.from_text(text), Future()
        if len(self.done) == self.ends_after:
            future.set_exception(KeyboardInterrupt())
        else:
            self.done.append(unit.key)
            future.set_result(self.judge(unit).to_text())
        return future
