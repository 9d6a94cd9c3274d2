"""Heap: freed memory returns to the system, and a trim runs only if much has been freed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from service.attention.heap import Heap, resident_bytes

MIB = 2**20
IDLE, BUSY = 4 * MIB, 32 * MIB


class Process:
    """A process with `used` bytes in use and `kept` bytes that were freed but not returned."""

    def __init__(self) -> None:
        self.used, self.kept, self.num_trims = 300 * MIB, 0, 0
        self.heap = Heap(lambda: self.used + self.kept, self._trim)

    def _trim(self) -> None:
        self.num_trims += 1
        self.kept = 0


def test_freed_memory_is_returned_once_and_memory_in_use_is_the_new_baseline():
    process = Process()
    process.heap.give_back(IDLE)
    assert process.num_trims == 1
    process.kept = 900 * MIB
    for _ in range(5):
        process.heap.give_back(IDLE)
    assert (process.num_trims, process.kept) == (2, 0)
    process.used += 200 * MIB
    for _ in range(5):
        process.heap.give_back(IDLE)
    assert process.num_trims == 3
    process.kept = IDLE
    process.heap.give_back(IDLE)
    assert process.num_trims == 3, "too little for a trim"


def test_while_busy_only_large_amounts_are_returned():
    process = Process()
    process.heap.give_back(IDLE)
    process.heap.give_back(BUSY)
    process.kept = BUSY
    process.heap.give_back(BUSY)
    assert process.num_trims == 2
    process.kept += MIB
    for _ in range(5):
        process.heap.give_back(BUSY)
    assert (process.num_trims, process.kept) == (3, 0)


def test_memory_in_use_while_busy_is_not_a_baseline():
    process = Process()
    process.heap.give_back(IDLE)
    process.used += 500 * MIB
    process.heap.give_back(BUSY)
    process.used, process.kept = process.used - 500 * MIB, 500 * MIB
    process.heap.give_back(IDLE)
    assert process.kept == 0


def test_the_baseline_falls_with_the_memory_in_use():
    process = Process()
    process.used = 800 * MIB
    process.heap.give_back(IDLE)
    process.used = 300 * MIB
    process.heap.give_back(IDLE)
    process.kept = 100 * MIB
    process.heap.give_back(IDLE)
    assert process.kept == 0


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_not_mapped_again():
    """Three blocks of 8 MiB, ten times: by default glibc would give 16 of the 24 MiB back each time."""
    program = """if True:
        import resource
        from service.attention.heap import keep_freed

        keep_freed()
        for _ in range(10):
            blocks = [bytearray(8 * 2**20) for _ in range(3)]
            for block in blocks:
                block[::4096] = bytes(2048)
            del block, blocks
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 2 * 6144 + 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_process_is_measured_and_trimmed():
    before = resident_bytes()
    block = np.ones(8 * MIB, np.float64)
    assert resident_bytes() > before + 32 * MIB
    del block
    Heap().give_back(IDLE)
    assert resident_bytes() < before + 48 * MIB


def test_memory_is_measured_without_a_free_descriptor():
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/proc/self/statm", os.O_RDONLY)
        found = resident_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    assert found > MIB
