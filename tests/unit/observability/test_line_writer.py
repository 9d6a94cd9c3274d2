"""Line writer: no line waits for a reader, and none is lost without being counted."""

import contextlib
import json
import os
import threading

import pytest

from service.observability import line_writer
from service.observability.line_writer import MAX_WAITING_BYTES, LineWriter, log_line

LINE = "x" * 199 + "\n"


class Pipe:
    """A pipe that does not block, with a writer at one end."""

    def __init__(self):
        self.source, self.end = os.pipe()
        for descriptor in (self.source, self.end):
            os.set_blocking(descriptor, False)
        self.writer = LineWriter(self.end)

    def write(self, text: str) -> None:
        self.writer.write(text.encode())

    def read(self) -> str:
        """Return everything in the pipe."""
        text = b""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.source, 2**16):
                text += data
        return text.decode()

    def read_all(self) -> str:
        """Return everything in the pipe and all lines that wait for space in it."""
        text = self.read()
        self.writer.flush()
        while more := self.read():
            text += more
            self.writer.flush()
        return text

    def has_all_room(self) -> bool:
        """Return whether nothing is counted as waiting: else the longest text that may wait is dropped."""
        before = self.writer.num_dropped
        self.write("x" * (MAX_WAITING_BYTES - 1) + "\n")
        return self.writer.num_dropped == before

    def fill(self) -> int:
        """Write lines until one is dropped; return how many were kept."""
        number = 0
        while not self.writer.num_dropped:
            self.write(f"{number:06d}{LINE}")
            number += 1
        return number - 1


@pytest.fixture
def pipe():
    made = Pipe()
    yield made
    for descriptor in (made.source, made.end):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def test_a_line_is_written_at_once(pipe):
    pipe.write(LINE)
    assert pipe.read() == LINE


def test_a_full_pipe_blocks_no_caller_and_waiting_lines_are_written_in_order(pipe):
    kept = pipe.fill()
    in_pipe = len(pipe.read().splitlines())
    assert 0 < kept - in_pipe <= MAX_WAITING_BYTES / len(LINE), "what waits is bounded"
    numbers = [int(line[:6]) for line in pipe.read_all().splitlines()[:-1]]
    assert numbers == list(range(in_pipe, kept)), "a pipe takes all of a line or nothing"


def test_dropped_lines_are_counted_and_reported_once_after_the_kept_ones(pipe):
    kept = pipe.fill()
    for _ in range(41):
        pipe.write(LINE + LINE)
    assert pipe.writer.num_dropped == 1 + 82
    text = pipe.read_all()
    pipe.write("the reader is back\n")
    text += pipe.read()
    *lines, report, last = text.splitlines()
    assert len(lines) == kept
    told = json.loads(report)
    assert (told["level"], told["event"], told["lines"]) == ("warning", "log_lines_dropped", 83)
    assert last == "the reader is back"
    pipe.write(LINE)
    assert pipe.read() == LINE, "once"


def test_later_losses_are_reported_later(pipe):
    for expected in (7, 3):
        before = pipe.writer.num_dropped
        while pipe.writer.num_dropped < before + expected:
            pipe.write(LINE)
        assert json.loads(pipe.read_all().splitlines()[-1])["lines"] == expected
    assert pipe.writer.num_dropped == 10


def test_waiting_lines_are_written_without_another_line(pipe):
    pipe.fill()
    pipe.read()
    pipe.writer.flush()
    assert LINE in pipe.read()


def test_a_partly_written_line_is_finished_before_the_next(pipe, monkeypatch):
    """A full disk accepts only part of a line."""
    write, room = os.write, [5, 0, 3]

    def write_some(descriptor, data):
        if room and not room[0]:
            room.pop(0)
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: room.pop(0)] if room else data)

    monkeypatch.setattr(os, "write", write_some)
    for text in ("first line\n", "second line\n", "third line\n"):
        pipe.write(text)
    pipe.writer.flush()
    assert pipe.read() == "first line\nsecond line\nthird line\n"
    assert pipe.has_all_room()


def test_a_lost_reader_costs_only_lines(pipe):
    os.close(pipe.source)
    kept = pipe.fill()
    assert 0 < kept <= MAX_WAITING_BYTES / len(LINE)
    pipe.writer.finish()
    assert pipe.writer.num_dropped == 1


def test_at_the_end_a_slow_reader_gets_the_waiting_lines(pipe):
    kept = pipe.fill()
    os.set_blocking(pipe.source, True)
    got: list[bytes] = []

    def read() -> None:
        while data := os.read(pipe.source, 1000):  # empty when the writing end is closed
            got.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    pipe.writer.finish()
    os.close(pipe.end)
    reader.join(10)
    assert b"".join(got).count(b"x\n") == kept


def test_at_the_end_a_missing_reader_is_not_waited_for(pipe, monkeypatch):
    monkeypatch.setattr(line_writer, "FINISH_S", 0)
    kept = pipe.fill()
    pipe.writer.finish()
    assert len(pipe.read().splitlines()) < kept


def test_a_line_logged_during_a_write_follows_it(pipe, monkeypatch):
    """The garbage collector may run anywhere, and a finalizer may log."""
    write, nested = os.write, [f"{number}\n" for number in range(3)]

    def write_and_log(descriptor, data):
        done = write(descriptor, data)
        if nested:
            pipe.write(nested.pop())
        return done

    monkeypatch.setattr(os, "write", write_and_log)
    pipe.write("outer\n")
    assert sorted(pipe.read().splitlines()) == ["0", "1", "2", "outer"]
    assert pipe.has_all_room()


def test_no_line_of_many_threads_is_lost_or_counted_twice(pipe):
    """Written and dropped lines add up to all lines."""

    def write() -> None:
        for _ in range(400):
            pipe.write(LINE)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    *lines, report = pipe.read_all().splitlines()
    assert set(lines) == {LINE.strip()}
    assert json.loads(report)["lines"] == pipe.writer.num_dropped
    assert len(lines) + pipe.writer.num_dropped == 1600


def test_every_line_has_the_common_fields():
    line = json.loads(log_line("info", "serving", port=1))
    assert list(line) == ["timestamp", "level", "event", "version", "port"]
