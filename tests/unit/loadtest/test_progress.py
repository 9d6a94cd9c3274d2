"""Progress: a terminal shows one line after two seconds."""

import io

import pytest

from attention_load.progress import Progress
from tests.doubles import ManualClock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "seconds", "shown"),
    [(Terminal(), 3, "\r\x1b[Ksteady: 3 of 20 s\r"), (Terminal(), 1, ""), (io.StringIO(), 3, "")],
)
def test_only_a_person_who_waits_sees_how_far_it_is(stream, seconds, shown):
    clock = ManualClock()
    progress = Progress(stream, clock.now)
    clock.advance(seconds)
    progress.show(f"steady: {seconds} of 20 s")
    assert stream.getvalue() == shown
