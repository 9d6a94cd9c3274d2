"""A worker's signs of life come through the pipe, and it says where it stands when it is asked."""

import asyncio
import faulthandler
import os
import subprocess
import sys

import pytest

from service.pulse import LOOKS, WHERE, Pulse, look_interval_s


@pytest.fixture(autouse=True)
def _signal_as_before():
    yield
    faulthandler.unregister(WHERE)


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    for descriptor in (reading, writing):
        os.set_blocking(descriptor, False)
    yield reading, writing
    os.close(reading)
    os.close(writing)


async def begin(pulse):
    pulse.begin()


def test_a_sign_is_the_number_of_the_slot(pipe):
    reading, writing = pipe
    asyncio.run(begin(Pulse(writing, 63)))
    assert os.read(reading, 10) == bytes([63])


def test_a_pipe_that_nobody_reads_stops_nobody(pipe):
    _, writing = pipe
    while True:
        try:
            os.write(writing, bytes(4096))
        except BlockingIOError:
            break
    asyncio.run(begin(Pulse(writing, 0)))


def test_a_pipe_whose_reader_is_gone_stops_nobody():
    reading, writing = os.pipe()
    os.close(reading)
    asyncio.run(begin(Pulse(writing, 0)))
    os.close(writing)


def test_one_look_is_later_than_a_sign_can_be_whatever_silence_is_asked_for():
    assert look_interval_s(0.01) == 2.0
    assert look_interval_s(60.0) * LOOKS == 60.0


def test_who_hangs_without_ever_returning_to_the_loop_still_says_where():
    code = """
import asyncio, os, signal
from service.pulse import WHERE, Pulse
async def main():
    Pulse(1, 0).begin()
    def stand_still():
        os.kill(os.getpid(), WHERE)
    stand_still()
asyncio.run(main())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert "in stand_still" in run.stderr


def test_without_a_stderr_the_signs_come_all_the_same(pipe, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    asyncio.run(begin(Pulse(pipe[1], 5)))
    assert os.read(pipe[0], 10) == bytes([5])
