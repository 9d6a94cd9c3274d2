"""Watchdog: a worker pings through the pipe, and prints its stack when it is signalled."""

import asyncio
import contextlib
import faulthandler
import os
import subprocess
import sys

import pytest

from service.supervisor.watchdog import CHECKS, STACKS_SIGNAL, Watchdog, check_interval_s


@pytest.fixture(autouse=True)
def _signal_as_before():
    yield
    faulthandler.unregister(STACKS_SIGNAL)


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


async def start(watchdog):
    watchdog.start()


async def pings(watchdog, reading, number):
    """Return at least this many bytes of pings, read while the loop runs."""
    found, is_enough = bytearray(), asyncio.Event()

    def read():
        found.extend(os.read(reading, 65536))
        if len(found) >= number:
            is_enough.set()

    watchdog.start()
    asyncio.get_running_loop().add_reader(reading, read)
    await is_enough.wait()
    return bytes(found)


def test_pings_carry_the_slot_number_while_the_loop_runs(pipe):
    reading, writing = pipe
    assert asyncio.run(pings(Watchdog(writing, 63), reading, 5))[:5] == bytes([63] * 5)


def test_an_unread_pipe_blocks_no_worker(pipe):
    reading, writing = pipe
    number = 1
    with contextlib.suppress(BlockingIOError):
        while True:
            number += os.write(writing, bytes(4096))
    assert asyncio.run(pings(Watchdog(writing, 9), reading, number)).endswith(bytes([9]))


def test_a_pipe_without_a_reader_blocks_no_worker():
    reading, writing = os.pipe()
    os.close(reading)
    asyncio.run(start(Watchdog(writing, 0)))
    os.close(writing)


def test_the_check_interval_exceeds_the_ping_interval_for_any_limit():
    assert check_interval_s(0.01) == 2.0
    assert check_interval_s(60.0) * CHECKS == 60.0


def test_a_worker_blocked_in_native_code_dumps_its_stack():
    """A signal handler written in Python would not run then."""
    code = """
import asyncio, ctypes, os, sys
from service.supervisor.watchdog import STACKS_SIGNAL, Watchdog
def stand_still():
    ctypes.PyDLL(None).sleep(20)  # with the lock, until a signal
    print("over", file=sys.stderr, flush=True)
async def main():
    Watchdog(1, 0).start()
    os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep 0.5; kill -{int(STACKS_SIGNAL)} {os.getpid()}"], os.environ)
    stand_still()
asyncio.run(main())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    stack, _, _ = run.stderr.partition("over")
    assert "in stand_still" in stack


def test_without_a_stderr_pings_are_still_sent(pipe, monkeypatch):
    reading, writing = pipe
    monkeypatch.setattr(sys, "stderr", None)
    assert set(asyncio.run(pings(Watchdog(writing, 5), reading, 2))) == {5}
