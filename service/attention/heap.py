"""Heap: what was freed is kept for the next batch, and goes back to the system when there is nothing else to do or it is much.

Left to itself glibc does neither well: it gives back and maps anew what every batch needs, page by page, and after a storm of
large bodies a process stays four times as large as it needs to be for the rest of its life. Laws: a trim is made only where
much can have been freed since the last one; what a trim leaves is in use and is the new measure; where there is no glibc there
is nothing to do; measuring opens nothing, for a process that can open no more descriptors still has to say so at every
heartbeat.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable

GROWTH_BYTES = 4 * 2**20
# While there is work, a trim costs a few milliseconds and what is mapped anew: only behind a storm of large bodies.
BUSY_GROWTH_BYTES = 64 * 2**20
# What `mallopt` calls them (malloc.h), in bytes: how much may be free at the heap's end, and from which size on a block is a
# mapping of its own, at most what glibc takes.
_MALLOPT = {-1: 64 * 2**20, -3: 32 * 2**20}
_STATM = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def resident_bytes() -> int:
    """Of this process (one small read of /proc, about 10 µs)."""
    return int(os.pread(_STATM, 64, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")


def keep_freed() -> None:
    """Once a process, before it has threads: without it a batch of 2,000 rows is 3,000 page faults, a twentieth of its time.

    Over what MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ say: processes of one service are alike.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for name, num_bytes in _MALLOPT.items():
            libc.mallopt(name, num_bytes)


def trim() -> None:
    """Gives back what glibc holds free, in all its arenas: a few milliseconds a GiB, without the interpreter's lock."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Heap:
    """One for each process; `give_back` is called off the event loop."""

    def __init__(self, resident: Callable[[], int] = resident_bytes, trim: Callable[[], None] = trim) -> None:
        self._resident = resident
        self._trim = trim
        self._least = {False: 0, True: 0}  # with work and without: what is in use then is another

    def give_back(self, *, is_busy: bool = False) -> None:
        now = self._resident()
        if now > self._least[is_busy] + (BUSY_GROWTH_BYTES if is_busy else GROWTH_BYTES):
            self._trim()
            now = self._least[is_busy] = self._resident()
        for state, least in self._least.items():
            self._least[state] = min(least, now)
