"""Kept: servers that stay up while others are timed, and rest meanwhile.

Laws: of all that are kept one is awake at a time, so that what is timed has the machine; one that failed is ended, and started
anew when it is asked for again; a form of request that needs a start of its own has one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

from benchmarks.running import Running
from benchmarks.subjects import Subject

Start = Callable[[Subject, str], AbstractContextManager[Running]]


class Kept:
    """`start(subject, form)` is how one is started and, behind it, ended."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._running: dict[tuple[str, str], tuple[Running, ExitStack]] = {}

    @contextlib.contextmanager
    def awake(self, subject: Subject, form: str) -> Iterator[Running]:
        """It, started where it is not; what is raised within ends it."""
        key = (subject.name, form if form in subject.by_form else "")
        try:
            running = self._started(key, subject, form)
            yield running
            running.rest()
        except BaseException:
            self._end(key)
            raise

    def _started(self, key: tuple[str, str], subject: Subject, form: str) -> Running:
        if key in self._running:
            running = self._running[key][0]
            running.wake()
            return running
        stack = ExitStack()
        running = stack.enter_context(self._start(subject, form))
        self._running[key] = (running, stack)
        return running

    def _end(self, key: tuple[str, str]) -> None:
        if key in self._running:
            self._running.pop(key)[1].close()

    def end(self) -> None:
        """All of them, whatever one raises at its end."""
        with ExitStack() as ends:
            for key in reversed(list(self._running)):  # what is pushed last is called first
                ends.callback(self._end, key)
