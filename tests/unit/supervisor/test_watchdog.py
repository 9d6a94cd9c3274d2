"""Watchdog: a worker pings through the pipe, and prints its stack when it is signalled."""

import asyncio
import contextlib
import faulthandler
import os
import subprocess
import sys

import pytest

from service.supervisor.watchdog import CHECKS, WHERE, Watchdog, check_interval_s


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


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr("service.supervisor.watchdog.PING_S", 0.001)


async def begin(pulse):
    pulse.begin()


async def signs(pulse, reading, number):
    """Return at least this many bytes of pings, read while the loop runs."""
    found, is_enough = bytearray(), asyncio.Event()

    def read():
        found.extend(os.read(reading, 65536))
        if len(found) >= number:
            is_enough.set()

    pulse.begin()
    asyncio.get_running_loop().add_reader(reading, read)
    await is_enough.wait()
    return bytes(found)


def test_signs_are_the_number_of_the_slot_for_as_long_as_the_loop_runs(pipe):
    reading, writing = pipe
    assert asyncio.run(signs(Watchdog(writing, 63), reading, 5))[:5] == bytes([63] * 5)


def test_a_pipe_that_nobody_read_for_a_while_stops_nobody(pipe):
    reading, writing = pipe
    number = 1
    with contextlib.suppress(BlockingIOError):
        while True:
            number += os.write(writing, bytes(4096))
    assert asyncio.run(signs(Watchdog(writing, 9), reading, number)).endswith(bytes([9]))


def test_a_pipe_whose_reader_is_gone_stops_nobody():
    reading, writing = os.pipe()
    os.close(reading)
    asyncio.run(begin(Watchdog(writing, 0)))
    os.close(writing)


def test_one_look_is_later_than_a_sign_can_be_whatever_silence_is_asked_for():
    assert check_interval_s(0.01) == 2.0
    assert check_interval_s(60.0) * CHECKS == 60.0


def test_who_holds_the_interpreter_in_code_that_is_not_python_still_says_where():
    """A signal handler written in Python would not run then."""
    code = """
import asyncio, ctypes, os, sys
from service.supervisor.watchdog import WHERE, Watchdog
def stand_still():
    ctypes.PyDLL(None).sleep(20)  # with the lock, until a signal
    print("over", file=sys.stderr, flush=True)
async def main():
    Watchdog(1, 0).begin()
    os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep 0.5; kill -{int(WHERE)} {os.getpid()}"], os.environ)
    stand_still()
asyncio.run(main())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    stack, _, _ = run.stderr.partition("over")
    assert "in stand_still" in stack


def test_without_a_stderr_the_signs_come_all_the_same(pipe, monkeypatch):
    reading, writing = pipe
    monkeypatch.setattr(sys, "stderr", None)
    assert set(asyncio.run(signs(Watchdog(writing, 5), reading, 2))) == {5}
