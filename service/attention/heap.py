"""Heap: keeps freed memory for the next batch and returns it to the system when idle, overloaded or when much is free.

By default glibc returns the memory that every batch needs and maps it anew, page by page. And after a burst of large bodies a
process stays four times as large as it needs to be.
Invariants: After the first trim, another runs only if resident memory has grown above the least since the last one. Without glibc
nothing is trimmed. Measuring opens no file, so that a process without free descriptors still sends heartbeats.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable

# How much resident memory may grow before it is trimmed. Under load a trim costs a few milliseconds and the pages mapped anew: W3
# is 1.5 % slower with 32 MiB. In an overload of large bodies memory peaks 70 MiB higher per service with 128 MiB.
IDLE_GROWTH_BYTES = 4 * 2**20
BUSY_GROWTH_BYTES = 128 * 2**20
OVERLOAD_GROWTH_BYTES = 32 * 2**20
# `mallopt` parameters (malloc.h) in bytes: free memory allowed at the heap's end (M_TRIM_THRESHOLD), and the size from which a
# block is its own mapping (M_MMAP_THRESHOLD), at the maximum that glibc takes; and the number of heaps (M_ARENA_MAX). With 64 MiB
# of free memory instead of 32 an overload with bodies of 4 MiB peaks 60 MiB higher, and no batch is faster; with 16, batches of
# 8,192 rows are 4 % slower. With one heap what one thread has freed serves another; requests/s are the same with more.
_MALLOPT = {-1: 32 * 2**20, -3: 32 * 2**20, -8: 1}
_STATM = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def resident_bytes() -> int:
    """Return the resident memory of this process (one small read of /proc, about 10 µs)."""
    return int(os.pread(_STATM, 64, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")


def keep_freed() -> None:
    """Make glibc keep freed memory; call it once a process, before it has threads.

    Without it a batch of 2,000 rows has 3,000 page faults, a twentieth of its time. It overrides MALLOC_TRIM_THRESHOLD_,
    MALLOC_MMAP_THRESHOLD_ and MALLOC_ARENA_MAX, so that all processes of a service have the same values.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for name, value in _MALLOPT.items():
            libc.mallopt(name, value)


def trim() -> None:
    """Return the free memory of all glibc arenas to the system: a few milliseconds a GiB, without the interpreter's lock."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Heap:
    """Trims the memory of one process; call `give_back` off the event loop."""

    def __init__(self, resident: Callable[[], int] = resident_bytes, trim: Callable[[], None] = trim) -> None:
        self._resident = resident
        self._trim = trim
        self._least: dict[int, int] = {}  # least resident bytes since the last trim, by its growth

    def give_back(self, growth_bytes: int) -> None:
        """Trim if resident memory has grown by `growth_bytes` above the least since the last trim with this growth."""
        now = self._resident()
        if now > self._least.get(growth_bytes, 0) + growth_bytes:
            self._trim()
            now = self._least[growth_bytes] = self._resident()
        for growth, least in self._least.items():
            self._least[growth] = min(least, now)
